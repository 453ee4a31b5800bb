# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows and bytes of the routed experts of one layer: what travels, and what waits in buffers.

Letters: T tokens of a device, K experts of a token, A = T*K assignments, S devices of the axis `expert`.
"""

from dataclasses import dataclass

from levanter_marin.config import DispatchImplementation, MoeConfig
from levanter_marin.moe.dispatch.padded_all_to_all import block_rows
from levanter_marin.moe.dispatch.plan import ExchangeShape, local_expert_count
from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation

_EXCHANGES = {DispatchImplementation.ragged_all_to_all, DispatchImplementation.padded_all_to_all}


@dataclass(frozen=True)
class LayerExchange:
    """Of one layer, one device and one microbatch.

    Attributes:
        implementation: the backend; `local` and `reference` send nothing.
        assignments: A, the rows that a device can have to send.
        receive_rows: rows that its receive buffers hold, over all chunks; those of `local` are its own assignments.
        row_bytes: of one row, in the width in which tokens travel.
        expert_width_bytes: of one row of an expert's hidden layer.
        trips: how often rows cross the network in a training step: there and back in the forward pass, the same for
            the cotangents, and again there and back as often as the backward pass computes the layer again.
        keeps_hidden: whether the kernel keeps the experts' hidden rows for the backward pass.
    """

    implementation: DispatchImplementation
    assignments: int
    receive_rows: int
    row_bytes: int
    expert_width_bytes: int
    trips: int
    keeps_hidden: bool

    @property
    def sends(self) -> bool:
        return self.implementation in _EXCHANGES

    @property
    def sent_bytes_per_trip(self) -> int:
        """Bytes that a device sends in one trip, itself among the receivers.

        Of a ragged exchange all its assignments, the most there can be and what a step without padding and drops
        sends; of a padded one all blocks, whatever they hold.
        """
        if not self.sends:
            return 0
        ragged = self.implementation is DispatchImplementation.ragged_all_to_all
        return (self.assignments if ragged else self.receive_rows) * self.row_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends in one training step of this layer."""
        return self.trips * self.sent_bytes_per_trip

    @property
    def buffer_bytes(self) -> int:
        """Rows sorted by expert before and after the experts; received rows and their results."""
        copies = {
            DispatchImplementation.ragged_all_to_all: 2 * self.assignments + 2 * self.receive_rows,
            DispatchImplementation.padded_all_to_all: 2 * self.assignments + 4 * self.receive_rows,
            DispatchImplementation.local: 2 * self.assignments if self.keeps_hidden else 0,
        }
        return copies.get(self.implementation, 0) * self.row_bytes

    @property
    def hidden_bytes(self) -> int:
        """Gate, up and their product, where the kernel keeps them."""
        return 3 * self.receive_rows * self.expert_width_bytes if self.keeps_hidden else 0


def layer_exchange(
    moe: MoeConfig,
    *,
    hidden_dim: int,
    tokens: int,
    shards: int,
    mlp_shards: int,
    itemsize: int,
    implementation: DispatchImplementation,
    grouped_matmul: GroupedMatmulImplementation,
    trips: int,
) -> LayerExchange:
    """Sizes of one layer.

    Args:
        moe: its config.
        hidden_dim: of the model, the width of a row without latent experts.
        tokens: T.
        shards: S.
        mlp_shards: devices that share the width of an expert.
        itemsize: bytes of a number in the compute dtype.
        implementation: the backend that runs, not `auto`.
        grouped_matmul: the kernel.
        trips: see `LayerExchange`.

    Raises:
        ValueError: experts do not divide over the devices.
    """
    dispatch, top = moe.dispatch, moe.num_experts_per_token
    assignments = tokens * top
    match implementation:
        case DispatchImplementation.ragged_all_to_all:
            shape = ExchangeShape.create(
                tokens=tokens,
                num_experts_per_token=top,
                num_experts=moe.num_experts,
                shards=shards,
                expert_chunks=dispatch.expert_chunks,
                capacity_factor=dispatch.capacity_factor,
            )
            receive_rows = shape.chunks * shape.chunk_rows
        case DispatchImplementation.padded_all_to_all:
            receive_rows = shards * block_rows(
                tokens=tokens,
                num_experts_per_token=top,
                local_experts=local_expert_count(moe.num_experts, shards),
                shards=shards,
                capacity_factor=dispatch.capacity_factor,
            )
        case DispatchImplementation.local:
            receive_rows = assignments
        case _:
            receive_rows = tokens * moe.num_experts
    latent_dim = hidden_dim if moe.latent_dim is None else moe.latent_dim
    return LayerExchange(
        implementation=implementation,
        assignments=assignments,
        receive_rows=receive_rows,
        row_bytes=latent_dim * itemsize,
        expert_width_bytes=moe.expert_dim // mlp_shards * itemsize,
        trips=trips,
        keeps_hidden=grouped_matmul is not GroupedMatmulImplementation.blocked,
    )
