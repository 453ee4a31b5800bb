# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Apply a function to whole matrices whose weight is sharded: exchange layers for pieces of matrices.

Newton-Schulz on a sharded matrix would sum a Gram matrix over devices at every product. Instead each device gets some
layers of a stack with their matrices whole. Letters: l layers, s further stacked axes (experts), r rows, c columns, of
what one device holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import current_thread_local_mapping
from haliax.util import ensure_tuple
from jax.sharding import AxisType, PartitionSpec

from levanter_marin.optim.parameters import MatrixAxes, map_matrices, matrix_sides


@dataclass(frozen=True)
class _Plan:
    """How a weight is exchanged.

    Attributes:
        axes: those of the weight, the one that is spread first, rows and columns last.
        num_stacked: how many of them stack matrices.
        spec: how the weight is sharded.
        exchanges: (mesh axis, dimension of rows or columns that it shards), in the order of exchange.
        replicas: mesh axes that hold copies of the weight; each copy computes a part of the layers.
        num_parts: into how many parts the layers are cut.
    """

    axes: tuple[Axis, ...]
    num_stacked: int
    spec: PartitionSpec
    exchanges: tuple[tuple[str, int], ...]
    replicas: tuple[str, ...]
    num_parts: int


def map_whole_matrices(f: Callable[[jax.Array], jax.Array], weight: NamedArray, matrix: MatrixAxes) -> NamedArray:
    """`map_matrices`, with stacked layers spread over the mesh while `f` runs.

    An all-to-all over each mesh axis that shards rows or columns makes these whole and cuts the layers instead; layers
    are padded with zeros to a multiple. Of a weight that other mesh axes replicate, each replica computes some layers
    and they are gathered after. Experts stay where they are: their bank is never gathered, and if it is replicated
    each replica computes all of it. Map experts to the data axes as well at rest, and there is no replica.

    The plain `map_matrices` where there is no mesh, no axis mapping, nothing to exchange or no axis to spread.
    """
    plan = _plan(weight, matrix)
    if plan is None:
        return map_matrices(f, weight, matrix)

    def spread(x: jax.Array) -> jax.Array:  # l s r c, in the sharding at rest
        num_layers = x.shape[0]
        x = jnp.pad(x, [(0, -num_layers % plan.num_parts)] + [(0, 0)] * (x.ndim - 1))
        for name, dimension in plan.exchanges:
            x = jax.lax.all_to_all(x, name, split_axis=0, concat_axis=dimension, tiled=True)
        for name in plan.replicas:
            share = x.shape[0] // jax.lax.axis_size(name)
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(name) * share, share)

        rows, columns = (hax.axis_size(side) for side in matrix_sides(weight, matrix))
        y = f(x.reshape((*x.shape[: plan.num_stacked], rows, columns))).reshape(x.shape)

        for name in reversed(plan.replicas):
            y = jax.lax.all_gather(y, name, tiled=True)
        for name, dimension in reversed(plan.exchanges):
            y = jax.lax.all_to_all(y, name, split_axis=dimension, concat_axis=0, tiled=True)
        return y[:num_layers]

    ordered = weight.rearrange(plan.axes)
    # what is gathered over replicas is the same on each, which the check cannot see
    spread_over_mesh = jax.shard_map(spread, in_specs=plan.spec, out_specs=plan.spec, check_vma=False)
    return hax.named(spread_over_mesh(ordered.array), plan.axes).rearrange(weight.axes)


def _plan(weight: NamedArray, matrix: MatrixAxes) -> _Plan | None:
    mesh: Any = jax.sharding.get_abstract_mesh()
    mapping = current_thread_local_mapping()
    if mesh.empty or mapping is None or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None

    def mesh_axes(axis: Axis) -> tuple[str, ...]:
        physical = mapping.get(axis.name)
        return () if physical is None else ensure_tuple(physical)

    rows, columns = matrix_sides(weight, matrix)
    stacked = [axis for axis in weight.axes if axis not in rows and axis not in columns]
    layers = [axis for axis in stacked if axis.name not in matrix.experts and not mesh_axes(axis)]
    if not layers:
        return None
    stacked.remove(layers[0])
    axes = (layers[0], *stacked, *rows, *columns)
    num_stacked = 1 + len(stacked)
    sharding = [mesh_axes(axis) for axis in axes]
    # of several mesh axes on one axis the last cuts finest, so it is put together first
    exchanges = [
        (name, dimension)
        for dimension in range(num_stacked, len(axes))
        for name in reversed(sharding[dimension])
        if mesh.shape[name] > 1
    ]
    used = {name for names in sharding for name in names}
    replicas = [name for name in mesh.axis_names if name not in used and mesh.shape[name] > 1]
    if matrix.experts:
        replicas = []
    num_parts = 1
    for name in [name for name, _ in exchanges] + replicas:
        num_parts *= mesh.shape[name]
    if num_parts == 1:
        return None
    spec = PartitionSpec(*(names or None for names in sharding))
    return _Plan(axes, num_stacked, spec, tuple(exchanges), tuple(replicas), num_parts)
