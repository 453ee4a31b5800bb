# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""From tokens to rows sorted by expert and back, on one device, without scatter in the gradient.

Letters: T tokens of this device, K experts of a token, A = T*K assignments, D latent width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from levanter_marin.moe.dispatch.plan import SortedAssignments


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


@jax.custom_vjp
def move_rows(rows: Float[Array, "N D"], source: Int[Array, " M"], target: Int[Array, " N"]) -> Float[Array, "M D"]:
    """Row `source[m]` for each m, zero where it is N or more. `target` is the inverse, M or more for rows not read.

    No row may be read twice: the gradient is then a gather too.
    """
    return rows.at[source].get(mode="fill", fill_value=0)


def _move_rows_fwd(rows, source, target):
    return move_rows(rows, source, target), (source, target)


def _move_rows_bwd(residuals, d_out):
    source, target = residuals
    return move_rows(d_out, target, source), None, None


move_rows.defvjp(_move_rows_fwd, _move_rows_bwd)
