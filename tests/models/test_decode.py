# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Prefill and decoding with a paged cache give the logits of full forward passes."""

import dataclasses
from functools import cache

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from levanter.layers.attention import AttentionMask

import compare
from levanter_marin import axes
from levanter_marin.config import ConvSite, ShortConvConfig
from paging import PagedSequences

ATOL = 1e-4
BF16_ERROR_RATIO = 1.3
PAGE = 4
LENGTH = 22  # over the window of 6 and several pages


@cache
def _model():
    """A group of a local and a global layer and a remainder of one, a convolution at every site."""
    everywhere = ShortConvConfig(sites=tuple(ConvSite))
    return toy.build(toy.config(max_seq_len=LENGTH, num_layers=3, short_conv=everywhere))


@eqx.filter_jit
def _decode(model, tokens, cache, batch, pos_ids):
    return model.decode(hax.named(tokens, axes.POSITION), cache, batch, pos_ids)


@eqx.filter_jit
def _full_forward(model, tokens, segment_ids):
    tokens, segment_ids = (hax.named(a, (axes.BATCH, axes.POSITION)) for a in (tokens, segment_ids))
    return model(tokens, AttentionMask.causal().with_segment_ids(segment_ids)).array


class Histories(PagedSequences):
    """Remembers the tokens of every sequence and the logits each of them gave."""

    def __init__(self, model, dtype=jnp.float32):
        super().__init__(
            lambda *step: _decode(model, *step), lambda spec: model.initial_cache(spec, dtype=dtype), page_size=PAGE
        )
        self.model, self.open, self.closed = model, {}, []
        self.random = np.random.default_rng(0)

    def new(self) -> int:
        slot = super().new()
        self.open[slot] = []
        return slot

    def fork(self, slot: int) -> int:
        child = super().fork(slot)
        self.open[child] = list(self.open[slot])
        return child

    def free(self, slot: int) -> None:
        super().free(slot)
        self.closed.append(self.open.pop(slot))

    def extend(self, counts: dict[int, int]) -> None:
        """One step with random tokens, so many for each slot."""
        runs = {slot: self.random.integers(0, toy.VOCAB_SIZE, n).astype(np.int32) for slot, n in counts.items()}
        for slot, logits in self.feed(runs).items():
            self.open[slot] += zip(runs[slot], logits, strict=True)

    def against(self, model) -> tuple[np.ndarray, np.ndarray]:
        """All logits, and those of full forward passes of `model` over the same sequences, [token, vocab] each.

        Two sequences are packed into each row of the full pass, where positions count through.
        """
        histories = [history for history in (*self.closed, *self.open.values()) if history]
        tokens, segments = np.zeros((4, 2 * LENGTH), np.int32), np.full((4, 2 * LENGTH), -1)
        cells = []
        for i, history in enumerate(histories):
            row, start = i // 2, i % 2 * len(histories[i - 1])
            cells += [(row, start + t) for t in range(len(history))]
            tokens[row, start : start + len(history)] = [token for token, _ in history]
            segments[row, start : start + len(history)] = i
        expected = np.asarray(_full_forward(model, jnp.asarray(tokens), jnp.asarray(segments)))
        ours = np.stack([logits for history in histories for _, logits in history])
        return ours.astype(np.float32), expected[tuple(np.transpose(cells))].astype(np.float32)

    def assert_equal_full_forward(self) -> None:
        ours, expected = self.against(self.model)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=ATOL)


def test_decode_prefill_then_token_by_token_equals_full_forward():
    run = Histories(_model())
    a, b = run.new(), run.new()
    run.extend({a: 13, b: 3})
    for _ in range(LENGTH - 13):
        run.extend({b: 1, a: 1})
    run.assert_equal_full_forward()


def test_decode_runs_of_any_length_equal_full_forward():
    """Runs shorter and longer than the convolutions, the window and a page, that start and end anywhere."""
    run = Histories(_model())
    a, b, c = run.new(), run.new(), run.new()
    for counts in ({a: 1, b: 2, c: 3}, {c: 5, a: 2}, {b: 9, c: 7}, {a: 7, b: 1}, {c: 2, b: 3, a: 4}, {a: 8, b: 7}):
        run.extend(counts)
    run.assert_equal_full_forward()


@pytest.mark.parametrize("length", (7, 8, 9), ids=("before page border", "on page border", "behind page border"))
def test_decode_clones_equal_full_forward(length):
    run = Histories(_model())
    parent = run.new()
    run.extend({parent: length})
    child = run.fork(parent)
    run.extend({parent: 1, child: 1})
    grandchild = run.fork(child)
    for counts in ({child: 2, grandchild: 3, parent: 1}, {grandchild: 1, parent: 5, child: 1}):
        run.extend(counts)
    run.assert_equal_full_forward()


def test_decode_in_freed_pages_equals_full_forward():
    run = Histories(_model())
    a, b = run.new(), run.new()
    run.extend({a: 9, b: 7})
    clone = run.fork(a)
    run.free(a)
    c = run.new()
    run.extend({c: 10, clone: 2})
    run.free(b)
    d = run.new()
    run.extend({d: 5, c: 1, clone: 2})
    run.free(clone)
    e = run.new()
    run.extend({e: 6, d: 3, c: 3})
    run.assert_equal_full_forward()


def _unrolled():
    model = _model()
    config = dataclasses.replace(model.config, scan_layers=False)
    layers = eqx.filter_eval_shape(toy.build, config).transformer.layers
    layers = dataclasses.replace(layers, blocks=list(model.transformer.layers.unstacked()))
    return dataclasses.replace(model, transformer=dataclasses.replace(model.transformer, layers=layers, config=config))


MAPPING = {axes.MLP: "model", axes.HEADS: "model", axes.KV_HEAD: "model", axes.BATCH: "data"}


def _run_with_clone(model, dtype=jnp.float32):
    run = Histories(model, dtype)
    a, b = run.new(), run.new()
    run.extend({a: 6, b: 10})
    child = run.fork(b)
    for _ in range(6):
        run.extend({child: 2, a: 1, b: 1})
    return run


@pytest.mark.slow
def test_decode_unrolled_layers_equals_full_forward():
    _run_with_clone(_unrolled()).assert_equal_full_forward()


@pytest.mark.slow
def test_decode_on_eight_devices_equals_full_forward():
    with compare.on_mesh("data4_model2", MAPPING):
        _run_with_clone(hax.shard(_model())).assert_equal_full_forward()


@pytest.mark.slow
def test_decode_in_bf16_errs_no_more_than_a_full_forward_in_bf16():
    """Rounding decides between nearly equal experts, so single logits may be far apart; the mean error is not."""
    model = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, _model())
    run = _run_with_clone(model, jnp.bfloat16)
    ours, bf16 = run.against(model)
    _, fp32 = run.against(_model())
    assert np.std(ours - fp32) <= BF16_ERROR_RATIO * np.std(bf16 - fp32)
