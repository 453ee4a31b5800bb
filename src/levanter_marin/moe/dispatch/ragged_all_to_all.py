# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Dispatch over the mesh axis `expert` by ragged all-to-all: only accepted rows travel, in the latent width.

The contract is that of `levanter_marin.moe.dispatch.plan`.

Letters: T tokens of this device, K experts of a token, A = T*K, S devices of the axis `expert`, L experts of this
device, G of them in a chunk, D latent width, F expert width (of this device).
"""

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Float, Int

from levanter_marin import axes
from levanter_marin.config import DispatchConfig
from levanter_marin.moe.dispatch.expert_parallel import require_expert_parallel
from levanter_marin.moe.dispatch.plan import (
    DispatchCounts,
    ExchangeShape,
    accepted_group_sizes,
    chunk_plan,
    prefix_rows,
    sort_assignments,
)
from levanter_marin.moe.dispatch.rows import combine, permute
from levanter_marin.moe.dispatch.sharded import counts_of_device, dispatch_sharded
from levanter_marin.moe.dispatch.transport import send, unwritten_rows
from levanter_marin.moe.experts import ExpertBank
from levanter_marin.moe.grouped_matmul import grouped_swiglu

_AXIS = axes.EXPERT_MESH_AXIS


def dispatch_ragged_all_to_all(
    x: NamedArray,
    bank: ExpertBank,
    selected_experts: NamedArray,
    combine_weights: NamedArray,
    token_valid: NamedArray,
    config: DispatchConfig,
) -> tuple[NamedArray, DispatchCounts]:
    """See `levanter_marin.moe.dispatch.api.dispatch_experts`.

    Each way has one ragged exchange a chunk, of one piece for each peer and expert of the chunk; the backward pass
    sends cotangents along the mirror image. Rows travel in the dtype of `x`. Assignments beyond the capacity are
    receiver-dropped.
    Memory: the rows of all assignments of a device, sorted, before and after the experts; for each chunk its receive
    buffer, twice, and what the experts keep. `gradient_checkpointing` keeps none of it between layers.

    Raises:
        ValueError: the mesh or the mapping does not spread experts and tokens over the axis `expert`, or an axis does
            not divide.
    """
    num_experts = bank.gate_proj.Experts.size
    shards = require_expert_parallel(x, num_experts)

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
        shape = ExchangeShape.create(
            tokens=T,
            num_experts_per_token=K,
            num_experts=num_experts,
            shards=shards,
            expert_chunks=config.expert_chunks,
            capacity_factor=config.capacity_factor,
        )
        order = sort_assignments(selected, valid, num_experts)
        group_sizes = jax.lax.all_gather(order.group_sizes, _AXIS)
        accepted_sizes = accepted_group_sizes(group_sizes, shape)
        me = jax.lax.axis_index(_AXIS)
        accepted, _, _ = prefix_rows(order.group_sizes, accepted_sizes[me], A)

        rows = jnp.where(accepted[:, None], permute(x, order), 0)
        returned = unwritten_rows(A, rows)
        for c in range(shape.chunks):
            plan = chunk_plan(group_sizes, accepted_sizes, me, c, shape)
            if c > 0:
                # One chunk after the other, so that only one chunk's buffers are alive.
                rows, returned = jax.lax.optimization_barrier((rows, returned))
            rows, received = send(rows, unwritten_rows(shape.chunk_rows, rows), plan.there, plan.back, _AXIS)
            experts = slice(c * shape.chunk_experts, (c + 1) * shape.chunk_experts)
            computed = grouped_swiglu(received, w_gate[experts], w_up[experts], w_down[experts], plan.group_sizes)
            _, returned = send(computed, returned, plan.back, plan.there, _AXIS)

        weights = jnp.where(accepted[order.row_of_assignment], weights, 0)
        weights = weights.astype(jnp.promote_types(x.dtype, jnp.float32))
        routed = combine(jnp.where(accepted[:, None], returned, 0), weights, order)
        valid_assignments = jnp.sum(order.group_sizes)
        dropped = valid_assignments - jnp.sum(accepted_sizes[me])
        return routed, counts_of_device(valid_assignments, A, receiver_dropped=dropped)

    return dispatch_sharded(body, x, bank, selected_experts, combine_weights, token_valid, experts_mesh_axis=_AXIS)
