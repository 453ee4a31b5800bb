# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""SwiGLU experts for CPU: gather, compute and add, one chunk of one expert's rows at a time.

XLA:CPU has no grouped matmul worth the name, but each of its loops may run a number of times known only at run
time. So every group is cut into chunks, of a few static sizes around the mean group, and one loop for each size
walks over the chunks of that size. Nothing is dropped, and no array of one row for each assignment exists: fresh
pages cost a CPU more than the arithmetic on them.

Letters: T tokens, R rows (assignments), E experts, D model (latent) width, F expert width, C rows of a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Carry = TypeVar("Carry")

# Chunk sizes over the mean group size. More of them waste fewer rows, and compile longer: each adds a loop body.
_SIZE_FRACTIONS = (0.25, 0.5, 0.75, 1.0, 1.25)
_SIZE_MULTIPLE = 16
# Above this a chunk leaves the core's cache, and weight gradients slow down.
_MAX_MEAN_SIZE = 512


@jax.custom_vjp
def blocked_swiglu(
    x: Float[Array, "T D"],
    w_gate: Float[Array, "E D F"],
    w_up: Float[Array, "E D F"],
    w_down: Float[Array, "E F D"],
    token_of_row: Int[Array, " R"],
    weight_of_row: Float[Array, " R"],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "T D"]:
    """For each token, the weighted sum of SwiGLU experts over the rows that name it.

    Rows are sorted by expert, `group_sizes` of them each; those past the last group are ignored, whatever they hold.

    Value: products take operands in the dtype of `x` and accumulate in fp32 (fp64 for fp64 input); activations, the
    sum over rows and the result are fp32.
    Gradient: reverse mode, once, for `x`, the weights and `weight_of_row`, in their dtypes; recomputes the hidden
    activations, so that only the arguments are kept.
    Memory: beside arguments, result and gradients, a few chunks.
    """
    matmul = functools.partial(_matmul, x.dtype)

    def add_chunk(out, chunk):
        rows = _take(x, chunk.token)
        gate, up = (matmul(rows, w[chunk.expert], 1, 0) for w in (w_gate, w_up))
        rows_out = matmul(jax.nn.silu(gate) * up, w_down[chunk.expert], 1, 0)
        return out.at[chunk.token].add(rows_out * chunk.weight[:, None], mode="drop")

    out = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    return _over_chunks(add_chunk, out, x.shape[0], token_of_row, weight_of_row, group_sizes)


def _fwd(*args):
    return blocked_swiglu(*args), args


def _bwd(args, d_out):
    x, w_gate, w_up, w_down, token_of_row, weight_of_row, group_sizes = args
    matmul = functools.partial(_matmul, x.dtype)

    def add_chunk(gradients, chunk):
        d_x, d_w_gate, d_w_up, d_w_down, d_weight = gradients
        rows, d_rows_out = _take(x, chunk.token), _take(d_out, chunk.token)
        gate, up = (matmul(rows, w[chunk.expert], 1, 0) for w in (w_gate, w_up))
        d_hidden = matmul(d_rows_out, w_down[chunk.expert], 1, 1)
        sigmoid = jax.nn.sigmoid(gate)
        silu = gate * sigmoid
        hidden = silu * up
        d_weight = d_weight.at[chunk.row].set(jnp.sum(hidden * d_hidden, axis=1), mode="drop")
        hidden, d_hidden = hidden * chunk.weight[:, None], d_hidden * chunk.weight[:, None]
        d_gate, d_up = d_hidden * up * (sigmoid + silu * (1 - sigmoid)), d_hidden * silu
        d_rows = matmul(d_gate, w_gate[chunk.expert], 1, 1) + matmul(d_up, w_up[chunk.expert], 1, 1)
        rows_t = _transpose(rows)
        return (
            d_x.at[chunk.token].add(d_rows, mode="drop"),
            d_w_gate.at[chunk.expert].add(matmul(rows_t, d_gate, 1, 0)),
            d_w_up.at[chunk.expert].add(matmul(rows_t, d_up, 1, 0)),
            d_w_down.at[chunk.expert].add(matmul(_transpose(hidden.astype(x.dtype)), d_rows_out, 1, 0)),
            d_weight,
        )

    differentiable = (x, w_gate, w_up, w_down, weight_of_row)
    zeros = tuple(jnp.zeros(a.shape, d_out.dtype) for a in differentiable)
    gradients = _over_chunks(add_chunk, zeros, x.shape[0], token_of_row, weight_of_row, group_sizes)
    d_x, d_w_gate, d_w_up, d_w_down, d_weight = (
        g.astype(a.dtype) for g, a in zip(gradients, differentiable, strict=True)
    )
    return d_x, d_w_gate, d_w_up, d_w_down, None, d_weight, None


blocked_swiglu.defvjp(_fwd, _bwd)


class _Chunk(NamedTuple):
    """C rows of one expert, the last of them unused: row R of token T, out of bounds, with weight 0."""

    expert: Int[Array, ""]
    row: Int[Array, " C"]
    token: Int[Array, " C"]
    weight: Float[Array, " C"]


def _chunk_sizes(R: int, E: int) -> tuple[int, ...]:
    mean = min(R / E, _MAX_MEAN_SIZE)
    return tuple(sorted({math.ceil(mean * f / _SIZE_MULTIPLE) * _SIZE_MULTIPLE for f in _SIZE_FRACTIONS}))


def _over_chunks(
    body: Callable[[Carry, _Chunk], Carry],
    carry: Carry,
    T: int,
    token_of_row: Int[Array, " R"],
    weight_of_row: Float[Array, " R"],
    group_sizes: Int[Array, " E"],
) -> Carry:
    """Fold `body` over the chunks of all groups, each of the smallest size that holds its rows."""
    R, E = token_of_row.shape[0], group_sizes.shape[0]
    sizes = _chunk_sizes(R, E)
    largest = sizes[-1]

    group_end = jnp.cumsum(group_sizes)
    chunks_of_group = -(-group_sizes // largest)
    chunk_end = jnp.cumsum(chunks_of_group)
    chunk = jnp.arange(R // largest + E)
    expert = jnp.minimum(jnp.searchsorted(chunk_end, chunk, side="right"), E - 1)
    first_row = (group_end - group_sizes)[expert] + (chunk - (chunk_end - chunks_of_group)[expert]) * largest
    used = jnp.where(chunk < chunk_end[-1], jnp.minimum(largest, group_end[expert] - first_row), 0)

    size_index = jnp.where(used > 0, jnp.searchsorted(jnp.array(sizes), used), len(sizes))
    by_size = jnp.argsort(size_index)
    bounds = jnp.searchsorted(size_index[by_size], jnp.arange(len(sizes) + 1))
    expert, first_row, used = expert[by_size], first_row[by_size], used[by_size]

    for i, C in enumerate(sizes):

        def step(j, carry, C=C):
            row = jnp.where(jnp.arange(C) < used[j], first_row[j] + jnp.arange(C), R)
            token = token_of_row.at[row].get(mode="fill", fill_value=T)
            weight = weight_of_row.at[row].get(mode="fill", fill_value=0)
            return body(carry, _Chunk(expert[j], row, token, weight))

        carry = lax.fori_loop(bounds[i], bounds[i + 1], step, carry)
    return carry


def _take(x: Float[Array, "T D"], token: Int[Array, " C"]) -> Float[Array, "C D"]:
    """Rows of tokens, zero for a token out of bounds."""
    return x.at[token].get(mode="fill", fill_value=0)


def _matmul(
    dtype: jnp.dtype, a: Float[Array, "_ _"], b: Float[Array, "_ _"], a_axis: int, b_axis: int
) -> Float[Array, "_ _"]:
    """A product of operands cast to `dtype`, accumulated in fp32 or more."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return lax.dot_general(a.astype(dtype), b.astype(dtype), axes, preferred_element_type=accumulator)


def _transpose(a: Float[Array, "C _"]) -> Float[Array, "_ C"]:
    """A transposed copy. Folded into the product, a transposed left side halves its speed."""
    return lax.optimization_barrier(a.T)
