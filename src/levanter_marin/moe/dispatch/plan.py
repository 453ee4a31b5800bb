# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Where assignments go, in integers only. An assignment is one (token, expert) pair.

Letters: T tokens, K experts of a token, E experts, A = T*K assignments, numbered token-major.
"""

from typing import NamedTuple

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Int


class DispatchCounts(NamedTuple):
    """What became of the assignments of all devices: int32 scalars {}, whose sum is tokens * K exactly."""

    kept: NamedArray
    sender_dropped: NamedArray
    """Assignments that were never sent."""
    receiver_dropped: NamedArray
    """Assignments that found the receiver's buffer full."""
    padding: NamedArray
    """Assignments of tokens that are not valid."""


class SortedAssignments(NamedTuple):
    """Assignments sorted by expert, a stable order; those of padding come last and belong to no group."""

    assignment_of_row: Int[Array, " A"]
    row_of_assignment: Int[Array, "T K"]
    group_sizes: Int[Array, " E"]


def dropless_counts(token_valid: NamedArray, num_experts_per_token: int) -> DispatchCounts:
    """The counts of a backend that computes every assignment of a valid token."""
    valid = hax.sum(token_valid.astype(jnp.int32))
    none = hax.zeros((), dtype=jnp.int32)
    return DispatchCounts(
        kept=valid * num_experts_per_token,
        sender_dropped=none,
        receiver_dropped=none,
        padding=(token_valid.array.size - valid) * num_experts_per_token,
    )


def sort_assignments(
    selected_experts: Int[Array, "T K"], token_valid: Bool[Array, " T"], num_experts: int
) -> SortedAssignments:
    """Sort by expert. Args and results are of one device; `assignment // K` is an assignment's token."""
    expert = jnp.where(token_valid[:, None], selected_experts, num_experts).reshape(-1)
    assignment_of_row = jnp.argsort(expert, stable=True).astype(jnp.int32)
    row = jnp.arange(expert.size, dtype=jnp.int32)
    # Inverting by scatter costs a twentieth of a second sort.
    row_of_assignment = jnp.zeros_like(row).at[assignment_of_row].set(row, unique_indices=True)
    group_sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)
    return SortedAssignments(assignment_of_row, row_of_assignment.reshape(selected_experts.shape), group_sizes)
