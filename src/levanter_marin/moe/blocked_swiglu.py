# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""SwiGLU experts for CPU: gather, compute and add, a few chunks of experts' rows at a time.

XLA:CPU has no fast grouped matmul, but its loops may run a number of times known only at run time. So every group is
cut into chunks of a few static sizes around the mean group, and one loop for each size takes the chunks of that size,
several at once: small products would keep one core busy. Nothing is dropped, and no array with a row for every
assignment exists, since fresh memory pages cost a CPU more than the arithmetic on them.

Letters: T tokens, R rows (assignments), E experts, D model (latent) width, F expert width, G chunks of a batch,
C rows of a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Chunk sizes over the mean group size. More of them waste fewer rows, but each adds a loop body to compile.
_SIZE_FRACTIONS = (0.5, 0.875, 1.0, 1.125, 1.25)
_SIZE_MULTIPLE = 16
# Beyond these sizes of a chunk and of a batch, in rows, products gain nothing and activations leave the cache.
_MAX_MEAN_SIZE = 512
_MAX_BATCH_ROWS = 3072
# The last batch is half empty on average: without enough of them that shows.
_MIN_BATCHES = 16


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
    Memory: beside arguments, result and gradients, one batch.
    """
    matmul = functools.partial(_matmul, x.dtype)

    def add_batch(out, batch, _):
        rows = _take(x, batch.token)
        gate, up = (matmul(rows, w[batch.expert], 2, 1) for w in (w_gate, w_up))
        rows_out = matmul(jax.nn.silu(gate) * up, w_down[batch.expert], 2, 1)
        return out.at[batch.token].add(rows_out * batch.weight[..., None], mode="drop")

    out = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    return _over_batches(add_batch, out, x.shape[0], token_of_row, weight_of_row, group_sizes)


def _fwd(*args):
    return blocked_swiglu(*args), args


def _bwd(args, d_out):
    x, w_gate, w_up, w_down, token_of_row, weight_of_row, group_sizes = args
    matmul = functools.partial(_matmul, x.dtype)

    def add_batch(gradients, batch, put):
        d_x, d_w_gate, d_w_up, d_w_down, d_weight = gradients
        rows, d_rows_out = _take(x, batch.token), _take(d_out, batch.token)
        gate, up = (matmul(rows, w[batch.expert], 2, 1) for w in (w_gate, w_up))
        d_hidden = matmul(d_rows_out, w_down[batch.expert], 2, 2)
        sigmoid = jax.nn.sigmoid(gate)
        silu = gate * sigmoid
        hidden = silu * up
        d_weight = d_weight.at[batch.row].set(jnp.sum(hidden * d_hidden, axis=2), mode="drop")
        weight = batch.weight[..., None]
        hidden, d_hidden = (hidden * weight).astype(x.dtype), d_hidden * weight
        d_gate, d_up = d_hidden * up * (sigmoid + silu * (1 - sigmoid)), d_hidden * silu
        d_rows = matmul(d_gate, w_gate[batch.expert], 2, 2) + matmul(d_up, w_up[batch.expert], 2, 2)
        rows_t, hidden_t = _transpose(rows), _transpose(hidden)
        return (
            d_x.at[batch.token].add(d_rows, mode="drop"),
            put(d_w_gate, batch, matmul(rows_t, d_gate, 2, 1)),
            put(d_w_up, batch, matmul(rows_t, d_up, 2, 1)),
            put(d_w_down, batch, matmul(hidden_t, d_rows_out, 2, 1)),
            d_weight,
        )

    differentiable = (x, w_gate, w_up, w_down, weight_of_row)
    zeros = tuple(jnp.zeros(a.shape, d_out.dtype) for a in differentiable)
    gradients = _over_batches(add_batch, zeros, x.shape[0], token_of_row, weight_of_row, group_sizes)
    d_x, d_w_gate, d_w_up, d_w_down, d_weight = (
        g.astype(a.dtype) for g, a in zip(gradients, differentiable, strict=True)
    )
    return d_x, d_w_gate, d_w_up, d_w_down, None, d_weight, None


blocked_swiglu.defvjp(_fwd, _bwd)


class _Batch(NamedTuple):
    """G chunks, each of C rows of one expert; without one, of expert E. The last rows of a chunk may be unused: row R
    of token T. All of these are out of bounds, so that writing does nothing and reading a row gives 0."""

    expert: Int[Array, " G"]
    row: Int[Array, "G C"]
    token: Int[Array, "G C"]
    weight: Float[Array, "G C"]


def _chunk_sizes(R: int, E: int) -> tuple[int, ...]:
    mean = min(R / E, _MAX_MEAN_SIZE)
    return tuple(sorted({math.ceil(mean * f / _SIZE_MULTIPLE) * _SIZE_MULTIPLE for f in _SIZE_FRACTIONS}))


def _chunks_per_batch(R: int, E: int, C: int) -> int:
    return max(1, min(E, round(min(_MAX_BATCH_ROWS, R / _MIN_BATCHES) / C)))


def _over_batches[Carry](
    body: Callable[[Carry, _Batch, Callable[[Array, _Batch, Array], Array]], Carry],
    carry: Carry,
    T: int,
    token_of_row: Int[Array, " R"],
    weight_of_row: Float[Array, " R"],
    group_sizes: Int[Array, " E"],
) -> Carry:
    """Fold `body` over all chunks; it gets what puts a chunk's share into the gradient of an expert's weight.

    Every expert has a first chunk, which is the one that may be partial, or empty. They come in order of size; those
    that do not fill a batch go up to the next size. Full chunks of the largest size follow.
    """
    R, E = token_of_row.shape[0], group_sizes.shape[0]
    sizes = _chunk_sizes(R, E)
    largest = sizes[-1]
    group_start = jnp.cumsum(group_sizes) - group_sizes
    full_chunks = jnp.maximum(group_sizes - 1, 0) // largest
    first_size = group_sizes - full_chunks * largest

    def fold(carry, C, put, batches, start, expert, first_row, used):
        """`body` over `batches` of the chunks from `start` on."""
        G = _chunks_per_batch(R, E, C)

        def step(j, carry):
            chunk = start + j * G + jnp.arange(G)
            expert_of_chunk = expert.at[chunk].get(mode="fill", fill_value=E)
            chunk_used = used.at[chunk].get(mode="fill", fill_value=0)
            row = jnp.where(jnp.arange(C) < chunk_used[:, None], first_row[chunk][:, None] + jnp.arange(C), R)
            token = token_of_row.at[row].get(mode="fill", fill_value=T)
            weight = weight_of_row.at[row].get(mode="fill", fill_value=0)
            # Without the barrier these few numbers are computed again for every element of a row.
            return body(carry, _Batch(*lax.optimization_barrier((expert_of_chunk, row, token, weight))), put)

        return lax.fori_loop(0, batches, step, carry)

    by_size = jnp.argsort(first_size)
    chunks = by_size, group_start[by_size], first_size[by_size]
    start = jnp.int32(0)
    for C in sizes:
        G = _chunks_per_batch(R, E, C)
        fitting = jnp.sum(first_size <= C) - start
        batches = fitting // G if C < largest else -(-fitting // G)
        carry = fold(carry, C, _set, batches, start, *chunks)
        start += batches * G

    max_chunks = max(1, R // largest)
    chunk = jnp.arange(max_chunks)
    chunk_end = jnp.cumsum(full_chunks)
    expert = jnp.repeat(jnp.arange(E), full_chunks, total_repeat_length=max_chunks)
    first_row = (group_start + first_size)[expert] + (chunk - (chunk_end - full_chunks)[expert]) * largest
    used = jnp.where(chunk < chunk_end[-1], largest, 0)
    batches = -(-chunk_end[-1] // _chunks_per_batch(R, E, largest))
    return fold(carry, largest, _add, batches, 0, expert, first_row, used)


def _set(gradient: Float[Array, "E _ _"], batch: _Batch, of_chunk: Float[Array, "G _ _"]) -> Float[Array, "E _ _"]:
    """The gradient of experts none of which has one yet: without reading what is there."""
    return gradient.at[batch.expert].set(of_chunk, mode="drop", unique_indices=True)


def _add(gradient: Float[Array, "E _ _"], batch: _Batch, of_chunk: Float[Array, "G _ _"]) -> Float[Array, "E _ _"]:
    return gradient.at[batch.expert].add(of_chunk, mode="drop")


def _take(x: Float[Array, "T D"], token: Int[Array, "G C"]) -> Float[Array, "G C D"]:
    """Rows of tokens, zero for a token out of bounds."""
    return x.at[token].get(mode="fill", fill_value=0)


def _matmul(
    dtype: jnp.dtype, a: Float[Array, "G _ _"], b: Float[Array, "G _ _"], a_axis: int, b_axis: int
) -> Float[Array, "G _ _"]:
    """A product for each chunk of operands cast to `dtype`, accumulated in fp32 or more."""
    axes = (((a_axis,), (b_axis,)), ((0,), (0,)))
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return lax.dot_general(a.astype(dtype), b.astype(dtype), axes, preferred_element_type=accumulator)


def _transpose(a: Float[Array, "G C _"]) -> Float[Array, "G _ C"]:
    """A transposed copy. Folded into the product, a transposed left side halves its speed."""
    return lax.optimization_barrier(jnp.swapaxes(a, 1, 2))
