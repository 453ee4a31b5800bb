# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The shared expert, and the initial weights of every linear layer."""

import math

import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import compare
import oracles
from compare import normal, numpy
from levanter_marin.layers.linear import truncated_normal, truncated_normal_linear
from levanter_marin.layers.mlp import SwiGlu

TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 2e-2}
STD = 0.02
# Standard deviation of a standard normal truncated at +-3.
TRUNCATED_STD = 0.98658

Batch, Pos, Embed, Mlp = Axis("batch", 8), Axis("position", 3), Axis("embed", 12), Axis("mlp", 20)


def _ours(x, gate, up, down):
    return SwiGlu(
        hnn.Linear(gate, None, Embed, Mlp), hnn.Linear(up, None, Embed, Mlp), hnn.Linear(down, None, Mlp, Embed)
    )(x)


def _arrays(dtype=jnp.float32):
    shapes = (Batch, Pos, Embed), (Mlp, Embed), (Mlp, Embed), (Embed, Mlp)
    return [normal(axes, i, 0.5, dtype) for i, axes in enumerate(shapes)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu_equals_oracle(dtype):
    compare.assert_matches_oracle(_ours, oracles.swiglu, _arrays(dtype), TOLERANCE[dtype])


def test_swiglu_on_eight_devices_equals_oracle():
    hlo = compare.assert_matches_oracle(
        _ours,
        oracles.swiglu,
        _arrays(),
        TOLERANCE[jnp.float32],
        mesh="data4_model2",
        mapping={"batch": "data", "mlp": "model"},
    )
    assert not compare.rearranging_collectives(hlo)


def test_swiglu_init_draws_every_matrix_anew_without_bias():
    mlp = SwiGlu.init(Embed, Mlp, STD, key=jax.random.key(0))
    for linear, axes in (
        (mlp.gate_proj, (Mlp, Embed)),
        (mlp.up_proj, (Mlp, Embed)),
        (mlp.down_proj, (Embed, Mlp)),
    ):
        assert linear.weight.axes == axes and linear.bias is None
    samples = np.concatenate([numpy(leaf).ravel() for leaf in jax.tree.leaves(mlp)])
    # a few pairs of 720 samples of 24 bits may meet by chance
    assert np.unique(samples).size > 0.99 * samples.size


def test_truncated_normal_has_its_standard_deviation_and_bound():
    size = 200_000
    x = numpy(truncated_normal(Axis("embed", size), STD, key=jax.random.key(0)))
    assert np.abs(x).max() <= 3 * STD * (1 + 1e-6)
    # five standard errors of each
    assert abs(x.mean()) < 5 * STD / math.sqrt(size)
    assert abs(x.std() / (TRUNCATED_STD * STD) - 1) < 5 / math.sqrt(2 * size)


def test_truncated_normal_linear_of_several_axes_maps_in_to_out():
    Heads, HeadSize = Axis("heads", 2), Axis("head_size", 4)
    linear = truncated_normal_linear(Embed, (Heads, HeadSize), STD, key=jax.random.key(0))
    assert linear.weight.axes == (Heads, HeadSize, Embed) and linear.bias is None
    x = normal((Batch, Embed), 0)
    expected = np.einsum("bd,hed->bhe", numpy(x), numpy(linear.weight))
    compare.assert_close(linear(x).rearrange((Batch, Heads, HeadSize)), expected, TOLERANCE[jnp.float32])
