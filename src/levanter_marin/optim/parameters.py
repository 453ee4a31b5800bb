# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The parameters of a model with the modules that hold them, and the matrices among them.

What an optimizer does with a weight depends on the layer it belongs to. A tree of parameters or gradients has the
modules of its model, so that can be read off the tree: which module and field a leaf is, and for the weight of a
linear layer which of its axes are inputs and which are outputs. Neither the rank of an array nor the position of an
axis decides anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from haliax.axis import axis_name
from haliax.quantization import CustomGradientAccumulation
from haliax.util import ensure_tuple
from jax.tree_util import DictKey, GetAttrKey, SequenceKey


@dataclass(frozen=True)
class MatrixAxes:
    """Names of the axes of a linear layer's weight. All others, such as `layer`, stack independent matrices.

    Attributes:
        inputs: axes that together are one side of each matrix.
        outputs: axes that together are the other side.
        experts: axes that stack the matrices of an expert bank.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    experts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holder:
    """A module and the name of its field on the way to a parameter."""

    module: Any
    field: str


@dataclass(frozen=True)
class Parameter:
    """A leaf of a model.

    Attributes:
        path: as in `transformer.layers.stacked.self_attn.q_proj.weight`.
        value: a named array, or a plain one where the model has those.
        holders: the modules around it, the outermost first.
    """

    path: str
    value: Any
    holders: tuple[Holder, ...]

    @property
    def matrix_axes(self) -> MatrixAxes | None:
        """The matrix axes of the weight of a `haliax.nn.Linear` or `MoELinear`; None for any other parameter."""
        if not self.holders or self.holders[-1].field != "weight":
            return None
        module = self.holders[-1].module
        if isinstance(module, hnn.Linear):
            return MatrixAxes(_names(module.In), _names(module.Out))
        if isinstance(module, hnn.MoELinear):
            return MatrixAxes(_names(module.In), _names(module.Out), _names(module.Experts))
        return None


def parameters(tree: Any) -> list[Parameter]:
    """Every array of a model, in the order of its leaves.

    Fields without an array (None, optax's masks) and state that travels with the gradient
    (`haliax.quantization.CustomGradientAccumulation`) are no parameters.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf):
        if isinstance(leaf, CustomGradientAccumulation):
            continue
        found.append(Parameter(jax.tree_util.keystr(path, simple=True, separator="."), leaf, _holders(tree, path)))
    return found


def map_parameters(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The tree with `f(parameter, *values)` in place of each parameter, where values are those of `rest`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
    others = [structure.flatten_up_to(other) for other in rest]
    by_position = iter(parameters(tree))
    mapped = [
        leaf if isinstance(leaf, CustomGradientAccumulation) else f(next(by_position), *values)
        for leaf, *values in zip(leaves, *others, strict=True)
    ]
    return jax.tree.unflatten(structure, mapped)


def matrix_sides(weight: NamedArray, matrix: MatrixAxes) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes that are the rows of each matrix, and those that are its columns, in the order of the weight.

    Rows are the side that the weight does not store last. A weight whose sides are contiguous is then a stack of
    matrices as it lies in memory.
    """
    rows, columns = matrix.outputs, matrix.inputs
    if weight.axes and weight.axes[-1].name in matrix.outputs:
        rows, columns = columns, rows
    return tuple(a for a in weight.axes if a.name in rows), tuple(a for a in weight.axes if a.name in columns)


def map_matrices(f: Callable[[jax.Array], jax.Array], weight: NamedArray, matrix: MatrixAxes) -> NamedArray:
    """Apply `f` to a weight seen as a stack of matrices {stacked axes..., rows, columns}; it keeps the shape.

    Articulated sides, such as heads x head_size, are flattened.
    """
    rows, columns = matrix_sides(weight, matrix)
    stacked = tuple(axis for axis in weight.axes if axis not in rows and axis not in columns)
    ordered = weight.rearrange((*stacked, *rows, *columns))
    shape = (*(axis.size for axis in stacked), hax.axis_size(rows), hax.axis_size(columns))
    mapped = f(ordered.array.reshape(shape)).reshape(ordered.array.shape)
    return hax.named(mapped, ordered.axes).rearrange(weight.axes)


def _is_leaf(node: Any) -> bool:
    return isinstance(node, NamedArray | CustomGradientAccumulation)


def _names(axes: Any) -> tuple[str, ...]:
    return tuple(axis_name(axis) for axis in ensure_tuple(axes))


def _holders(tree: Any, path: tuple) -> tuple[Holder, ...]:
    holders, node = [], tree
    for key in path:
        if isinstance(key, GetAttrKey):
            if isinstance(node, eqx.Module):
                holders.append(Holder(node, key.name))
            node = getattr(node, key.name)
        elif isinstance(key, SequenceKey):
            node = node[key.idx]
        elif isinstance(key, DictKey):
            node = node[key.key]
        else:
            raise TypeError(f"a {type(node).__name__} in {jax.tree_util.keystr(path)} cannot be looked into")
    return tuple(holders)
