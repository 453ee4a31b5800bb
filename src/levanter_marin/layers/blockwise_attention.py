# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Causal grouped-query attention that skips the key blocks no query of a block can see.

Letters of raw arrays: `...` batch axes, s position, k KV head, g query head of a KV head, d head size, c query blocks
of one step, q position inside a query block, r = g * q rows of a query block, b key block, t position inside a key
block or inside a stretch of key blocks. Batched products of [r, d] and [t, d] matrices are the fast ones on CPU; a
step is small enough for the caches; batch and head axes stay apart so that a mesh can shard each.

The forward pass saves its output and the log-sum-exp of its scores; the backward pass recomputes the probabilities.

References:
    Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023.
    Beltagy, Peters, Cohan, Longformer: The Long-Document Transformer, 2020 (banded attention in blocks).
"""

import functools
import math
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from levanter_marin import axes

CHECKPOINT_NAME = "blockwise_attention"
"""Name of output and log-sum-exp in a checkpoint policy, for instance in `save_block_internals` of Haliax's."""

# Far below any score, finite so that a row whose keys are all masked stays free of NaN until it is discarded.
_MASKED = -1e30
# The id of the positions before a sequence, which no query has.
_NO_SEGMENT = np.iinfo(np.int32).min
# Scores at once. A banded step takes as many query blocks, a tiled one as long a key block as this allows.
_BANDED_SCORES = 2**20
_TILED_SCORES = 2**17


class _Plan(NamedTuple):
    """Static part of a call.

    A banded step compares each of its `at_once` query blocks with the `reach` key blocks before it and its own, side
    by side. A tiled step compares one query block with one key block after the other.
    """

    banded: bool
    window: int  # the sequence's length when every earlier key is seen
    block: int  # positions of a query block
    key_block: int  # positions of a key block
    reach: int
    at_once: int
    steps: int
    dtype: jnp.dtype  # of the operands of products

    @property
    def step_length(self) -> int:
        return self.at_once * self.block

    @property
    def length(self) -> int:
        """Positions of all steps: the sequence's, rounded up."""
        return self.steps * self.step_length


def blockwise_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *,
    segment_ids: NamedArray | None,
    sliding_window: int | None,
    block_size: int | None = None,
    attention_dtype: jnp.dtype | None = None,
) -> NamedArray:
    """Causal softmax attention with scale 1/sqrt(head_size), within documents and optionally within a window.

    Query i sees key j iff `j <= i`, `j > i - sliding_window` and `segment_ids[i] == segment_ids[j]`. Every query sees
    its own key, so a padding row (id -1) attends among its equals and is never NaN.

    Gradients are exact. The gradient of a query's output with respect to a key or value it does not see is exactly 0.
    With a window, time and memory are linear in the sequence length; without, time is quadratic (half the square)
    and memory is linear. Batch and head axes may be sharded. Gradient checkpointing repeats the forward pass unless
    its policy saves `CHECKPOINT_NAME`.

    Args:
        query: {batch axes..., position, kv_head, q_heads_per_group, head_size}, in any order.
        key: {batch axes..., position, kv_head, head_size}, in any order.
        value: as `key`.
        segment_ids: Integers {batch axes..., position}, or fewer batch axes; None is one document a row.
        sliding_window: Keys a query sees, its own included; None is all earlier keys.
        block_size: Queries of one block; None chooses. It changes rounding only.
        attention_dtype: Dtype of the products' operands; None is fp32. Softmax and accumulation are in fp32 anyway.

    Returns:
        Array with the query's axes and dtype.

    Raises:
        ValueError: if axes disagree, or the window or block is not positive.
    """
    _check(query, key, value, sliding_window, block_size)
    inner = (axes.POSITION, axes.KV_HEAD, axes.Q_HEADS_PER_GROUP, axes.HEAD_SIZE)
    Pos, KvHead, Group, HeadSize = (query.resolve_axis(name) for name in inner)
    batch = tuple(axis for axis in query.axes if axis.name not in inner)
    ordered = query.rearrange((*batch, Pos, KvHead, Group, HeadSize))
    if segment_ids is None:
        ids = jnp.zeros((1,) * len(batch) + (Pos.size,), jnp.int32)
    else:
        ids = hax.broadcast_to(segment_ids, (*batch, Pos)).array.astype(jnp.int32)

    heads = query.size // (Pos.size * HeadSize.size)
    dtype = jnp.dtype(jnp.float32 if attention_dtype is None else attention_dtype)
    out = _attention(
        _plan(Pos.size, heads, sliding_window, block_size, dtype),
        ordered.array,
        key.rearrange((*batch, Pos, KvHead, HeadSize)).array,
        value.rearrange((*batch, Pos, KvHead, HeadSize)).array,
        ids,
    )
    return hax.named(out, ordered.axes).rearrange(query.axes)


def _check(query, key, value, sliding_window, block_size) -> None:
    for name, size in (("sliding_window", sliding_window), ("block_size", block_size)):
        if size is not None and size <= 0:
            raise ValueError(f"blockwise_attention: {name}={size} must be positive; set 1 or more, or None")
    expected = {axis.name: axis.size for axis in query.axes if axis.name != axes.Q_HEADS_PER_GROUP}
    for name, array in (("key", key), ("value", value)):
        sizes = {axis.name: axis.size for axis in array.axes}
        if sizes != expected:
            raise ValueError(
                f"blockwise_attention: {name} has axes {sizes}, the query without {axes.Q_HEADS_PER_GROUP} has "
                f"{expected}; give both the same"
            )


def _plan(length: int, heads: int, window: int | None, block: int | None, dtype: jnp.dtype) -> _Plan:
    """`heads` counts the query heads of all rows of the batch."""
    window = length if window is None else min(window, length)
    if block is None and window == length:
        block = 64 if length < 2048 else 128
    elif block is None:
        block = min(max(32, _power_of_two(window // 2)), 128)
    block = min(block, length)
    count, reach = -(-length // block), -(-(window - 1) // block)
    most = min(count, _BANDED_SCORES // (heads * block**2 * (reach + 1)))
    if window == length or most == 0:
        blocks_per_key_block = max(1, _power_of_two(_TILED_SCORES // (heads * block**2)))
        return _Plan(False, window, block, block * min(blocks_per_key_block, count), 0, 1, count, dtype)
    evenly = (n for n in range(most, most // 2, -1) if count % n == 0)
    at_once = next(evenly, -(-count // -(-count // most)))
    return _Plan(True, window, block, block, reach, at_once, -(-count // at_once), dtype)


def _power_of_two(n: int) -> int:
    """The largest power of two up to n, 0 for 0."""
    return 1 << n.bit_length() - 1 if n else 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: _Plan,
    query: Float[Array, "... s k g d"],
    key: Float[Array, "... s k d"],
    value: Float[Array, "... s k d"],
    ids: Int[Array, "... s"],
) -> Float[Array, "... s k g d"]:
    return _attention_forward(plan, query, key, value, ids)[0]


def _attention_forward(plan, query, key, value, ids):
    padded_query, query_ids = _pad(query, -4, 0, plan.length), _pad(ids, -1, 0, plan.length)
    keys = _key_blocks(plan, key), _key_blocks(plan, value), _key_id_blocks(plan, ids)

    def step(_, i):
        q, q_ids = _scaled_rows(plan, padded_query, i), _id_blocks(plan, query_ids, i)

        def attend(j):
            stretch = _stretch(plan, keys, i, j)
            return _block_forward(q, *stretch[:2], _mask(plan, q_ids, stretch[2], i, j))

        first, end = _stretches(plan, i)
        out, lse = jax.lax.fori_loop(first + 1, end, lambda j, so_far: _merge(*so_far, *attend(j)), attend(first))
        return None, (_from_rows(plan, out, query).astype(query.dtype), lse)

    _, (out, lse) = jax.lax.scan(step, None, jnp.arange(plan.steps))
    out, lse = checkpoint_name((_join_steps(out, query), lse), CHECKPOINT_NAME)
    return out, (query, key, value, ids, out, lse)


def _attention_backward(plan, residuals, d_out):
    query, key, value, ids, out, lse = residuals
    padded_query, padded_out, padded_d_out = (_pad(x, -4, 0, plan.length) for x in (query, out, d_out))
    query_ids = _pad(ids, -1, 0, plan.length)
    keys = _key_blocks(plan, key), _key_blocks(plan, value), _key_id_blocks(plan, ids)
    zeros = jnp.zeros_like(keys[0].swapaxes(-1, -2), jnp.float32)

    def step(d_keys_values, given):
        i, step_lse = given
        q, q_ids = _scaled_rows(plan, padded_query, i), _id_blocks(plan, query_ids, i)
        rows = [_rows(plan, x, i).astype(jnp.float32) for x in (padded_out, padded_d_out)]
        delta = jnp.sum(rows[0] * rows[1], axis=-1, keepdims=True)

        def attend(j, so_far):
            d_q, *d_keys_values = so_far
            stretch = _stretch(plan, keys, i, j)
            mask = _mask(plan, q_ids, stretch[2], i, j)
            d_q_part, *parts = _block_backward(q, *stretch[:2], mask, step_lse, delta, rows[1].astype(plan.dtype))
            start = _stretch_start(plan, i, j)
            return d_q + d_q_part, *(
                _add_stretch(plan, x, y, start) for x, y in zip(d_keys_values, parts, strict=True)
            )

        d_q, *d_keys_values = jax.lax.fori_loop(
            *_stretches(plan, i), attend, (jnp.zeros(q.shape, jnp.float32), *d_keys_values)
        )
        d_q = _from_rows(plan, d_q, query) / math.sqrt(query.shape[-1])
        return tuple(d_keys_values), d_q.astype(query.dtype)

    d_keys_values, d_query = jax.lax.scan(step, (zeros, zeros), (jnp.arange(plan.steps), lse))
    d_key, d_value = (_from_key_blocks(plan, x, of) for x, of in zip(d_keys_values, (key, value), strict=True))
    return _join_steps(d_query, query), d_key, d_value, None


_attention.defvjp(_attention_forward, _attention_backward)


# Query blocks against stretches of keys.


def _product(spec: str, a: Array, b: Array) -> Float[Array, "..."]:
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=jnp.float32)


def _scores(
    query: Float[Array, "... k c r d"], key: Float[Array, "... k c t d"], mask: Bool[Array, "... #c 1 q t"]
) -> Float[Array, "... k c r t"]:
    scores = _product("...rd,...td->...rt", query, key)
    by_group = scores.reshape(*scores.shape[:-2], -1, *mask.shape[-2:])
    return jnp.where(mask, by_group, _MASKED).reshape(scores.shape)


def _block_forward(query, key, value, mask):
    """Output [... k c r d] and log-sum-exp [... k c r 1] in fp32; the query comes scaled."""
    scores = _scores(query, key, mask)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return _product("...rt,...td->...rd", weights.astype(value.dtype), value) / total, peak + jnp.log(total)


def _block_backward(query, key, value, mask, lse, delta, d_out):
    """Gradients in fp32 of query [... k c r d], key and value [... k c d t], the faster layout of that product."""
    weights = jnp.exp(_scores(query, key, mask) - lse)
    d_scores = (weights * (_product("...rd,...td->...rt", d_out, value) - delta)).astype(query.dtype)
    d_query = _product("...rt,...td->...rd", d_scores, key)
    d_key = _product("...rd,...rt->...dt", query, d_scores)
    d_value = _product("...rd,...rt->...dt", d_out, weights)
    return d_query, d_key, d_value


def _merge(out_a, lse_a, out_b, lse_b):
    """Attention to two sets of keys from the attention to each."""
    lse = jnp.logaddexp(lse_a, lse_b)
    return out_a * jnp.exp(lse_a - lse) + out_b * jnp.exp(lse_b - lse), lse


def _mask(plan: _Plan, query_ids: Int[Array, "... c q"], key_ids: Int[Array, "... c t"], i, j):
    """Which keys of stretch j a query of step i sees [... 1 c 1 q t]."""
    behind = plan.reach * plan.block if plan.banded else i * plan.block - j * plan.key_block
    shape = (query_ids.shape[-1], key_ids.shape[-1])
    distance = behind + jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = (distance >= 0) & (distance < plan.window)
    return seen & (query_ids[..., None, :, None, :, None] == key_ids[..., None, :, None, None, :])


def _stretches(plan: _Plan, i):
    """First and end of the stretches of keys that step i sees."""
    if plan.banded:
        return 0, 1
    first = jnp.maximum(i * plan.block - (plan.window - 1), 0) // plan.key_block
    return first, -(-(i + 1) * plan.block // plan.key_block)


# Queries and results: slices of a step, and their blocks as rows.


def _pad(x: Array, axis: int, before: int, length: int, fill: int = 0) -> Array:
    """`before` positions in front, and as many behind as make `before + length`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def _rows(plan: _Plan, x: Float[Array, "... s k g d"], i) -> Float[Array, "... k c r d"]:
    x = jax.lax.dynamic_slice_in_dim(x, i * plan.step_length, plan.step_length, axis=x.ndim - 4)
    x = x.reshape(*x.shape[:-4], plan.at_once, plan.block, *x.shape[-3:])
    x = jnp.moveaxis(x, (-3, -2), (-5, -3))
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _from_rows(plan: _Plan, x: Float[Array, "... k c r d"], query: Array) -> Float[Array, "... s k g d"]:
    x = x.reshape(*x.shape[:-2], query.shape[-2], plan.block, x.shape[-1])
    x = jnp.moveaxis(x, (-5, -3), (-3, -2))
    return x.reshape(*x.shape[:-5], plan.step_length, *x.shape[-3:])


def _scaled_rows(plan: _Plan, query: Array, i) -> Float[Array, "... k c r d"]:
    return (_rows(plan, query, i).astype(jnp.float32) / math.sqrt(query.shape[-1])).astype(plan.dtype)


def _id_blocks(plan: _Plan, ids: Int[Array, "... s"], i) -> Int[Array, "... c q"]:
    ids = jax.lax.dynamic_slice_in_dim(ids, i * plan.step_length, plan.step_length, axis=ids.ndim - 1)
    return ids.reshape(*ids.shape[:-1], plan.at_once, plan.block)


def _join_steps(x: Array, query: Array) -> Float[Array, "... s k g d"]:
    """Stacked results of the steps as one sequence of the query's shape."""
    axis = query.ndim - 4
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, query.shape[axis], axis=axis)


# Keys, values and their ids in blocks, and the stretch of blocks that a query block is compared with.


def _key_blocks(plan: _Plan, x: Float[Array, "... s k d"]) -> Float[Array, "... k b t d"]:
    length = -(-plan.length // plan.key_block) * plan.key_block
    x = _pad(x.astype(plan.dtype), -3, plan.reach * plan.key_block, length)
    x = x.reshape(*x.shape[:-3], -1, plan.key_block, *x.shape[-2:])
    return jnp.moveaxis(x, -2, -4)


def _from_key_blocks(plan: _Plan, x: Float[Array, "... k b d t"], of: Array) -> Float[Array, "... s k d"]:
    x = jnp.moveaxis(x, (-4, -1), (-2, -3))
    x = x.reshape(*x.shape[:-4], -1, *x.shape[-2:])
    axis, before = of.ndim - 3, plan.reach * plan.key_block
    return jax.lax.slice_in_dim(x, before, before + of.shape[axis], axis=axis).astype(of.dtype)


def _key_id_blocks(plan: _Plan, ids: Int[Array, "... s"]) -> Int[Array, "... b t"]:
    length = -(-plan.length // plan.key_block) * plan.key_block
    ids = _pad(ids, -1, plan.reach * plan.key_block, length, fill=_NO_SEGMENT)
    return ids.reshape(*ids.shape[:-1], -1, plan.key_block)


def _stretch_start(plan: _Plan, i, j):
    """First key block of stretch j of step i."""
    return i * plan.at_once if plan.banded else j


def _stretch(plan: _Plan, keys, i, j):
    """Of keys, values and ids, the blocks that each query block of a step is compared with, side by side."""
    count = plan.at_once

    def side_by_side(x, axis):
        x = jax.lax.dynamic_slice_in_dim(x, _stretch_start(plan, i, j), count + plan.reach, axis=x.ndim + axis - 1)
        parts = [jax.lax.slice_in_dim(x, b, b + count, axis=x.ndim + axis - 1) for b in range(plan.reach + 1)]
        return jnp.concatenate(parts, axis=axis)

    key, value, ids = keys
    return side_by_side(key, -2), side_by_side(value, -2), side_by_side(ids, -1)


def _add_stretch(plan: _Plan, total: Float[Array, "... k b d t"], part: Float[Array, "... k c d t"], start):
    """Transpose of `_stretch`: adds the gradients of a stretch to those of its key blocks."""
    axis = total.ndim - 3
    blocks = jax.lax.dynamic_slice_in_dim(total, start, plan.at_once + plan.reach, axis=axis)
    for b, x in enumerate(jnp.split(part, plan.reach + 1, axis=-1)):
        blocks = blocks.at[..., b : b + plan.at_once, :, :].add(x)
    return jax.lax.dynamic_update_slice_in_dim(total, blocks, start, axis=axis)
