# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import compare
import oracles
from compare import normal, numpy
from levanter_marin.layers.norms import GatedNorm, RmsNorm, rms_norm

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}
# Largest relative error of one rounding to bf16, and a little for fp32's own.
ONE_BF16_ROUNDING = 2.0**-8 * 1.001
EPS = 1e-5

Batch, Pos, Embed, Rank = Axis("batch", 3), Axis("position", 5), Axis("embed", 24), Axis("gate_rank", 6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_without_gain_equals_oracle(dtype):
    compare.assert_matches_oracle(
        lambda x: rms_norm(x, Embed, EPS),
        lambda x: oracles.rms_norm(x, eps=EPS),
        [normal((Batch, Pos, Embed), 0, 3.0, dtype)],
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("scale", (1e-3, 3.0), ids=("eps decides", "eps is small"))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_with_gain_equals_oracle(dtype, scale):
    compare.assert_matches_oracle(
        lambda x, gain: RmsNorm(Embed, gain, None, EPS)(x),
        lambda x, gain: oracles.rms_norm(x, gain, eps=EPS),
        [normal((Batch, Pos, Embed), 0, scale, dtype), 1 + normal(Embed, 1, 0.5, dtype)],
        TOLERANCE[dtype],
    )


def test_rms_norm_in_bf16_rounds_once():
    x, gain = normal((Batch, Pos, Embed), 0, 1.0, jnp.bfloat16), normal(Embed, 1, 1.0, jnp.bfloat16)
    exact = oracles.rms_norm(numpy(x), numpy(gain), eps=EPS)
    assert np.all(np.abs(numpy(RmsNorm(Embed, gain, None, EPS)(x)) - exact) <= ONE_BF16_ROUNDING * np.abs(exact))


def test_rms_norm_init_has_unit_gain_and_no_bias():
    norm = RmsNorm.init(Embed, EPS, use_bias=False)
    assert norm.bias is None and norm.weight is not None
    np.testing.assert_array_equal(norm.weight.array, np.ones(Embed.size))


def test_rms_norm_of_a_zero_token_is_zero_with_finite_gradient():
    x = hax.zeros((Pos, Embed))
    out, vjp = jax.vjp(lambda x: RmsNorm.init(Embed, EPS, use_bias=False)(x), x)
    np.testing.assert_array_equal(out.array, 0)
    # at zero the norm is multiplication by 1/sqrt(eps)
    np.testing.assert_allclose(vjp(hax.ones_like(x))[0].array, EPS**-0.5, rtol=TOLERANCE[jnp.float32])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gated_norm_equals_oracle(dtype):
    def ours(x, down, up):
        return GatedNorm(hnn.Linear(down, None, Embed, Rank), hnn.Linear(up, None, Rank, Embed))(x)

    arrays = [normal((Batch, Pos, Embed), 0), normal((Rank, Embed), 1, 0.5), normal((Embed, Rank), 2, 0.5)]
    compare.assert_matches_oracle(ours, oracles.gated_norm, [a.astype(dtype) for a in arrays], TOLERANCE[dtype])


def test_gated_norm_of_zero_matrices_halves():
    gate = GatedNorm.init(Embed, Rank.size, 0.0, key=jax.random.key(0))
    x = normal((Batch, Embed), 0)
    np.testing.assert_array_equal(gate(x).array, x.array / 2)
