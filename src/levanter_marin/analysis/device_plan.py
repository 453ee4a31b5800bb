# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What a training step costs one device: bytes held, bytes sent, FLOPs. From shapes alone.

Parameters, optimizer state and gradients are exact: Levanter's own state under its own mappings. Activations and
buffers are an estimate of what XLA allocates; what it fuses away or schedules otherwise is not known before compiling.
"""

from dataclasses import dataclass

import haliax as hax
import jax
from haliax import Axis, NamedArray, ScanCheckpointPolicy
from jax.sharding import AbstractMesh
from levanter.main.train_lm import TrainLmConfig
from levanter.schedule import value_at_step
from levanter.trainer_state import trainables_only

from levanter_marin import axes
from levanter_marin.analysis.activations import ActivationBytes, activation_bytes
from levanter_marin.analysis.counts import BACKWARD_AND_FORWARD
from levanter_marin.analysis.exchange import LayerExchange, layer_exchange
from levanter_marin.analysis.train_state import (
    abstract_batch,
    abstract_state,
    axis_shards,
    device_bytes,
    with_shardings,
)
from levanter_marin.config import DispatchImplementation
from levanter_marin.models import parameter_counts
from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.moe.dispatch.api import best_implementation
from levanter_marin.moe.dispatch.expert_parallel import require_expert_parallel
from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one device.

    Attributes:
        parameters: the model, router biases included, in the parameter dtype.
        optimizer_state: all of it, and averaged weights if the trainer keeps them.
        gradients: in the parameter dtype, which the optimizer reads.
        gradient_accumulator: a second copy while microbatches are added up.
        cast_weights: the weights in the compute dtype, where it differs.
        cast_gradients: their gradients before the cast back.
        gathered_weights: the weights of one layer or of the LM head as the computation shards them; their gradient.
        activations: kept and recomputed, without routed experts.
        expert_rows: buffers of the exchange and hidden rows of the routed experts of one layer.
        expert_row_gradients: their cotangents.
    """

    parameters: int
    optimizer_state: int
    gradients: int
    gradient_accumulator: int
    cast_weights: int
    cast_gradients: int
    gathered_weights: int
    activations: ActivationBytes
    expert_rows: int
    expert_row_gradients: int

    @property
    def state(self) -> int:
        """What lies on the device between two steps."""
        return self.parameters + self.optimizer_state

    @property
    def working(self) -> int:
        """Temporaries of the backward pass."""
        rows = self.expert_rows + self.expert_row_gradients
        layer = self.activations.recomputed + self.activations.layer + rows
        return self.gathered_weights + self.activations.saved + max(self.activations.head, layer)

    @property
    def peak(self) -> int:
        """Either in the backward pass or in the update, when activations are gone."""
        casts = self.cast_weights + self.cast_gradients
        # Without a cast the backward pass writes the gradients themselves.
        backward = casts + self.working + (0 if casts else self.gradients)
        update = self.gradients + self.cast_gradients
        return self.state + self.gradient_accumulator + max(backward, update)


@dataclass(frozen=True)
class DevicePlan:
    """The whole plan. Bytes and FLOPs are of one training step.

    Attributes:
        rows: rows of the batch that a device computes at a time.
        microbatches: how often it does so in a step.
        flops: forward and backward, all devices, without recomputation; what MFU is measured by.
        executed_flops: with the recomputation of gradient checkpoints.
    """

    mesh: dict[str, int]
    seq_len: int
    batch_size: int
    rows: int
    microbatches: int
    num_layers: int
    bytes: DeviceBytes
    exchange: LayerExchange
    flops: float
    executed_flops: float

    @property
    def num_devices(self) -> int:
        total = 1
        for size in self.mesh.values():
            total *= size
        return total

    @property
    def layer_all_to_all_bytes(self) -> int:
        """Sent by a device for one layer in a step."""
        return self.microbatches * self.exchange.sent_bytes

    @property
    def all_to_all_bytes(self) -> int:
        """Sent by a device in a step."""
        return self.num_layers * self.layer_all_to_all_bytes


def plan_device(
    config: TrainLmConfig,
    vocab_size: int,
    mesh: AbstractMesh,
    grouped_matmul: GroupedMatmulImplementation = GroupedMatmulImplementation.ragged_dot,
) -> DevicePlan:
    """The plan of the first training step.

    Args:
        config: as for training; its model is a `MarinMoeConfig`.
        vocab_size: before Levanter rounds it up for the mesh.
        mesh: its sizes; `config.trainer.mesh` has the mappings.
        grouped_matmul: the kernel of the experts; `ragged_dot` is that of accelerators.

    Raises:
        ValueError: batch, experts or another axis do not divide over the mesh, or the dispatch can't run on it.
    """
    trainer, model = config.trainer, config.model
    assert isinstance(model, MarinMoeConfig)
    compute, mp = trainer.compute_axis_mapping, trainer.mp
    seq_len = config.train_seq_len or model.max_seq_len
    batch_size = value_at_step(trainer.train_batch_size, 0)
    rows, microbatches = _rows_of_device(config, batch_size, mesh)

    state = abstract_state(config, vocab_size, mesh)
    cast = mp.cast_to_compute if mp.compute_dtype != mp.param_dtype else None
    cast_bytes = device_bytes(_cast(state.model, mp.compute_dtype)) if cast else 0
    gradients = device_bytes(trainables_only(state.model, True))
    layers = _cast(state.model.transformer.layers, mp.compute_dtype)
    head = _cast(state.model.lm_head, mp.compute_dtype)
    gathered = max(
        device_bytes(with_shardings(layers, compute, mesh)) // model.num_layers,
        device_bytes(with_shardings(head, compute, mesh)),
    )
    recomputations = _recomputations(model)
    exchange = layer_exchange(
        model.moe,
        hidden_dim=model.hidden_dim,
        tokens=rows * seq_len,
        shards=mesh.shape.get(axes.EXPERT_MESH_AXIS, 1),
        mlp_shards=axis_shards(axes.MLP, compute, mesh),
        itemsize=jax.numpy.dtype(mp.compute_dtype).itemsize,
        implementation=_implementation(config, mesh),
        grouped_matmul=grouped_matmul,
        trips=4 + 2 * recomputations,
    )
    expert_rows = exchange.buffer_bytes + exchange.hidden_bytes
    batch = abstract_batch(rows, seq_len, trainer.batch_axis_name or axes.BATCH)

    tokens = batch_size * seq_len
    forward = tokens * parameter_counts.flops_per_token(model, vocab_size, seq_len)
    head_forward = 2 * tokens * model.hidden_dim * vocab_size
    return DevicePlan(
        mesh=dict(mesh.shape),
        seq_len=seq_len,
        batch_size=batch_size,
        rows=rows,
        microbatches=microbatches,
        num_layers=model.num_layers,
        bytes=DeviceBytes(
            parameters=device_bytes(state.model),
            optimizer_state=device_bytes((state.opt_state, state.model_averaging)),
            gradients=gradients,
            gradient_accumulator=gradients if microbatches > 1 else 0,
            cast_weights=cast_bytes,
            cast_gradients=cast_bytes,
            gathered_weights=2 * gathered,
            activations=activation_bytes(model, state.model.Vocab, batch, mp, config.z_loss_weight),
            expert_rows=expert_rows,
            expert_row_gradients=expert_rows,
        ),
        exchange=exchange,
        flops=BACKWARD_AND_FORWARD * forward,
        executed_flops=BACKWARD_AND_FORWARD * forward + recomputations * (forward - head_forward),
    )


def _rows_of_device(config: TrainLmConfig, batch_size: int, mesh: AbstractMesh) -> tuple[int, int]:
    """Rows that a device computes at a time, and how often."""
    trainer = config.trainer
    batch_axis = trainer.batch_axis_name or axes.BATCH
    shards = axis_shards(batch_axis, trainer.compute_axis_mapping, mesh)
    if axis_shards(axes.POSITION, trainer.compute_axis_mapping, mesh) > 1:
        raise ValueError("trainer.mesh shards `position`, which the plan does not know; shard `batch` instead")
    if batch_size % shards != 0:
        raise ValueError(
            f"trainer.train_batch_size={batch_size} does not divide over the {shards} devices of mesh axes "
            f"{trainer.compute_axis_mapping[batch_axis]}; set it to a multiple of {shards}"
        )
    at_once = trainer.per_device_parallelism
    if at_once < 0 or at_once * shards >= batch_size:
        return batch_size // shards, 1
    if batch_size % (at_once * shards) != 0:
        raise ValueError(
            f"trainer.train_batch_size={batch_size} is no multiple of trainer.per_device_parallelism={at_once} x "
            f"{shards} devices; set per_device_parallelism to a divisor of {batch_size // shards}"
        )
    return at_once, batch_size // (at_once * shards)


def _recomputations(model: MarinMoeConfig) -> int:
    """How often the backward pass computes a layer again. Internals saved by name are counted as computed again."""
    policy = ScanCheckpointPolicy._mk(model.gradient_checkpointing)
    if policy.disable or policy.save_block_internals is True:
        return 0
    return 2 if policy.nested else 1


def _implementation(config: TrainLmConfig, mesh: AbstractMesh) -> DispatchImplementation:
    """The backend that the model would run."""
    model, trainer = config.model, config.trainer
    wanted = model.moe.dispatch.implementation
    token_axes = (Axis(trainer.batch_axis_name or axes.BATCH, 1), Axis(axes.POSITION, 1))
    tokens = NamedArray(jax.ShapeDtypeStruct((1, 1), int), tuple(axis.name for axis in token_axes))
    with jax.sharding.use_abstract_mesh(mesh), hax.axis_mapping(trainer.compute_axis_mapping):
        if wanted is DispatchImplementation.auto:
            wanted = best_implementation()
        if wanted in (DispatchImplementation.ragged_all_to_all, DispatchImplementation.padded_all_to_all):
            require_expert_parallel(tokens, model.moe.num_experts)
    return wanted


def _cast(tree, dtype):
    """Floating-point leaves in another dtype, sharded as before."""

    def leaf_as(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct) or not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return jax.tree.map(leaf_as, tree)
