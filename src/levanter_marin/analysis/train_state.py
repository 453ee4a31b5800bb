# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Shapes and shardings of a training run on a mesh that need not exist.

Everything is abstract: `jax.sharding.AbstractMesh` stands for the devices and `jax.ShapeDtypeStruct` for the arrays.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask
from levanter.main.train_lm import TrainLmConfig
from levanter.models.lm_model import LmExample
from levanter.trainer_state import TrainerState
from levanter.utils.mesh import DEFAULT_DCN_AXIS_SPEC, MeshConfig

from levanter_marin import axes

EXPERT_PARALLEL_MAPPINGS: Mapping[str, Any] = MappingProxyType(
    {
        "shared_mapping": {axes.EXPERTS: axes.EXPERT_MESH_AXIS},
        "compute_mapping": {axes.BATCH: ["replica_dcn", "replica", "data", axes.EXPERT_MESH_AXIS]},
        "param_mapping": {axes.EMBED: ["data", axes.EXPERT_MESH_AXIS]},
    }
)
"""Fields of `MeshConfig` for expert parallelism, as the files under config/mesh have them."""


def with_mesh_sizes(mesh: MeshConfig, sizes: Mapping[str, int]) -> MeshConfig:
    """The same mappings over a mesh of exactly these sizes; axes that are not named get size 1.

    Axes across slices stay those of `mesh`, or Levanter's default `replica_dcn`.
    """
    across = {**DEFAULT_DCN_AXIS_SPEC, **mesh.dcn_axes}
    within = [name for name in ("data", *mesh.axes, *sizes, *sorted(mapped_mesh_axes(mesh))) if name not in across]
    return dataclasses.replace(
        mesh,
        axes={name: sizes.get(name, 1) for name in within},
        dcn_axes={name: sizes.get(name, 1) for name in across},
    )


def mapped_mesh_axes(mesh: MeshConfig) -> set[str]:
    """The mesh axes that a mapping names."""
    targets = (*mesh.resolved_compute_mapping.values(), *mesh.resolved_param_mapping.values())
    return {name for target in targets for name in ((target,) if isinstance(target, str) else target)}


def abstract_mesh(mesh: MeshConfig, num_devices: int | None = None) -> AbstractMesh:
    """The mesh that Levanter would make.

    Args:
        mesh: sizes of the axes; -1 takes what is left of the devices.
        num_devices: of all slices together; None takes the fewest that the sizes allow.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    slices = math.prod(size for size in {**DEFAULT_DCN_AXIS_SPEC, **mesh.dcn_axes}.values() if size > 0)
    if num_devices is None:
        num_devices = slices * math.prod(size for size in mesh.axes.values() if size > 0)
    within, across = mesh.axis_shapes(num_devices, slices)
    sizes = {**across, **within}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_state(config: TrainLmConfig, vocab_size: int, mesh: AbstractMesh) -> TrainerState:
    """Levanter's `TrainerState` before the first step, every array a `jax.ShapeDtypeStruct` with its sharding.

    Arrays without axis names, such as the optimizer's counts, are whole on every device.
    """
    trainer = config.trainer
    optimizer = config.optimizer.build(trainer.num_train_steps)
    # as Levanter rounds it
    multiple = axis_shards(axes.VOCAB, trainer.parameter_axis_mapping, mesh)
    Vocab = Axis(axes.VOCAB, math.ceil(vocab_size / multiple) * multiple)

    def init() -> TrainerState:
        key = jax.random.PRNGKey(0)
        return TrainerState.init(
            optimizer,
            config.model.build(Vocab, key=key),
            key=key,
            mp=trainer.mp,
            quantization=trainer.quantization,
            model_averaging=trainer.model_averaging,
        )

    return with_shardings(eqx.filter_eval_shape(init), trainer.parameter_axis_mapping, mesh)


def abstract_batch(batch_size: int, seq_len: int, batch_axis: str = axes.BATCH) -> LmExample:
    """Packed rows of tokens: {batch, position}."""
    Batch, Pos = Axis(batch_axis, batch_size), Axis(axes.POSITION, seq_len)

    def make() -> LmExample:
        segment_ids = hax.zeros((Batch, Pos), dtype=jnp.int32)
        mask = AttentionMask.causal().with_segment_ids(segment_ids)
        return LmExample(segment_ids, hax.ones((Batch, Pos)), mask)

    return eqx.filter_eval_shape(make)


def with_shardings(tree: Any, mapping: ResourceMapping, mesh: AbstractMesh) -> Any:
    """Every array of a tree as a `jax.ShapeDtypeStruct` that is sharded as `mapping` shards its axes.

    Raises:
        ValueError: an axis does not divide over the devices that it is mapped to.
    """

    def shard(leaf):
        if not isinstance(leaf, NamedArray):
            return _struct(leaf, NamedSharding(mesh, PartitionSpec())) if is_abstract_array(leaf) else leaf
        for axis in leaf.axes:
            shards = axis_shards(axis.name, mapping, mesh)
            if axis.size % shards != 0:
                raise ValueError(
                    f"axis {axis.name} of size {axis.size} does not divide over the {shards} devices of mesh axes "
                    f"{mapping[axis.name]}; make {axis.name} a multiple of {shards} or the mesh smaller"
                )
        spec = pspec_for_axis(leaf.axes, mapping)
        return NamedArray(_struct(leaf.array, NamedSharding(mesh, spec)), leaf.axis_names)

    return jax.tree.map(shard, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of `with_shardings`."""
    structs = filter(is_abstract_array, jax.tree.leaves(tree))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in structs)


def axis_shards(axis_name: str, mapping: ResourceMapping, mesh: AbstractMesh) -> int:
    """Over how many devices a tensor axis is split."""
    names = mapping.get(axis_name, ())
    return math.prod(mesh.shape.get(name, 1) for name in ((names,) if isinstance(names, str) else names))


def is_abstract_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _struct(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
