# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention over pages against attention over whole sequences."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.inference.page_table import PageBatchInfo
from levanter.inference.utils import INVALID

import compare
import oracles
from levanter_marin.layers.page_cache import PagedTokens
from levanter_marin.layers.paged_attention import paged_attention

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}


def _assert_matches_oracle(
    lengths, new, *, window, page_size=4, kv_heads=2, group=2, head_size=8, dtype=jnp.float32, padding=3, mesh=None
):
    """Sequences of these lengths, the last `new` tokens of each in this step; pages in random order, the rest NaN."""
    rng = np.random.default_rng(0)
    pages_per_seq = -(-max(lengths) // page_size)
    order = rng.permutation(len(lengths) * pages_per_seq + 2)
    page_lists = np.full((len(lengths) + 1, pages_per_seq), INVALID)
    kv_pages = np.full((len(order), page_size, 2 * kv_heads, head_size), np.nan)
    queries, expected, positions, destinations = [], [], [], []
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        q = rng.standard_normal((length, kv_heads * group, head_size))
        k, v = rng.standard_normal((2, length, kv_heads, head_size))
        q, k, v = (np.asarray(jnp.asarray(a).astype(dtype), np.float64) for a in (q, k, v))
        used = -(-length // page_size)
        page_lists[i, :used] = order[i * pages_per_seq :][:used]
        place = page_lists[i, np.arange(length) // page_size], np.arange(length) % page_size
        kv_pages[*place, 0::2], kv_pages[*place, 1::2] = k, v
        out = oracles.softmax_attention(q[None], k[None], v[None], window=window or length, segments=None)[0]
        queries.append(q[length - count :])
        expected.append(out[length - count :])
        positions += range(length - count, length)
        destinations += [*(place[0] * page_size + place[1])[length - count :]]

    def per_token(ids):
        return hax.named(jnp.asarray([*ids, *[INVALID] * padding], jnp.int32), "position")

    batch = PageBatchInfo(
        slot_ids=hax.named(jnp.asarray([*range(len(lengths)), INVALID]), "seq"),
        page_indices=hax.named(jnp.asarray(page_lists), ("seq", "page")),
        seq_lens=hax.named(jnp.asarray([*lengths, INVALID]), "seq"),
        cu_q_lens=hax.named(jnp.asarray([0, *np.cumsum(new), sum(new) + padding]), "seq"),
        num_seqs=jnp.asarray(len(lengths)),
        new_token_dests=per_token(destinations),
        page_size=page_size,
    )
    q = np.concatenate([*queries, np.full((padding, kv_heads * group, head_size), np.nan)])
    Heads = (Axis("kv_head", kv_heads), Axis("q_heads_per_group", group))
    q = hax.named(jnp.asarray(q, dtype), ("position", "heads", "head_size")).unflatten_axis("heads", Heads)
    kv_pages = hax.named(jnp.asarray(kv_pages, dtype), ("page", "slot", "kv_head", "head_size"))
    with compare.on_mesh(mesh, {"kv_head": "model", "page": "data"}):
        out = jax.jit(lambda q, kv: paged_attention(q, kv, PagedTokens.create(batch, per_token(positions)), window))(
            hax.shard(q) if mesh else q, hax.shard(kv_pages) if mesh else kv_pages
        )
    assert out.axes == q.axes and out.dtype == dtype
    out = out.flatten_axes(Heads, "heads").array
    compare.assert_close(out[: sum(new)], np.concatenate(expected), TOLERANCE[dtype])
    assert not np.any(np.asarray(out[sum(new) :], np.float32))


@pytest.mark.parametrize("window", (1, 4, 5, 50, None))
def test_paged_attention_any_window_equals_oracle(window):
    _assert_matches_oracle((17, 1, 8, 5), (6, 1, 8, 1), window=window)


@pytest.mark.parametrize("window", (5, None))
def test_paged_attention_in_bf16_equals_oracle(window):
    _assert_matches_oracle((17, 1, 8, 5), (6, 1, 8, 1), window=window, dtype=jnp.bfloat16)


@pytest.mark.parametrize(("window", "page_size"), ((6, 1), (None, 1), (6, 32), (None, 32)))
def test_paged_attention_any_page_size_equals_oracle(window, page_size):
    _assert_matches_oracle((17, 16, 3), (1, 16, 2), window=window, page_size=page_size)


def test_paged_attention_of_more_tokens_than_are_gathered_at_once_equals_oracle():
    """Blocks of 64 tokens."""
    shape = {"page_size": 64, "kv_heads": 2, "group": 1, "head_size": 256}
    _assert_matches_oracle((130, 70), (130, 20), window=40, **shape)


@pytest.mark.parametrize("mesh", compare.MESHES)
def test_paged_attention_on_eight_devices_equals_oracle(mesh):
    _assert_matches_oracle((17, 1, 8, 5, 3, 6), (6, 1, 8, 1, 2, 1), window=5, page_size=4, mesh=mesh, padding=5)


def test_paged_attention_with_pages_for_other_heads_names_both():
    q = hax.zeros({"position": 1, "kv_head": 2, "q_heads_per_group": 1, "head_size": 4})
    kv_pages = hax.zeros({"page": 1, "slot": 1, "kv_head": 2, "head_size": 4})
    with pytest.raises(ValueError, match="kv_pages has 2 entries of kv_head, the query 2 heads; store 4"):
        paged_attention(q, kv_pages, None, None)
