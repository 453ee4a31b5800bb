# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Dispatch within each device: sort by expert, compute the groups, sum the results of each token. Dropless.

Letters: T tokens of this device, K experts of a token, A = T*K assignments, E experts, D latent width, F expert width.
"""

import math

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import current_thread_local_mapping
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from levanter_marin import axes
from levanter_marin.config import DispatchConfig
from levanter_marin.moe.blocked_swiglu import blocked_swiglu
from levanter_marin.moe.dispatch.plan import DispatchCounts, SortedAssignments, dropless_counts, sort_assignments
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
    Top = selected_experts.resolve_axis(axes.TOP_EXPERTS)
    Latent, Mlp = bank.gate_proj.In, bank.gate_proj.Out
    token_axes = hax.axis.without_axes(x.axes, Latent)
    experts_shards = math.prod(_mesh_sizes(_mesh_axes(axes.EXPERTS)))
    if experts_shards > 1:
        raise ValueError(
            f"local dispatch needs all {bank.gate_proj.Experts.size} experts on every device, but the mesh axes "
            f"{_mesh_axes(axes.EXPERTS)} split them over {experts_shards}; set the size of those mesh axes to 1"
        )
    token_mesh_axes = tuple(_mesh_axes(axis.name) for axis in token_axes)
    used = {name for names in token_mesh_axes for name in names}
    # A mesh axis that splits the tokens can't also split the sum over `mlp`.
    mlp_mesh_axes = tuple(name for name in _mesh_axes(axes.MLP) if name not in used)
    for axis, names in zip((*token_axes, Mlp), (*token_mesh_axes, mlp_mesh_axes), strict=True):
        shards = math.prod(_mesh_sizes(names))
        if axis.size % shards != 0:
            raise ValueError(
                f"axis {axis.name} of size {axis.size} does not divide over the {shards} devices of mesh axes "
                f"{names}; make {axis.name} a multiple of {shards}"
            )

    def body(x, w_gate, w_up, w_down, selected, weights, valid):
        D, K = x.shape[-1], selected.shape[-1]
        plan = sort_assignments(selected.reshape(-1, K), valid.reshape(-1), w_gate.shape[0])
        weights = jnp.where(valid[..., None], weights, 0).reshape(-1, K)
        routed = sum_of_experts(x.reshape(-1, D), w_gate, w_up, w_down, weights, plan)
        if mlp_mesh_axes:
            routed = jax.lax.psum(routed, mlp_mesh_axes)
        return routed.reshape(x.shape).astype(x.dtype)

    if any((*token_mesh_axes, mlp_mesh_axes)):
        tokens = PartitionSpec(*(names or None for names in token_mesh_axes))
        per_token = PartitionSpec(*tokens, None)
        mlp = mlp_mesh_axes or None
        mlp_out, mlp_in = PartitionSpec(None, None, mlp), PartitionSpec(None, mlp, None)
        body = hax.shard_map(
            body, in_specs=(per_token, mlp_out, mlp_out, mlp_in, per_token, per_token, tokens), out_specs=per_token
        )

    routed = body(
        x.rearrange((*token_axes, Latent)).array,
        bank.gate_proj.weight.rearrange((axes.EXPERTS, axes.LATENT, axes.MLP)).array,
        bank.up_proj.weight.rearrange((axes.EXPERTS, axes.LATENT, axes.MLP)).array,
        bank.down_proj.weight.rearrange((axes.EXPERTS, axes.MLP, axes.LATENT)).array,
        selected_experts.rearrange((*token_axes, Top)).array,
        combine_weights.rearrange((*token_axes, Top)).array,
        token_valid.rearrange(token_axes).array,
    )
    counts = dropless_counts(token_valid, Top.size)
    return hax.named(routed, (*token_axes, Latent)).rearrange(x.axes), counts


def _mesh_axes(axis_name: str) -> tuple[str, ...]:
    """The axes of the current mesh, size 1 left out, that the current mapping gives a tensor axis."""
    names = (current_thread_local_mapping() or {}).get(axis_name)
    if names is None:
        return ()
    mesh_shape = jax.sharding.get_abstract_mesh().shape
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if mesh_shape.get(n, 1) > 1)


def _mesh_sizes(mesh_axes: tuple[str, ...]) -> tuple[int, ...]:
    mesh_shape = jax.sharding.get_abstract_mesh().shape
    return tuple(mesh_shape[name] for name in mesh_axes)


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


@jax.custom_vjp
def permute(x: Float[Array, "T D"], plan: SortedAssignments) -> Float[Array, "A D"]:
    """A copy of its token's row for every assignment, sorted by expert. The gradient sums in fp32 without scatter."""
    K = plan.row_of_assignment.shape[1]
    return jnp.take(x, plan.assignment_of_row // K, axis=0, mode="clip")


def _permute_fwd(x, plan):
    return permute(x, plan), plan


def _permute_bwd(plan, d_rows):
    return _sum_rows(d_rows, None, plan.row_of_assignment).astype(d_rows.dtype), None


permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def combine(rows: Float[Array, "A D"], weights: Float[Array, "T K"], plan: SortedAssignments) -> Float[Array, "T D"]:
    """The weighted sum of every token's rows, in fp32. The gradient gathers, without scatter."""
    return _sum_rows(rows, weights, plan.row_of_assignment)


def _combine_fwd(rows, weights, plan):
    return combine(rows, weights, plan), (rows, weights, plan)


def _combine_bwd(residuals, d_out):
    rows, weights, plan = residuals
    K = weights.shape[1]
    d_out_rows = jnp.take(d_out, plan.assignment_of_row // K, axis=0, mode="clip")
    weight_of_row = jnp.take(weights.reshape(-1), plan.assignment_of_row, mode="clip")
    d_rows = (weight_of_row[:, None] * d_out_rows).astype(rows.dtype)
    d_weight_of_row = jnp.sum(rows.astype(d_out.dtype) * d_out_rows, axis=1)
    d_weights = jnp.take(d_weight_of_row, plan.row_of_assignment, mode="clip")
    return d_rows, d_weights.astype(weights.dtype), None


combine.defvjp(_combine_fwd, _combine_bwd)


def _sum_rows(
    rows: Float[Array, "A D"], weights: Float[Array, "T K"] | None, row_of_assignment: Int[Array, "T K"]
) -> Float[Array, "T D"]:
    """Each token's rows, weighted and summed in fp32."""
    T, K = row_of_assignment.shape
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((T, rows.shape[1]), dtype)
    for k in range(K):
        term = jnp.take(rows, row_of_assignment[:, k], axis=0, mode="clip").astype(dtype)
        total += term if weights is None else weights[:, k, None] * term
    return total
