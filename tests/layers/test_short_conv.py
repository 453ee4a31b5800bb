# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import compare
import oracles
from compare import normal, numpy
from levanter_marin.layers.short_conv import ShortConv

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}

Batch, Pos, Embed, Tap = Axis("batch", 8), Axis("position", 12), Axis("embed", 6), Axis("conv_tap", 4)
KvHead, HeadSize = Axis("kv_head", 2), Axis("head_size", 3)

# One row of segment ids each; eight rows cycle through them.
DOCUMENTS = {
    "none": None,
    "one": [[0] * 12],
    "different per row": [[0] * 5 + [1] * 7, [3] * 7 + [8] * 5, [0] * 12],
    "one token each": [list(range(12))],
    "padding": [[2] * 5 + [4] * 4 + [-1] * 3, [-1] * 12],
}
FIVE_AND_SEVEN = DOCUMENTS["different per row"]


def _segments(rows, Batch=Batch):
    if rows is None:
        return None
    return hax.named(jnp.asarray([rows[i % len(rows)] for i in range(Batch.size)]), (Batch, Pos))


def _conv(weight) -> ShortConv:
    return ShortConv(weight, weight.resolve_axis("conv_tap"))


def _assert_matches_oracle(x, weight, segments, tolerance, **mesh) -> str:
    ids = None if segments is None else np.asarray(segments.array)
    return compare.assert_matches_oracle(
        lambda x, weight: _conv(weight)(x, segments),
        lambda x, weight: oracles.short_conv(x, weight, ids),
        [x, weight],
        tolerance,
        **mesh,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_short_conv_at_initialisation_is_the_identity(dtype):
    conv = ShortConv.init(Tap, (KvHead, HeadSize))
    assert conv.weight.axes == (Tap, KvHead, HeadSize) and conv.weight.dtype == jnp.float32
    x = normal((Batch, Pos, KvHead, HeadSize), 0, dtype=dtype)
    out = conv(x, _segments(FIVE_AND_SEVEN))
    assert out.axes == x.axes and out.dtype == dtype
    np.testing.assert_array_equal(out.array, x.array)


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_short_conv_packed_documents_equals_oracle(documents):
    x, weight = normal((Batch, Pos, Embed), 0), normal((Tap, Embed), 1)
    _assert_matches_oracle(x, weight, _segments(DOCUMENTS[documents]), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("kernel_size", (1, 2, 12, 16))
def test_short_conv_any_kernel_size_equals_oracle(kernel_size):
    x, weight = normal((Batch, Pos, Embed), 0), normal((Tap.resize(kernel_size), Embed), 1)
    segments, ids = _segments(FIVE_AND_SEVEN), _segments(FIVE_AND_SEVEN).array
    everything = hax.ones((Batch, Pos), dtype=bool)
    out, _, d_weight = _value_and_gradients_of(everything, x, weight, segments)
    compare.assert_close(out, oracles.short_conv(numpy(x), numpy(weight), ids), TOLERANCE[jnp.float32])
    # every tap that some token reaches has a gradient, and one that none does has exactly none
    assert np.all(numpy(d_weight)[:12]) and not np.any(numpy(d_weight)[12:])


def test_short_conv_bf16_several_channel_axes_equals_oracle():
    x = normal((Batch, Pos, KvHead, HeadSize), 0, dtype=jnp.bfloat16)
    weight = normal((Tap, KvHead, HeadSize), 1, dtype=jnp.bfloat16)
    _assert_matches_oracle(x, weight, _segments(FIVE_AND_SEVEN), TOLERANCE[jnp.bfloat16])


@pytest.mark.parametrize("mesh", compare.MESHES)
def test_short_conv_on_eight_devices_equals_oracle_without_moving_rows(mesh):
    x, weight = normal((Batch, Pos, KvHead, HeadSize), 0), normal((Tap, KvHead, HeadSize), 1)
    mapping = {"batch": "data", "kv_head": "model"}
    segments = _segments(FIVE_AND_SEVEN)
    hlo = _assert_matches_oracle(x, weight, segments, TOLERANCE[jnp.float32], mesh=mesh, mapping=mapping)
    assert not compare.rearranging_collectives(hlo)


def test_short_conv_axes_in_another_order_keep_it():
    x, weight = normal((Embed, Pos, Batch), 0), normal((Tap, Embed), 1)
    segments = _segments(FIVE_AND_SEVEN)
    out = _conv(weight)(x, segments.rearrange((Pos, Batch)))
    assert out.axes == x.axes
    rows = numpy(x.rearrange((Batch, Pos, Embed)))
    expected = oracles.short_conv(rows, numpy(weight), np.asarray(segments.array)).transpose(2, 1, 0)
    compare.assert_close(out, expected, TOLERANCE[jnp.float32])


def test_short_conv_one_row_of_segments_serves_every_row_and_none():
    x, weight = normal((Batch, Pos, Embed), 0), normal((Tap, Embed), 1)
    segments = _segments(FIVE_AND_SEVEN)["batch", 0]
    out = _conv(weight)(x, segments)
    ids = np.broadcast_to(segments.array, (Batch.size, Pos.size))
    compare.assert_close(out, oracles.short_conv(numpy(x), numpy(weight), ids), TOLERANCE[jnp.float32])
    np.testing.assert_array_equal(_conv(weight)(x["batch", 3], segments).array, out["batch", 3].array)


@jax.jit
def _value_and_gradients_of(mine, x, weight, segments):
    """Of the chosen tokens alone; jitted once for all of them."""

    def masked(x, weight):
        return hax.where(mine, _conv(weight)(x, segments), 0.0).rearrange(x.axes)

    out, vjp = jax.vjp(masked, x, weight)
    return out, *vjp(hax.ones_like(out))


@pytest.mark.parametrize("filler", (0.0, 1e30, np.nan), ids=str)
def test_short_conv_document_is_the_same_whatever_its_neighbours_hold(filler):
    """Documents of 5 and 7 tokens, and what one of them, or the row before, may leak into the other."""
    x, weight = normal((Batch, Pos, Embed), 0), normal((Tap, Embed), 1)
    segments = _segments(FIVE_AND_SEVEN)
    for row, segment in ((0, 0), (0, 1), (1, 3), (1, 8)):
        mine = ((segments == segment) & (hax.arange(Batch) == row)).rearrange((Batch, Pos))
        clean = _value_and_gradients_of(mine, x, weight, segments)
        dirty = _value_and_gradients_of(mine, hax.where(mine, x, filler).rearrange(x.axes), weight, segments)
        # a neighbour's own rows of the weight gradient are 0 x NaN
        for a, b in list(zip(clean, dirty, strict=True))[: 2 if np.isnan(filler) else 3]:
            np.testing.assert_array_equal(a.array, b.array)
        np.testing.assert_array_equal(np.any(clean[1].array, axis=-1), mine.array)


def test_short_conv_packed_document_equals_it_alone():
    x, weight = normal((Batch, Pos, Embed), 0), normal((Tap, Embed), 1)
    packed = _conv(weight)(x, _segments(FIVE_AND_SEVEN))
    alone = _conv(weight)(x["position", 5:])
    np.testing.assert_allclose(packed["position", 5:]["batch", 0].array, alone["batch", 0].array, rtol=0, atol=1e-6)


def test_short_conv_of_one_token_documents_trains_the_first_tap_alone():
    x, weight = normal((Batch, Pos, Embed), 0), normal((Tap, Embed), 1)
    everything = hax.ones((Batch, Pos), dtype=bool)
    _, d_x, d_weight = _value_and_gradients_of(everything, x, weight, _segments(DOCUMENTS["one token each"]))
    np.testing.assert_array_equal(d_x.array, np.broadcast_to(weight["conv_tap", 0].array, d_x.array.shape))
    assert np.all(numpy(d_weight)[0]) and not np.any(numpy(d_weight)[1:])
