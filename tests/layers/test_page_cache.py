# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Short convolutions that continue sequences in pages, against the convolution of whole sequences."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import oracles
from compare import assert_close, normal
from levanter_marin.layers.page_cache import ConvPageCache, PagedTokens
from levanter_marin.layers.short_conv import ShortConv
from paging import PagedSequences

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}

KvHead, HeadSize = Axis("kv_head", 2), Axis("head_size", 3)
LENGTH = 19


class ConvolvedSequences(PagedSequences):
    """Sequences whose slot i holds `inputs[i]`, fed in runs; padding is NaN."""

    def __init__(self, page_size: int, taps: int, dtype):
        Tap = Axis("conv_tap", taps)
        self.weight = normal((Tap, KvHead, HeadSize), 1, dtype=dtype)
        self.inputs = np.array(normal((Axis("seq", 4), Axis("position", LENGTH), KvHead, HeadSize), 0).array)
        self.dtype = dtype
        conv = ShortConv(self.weight, Tap)

        @jax.jit
        def step(x, cache, batch, pos_ids):
            x = hax.named(x.astype(dtype), ("position", KvHead, HeadSize))
            return conv.decode(x, cache, PagedTokens.create(batch, pos_ids))

        super().__init__(
            step,
            lambda spec: ConvPageCache.init(spec, Tap, (KvHead, HeadSize), dtype),
            page_size=page_size,
            pages_per_seq=-(-LENGTH // page_size),
            max_pages=3 * -(-LENGTH // page_size),
            filler=np.nan,
        )

    def assert_extends(self, counts: dict[int, int]) -> None:
        """One step with the next inputs of each slot gives what convolving each whole row gives."""
        starts = dict(self.length)
        outputs = self.feed({slot: self.inputs[slot, starts[slot] : starts[slot] + n] for slot, n in counts.items()})
        weight = np.asarray(self.weight.array, np.float64)
        for slot, n in counts.items():
            rounded = np.asarray(jnp.asarray(self.inputs[slot]).astype(self.dtype), np.float64)
            expected = oracles.short_conv(rounded[None], weight, None)[0, starts[slot] : starts[slot] + n]
            assert_close(outputs[slot], expected, TOLERANCE[self.dtype], f"slot {slot} from {starts[slot]}")


@pytest.mark.parametrize(
    ("page_size", "taps", "dtype"),
    ((1, 4, jnp.float32), (2, 4, jnp.bfloat16), (4, 1, jnp.float32), (4, 2, jnp.float32)),
)
def test_short_conv_decoding_in_pages_equals_oracle(page_size, taps, dtype):
    run = ConvolvedSequences(page_size, taps, dtype)
    a, b = run.new(), run.new()
    for counts in ({a: 5, b: 1}, {b: 1, a: 1}, {a: 2, b: 9}, {b: 3, a: 8}, {a: 3, b: 5}):
        run.assert_extends(counts)


@pytest.mark.parametrize("length", (7, 8, 9), ids=("before page border", "on page border", "behind page border"))
def test_short_conv_decoding_of_clones_and_freed_pages_equals_oracle(length):
    run = ConvolvedSequences(page_size=4, taps=4, dtype=jnp.float32)
    parent = run.new()
    run.assert_extends({parent: length})
    child = run.fork(parent)
    run.inputs[child, :length] = run.inputs[parent, :length]
    run.assert_extends({parent: 2, child: 3})
    run.free(parent)
    other = run.new()
    for counts in ({other: 5, child: 1}, {child: 4, other: 1}):
        run.assert_extends(counts)
