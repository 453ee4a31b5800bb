# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Dispatch over the mesh axis `expert` by a plain all-to-all of equal, padded blocks: what a ragged one saves.

Every sender has the same number of rows for every receiver, so it drops what one receiver gets too much of, however
much room the others left. It runs wherever `jax.lax.all_to_all` does.

Letters: T tokens of this device, K experts of a token, A = T*K, S devices of the axis `expert`, L experts of this
device, B rows of a block, D latent width, F expert width (of this device).
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Float, Int

from levanter_marin import axes
from levanter_marin.config import DispatchConfig
from levanter_marin.moe.dispatch.expert_parallel import require_expert_parallel
from levanter_marin.moe.dispatch.plan import MAX_DENOMINATOR, DispatchCounts, prefix_rows, sort_assignments
from levanter_marin.moe.dispatch.rows import combine, move_rows, permute
from levanter_marin.moe.dispatch.sharded import counts_of_device, dispatch_sharded
from levanter_marin.moe.experts import ExpertBank
from levanter_marin.moe.grouped_matmul import grouped_swiglu

_AXIS = axes.EXPERT_MESH_AXIS


def block_rows(
    *, tokens: int, num_experts_per_token: int, local_experts: int, shards: int, capacity_factor: float | None
) -> int:
    """ceil(factor * T * K / S), or room for every row that a sender could have: T * min(K, L)."""
    could_be_sent = tokens * min(num_experts_per_token, local_experts)
    if capacity_factor is None:
        return could_be_sent
    factor = Fraction(capacity_factor).limit_denominator(MAX_DENOMINATOR)
    return min(math.ceil(factor * tokens * num_experts_per_token / shards), could_be_sent)


def dispatch_padded_all_to_all(
    x: NamedArray,
    bank: ExpertBank,
    selected_experts: NamedArray,
    combine_weights: NamedArray,
    token_valid: NamedArray,
    config: DispatchConfig,
) -> tuple[NamedArray, DispatchCounts]:
    """See `levanter_marin.moe.dispatch.api.dispatch_experts`.

    A block holds a prefix of what its sender has for its receiver, sorted by expert, earlier tokens first; the rest is
    sender-dropped. Padding takes no row.
    Memory: S blocks four times, and what the experts keep.

    Raises:
        ValueError: the mesh or the mapping does not spread experts and tokens over the axis `expert`, or an axis does
            not divide.
    """
    num_experts = bank.gate_proj.Experts.size
    S = require_expert_parallel(x, num_experts)
    L = num_experts // S

    def body(
        x: Float[Array, "T D"],
        w_gate: Float[Array, "L D F"],
        w_up: Float[Array, "L D F"],
        w_down: Float[Array, "L F D"],
        selected: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        valid: Bool[Array, " T"],
    ):
        T, K = selected.shape
        A = T * K
        B = block_rows(
            tokens=T, num_experts_per_token=K, local_experts=L, shards=S, capacity_factor=config.capacity_factor
        )
        order = sort_assignments(selected, valid, num_experts)
        # Of each receiver's rows the first B; of each of its experts what lies among them.
        per_receiver = order.group_sizes.reshape(S, L)
        before = jnp.cumsum(per_receiver, axis=1) - per_receiver
        sent_sizes = jnp.minimum(per_receiver, jnp.maximum(B - before, 0))
        sent, receiver, rank = prefix_rows(per_receiver.sum(axis=1), sent_sizes.sum(axis=1), A)
        slot_of_row = jnp.where(sent, receiver * B + rank, S * B)
        row_of_slot = _inverse(slot_of_row, S * B, absent=A)

        # What arrives: S blocks of rows sorted by expert, to be sorted by expert as a whole.
        arriving_sizes = jax.lax.all_to_all(sent_sizes, _AXIS, split_axis=0, concat_axis=0)
        expert_ends = jnp.cumsum(arriving_sizes, axis=1)
        place = jnp.arange(B)[None, :, None]
        expert = jnp.sum(place >= expert_ends[:, None, :], axis=2).reshape(-1)
        arrival_of_row = jnp.argsort(expert, stable=True)
        row_of_arrival = _inverse(arrival_of_row, S * B, absent=S * B)

        sorted_rows = permute(x, order)
        blocks = move_rows(sorted_rows, row_of_slot, slot_of_row).reshape(S, B, -1)
        arrived = jax.lax.all_to_all(blocks, _AXIS, split_axis=0, concat_axis=0).reshape(S * B, -1)
        rows = move_rows(arrived, arrival_of_row, row_of_arrival)
        computed = grouped_swiglu(rows, w_gate, w_up, w_down, jnp.sum(arriving_sizes, axis=0))
        blocks = move_rows(computed, row_of_arrival, arrival_of_row).reshape(S, B, -1)
        returned = jax.lax.all_to_all(blocks, _AXIS, split_axis=0, concat_axis=0).reshape(S * B, -1)
        returned = move_rows(returned, slot_of_row, row_of_slot)

        weights = jnp.where(sent[order.row_of_assignment], weights, 0)
        weights = weights.astype(jnp.promote_types(x.dtype, jnp.float32))
        routed = combine(returned, weights, order)
        valid_assignments = jnp.sum(order.group_sizes)
        dropped = valid_assignments - jnp.sum(sent_sizes)
        return routed, counts_of_device(valid_assignments, A, sender_dropped=dropped)

    return dispatch_sharded(body, x, bank, selected_experts, combine_weights, token_valid, experts_mesh_axis=_AXIS)


def _inverse(index: Int[Array, " N"], size: int, *, absent: int) -> Int[Array, " size"]:
    """Where each number below `size` stands in `index`; `absent` where it does not."""
    place = jnp.arange(index.shape[0], dtype=jnp.int32)
    return jnp.full(size, absent, jnp.int32).at[index].set(place, mode="drop", unique_indices=True)
