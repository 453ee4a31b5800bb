# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""SwiGLU experts over rows that are already sorted by expert.

Letters: R rows, E experts, D model (latent) width, F expert width.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType

import jax
import jax.numpy as jnp
from haliax.nn import ragged_dot
from jaxtyping import Array, Float, Int

from levanter_marin.moe.blocked_swiglu import blocked_swiglu


class GroupedMatmulImplementation(StrEnum):
    """`blocked` is ours for CPU, `ragged_dot` Haliax's choice of kernel, `reference` every expert on every row."""

    blocked = "blocked"
    ragged_dot = "ragged_dot"
    reference = "reference"


def _reference(rows, w_gate, w_up, w_down, group_sizes):
    """Every expert on every row in fp32, one row's own expert picked: the oracle, R*E*F memory."""
    R, E = rows.shape[0], w_gate.shape[0]
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(R)
    own = (row[:, None] < ends) & (row[:, None] >= ends - group_sizes)
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    x = jnp.where(row[:, None] < ends[-1], rows, 0).astype(dtype)
    w_gate, w_up, w_down = (w.astype(dtype) for w in (w_gate, w_up, w_down))
    out = jnp.zeros(rows.shape, dtype)
    for e in range(E):
        hidden = jax.nn.silu(x @ w_gate[e]) * (x @ w_up[e])
        out += jnp.where(own[:, e, None], hidden @ w_down[e], 0)
    return out.astype(rows.dtype)


def _blocked(rows, w_gate, w_up, w_down, group_sizes):
    R = rows.shape[0]
    row, one = jnp.arange(R), jnp.ones(R, jnp.promote_types(rows.dtype, jnp.float32))
    return blocked_swiglu(rows, w_gate, w_up, w_down, row, one, group_sizes).astype(rows.dtype)


def _ragged_dot(rows, w_gate, w_up, w_down, group_sizes):
    # Kernels may leave anything in rows past the last group, in the result and in the gradient.
    used = (jnp.arange(rows.shape[0]) < jnp.sum(group_sizes))[:, None]
    rows = jnp.where(used, rows, 0)
    gate = jnp.where(used, ragged_dot(rows, w_gate, group_sizes), 0)
    up = jnp.where(used, ragged_dot(rows, w_up, group_sizes), 0)
    return jnp.where(used, ragged_dot(jax.nn.silu(gate) * up, w_down, group_sizes), 0)


_IMPLEMENTATIONS: Mapping[GroupedMatmulImplementation, Callable] = MappingProxyType(
    {
        GroupedMatmulImplementation.blocked: _blocked,
        GroupedMatmulImplementation.ragged_dot: _ragged_dot,
        GroupedMatmulImplementation.reference: _reference,
    }
)


def default_implementation() -> GroupedMatmulImplementation:
    """The fastest one for the default backend."""
    if jax.default_backend() == "cpu":
        return GroupedMatmulImplementation.blocked
    return GroupedMatmulImplementation.ragged_dot


def grouped_swiglu(
    rows: Float[Array, "R D"],
    w_gate: Float[Array, "E D F"],
    w_up: Float[Array, "E D F"],
    w_down: Float[Array, "E F D"],
    group_sizes: Int[Array, " E"],
    implementation: GroupedMatmulImplementation | None = None,
) -> Float[Array, "R D"]:
    """Row r of group e becomes `(silu(row @ w_gate[e]) * (row @ w_up[e])) @ w_down[e]`.

    Value: the groups follow one another from row 0. Rows past `sum(group_sizes)` may hold anything, NaN included;
    their result is exactly zero. Products accumulate in fp32; weights are cast to the dtype of `rows`.
    Gradient: reverse mode, once, in the dtype of each argument; exactly zero for unused rows and empty groups.
    Memory: `blocked` keeps only the arguments; the others keep R rows of D and of twice F for the backward pass.

    Args:
        rows: Rows sorted by expert.
        w_gate: Weights of the gate projection, `w_up` and `w_down` of the other two.
        group_sizes: int32 rows of each expert, possibly zero; their sum is at most R.
        implementation: A name means that one; None the best for the default backend.

    Returns:
        One row for each row given, in its dtype.
    """
    if implementation is None:
        implementation = default_implementation()
    weights = (w.astype(rows.dtype) for w in (w_gate, w_up, w_down))
    return _IMPLEMENTATIONS[implementation](rows, *weights, group_sizes)
