# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Dispatch within each device: sort by expert, compute the groups, sum the results of each token. Dropless.

Letters: T tokens of this device, K experts of a token, A = T*K assignments, E experts, D latent width, F expert width.
"""

import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Float

from levanter_marin import axes
from levanter_marin.config import DispatchConfig
from levanter_marin.moe.blocked_swiglu import blocked_swiglu
from levanter_marin.moe.dispatch.plan import DispatchCounts, SortedAssignments, sort_assignments
from levanter_marin.moe.dispatch.rows import combine, permute
from levanter_marin.moe.dispatch.sharded import counts_of_device, dispatch_sharded, mesh_axes, shard_count
from levanter_marin.moe.experts import ExpertBank
from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation, default_implementation, grouped_swiglu


def dispatch_local(
    x: NamedArray,
    bank: ExpertBank,
    selected_experts: NamedArray,
    combine_weights: NamedArray,
    token_valid: NamedArray,
    config: DispatchConfig,
) -> tuple[NamedArray, DispatchCounts]:
    """See `levanter_marin.moe.dispatch.api.dispatch_experts`.

    Tokens stay on their device. The bank is whole on every device, but for its `mlp` axis, which stays sharded as
    the axis mapping has it: each device then adds its part of the sum after the down projection.

    Raises:
        ValueError: the mapping shards `experts`, or an axis unevenly.
    """
    del config
    if shard_count(mesh_axes(axes.EXPERTS)) > 1:
        raise ValueError(
            f"local dispatch needs all {bank.gate_proj.Experts.size} experts on every device, but the mesh axes "
            f"{mesh_axes(axes.EXPERTS)} split them over {shard_count(mesh_axes(axes.EXPERTS))}; set the size of those "
            "mesh axes to 1, or map `experts` to the mesh axis `expert` alone for an all-to-all"
        )

    def body(x, w_gate, w_up, w_down, selected, weights, valid):
        plan = sort_assignments(selected, valid, w_gate.shape[0])
        weights = jnp.where(valid[:, None], weights, 0)
        counts = counts_of_device(jnp.sum(plan.group_sizes), selected.size)
        return sum_of_experts(x, w_gate, w_up, w_down, weights, plan), counts

    return dispatch_sharded(body, x, bank, selected_experts, combine_weights, token_valid, experts_mesh_axis=None)


def sum_of_experts(
    x: Float[Array, "T D"],
    w_gate: Float[Array, "E D F"],
    w_up: Float[Array, "E D F"],
    w_down: Float[Array, "E F D"],
    weights: Float[Array, "T K"],
    plan: SortedAssignments,
    implementation: GroupedMatmulImplementation | None = None,
) -> Float[Array, "T D"]:
    """The weighted sum of each token's experts, in fp32, on one device.

    Args:
        weights: Combine weights, 0 for padding.
        plan: `sort_assignments` of the same tokens.
        implementation: As in `grouped_swiglu`; `blocked` alone needs no row for each assignment.
    """
    if implementation is None:
        implementation = default_implementation()
    weights = weights.astype(jnp.promote_types(x.dtype, jnp.float32))
    if implementation is GroupedMatmulImplementation.blocked:
        w_gate, w_up, w_down = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))
        token_of_row = plan.assignment_of_row // weights.shape[1]
        weight_of_row = jnp.take(weights.reshape(-1), plan.assignment_of_row, mode="clip")
        return blocked_swiglu(x, w_gate, w_up, w_down, token_of_row, weight_of_row, plan.group_sizes)
    rows = grouped_swiglu(permute(x, plan), w_gate, w_up, w_down, plan.group_sizes, implementation)
    return combine(rows, weights, plan)
