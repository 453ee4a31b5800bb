# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Causal attention over pages of keys and values, optionally within a sliding window.

Letters of raw arrays: t token, b token of one block, n page of a sequence, s slot of a page, k KV head, g query head
of a KV head, d head size.
"""

import functools
import math

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.jax_utils import named_call
from jaxtyping import Array, Bool, Float, Int

from levanter_marin import axes
from levanter_marin.layers.page_cache import PAGE, SLOT, PagedTokens

# Far below any score, finite so that a page without an allowed key leaves no NaN behind.
_MASKED = -1e30
# Numbers of keys and values gathered at once.
_GATHERED = 2**22


@named_call
def paged_attention(
    query: NamedArray, kv_pages: NamedArray, tokens: PagedTokens, sliding_window: int | None
) -> NamedArray:
    """Softmax attention with scale 1/sqrt(head_size) of this step's tokens over the pages of their sequences.

    The token at position i of a sequence sees its positions j iff `j <= i` and `j > i - sliding_window`; all of them
    have been stored before. Scores, softmax and sums are fp32. Only pages that hold an allowed key are read, so with a
    window the work does not grow with the length of the sequence. Online softmax, page by page:

        m' = max(m, max_s score_s);  l' = l exp(m - m') + sum_s exp(score_s - m');  o' likewise.

    Memory: beside the arguments, about 16 MB of gathered keys and values, or those of one page for one token if that
    is more. No reverse-mode gradient.

    Args:
        query: {position, kv_head, q_heads_per_group, head_size}.
        kv_pages: {page, slot, kv_head, head_size} as `levanter.layers.kv_cache.KvPageCache` has them: key and value
            of head h are entries 2h and 2h + 1 of `kv_head`.
        sliding_window: Keys a token sees, its own included; None is all earlier ones.

    Returns:
        Array with the query's axes and dtype; zero for padding.

    Raises:
        ValueError: `kv_pages` does not hold a key and a value for every KV head of the query.
    """
    heads, stored = query.axis_size(axes.KV_HEAD), kv_pages.axis_size(axes.KV_HEAD)
    if stored != 2 * heads:
        raise ValueError(
            f"paged_attention: kv_pages has {stored} entries of {axes.KV_HEAD}, the query {heads} heads; "
            f"store {2 * heads}, a key and a value for each"
        )
    ordered = query.rearrange((axes.POSITION, axes.KV_HEAD, axes.Q_HEADS_PER_GROUP, axes.HEAD_SIZE))
    pages = kv_pages.rearrange((PAGE, SLOT, axes.KV_HEAD, axes.HEAD_SIZE)).array
    page_lists = tokens.batch.page_indices.rearrange(("seq", PAGE)).array
    attend = functools.partial(_attend, pages, page_lists, sliding_window)
    per_token = (ordered.array, tokens.sequence.array, tokens.pos_ids.array, tokens.valid.array)

    length = ordered.axis_size(axes.POSITION)
    block = max(1, min(length, _GATHERED // math.prod(pages.shape[1:])))
    if block == length:
        out = attend(*per_token)
    else:
        blocks = -(-length // block)

        def in_blocks(a: Array) -> Array:
            padded = jnp.pad(a, [(0, blocks * block - length)] + [(0, 0)] * (a.ndim - 1))
            return padded.reshape(blocks, block, *a.shape[1:])

        out = jax.lax.map(lambda args: attend(*args), tuple(in_blocks(a) for a in per_token))
        out = out.reshape(blocks * block, *out.shape[2:])[:length]
    return hax.named(out, ordered.axes).rearrange(query.axes)


def _attend(
    kv_pages: Float[Array, "page s 2k d"],
    page_lists: Int[Array, "seq n"],
    sliding_window: int | None,
    query: Float[Array, "b k g d"],
    sequence: Int[Array, " b"],
    position: Int[Array, " b"],
    valid: Bool[Array, " b"],
) -> Float[Array, "b k g d"]:
    page_size = kv_pages.shape[1]
    scaled = query.astype(jnp.float32) / math.sqrt(query.shape[-1])
    lowest = jnp.zeros_like(position) if sliding_window is None else jnp.maximum(position - sliding_window + 1, 0)
    first = lowest // page_size
    steps = jnp.max(jnp.where(valid, position // page_size - first + 1, 0))

    def add_page(step, carry):
        largest, total, weighted = carry
        row = first + step
        page = page_lists.at[sequence, row].get(mode="clip")
        kv = kv_pages.at[page].get(mode="clip").astype(jnp.float32)
        key_position = row[:, None] * page_size + jnp.arange(page_size)
        allowed = (key_position <= position[:, None]) & (key_position >= lowest[:, None]) & valid[:, None]
        allowed = allowed[:, None, None, :]
        keys, values = kv[:, :, 0::2], kv[:, :, 1::2]
        scores = jnp.einsum("bkgd,bskd->bkgs", scaled, keys, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where(allowed, scores, _MASKED)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.where(allowed, jnp.exp(scores - new_largest[..., None]), 0)
        rescale = jnp.exp(largest - new_largest)
        # a slot that was never written may hold anything, and 0 * NaN is NaN
        values = jnp.where(allowed[:, 0, 0, :, None, None], values, 0)
        new_values = jnp.einsum("bkgs,bskd->bkgd", weights, values, precision=jax.lax.Precision.HIGHEST)
        return new_largest, total * rescale + weights.sum(-1), weighted * rescale[..., None] + new_values

    rows = query.shape[:-1]
    start = (jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros(query.shape, jnp.float32))
    _, total, weighted = jax.lax.fori_loop(0, steps, add_page, start)
    out = jnp.where(total[..., None] > 0, weighted / jnp.maximum(total, 1e-30)[..., None], 0)
    return out.astype(query.dtype)
