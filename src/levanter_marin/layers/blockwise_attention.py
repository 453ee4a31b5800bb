# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Causal grouped-query attention that skips the key blocks no query of a block can see.

Letters of raw arrays: `...` batch axes, s position, n block, c blocks of one step, k KV head, g query head of a
KV head, q query and t key inside a block, d head size. Blocks are [n, ..., k, g, q, d] and [n, ..., k, t, d]: the
position is the second to last axis because batched products over [position, head_size] matrices take half the time
of other layouts on CPU, and batch and head axes stay apart so that a mesh can shard each.

A block saves its output and the log-sum-exp of its scores; the backward pass recomputes the probabilities.

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
from jaxtyping import Array, Bool, Float, Int

from levanter_marin import axes

# Far below any score, finite so that a row whose keys are all masked stays free of NaN until it is discarded.
_MASKED = -1e30
# Scores of one step: 4 MiB in fp32, about what the caches hold.
_SCORES_PER_STEP = 2**20
# Up to this many query blocks, global attention is unrolled and slices keys to the length of the block's prefix.
_MAX_UNROLLED_BLOCKS = 8
# Query blocks that one key tile of the looped global attention spans.
_QUERY_BLOCKS_PER_TILE = 4
# An id of positions before the sequence, which no query has.
_NO_SEGMENT = np.iinfo(np.int32).min


class _Plan(NamedTuple):
    """Static part of a call: all sizes in positions."""

    window: int | None
    block: int
    dtype: jnp.dtype  # of the operands of products


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
    and memory is linear. Batch and head axes may be sharded, the position axis may not.

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

    window = None if sliding_window is None or sliding_window >= Pos.size else sliding_window
    block = min(block_size or _default_block(Pos.size, window), Pos.size)
    dtype = jnp.dtype(jnp.float32 if attention_dtype is None else attention_dtype)
    out = _attention(
        _Plan(window, block, dtype),
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


def _default_block(length: int, window: int | None) -> int:
    if window is None:
        return 128 if length > 1024 else max(64, _power_of_two(length // _MAX_UNROLLED_BLOCKS))
    return min(max(32, _power_of_two(window // 2)), 128)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


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
    forward = _global_forward if plan.window is None else _local_forward
    out, lse = forward(plan, query, key, value, ids)
    return out, (query, key, value, ids, out, lse)


def _attention_backward(plan, residuals, d_out):
    backward = _global_backward if plan.window is None else _local_backward
    query, key, value = residuals[:3]
    d_query, d_key, d_value = backward(plan, *residuals, d_out)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attention.defvjp(_attention_forward, _attention_backward)


# One query block against one stretch of keys.


def _scores(query, key, mask: Bool[Array, "... #k #g q t"]) -> Float[Array, "... k g q t"]:
    return jnp.where(mask, _product("...kgqd,...ktd->...kgqt", query, key), _MASKED)


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=jnp.float32)


def _block_forward(query, key, value, mask):
    """Output and log-sum-exp [... k g q 1] of one block, in fp32."""
    scores = _scores(query, key, mask)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = _product("...kgqt,...ktd->...kgqd", weights.astype(value.dtype), value) / total
    return out, peak + jnp.log(total)


def _block_backward(query, key, value, mask, out, lse, d_out):
    """Gradients of one block's query, key and value, in fp32; the query comes scaled."""
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1, keepdims=True)
    d_out = d_out.astype(query.dtype)
    probabilities = jnp.exp(_scores(query, key, mask) - lse)
    d_value = _product("...kgqt,...kgqd->...ktd", probabilities.astype(query.dtype), d_out)
    d_probabilities = _product("...kgqd,...ktd->...kgqt", d_out, value)
    d_scores = (probabilities * (d_probabilities - delta)).astype(query.dtype)
    d_query = _product("...kgqt,...ktd->...kgqd", d_scores, key)
    d_key = _product("...kgqt,...kgqd->...ktd", d_scores, query)
    return d_query, d_key, d_value


# Between sequences and blocks. `batch_rank` is the number of batch axes.


def _to_blocks(x: Array, batch_rank: int, block: int) -> Array:
    """[... s (k (g)) (d)] to [n ... (k (g)) q (d)]; a length that is no multiple of the block is zero padded."""
    length = x.shape[batch_rank]
    count = -(-length // block)
    x = jnp.pad(x, [(0, count * block - length if i == batch_rank else 0) for i in range(x.ndim)])
    x = x.reshape(*x.shape[:batch_rank], count, block, *x.shape[batch_rank + 1 :])
    if x.ndim > batch_rank + 2:
        x = jnp.moveaxis(x, batch_rank + 1, -2)
    return jnp.moveaxis(x, batch_rank, 0)


def _from_blocks(x: Array, batch_rank: int, length: int) -> Array:
    """Inverse of `_to_blocks` for arrays with a head_size axis."""
    x = jnp.moveaxis(jnp.moveaxis(x, 0, batch_rank), -2, batch_rank + 1)
    x = x.reshape(*x.shape[:batch_rank], -1, *x.shape[batch_rank + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=batch_rank)


def _scaled(plan: _Plan, query: Array) -> Array:
    return (query.astype(jnp.float32) / math.sqrt(query.shape[-1])).astype(plan.dtype)


def _same_segment(query_ids: Int[Array, "... q"], key_ids: Int[Array, "... t"]) -> Bool[Array, "... 1 1 q t"]:
    return query_ids[..., None, None, :, None] == key_ids[..., None, None, None, :]


# Local: every query block against the same number of key blocks, its own last.


def _local_blocks(plan: _Plan, query, key, value, ids):
    """Query blocks, keys and values in reach of each, ids of both."""
    rank, block = ids.ndim - 1, plan.block
    reach = _reach(plan)
    key_ids = _in_reach(_to_blocks(ids, rank, block), reach, -1, _NO_SEGMENT)
    keys, values = (_in_reach(_to_blocks(x.astype(plan.dtype), rank, block), reach, -2, 0) for x in (key, value))
    return _to_blocks(_scaled(plan, query), rank, block), keys, values, _to_blocks(ids, rank, block), key_ids


def _reach(plan: _Plan) -> int:
    """Earlier key blocks that a query block touches."""
    return -(-(plan.window - 1) // plan.block)


def _in_reach(blocks: Array, reach: int, axis: int, fill: int) -> Array:
    count = blocks.shape[0]
    padded = jnp.pad(blocks, [(reach, 0)] + [(0, 0)] * (blocks.ndim - 1), constant_values=fill)
    return jnp.concatenate([padded[i : i + count] for i in range(reach + 1)], axis=axis)


def _sum_in_reach(gradients: Float[Array, "n ... t d"], reach: int, block: int) -> Float[Array, "n ... q d"]:
    """Transpose of `_in_reach`: adds what the query blocks say about the same key block."""
    total = gradients[..., reach * block :, :]
    for i in range(reach):
        ahead = reach - i
        part = gradients[ahead:, ..., i * block : (i + 1) * block, :]
        total = total + jnp.pad(part, [(0, min(ahead, total.shape[0]))] + [(0, 0)] * (part.ndim - 1))
    return total


def _local_mask(plan: _Plan, query_ids, key_ids):
    ahead = _reach(plan) * plan.block
    distance = ahead + np.arange(plan.block)[:, None] - np.arange(ahead + plan.block)
    return jnp.asarray((distance >= 0) & (distance < plan.window)) & _same_segment(query_ids, key_ids)


def _map_steps(function, blocks, scores_per_block: int):
    """Applies a function of blocks to as many at once as `_SCORES_PER_STEP` allows."""
    count = blocks[0].shape[0]
    at_once = max(1, _SCORES_PER_STEP // scores_per_block)
    steps = -(-count // at_once)
    if steps == 1:
        return function(blocks)
    at_once = -(-count // steps)

    def split(x):
        x = jnp.pad(x, [(0, steps * at_once - count)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(steps, at_once, *x.shape[1:])

    results = jax.lax.map(function, jax.tree.map(split, blocks))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], results)


def _scores_per_block(query_blocks: Array, keys: Array) -> int:
    return math.prod(query_blocks.shape[1:-1]) * keys.shape[-2]


def _local_forward(plan: _Plan, query, key, value, ids):
    blocks = _local_blocks(plan, query, key, value, ids)

    def forward(step):
        q, k, v, query_ids, key_ids = step
        return _block_forward(q, k, v, _local_mask(plan, query_ids, key_ids))

    out, lse = _map_steps(forward, blocks, _scores_per_block(*blocks[:2]))
    length, rank = query.shape[ids.ndim - 1], ids.ndim - 1
    return _from_blocks(out, rank, length).astype(query.dtype), lse


def _local_backward(plan: _Plan, query, key, value, ids, out, lse, d_out):
    length, rank = query.shape[ids.ndim - 1], ids.ndim - 1
    blocks = _local_blocks(plan, query, key, value, ids)
    out, d_out = (_to_blocks(x, rank, plan.block) for x in (out, d_out))

    def backward(step):
        q, k, v, query_ids, key_ids, *rest = step
        return _block_backward(q, k, v, _local_mask(plan, query_ids, key_ids), *rest)

    d_query, d_keys, d_values = _map_steps(backward, (*blocks, out, lse, d_out), _scores_per_block(*blocks[:2]))
    d_key, d_value = (_sum_in_reach(x, _reach(plan), plan.block) for x in (d_keys, d_values))
    d_query = d_query / math.sqrt(query.shape[-1])
    return tuple(_from_blocks(x, rank, length) for x in (d_query, d_key, d_value))


# Global: a query block against its whole prefix, unrolled when short, else tile by tile.


def _global_blocks(plan: _Plan, query, key, value, ids):
    rank = ids.ndim - 1
    count = -(-query.shape[rank] // plan.block)
    tile = plan.block if count <= _MAX_UNROLLED_BLOCKS else plan.block * _QUERY_BLOCKS_PER_TILE
    keys, values = (_to_blocks(x.astype(plan.dtype), rank, tile) for x in (key, value))
    queries = _to_blocks(_scaled(plan, query), rank, plan.block)
    return queries, keys, values, _to_blocks(ids, rank, plan.block), _to_blocks(ids, rank, tile)


def _prefix(tiles: Array, count: int, axis: int) -> Array:
    return jnp.concatenate([tiles[i] for i in range(count)], axis=axis)


def _global_mask(query_start, key_start, query_ids, key_ids):
    shape = (query_ids.shape[-1], key_ids.shape[-1])
    rows = query_start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    columns = key_start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (columns <= rows) & _same_segment(query_ids, key_ids)


def _tiles_of(plan: _Plan, i, tile: int):
    """Key tiles that query block i sees."""
    return ((i + 1) * plan.block + tile - 1) // tile


def _global_forward(plan: _Plan, query, key, value, ids):
    queries, keys, values, query_ids, key_ids = _global_blocks(plan, query, key, value, ids)
    count, tile = queries.shape[0], keys.shape[-2]

    def unrolled_block(i):
        k, v, ids = _prefix(keys, i + 1, -2), _prefix(values, i + 1, -2), _prefix(key_ids, i + 1, -1)
        return _block_forward(queries[i], k, v, _global_mask(i * plan.block, 0, query_ids[i], ids))

    def looped_block(step):
        i, q, q_ids = step

        def add_tile(j, so_far):
            mask = _global_mask(i * plan.block, j * tile, q_ids, key_ids[j])
            return _merge(*so_far, *_block_forward(q, keys[j], values[j], mask))

        nothing = jnp.zeros(q.shape, jnp.float32), jnp.full((*q.shape[:-1], 1), _MASKED, jnp.float32)
        return jax.lax.fori_loop(0, _tiles_of(plan, i, tile), add_tile, nothing)

    if count <= _MAX_UNROLLED_BLOCKS:
        out, lse = jax.tree.map(lambda *x: jnp.stack(x), *[unrolled_block(i) for i in range(count)])
    else:
        out, lse = jax.lax.map(looped_block, (jnp.arange(count), queries, query_ids))
    rank = ids.ndim - 1
    return _from_blocks(out, rank, query.shape[rank]).astype(query.dtype), lse


def _merge(out_a, lse_a, out_b, lse_b):
    """Attention to two sets of keys from the attention to each."""
    lse = jnp.logaddexp(lse_a, lse_b)
    return out_a * jnp.exp(lse_a - lse) + out_b * jnp.exp(lse_b - lse), lse


def _global_backward(plan: _Plan, query, key, value, ids, out, lse, d_out):
    rank = ids.ndim - 1
    queries, keys, values, query_ids, key_ids = _global_blocks(plan, query, key, value, ids)
    out, d_out = (_to_blocks(x, rank, plan.block) for x in (out, d_out))
    count, tile = queries.shape[0], keys.shape[-2]
    zeros = jnp.zeros(keys.shape, jnp.float32)

    def unrolled():
        d_queries, d_keys, d_values = [], zeros, zeros
        for i in range(count):
            k, v, prefix_ids = _prefix(keys, i + 1, -2), _prefix(values, i + 1, -2), _prefix(key_ids, i + 1, -1)
            mask = _global_mask(i * plan.block, 0, query_ids[i], prefix_ids)
            d_q, d_k, d_v = _block_backward(queries[i], k, v, mask, out[i], lse[i], d_out[i])
            d_queries.append(d_q)
            d_keys = d_keys.at[: i + 1].add(jnp.stack(jnp.split(d_k, i + 1, axis=-2)))
            d_values = d_values.at[: i + 1].add(jnp.stack(jnp.split(d_v, i + 1, axis=-2)))
        return jnp.stack(d_queries), d_keys, d_values

    def looped_block(d_keys_values, step):
        i, q, q_ids, *rest = step

        def add_tile(j, so_far):
            d_q, d_keys, d_values = so_far
            mask = _global_mask(i * plan.block, j * tile, q_ids, key_ids[j])
            d_q_tile, d_k, d_v = _block_backward(q, keys[j], values[j], mask, *rest)
            return d_q + d_q_tile, d_keys.at[j].add(d_k), d_values.at[j].add(d_v)

        start = (jnp.zeros(q.shape, jnp.float32), *d_keys_values)
        d_q, *d_keys_values = jax.lax.fori_loop(0, _tiles_of(plan, i, tile), add_tile, start)
        return tuple(d_keys_values), d_q

    if count <= _MAX_UNROLLED_BLOCKS:
        d_query, d_key, d_value = unrolled()
    else:
        steps = (jnp.arange(count), queries, query_ids, out, lse, d_out)
        (d_key, d_value), d_query = jax.lax.scan(looped_block, (zeros, zeros), steps)
    d_query = d_query / math.sqrt(query.shape[-1])
    return tuple(_from_blocks(x, rank, query.shape[rank]) for x in (d_query, d_key, d_value))
