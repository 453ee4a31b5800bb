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
from levanter_marin.layers.exclusive_attention import OWN_VALUE_EPS, exclude_own_value

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2}

Batch, Pos, KvHead, Group = Axis("batch", 2), Axis("position", 3), Axis("kv_head", 2), Axis("q_heads_per_group", 3)
HeadSize = Axis("head_size", 8)
Y_AXES, V_AXES = (Batch, Pos, KvHead, Group, HeadSize), (Batch, Pos, KvHead, HeadSize)


def _ours(y, v):
    return exclude_own_value(y, v, HeadSize)


# The smallest values are as short as the root of eps, where it decides.
@pytest.mark.parametrize("scale", (1.0, 3e-4))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_exclude_own_value_equals_oracle(dtype, scale):
    compare.assert_matches_oracle(
        _ours,
        lambda y, v: oracles.exclude_own_value(y, v[:, :, :, None]),
        [normal(Y_AXES, 0, dtype=dtype), normal(V_AXES, 1, scale, dtype)],
        TOLERANCE[dtype],
    )


def test_exclude_own_value_leaves_the_share_that_eps_keeps():
    y, v = normal(Y_AXES, 0), normal(V_AXES, 1)
    left = hax.dot(_ours(y, v), v, axis=HeadSize)
    own, squares = hax.dot(y, v, axis=HeadSize), hax.dot(v, v, axis=HeadSize)
    np.testing.assert_allclose(left.array, (own * OWN_VALUE_EPS / (squares + OWN_VALUE_EPS)).array, atol=3e-6)


def test_exclude_own_value_of_an_output_along_the_value_is_zero_up_to_eps():
    v = normal(V_AXES, 1)
    y = (3 * v).broadcast_axis(Group).rearrange(Y_AXES)
    np.testing.assert_allclose(_ours(y, v).array, 0, atol=1e-5)


def test_exclude_own_value_zero_value_keeps_the_output():
    y = normal(Y_AXES, 0)
    out, vjp = jax.vjp(_ours, y, hax.zeros(V_AXES))
    np.testing.assert_array_equal(out.array, y.array)
    d_y, d_v = vjp(y)
    np.testing.assert_array_equal(d_y.array, y.array)
    np.testing.assert_array_equal(d_v.array, 0)


def test_exclude_own_value_axes_in_another_order_keep_it():
    y, v = normal(Y_AXES, 0), normal(V_AXES, 1)
    order = (HeadSize, Group, Pos, KvHead, Batch)
    out = _ours(y.rearrange(order), v.rearrange((KvHead, HeadSize, Batch, Pos)))
    assert out.axes == order
    compare.assert_close(out.rearrange(Y_AXES), numpy(_ours(y, v)), TOLERANCE[jnp.float32])
