# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compare
import oracles
from compare import normal, numpy
from levanter_marin.layers.embedding import NormedEmbedding
from levanter_marin.layers.norms import GatedNorm, RmsNorm

TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 2e-2}
EPS = 1e-5

Batch, Pos, Vocab, Embed, Rank = hax.make_axes(batch=8, position=4, vocab=11, embed=12, gate_rank=5)
# Repeats, the last token of the vocabulary, and tokens that never occur.
TOKENS = hax.named(jnp.asarray([[0, 3, 3, 10], [10, 0, 7, 2]] * 4), (Batch, Pos))


def _module(weight, gain, down=None, up=None) -> NormedEmbedding:
    gate = None if down is None else GatedNorm(hnn.Linear(down, None, Embed, Rank), hnn.Linear(up, None, Rank, Embed))
    return NormedEmbedding(hnn.Embedding(weight, Vocab, Embed), RmsNorm(Embed, gain, None, EPS), gate)


def _oracle(weight, gain, down=None, up=None):
    x = oracles.rms_norm(weight[np.asarray(TOKENS.array)], gain, eps=EPS)
    return x if down is None else oracles.gated_norm(x, down, up)


def _arrays(gated=True, dtype=jnp.float32):
    shapes = [(Vocab, Embed), (Embed,), (Rank, Embed), (Embed, Rank)]
    return [normal(axes, i, 0.5, dtype) for i, axes in enumerate(shapes[: 4 if gated else 2])]


@pytest.mark.parametrize("gated", (True, False), ids=("gated", "plain"))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_normed_embedding_equals_oracle(dtype, gated):
    compare.assert_matches_oracle(
        lambda *arrays: _module(*arrays)(TOKENS), _oracle, _arrays(gated, dtype), TOLERANCE[dtype]
    )


@pytest.mark.parametrize("mesh", compare.MESHES)
def test_normed_embedding_on_eight_devices_equals_oracle(mesh):
    compare.assert_matches_oracle(
        lambda *arrays: _module(*arrays)(hax.auto_sharded(TOKENS)),
        _oracle,
        _arrays(),
        TOLERANCE[jnp.float32],
        mesh=mesh,
        mapping={"batch": "data"},
    )


def test_normed_embedding_gradient_of_absent_tokens_is_zero():
    weight, *rest = _arrays()
    d_weight = jax.grad(lambda w: hax.sum(hax.sin(_module(w, *rest)(TOKENS))).scalar())(weight)
    present = np.isin(np.arange(Vocab.size), TOKENS.array)
    np.testing.assert_array_equal(np.any(numpy(d_weight), axis=1), present)


def test_normed_embedding_output_does_not_depend_on_the_scale_of_its_rows():
    weight, *rest = _arrays()
    out, scaled = (numpy(_module(w, *rest)(TOKENS)) for w in (weight, 100 * weight))
    np.testing.assert_allclose(out, scaled, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", (8, 14))
def test_normed_embedding_resized_vocabulary_keeps_the_tokens_in_both(size):
    module = _module(*_arrays())
    resized = module.resize_embeddings(size, key=jax.random.key(0))
    assert resized.token_embeddings.Vocab == Vocab.resize(size)
    kept = min(size, Vocab.size)
    np.testing.assert_array_equal(
        resized.token_embeddings.weight["vocab", :kept].array, module.token_embeddings.weight["vocab", :kept].array
    )
    tokens = hax.named(jnp.arange(kept), (Pos.resize(kept),))
    np.testing.assert_array_equal(resized(tokens).array, module(tokens).array)
