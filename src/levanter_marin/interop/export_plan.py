# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What an export writes: which tensors under which names in which file, and whether it did."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax.jax_utils import is_jax_array_like
from levanter.compat.hf_checkpoints import SAFE_TENSORS_MODEL
from safetensors import safe_open

from levanter_marin.interop.folder import read_stored_tensors
from levanter_marin.interop.state_dict import ROUTER_BIAS, TensorFormat, stored_names, to_tensors

_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """How one tensor of the model is stored: whole under one name, or a slice of its first axis under each of many."""

    source: str
    """Its name in `to_tensors`."""
    spec: jax.ShapeDtypeStruct
    """Shape and dtype of the whole."""
    names: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return self.spec.size * self.spec.dtype.itemsize

    @property
    def key(self) -> str:
        return self.names[0] if len(self.names) == 1 else self.source

    def stored(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype by stored name."""
        shape = self.spec.shape if len(self.names) == 1 else self.spec.shape[1:]
        return dict.fromkeys(self.names, jax.ShapeDtypeStruct(shape, self.spec.dtype))


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """What an export writes: the leaves of each file, in order, and the config."""

    files: dict[str, tuple[StoredLeaf, ...]]
    config: dict[str, Any]
    format: TensorFormat

    @property
    def leaves(self) -> list[StoredLeaf]:
        return [leaf for leaves in self.files.values() for leaf in leaves]

    @property
    def num_bytes(self) -> int:
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def num_parameters(self) -> int:
        return sum(leaf.spec.size for leaf in self.leaves)

    def stored(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor by the name it is stored under."""
        return {name: spec for leaf in self.leaves for name, spec in leaf.stored().items()}

    def index(self) -> dict[str, Any]:
        weight_map = {name: file for file, leaves in self.files.items() for leaf in leaves for name in leaf.names}
        metadata = {"total_size": self.num_bytes, "total_parameters": self.num_parameters}
        return {"metadata": metadata, "weight_map": weight_map}


type LoadLeaves = Callable[[Sequence[StoredLeaf]], Sequence[jax.Array]]
"""Gives the whole tensor of each leaf, in the dtype of its spec."""


def leaves_of(model: Any) -> LoadLeaves:
    """Loads the leaves of a model that is in memory; compiled once for each file."""
    arrays = eqx.filter(model, is_jax_array_like)
    return lambda leaves: _load(arrays, tuple(x.source for x in leaves), tuple(x.spec.dtype for x in leaves))


@eqx.filter_jit
def _load(model: Any, sources: tuple[str, ...], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    tensors = to_tensors(model)
    return [tensors[source].astype(dtype) for source, dtype in zip(sources, dtypes, strict=True)]


def plan_files(
    model: Any, format: TensorFormat, dtype: jnp.dtype | None, max_size: int
) -> dict[str, tuple[StoredLeaf, ...]]:
    """The leaves of each file, layer after layer, for a model that may be shapes.

    Args:
        dtype: of every floating-point tensor but the router biases, which stay fp32; None keeps each as it is.
        max_size: bytes of a file, unless one leaf alone is larger.
    """
    leaves = []
    shapes = eqx.filter_eval_shape(to_tensors, model)
    for source in sorted(shapes, key=_in_layer_order):
        spec = shapes[source]
        if dtype is not None and not source.endswith(ROUTER_BIAS) and jnp.issubdtype(spec.dtype, jnp.floating):
            spec = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype))
        leaves.append(StoredLeaf(source, spec, stored_names(source, spec.shape, format)))
    return _split(leaves, max_size)


def _in_layer_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _split(leaves: list[StoredLeaf], max_size: int) -> dict[str, tuple[StoredLeaf, ...]]:
    """Consecutive leaves by file, none above `max_size` bytes unless one leaf alone is."""
    groups: list[list[StoredLeaf]] = [[]]
    for leaf in leaves:
        if groups[-1] and sum(member.num_bytes for member in groups[-1]) + leaf.num_bytes > max_size:
            groups.append([])
        groups[-1].append(leaf)
    if len(groups) == 1:
        return {SAFE_TENSORS_MODEL: tuple(leaves)}
    stem = SAFE_TENSORS_MODEL.removesuffix(".safetensors")
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": tuple(g) for i, g in enumerate(groups, start=1)}


def check_headers(folder: Path, plan: ExportPlan) -> None:
    """Compare the headers of written files with the plan.

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype.
    """
    found = {name: (t.shape, t.dtype) for name, t in read_stored_tensors(folder).items()}
    wanted = {name: (spec.shape, _DTYPE_NAMES[str(spec.dtype)]) for name, spec in plan.stored().items()}
    for name in wanted.keys() | found.keys():
        if found.get(name) != wanted.get(name):
            raise ValueError(f"{folder}: {name} is {found.get(name)} on disk and was to be {wanted.get(name)}")


def check_values(folder: Path, plan: ExportPlan, load: LoadLeaves) -> None:
    """Compare every stored tensor with its source, one file at a time.

    Raises:
        ValueError: names the first tensor that differs.
    """
    for file, leaves in plan.files.items():
        values = load(leaves)
        with safe_open(folder / file, framework="numpy") as stored:
            for leaf, value in zip(leaves, values, strict=True):
                for i, name in enumerate(leaf.names):
                    if not np.array_equal(stored.get_tensor(name), value if len(leaf.names) == 1 else value[i]):
                        raise ValueError(f"{folder / file}: {name} is not what was written")
        del values  # before those of the next file are loaded
