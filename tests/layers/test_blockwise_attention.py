# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Blockwise attention against a plain masked softmax in NumPy fp64: value and gradients."""

import re
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from levanter_marin.layers.blockwise_attention import CHECKPOINT_NAME, blockwise_attention

FP32_TOLERANCE = 2e-5  # absolute, on outputs and gradients of order 1
BF16_TOLERANCE = 4e-2  # one rounding of results of order 4

BATCH, POSITION, KV_HEAD, GROUP, HEAD_SIZE = "batch", "position", "kv_head", "q_heads_per_group", "head_size"


class Case(NamedTuple):
    length: int
    window: int | None
    block: int | None
    documents: str = "one"
    kv_heads: int = 2
    group: int = 2
    batch: int = 2


CASES = {
    "window": Case(64, 16, 16),
    "window_default_block": Case(300, 64, None, "random"),
    "window_larger_than_block": Case(50, 20, 4, "random"),
    "window_of_one": Case(20, 1, 8),
    "window_of_two": Case(20, 2, 1, "random"),
    "window_one_below_length": Case(33, 32, 8),
    "window_larger_than_length": Case(20, 64, 8, "random"),
    "window_block_larger_than_length": Case(13, 4, 64, "random"),
    "window_odd_length": Case(67, 16, 8, "random"),
    "window_single_token": Case(1, 4, None),
    "window_each_token_a_document": Case(40, 8, 8, "each_token"),
    "window_padding": Case(45, 16, 8, "padding"),
    "window_one_kv_head": Case(48, 16, 8, "random", kv_heads=1, group=4),
    "window_no_groups": Case(48, 16, 8, "random", kv_heads=4, group=1),
    "window_many_steps": Case(700, 128, None, "random", kv_heads=4),
    "window_tiled": Case(900, 300, 256, "random"),
    "window_tiled_key_blocks_longer_than_query_blocks": Case(1150, 1030, 64, "random", group=4),
    "global": Case(64, None, 16),
    "global_default_block": Case(300, None, None, "random"),
    "global_odd_length": Case(37, None, 8, "random"),
    "global_block_larger_than_length": Case(13, None, 64, "random"),
    "global_single_token": Case(1, None, None),
    "global_looped": Case(128, None, 8, "random"),
    "global_looped_odd_length": Case(101, None, 8, "random"),
    "global_looped_block_of_one": Case(23, None, 1, "random"),
    "global_looped_each_token_a_document": Case(75, None, 8, "each_token"),
    "global_looped_padding": Case(75, None, 8, "padding"),
    "global_looped_default_block": Case(1100, None, None, "random", kv_heads=1, batch=1),
    "global_each_token_a_document": Case(40, None, 16, "each_token"),
    "global_padding": Case(45, None, 16, "padding"),
    "global_one_kv_head": Case(48, None, 16, "random", kv_heads=1, group=4),
    "global_no_groups": Case(48, None, 16, "random", kv_heads=4, group=1),
}


def _segment_ids(case: Case, rng) -> np.ndarray | None:
    shape = (case.batch, case.length)
    match case.documents:
        case "one":
            return None
        case "each_token":
            return np.broadcast_to(np.arange(case.length), shape)
        case "random":
            return np.cumsum(rng.random(shape) < 0.1, axis=1)
        case "padding":
            ids = np.cumsum(rng.random(shape) < 0.1, axis=1)
            return np.where(np.arange(case.length) >= [[case.length // 2], [case.length - 1]], -1, ids)
    raise ValueError(case.documents)


def _inputs(case: Case, dtype=jnp.float32, head_size: int = 8, seed: int = 0):
    """Query, key, value, gradient of the output as named arrays; ids as a named array or None."""
    rng = np.random.default_rng(seed)
    axes = [
        Axis(BATCH, case.batch),
        Axis(POSITION, case.length),
        Axis(KV_HEAD, case.kv_heads),
        Axis(GROUP, case.group),
        Axis(HEAD_SIZE, head_size),
    ]
    shared = [axis for axis in axes if axis.name != GROUP]
    q, k, v, g = (
        hax.named(jnp.asarray(rng.standard_normal([a.size for a in ax]), dtype), ax)
        for ax in (axes, shared, shared, axes)
    )
    ids = _segment_ids(case, rng)
    return (q, k, v, g), None if ids is None else hax.named(jnp.asarray(ids, jnp.int32), axes[:2])


def _oracle(q, k, v, g, ids, window):
    """Output and gradients of q, k, v of plain attention; [b s k g d] and [b s k d], fp64."""
    q, k, v, g = (np.asarray(x.array.astype(jnp.float32), np.float64) for x in (q, k, v, g))
    position = np.arange(q.shape[1])
    mask = position[None, :] <= position[:, None]
    if window is not None:
        mask &= position[None, :] > position[:, None] - window
    mask = mask[None]
    if ids is not None:
        ids = np.asarray(ids.array)
        mask = mask & (ids[:, :, None] == ids[:, None, :])
    scale = q.shape[-1] ** -0.5
    scores = np.where(mask[:, None, None], np.einsum("bskgd,btkd->bkgst", q, k) * scale, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    d_p = np.einsum("bskgd,btkd->bkgst", g, v)
    d_scores = p * (d_p - (p * d_p).sum(axis=-1, keepdims=True)) * scale
    return (
        np.einsum("bkgst,btkd->bskgd", p, v),
        np.einsum("bkgst,btkd->bskgd", d_scores, k),
        np.einsum("bkgst,bskgd->btkd", d_scores, q),
        np.einsum("bkgst,bskgd->btkd", p, g),
    )


def _value_and_gradients(q, k, v, g, ids, case: Case, **kwargs):
    def attend(q, k, v):
        return blockwise_attention(
            q, k, v, segment_ids=ids, sliding_window=case.window, block_size=case.block, **kwargs
        )

    out, vjp = jax.vjp(attend, q, k, v)
    return (out, *vjp(g))


_jit_value_and_gradients = jax.jit(_value_and_gradients, static_argnums=(5,))


def _assert_close(actual, expected, tolerance):
    for name, a, e in zip(("output", "d_query", "d_key", "d_value"), actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a.array, np.float32), e, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_blockwise_attention_fp32_equals_plain_softmax(name):
    case = CASES[name]
    arrays, ids = _inputs(case)
    actual = _jit_value_and_gradients(*arrays, ids, case)
    assert actual[0].axes == arrays[0].axes
    _assert_close(actual, _oracle(*arrays, ids, case.window), FP32_TOLERANCE)


@pytest.mark.parametrize("attention_dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("name", ["window_odd_length", "global_odd_length", "global_looped_odd_length"])
def test_blockwise_attention_bf16_inputs_equal_plain_softmax(name, attention_dtype):
    case = CASES[name]
    arrays, ids = _inputs(case, jnp.bfloat16)
    actual = _value_and_gradients(*arrays, ids, case, attention_dtype=attention_dtype)
    assert {x.dtype for x in actual} == {jnp.dtype(jnp.bfloat16)}
    _assert_close(actual, _oracle(*arrays, ids, case.window), BF16_TOLERANCE)


@pytest.mark.parametrize("window", [None, 32])
def test_blockwise_attention_packed_rows_equals_levanter_vanilla(window):
    case = Case(128, window, None, "random")
    (q, k, v, _), ids = _inputs(case)
    Pos = q.resolve_axis(POSITION)
    KeyPos = Pos.alias("key_position")
    mask = AttentionMask.causal(sliding_window=window).with_segment_ids(ids, ids.rename({POSITION: KeyPos.name}))
    k_renamed, v_renamed = (x.rename({POSITION: KeyPos.name}) for x in (k, v))
    expected = dot_product_attention(
        Pos, KeyPos, HEAD_SIZE, q, k_renamed, v_renamed, mask=mask, attn_backend=AttentionBackend.VANILLA
    ).rearrange(q.axes)
    actual = blockwise_attention(q, k, v, segment_ids=ids, sliding_window=window)
    np.testing.assert_allclose(actual.array, expected.array, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


@pytest.mark.parametrize("window", [None, 8])
def test_blockwise_attention_any_axis_order_and_batch_axes_equals_canonical(window):
    case = Case(40, window, 8, "random", batch=6)
    (q, k, v, _), ids = _inputs(case)
    expected = blockwise_attention(q, k, v, segment_ids=ids, sliding_window=window, block_size=8)

    def split(x):
        return x.unflatten_axis(BATCH, (Axis("outer", 2), Axis(BATCH, 3)))

    order = (HEAD_SIZE, "outer", KV_HEAD, POSITION, BATCH)
    q_split = split(q).rearrange((GROUP, *order))
    actual = blockwise_attention(
        q_split,
        split(k).rearrange(order),
        split(v).rearrange(order[::-1]),
        segment_ids=split(ids).rearrange((POSITION, BATCH, "outer")),
        sliding_window=window,
        block_size=8,
    )
    assert actual.axes == q_split.axes
    np.testing.assert_array_equal(actual.rearrange(split(q).axes).array, split(expected).array)


@pytest.mark.parametrize("window", [None, 8])
def test_blockwise_attention_without_batch_axis_equals_its_row(window):
    case = Case(40, window, 8, "random")
    (q, k, v, _), ids = _inputs(case)
    expected = blockwise_attention(q, k, v, segment_ids=ids, sliding_window=window, block_size=8)[BATCH, 1]
    assert ids is not None
    q, k, v, ids = (x[BATCH, 1] for x in (q, k, v, ids))
    actual = blockwise_attention(q, k, v, segment_ids=ids, sliding_window=window, block_size=8)
    np.testing.assert_allclose(actual.array, expected.array, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


EXACT_CASES = [Case(48, 16, 8), Case(48, 40, 8), Case(900, 300, 256), Case(48, None, 8), Case(96, None, 8)]


@pytest.mark.parametrize("case", EXACT_CASES)
def test_blockwise_attention_gradient_of_later_and_out_of_window_keys_is_zero(case):
    (q, k, v, g), _ = _inputs(case)
    row = case.length // 2 + 3
    only_row = hax.named(jnp.arange(case.length) == row, (q.resolve_axis(POSITION),))
    _, d_query, d_key, d_value = _value_and_gradients(q, k, v, hax.where(only_row, g, 0.0), None, case)
    position = np.arange(case.length)
    seen = (position <= row) & (position > row - (case.window or case.length))
    for gradient in (d_key, d_value):
        per_position = np.abs(gradient.array).sum(axis=(0, 2, 3))
        assert np.all(per_position[~seen] == 0)
        assert np.all(per_position[seen] > 0)
    assert np.all(np.delete(np.asarray(d_query.array), row, axis=1) == 0)


@pytest.mark.parametrize("case", EXACT_CASES)
def test_blockwise_attention_gradient_of_other_documents_is_zero(case):
    (q, k, v, g), _ = _inputs(case)
    Pos = q.resolve_axis(POSITION)
    start, end = case.length // 3, case.length // 3 + 13
    ids = hax.named(jnp.searchsorted(jnp.array([start, end]), jnp.arange(case.length), side="right"), (Pos,))
    ids = hax.broadcast_to(ids, (q.resolve_axis(BATCH), Pos))
    _, _, d_key, d_value = _value_and_gradients(q, k, v, hax.where(ids == 1, g, 0.0), ids, case)
    inside = (np.arange(case.length) >= start) & (np.arange(case.length) < end)
    for gradient in (d_key, d_value):
        per_position = np.abs(gradient.array).sum(axis=(0, 2, 3))
        assert np.all(per_position[~inside] == 0)
        assert np.all(per_position[inside] > 0)


@pytest.mark.parametrize("block", [8, None])
def test_blockwise_attention_longer_sequence_keeps_bits_of_window_layers(block):
    (q, k, v, _), ids = _inputs(Case(600, 16, block, "random"))
    assert ids is not None

    def attend(length):
        parts = (x[POSITION, :length] for x in (q, k, v))
        return blockwise_attention(
            *parts, segment_ids=ids[POSITION, :length], sliding_window=16, block_size=block
        ).array

    np.testing.assert_array_equal(attend(600)[:, :101], attend(101))


@pytest.mark.parametrize("window", [None, 8])
def test_blockwise_attention_large_scores_stay_finite(window):
    case = Case(100, window, 8, "padding")
    (q, k, v, g), ids = _inputs(case)
    actual = _value_and_gradients(q * 1e3, k * 1e3, v, g, ids, case)
    assert all(bool(jnp.all(jnp.isfinite(x.array))) for x in actual)


@pytest.mark.parametrize("window", [None, 16])
def test_blockwise_attention_remat_and_scan_keep_gradients(window):
    case = Case(80, window, 8, "random")
    (x, k, v, g), ids = _inputs(case)
    Layer = Axis("layer", 3)
    keys = hax.stack(Layer, [k, 0.5 * k, -k])

    def layer(x, k):
        return x + blockwise_attention(x, k, v, segment_ids=ids, sliding_window=window, block_size=8)

    def unrolled(x, keys):
        for i in range(Layer.size):
            x = layer(x, keys[Layer, i])
        return jnp.sum((x * g).array)

    def scanned(x, keys):
        return jnp.sum((hax.fold(layer, Layer, remat=True)(x, keys) * g).array)

    expected = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(x, keys)
    actual = jax.jit(jax.grad(scanned, argnums=(0, 1)))(x, keys)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.array, e.array, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


@pytest.mark.parametrize("window", [None, 16])
def test_blockwise_attention_saved_by_name_is_not_recomputed(window):
    (q, k, v, g), _ = _inputs(Case(64, window, 8))

    def exponentials(policy):
        def loss(q):
            out = blockwise_attention(q, k, v, segment_ids=None, sliding_window=window, block_size=8)
            return jnp.sum((hax.sin(out) * g).array)

        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(q)).count(" exp ")

    once = exponentials(jax.checkpoint_policies.everything_saveable)
    assert exponentials(jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)) == once
    assert exponentials(None) > once


@pytest.mark.parametrize("mesh_shape", [(8, 1), (4, 2)])
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 16, 8, "random", batch=8),
        Case(64, None, 16, "random", batch=8),
        Case(160, None, 8, "random", batch=8),
        Case(64, 16, 8, "random", kv_heads=1, group=4, batch=8),
    ],
)
def test_blockwise_attention_sharded_equals_one_device_without_gathering(mesh_shape, case):
    arrays, ids = _inputs(case)
    expected = _jit_value_and_gradients(*arrays, ids, case)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(mesh_shape), ("data", "model"))
    head_axis = KV_HEAD if case.kv_heads > 1 else GROUP

    def place(x):
        spec = PartitionSpec(*({BATCH: "data", head_axis: "model"}.get(axis.name) for axis in x.axes))
        return jax.device_put(x, NamedSharding(mesh, spec))

    compiled = _jit_value_and_gradients.lower(*map(place, arrays), place(ids), case).compile()
    assert not re.findall(r"all-gather|all-to-all|collective-permute", compiled.as_text())
    actual = compiled(*map(place, arrays), place(ids))
    _assert_close(actual, [x.array for x in expected], FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"block_size": -1}, "block_size=-1"),
        ({"key": hax.zeros((Axis(POSITION, 9), Axis(KV_HEAD, 2), Axis(HEAD_SIZE, 8)))}, "9.*16"),
    ],
)
def test_blockwise_attention_bad_argument_names_the_numbers(change, message):
    (q, k, v, _), _ = _inputs(Case(16, 4, 4))
    arguments = {"query": q, "key": k, "value": v, "segment_ids": None, "sliding_window": 4} | change
    with pytest.raises(ValueError, match=message):
        blockwise_attention(**arguments)
