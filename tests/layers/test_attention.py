# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The whole attention layer against its oracle: both kinds of layer, every switch, every implementation."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask

import compare
import oracles
from compare import normal, numpy
from levanter_marin.axes import LayerKind
from levanter_marin.config import AttentionConfig, AttentionImplementation, ConvSite, RopePairing, ShortConvConfig
from levanter_marin.layers.attention import Attention, AttentionContext
from levanter_marin.layers.short_conv import ShortConv

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 4e-2}

LOCAL, GLOBAL = LayerKind.LOCAL, LayerKind.GLOBAL
# 4 x 8 query dimensions on a width of 20.
Batch, Pos, Embed = Axis("batch", 2), Axis("position", 12), Axis("embed", 20)
CONFIG = AttentionConfig(
    num_heads=4, head_dim=8, num_kv_heads=4, local_kv_heads=2, global_kv_heads=1, sliding_window=4, block_size=4
)
CONV = ShortConvConfig(kernel_size=3)
KV_CONVS = dataclasses.replace(CONV, sites=(ConvSite.k, ConvSite.v))
# Documents of 5 and 7 tokens, and in the other order with padding behind.
SEGMENTS = hax.named(jnp.asarray([[0] * 5 + [1] * 7, [4] * 7 + [5] * 3 + [-1] * 2]), (Batch, Pos))


def _weights(config: AttentionConfig, short_conv: ShortConvConfig, dtype=jnp.float32) -> dict[str, NamedArray]:
    Heads, KvHeads, HeadSize = config.Heads, config.KvHeads, config.HeadSize
    shapes = {
        "q": (Heads, HeadSize, Embed),
        "k": (KvHeads, HeadSize, Embed),
        "v": (KvHeads, HeadSize, Embed),
        "o": (Embed, Heads, HeadSize),
    }
    if config.head_gate:
        shapes["gate"] = (Heads, Embed)
    for site in (ConvSite.k, ConvSite.v):
        if site in short_conv.sites:
            shapes[f"sconv_{site}"] = (short_conv.Tap, KvHeads, HeadSize)
    return {name: normal(axes, i, 0.4, dtype) for i, (name, axes) in enumerate(shapes.items(), start=1)}


def _layer(weights: dict[str, NamedArray], config: AttentionConfig) -> Attention:
    Heads, KvHeads, HeadSize = config.Heads, config.KvHeads, config.HeadSize
    convs = (weights.get(f"sconv_{site}") for site in "kv")
    return Attention(
        hnn.Linear(weights["q"], None, Embed, (Heads, HeadSize)),
        hnn.Linear(weights["k"], None, Embed, (KvHeads, HeadSize)),
        hnn.Linear(weights["v"], None, Embed, (KvHeads, HeadSize)),
        hnn.Linear(weights["o"], None, (Heads, HeadSize), Embed),
        hnn.Linear(weights["gate"], None, Embed, Heads) if "gate" in weights else None,
        *(None if w is None else ShortConv(w, w.resolve_axis("conv_tap")) for w in convs),
        config,
    )


def _mask(segments: NamedArray | None, window: int | None = None) -> AttentionMask:
    mask = AttentionMask.causal(sliding_window=window)
    return mask if segments is None else mask.with_segment_ids(segments)


def _assert_matches_oracle(
    kind,
    config=CONFIG,
    short_conv=CONV,
    segments=SEGMENTS,
    pos_ids=None,
    mask_window=None,
    dtype=jnp.float32,
    Batch=Batch,
    **mesh,
) -> str:
    weights = _weights(config, short_conv, dtype)
    x = normal((Batch, Pos, Embed), 0, dtype=dtype)
    windows = [Pos.size, mask_window, config.sliding_window if kind is LOCAL else None]
    used = config.local_kv_heads if kind is LOCAL else config.global_kv_heads
    expectation = {
        "rotates": kind is LOCAL or config.rope_on_global,
        "kv_heads": config.num_kv_heads if used is None else used,
        "window": min(w for w in windows if w is not None),
        "segments": None if segments is None else np.asarray(segments.array),
        "positions": None if pos_ids is None else np.asarray(hax.broadcast_to(pos_ids, (Batch, Pos)).array),
    }

    def ours(x, *arrays):
        context = AttentionContext.create(Pos, _mask(segments, mask_window), pos_ids)
        layer = _layer(dict(zip(weights, arrays, strict=True)), config)
        return layer(hax.auto_sharded(x), kind, context)

    def oracle(x, *arrays):
        return oracles.attention(x, dict(zip(weights, arrays, strict=True)), config, **expectation)

    return compare.assert_matches_oracle(ours, oracle, [x, *weights.values()], TOLERANCE[dtype], **mesh)


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_equals_oracle(dtype, kind):
    _assert_matches_oracle(kind, short_conv=KV_CONVS, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "change", "short_conv"),
    (
        (LOCAL, {"qk_norm": False}, CONV),
        (LOCAL, {"exclusive": False}, CONV),
        (LOCAL, {"head_gate": False}, CONV),
        (LOCAL, {"rope_fraction": 0.0}, CONV),
        (LOCAL, {"rope_fraction": 1.0}, CONV),
        (LOCAL, {"rope_pairing": RopePairing.split_half}, CONV),
        (LOCAL, {"qk_mult": 0.7}, CONV),
        (LOCAL, {"rope_theta": 100.0}, CONV),
        (LOCAL, {"local_kv_heads": None}, CONV),
        (LOCAL, {"local_kv_heads": 1, "num_kv_heads": 1}, CONV),
        (LOCAL, {"sliding_window": 2}, CONV),
        (LOCAL, {"sliding_window": 50}, CONV),
        (LOCAL, {}, dataclasses.replace(CONV, sites=())),
        (LOCAL, {}, dataclasses.replace(CONV, sites=(ConvSite.v,))),
        (GLOBAL, {"rope_on_global": True}, CONV),
        (GLOBAL, {"global_kv_heads": 2}, CONV),
    ),
    ids=lambda case: "convs " + ",".join(case.sites) if isinstance(case, ShortConvConfig) else str(case),
)
def test_attention_each_switch_equals_oracle(kind, change, short_conv):
    _assert_matches_oracle(kind, dataclasses.replace(CONFIG, **change), short_conv)


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize("implementation", (AttentionImplementation.vanilla, AttentionImplementation.jax_flash))
def test_attention_each_implementation_equals_oracle(implementation, kind):
    _assert_matches_oracle(kind, dataclasses.replace(CONFIG, implementation=implementation))


@pytest.mark.parametrize("kind", LayerKind)
def test_attention_without_segment_ids_equals_oracle(kind):
    _assert_matches_oracle(kind, segments=None)


@pytest.mark.parametrize(("kind", "mask_window"), ((LOCAL, 3), (LOCAL, 7), (GLOBAL, 3)))
def test_attention_mask_with_a_window_of_its_own_narrows_that_of_the_layer(kind, mask_window):
    _assert_matches_oracle(kind, mask_window=mask_window)


def test_attention_given_positions_turn_each_row_by_its_own():
    pos_ids = hax.named(jnp.asarray([[*range(100, 112)], [*range(5), *range(40, 47)]]), (Batch, Pos))
    _assert_matches_oracle(LOCAL, pos_ids=pos_ids)


@pytest.mark.parametrize(("mesh", "kind"), (("data8", LOCAL), ("data4_model2", LOCAL), ("data4_model2", GLOBAL)))
def test_attention_on_eight_devices_equals_oracle_without_moving_rows(mesh, kind):
    Rows = Batch.resize(8)
    segments = hax.named(jnp.tile(SEGMENTS.array, (4, 1)), (Rows, Pos))
    config = dataclasses.replace(CONFIG, local_kv_heads=None, global_kv_heads=2, num_kv_heads=2)
    mapping = {"batch": "data", "heads": "model", "kv_head": "model"}
    hlo = _assert_matches_oracle(kind, config, segments=segments, Batch=Rows, mesh=mesh, mapping=mapping)
    assert not compare.rearranging_collectives(hlo)


LAYER = _layer(_weights(CONFIG, KV_CONVS), CONFIG)


@eqx.filter_jit
def _local_and_global(layer, x, mask, pos_ids, chosen):
    """Outputs of the layer as either kind, and the gradient of those of the chosen tokens with respect to x."""
    context = AttentionContext.create(x.resolve_axis("position"), mask, pos_ids)
    results = []
    for kind in LayerKind:
        out, vjp = jax.vjp(lambda x, kind=kind: layer(x, kind, context), x)
        results += [out, vjp(hax.where(chosen, out, 0.0).rearrange(out.axes))[0]]
    return results


def test_attention_packed_document_equals_it_alone_and_has_no_gradient_from_the_first():
    """The second document, of 7 tokens in row 0 and of 5 in row 1, against the same at the same positions alone."""
    x = normal((Batch, Pos, Embed), 0)
    segments = hax.named(jnp.asarray([[0] * 5 + [1] * 7, [0] * 7 + [1] * 5]), (Batch, Pos))
    packed = _local_and_global(LAYER, x, _mask(segments), hax.arange(Pos), segments == 1)
    # row 1 goes on with two tokens that its document can't see
    Alone, starts = Pos.resize(7), np.asarray([[5], [7]])
    places = starts + np.arange(7)
    alone_x = hax.named(jnp.take_along_axis(x.array, places[..., None] % Pos.size, axis=1), (Batch, Alone, Embed))
    mine = hax.named(jnp.asarray(places < Pos.size), (Batch, Alone))
    alone = _local_and_global(
        LAYER, alone_x, AttentionMask.causal(), hax.named(jnp.asarray(places), (Batch, Alone)), mine
    )
    for ours, expected in zip(packed, alone, strict=True):
        for row, start in enumerate(starts[:, 0]):
            second = numpy(expected)[row, : Pos.size - start]
            compare.assert_close(ours.array[row, start:], second, TOLERANCE[jnp.float32])
    for gradient in packed[1::2]:
        np.testing.assert_array_equal(np.any(gradient.array, axis=-1), np.asarray(segments.array) == 1)


def test_attention_scores_of_a_global_layer_do_not_depend_on_positions():
    x = normal((Batch, Pos, Embed), 0)
    everything = hax.ones((Batch, Pos), dtype=bool)
    near, far = (_local_and_global(LAYER, x, _mask(SEGMENTS), hax.arange(Pos) * s, everything) for s in (1, 40))
    local, global_ = (list(zip(near, far, strict=True))[i] for i in (0, 2))
    np.testing.assert_array_equal(*(out.array for out in global_))
    assert np.abs(numpy(local[0]) - numpy(local[1])).max() > 1e-3


def test_attention_at_initialisation_leaves_gate_and_convolutions_out():
    """A zero gate multiplies by one and a fresh convolution is the identity."""
    plain = dataclasses.replace(CONFIG, head_gate=False)
    layer = Attention.init(Embed, CONFIG, KV_CONVS, 0.3, key=jax.random.key(0))
    bare = Attention.init(Embed, plain, dataclasses.replace(CONV, sites=()), 0.3, key=jax.random.key(0))
    assert bare.attn_gate is None and bare.sconv_k is None and bare.sconv_v is None
    assert layer.k_proj.weight.axes == (CONFIG.KvHeads, CONFIG.HeadSize, Embed)
    context = AttentionContext.create(Pos, _mask(SEGMENTS), None)
    x = normal((Batch, Pos, Embed), 0)
    with_both, without = (jax.jit(lambda x, a=a: a(x, LOCAL, context))(x) for a in (layer, bare))
    np.testing.assert_allclose(with_both.array, without.array, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "mask",
    (
        AttentionMask(),
        AttentionMask.explicit(hax.ones((Pos, Pos.alias("key_position")), dtype=bool)),
        AttentionMask(is_causal=True, explicit_mask=hax.ones((Pos, Pos.alias("key_position")), dtype=bool)),
        AttentionMask.causal(offset=1),
        AttentionMask.bidirectional_sliding_window(3),
        AttentionMask(is_causal=True, bidirectional_window=3),
        hax.ones((Pos, Pos.alias("key_position")), dtype=bool),
    ),
    ids=(
        "not causal",
        "explicit",
        "causal and explicit",
        "offset",
        "bidirectional",
        "causal and bidirectional",
        "array",
    ),
)
def test_attention_context_refuses_a_mask_it_would_ignore_in_one_line(mask):
    with pytest.raises(ValueError, match=r"AttentionMask.causal\(\)") as refusal:
        AttentionContext.create(Pos, mask, None)
    assert "\n" not in str(refusal.value)


def test_attention_context_reads_segments_window_and_positions():
    context = AttentionContext.create(Pos, _mask(SEGMENTS, 3), None)
    assert context.window == 3
    np.testing.assert_array_equal(context.pos_ids.array, np.arange(12))
    np.testing.assert_array_equal(context.token_valid.array, np.asarray(SEGMENTS.array) >= 0)
    for mask in (None, AttentionMask.causal()):
        context = AttentionContext.create(Pos, mask, hax.arange(Pos) + 7)
        assert context.segment_ids is None and context.token_valid is None and context.window is None
        np.testing.assert_array_equal(context.pos_ids.array, np.arange(7, 19))
