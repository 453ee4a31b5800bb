# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

import compare
import oracles
from compare import normal, numpy
from levanter_marin.config import RopePairing
from levanter_marin.layers.rotary import partial_rotary

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}
SCORE_ATOL = 1e-5
# An angle near 65536 has a spacing of 2^-7 in fp32; its frequency and its product round once each.
LONG_ANGLE_ATOL = 2.0**-7

THETA = 10000.0
Batch, Pos, Heads, HeadSize = Axis("batch", 2), Axis("position", 6), Axis("heads", 3), Axis("head_size", 8)
X_AXES = (Batch, Pos, Heads, HeadSize)
# Absolute positions in a row, gaps, a row that starts late.
POSITIONS = hax.named(jnp.asarray([[0, 1, 2, 3, 4, 5], [7, 8, 40, 41, 300, 2]]), (Batch, Pos))


def _rotate(x, positions, rope_dim, pairing):
    return partial_rotary(x, positions, HeadSize, rope_dim, THETA, pairing)


def _oracle(x, positions, rope_dim, pairing):
    adjacent = pairing is RopePairing.adjacent
    return oracles.rotary(x, positions, rope_dim=rope_dim, theta=THETA, adjacent=adjacent)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rope_dim", (2, 4, 8))
@pytest.mark.parametrize("pairing", RopePairing)
def test_partial_rotary_equals_complex_rotation(pairing, rope_dim, dtype):
    compare.assert_matches_oracle(
        lambda x: _rotate(x, POSITIONS, rope_dim, pairing),
        lambda x: _oracle(x, np.asarray(POSITIONS.array), rope_dim, pairing),
        [normal(X_AXES, 0, dtype=dtype)],
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("pairing", RopePairing)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_partial_rotary_leaves_the_rest_of_the_head_bit_for_bit(dtype, pairing):
    x = normal(X_AXES, 0, dtype=dtype)
    out = _rotate(x, POSITIONS, 4, pairing)
    assert out.axes == x.axes and out.dtype == dtype
    np.testing.assert_array_equal(out[HeadSize, 4:].array, x[HeadSize, 4:].array)
    assert np.all(numpy(out[HeadSize, :4])[1] != numpy(x[HeadSize, :4])[1])


@pytest.mark.parametrize("pairing", RopePairing)
def test_partial_rotary_of_no_dimension_is_the_identity(pairing):
    x = normal(X_AXES, 0)
    np.testing.assert_array_equal(_rotate(x, POSITIONS, 0, pairing).array, x.array)


def test_partial_rotary_pairings_differ():
    x = normal(X_AXES, 0)
    adjacent, split = (numpy(_rotate(x, POSITIONS, 8, pairing)) for pairing in RopePairing)
    assert np.abs(adjacent - split)[0, 1:].max() > 0.1


@pytest.mark.parametrize("pairing", RopePairing)
def test_partial_rotary_positions_of_every_row_equal_positions_of_one(pairing):
    x = normal(X_AXES, 0)
    one = POSITIONS["batch", 1]
    expected = _rotate(x, one.broadcast_axis(Batch), 4, pairing)
    np.testing.assert_array_equal(_rotate(x, one, 4, pairing).array, expected.array)
    order = (HeadSize, Heads, Pos, Batch)
    out = _rotate(x.rearrange(order), POSITIONS.rearrange((Pos, Batch)), 4, pairing)
    assert out.axes == order
    compare.assert_close(out.rearrange(X_AXES), numpy(_rotate(x, POSITIONS, 4, pairing)), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("rope_dim", (4, 8))
@pytest.mark.parametrize("pairing", RopePairing)
def test_partial_rotary_scores_depend_on_differences_of_positions_only(pairing, rope_dim):
    q, k = normal(X_AXES, 0), normal(X_AXES, 1)

    def scores(shift):
        positions = hax.arange(Pos) + shift
        key = _rotate(k, positions, rope_dim, pairing).rename({"position": "key_position"})
        return numpy(hax.dot(_rotate(q, positions, rope_dim, pairing), key, axis=HeadSize))

    np.testing.assert_allclose(scores(117), scores(0), rtol=0, atol=117 * SCORE_ATOL)
    assert np.abs(scores(0) - numpy(hax.dot(q, k.rename({"position": "key_position"}), axis=HeadSize))).max() > 0.1


def test_partial_rotary_last_position_of_a_long_row_keeps_its_angles():
    x = hax.ones((Pos, HeadSize))
    positions = hax.named(jnp.asarray([65535, 65534, 50001, 32768, 4095, 16383]), (Pos,))
    expected = _oracle(np.ones((1, 6, 1, 8)), np.asarray(positions.array)[None], 8, RopePairing.adjacent)
    out = numpy(_rotate(x, positions, 8, RopePairing.adjacent))
    # a wrong angle moves a vector of length sqrt(2) by that much
    np.testing.assert_allclose(out, expected[0, :, 0], rtol=0, atol=LONG_ANGLE_ATOL * 2**0.5)
