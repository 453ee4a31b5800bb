# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Newton-Schulz orthogonalization against the original's numbers, the SVD, and what must not change it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter_marin.optim.newton_schulz import COEFFICIENTS, Coefficients, NewtonSchulzDtype, orthogonalize

GOLDEN_ATOL = 5e-5  # of the largest entry, as the optimizer updates
BF16_MIN_COSINE = 0.99
SVD_ATOL = 2e-5
EQUIVARIANCE_ATOL = 2e-5
STACK_ATOL = 1e-6

UNITS = Path(__file__).parents[1] / "data" / "goldens" / "optimizer_units.npz"
GOLDEN_CASES = [(shape, "quintic", 5) for shape in ("7x5", "5x7", "64x64", "3x6x4", "2x3x6x4")] + [
    (shape, *name) for shape in ("7x5", "5x7") for name in (("simple", 5), ("polar_express", 8), ("aol", 4))
]


def matrix(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def fp32(x, **kwargs):
    return np.asarray(orthogonalize(jnp.asarray(x), dtype=NewtonSchulzDtype.fp32, **kwargs))


def svd_oracle(x, coefficients, num_steps):
    """The polynomials applied to the singular values of each matrix, in float64."""
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True)
    rows = COEFFICIENTS[coefficients]
    for step in range(num_steps):
        a, b, c = rows[step % len(rows)]
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ vt


@pytest.mark.parametrize(("shape", "name", "num_steps"), GOLDEN_CASES)
def test_orthogonalize_golden_input_gives_the_golden(shape, name, num_steps):
    arrays = np.load(UNITS)
    key = f"ns/{shape}/{name}{num_steps}"
    x, coefficients = arrays[f"ns/{shape}/in"], Coefficients[name]
    ours = fp32(x, coefficients=coefficients, num_steps=num_steps)
    for golden in ("fp32", "fp64"):
        expected = arrays[f"{key}/{golden}"]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=GOLDEN_ATOL * np.abs(expected).max())
    in_bf16 = np.asarray(orthogonalize(jnp.asarray(x), coefficients=coefficients, num_steps=num_steps))
    expected = arrays[f"{key}/bf16"]
    cosine = np.sum(in_bf16 * expected) / np.linalg.norm(in_bf16) / np.linalg.norm(expected)
    assert cosine > BF16_MIN_COSINE


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (1, 4), (2, 3, 4, 7)])
@pytest.mark.parametrize("coefficients", Coefficients)
def test_orthogonalize_any_coefficients_equals_the_svd_oracle(shape, coefficients):
    x = matrix(*shape)
    # cycling through the coefficients beyond their number, but for polar_express, whose 8 steps amplify rounding
    num_steps = 6 if coefficients is Coefficients.aol else 5
    ours = fp32(x, coefficients=coefficients, num_steps=num_steps)
    np.testing.assert_allclose(ours, svd_oracle(x, coefficients, num_steps), rtol=0, atol=SVD_ATOL)


@pytest.mark.parametrize("dtype", NewtonSchulzDtype)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-30, 1e30])
def test_orthogonalize_scaled_input_gives_the_same_direction(dtype, scale):
    x = matrix(16, 24)
    unscaled = np.asarray(orthogonalize(jnp.asarray(x), dtype=dtype))
    ours = np.asarray(orthogonalize(jnp.asarray(x * np.float32(scale)), dtype=dtype))
    atol = SVD_ATOL if dtype is NewtonSchulzDtype.fp32 else 0.05
    np.testing.assert_allclose(ours, unscaled, rtol=0, atol=atol)
    singular_values = np.linalg.svd(ours, compute_uv=False)
    assert 0.7 < singular_values.min() and singular_values.max() < 1.3


@pytest.mark.parametrize("dtype", NewtonSchulzDtype)
def test_orthogonalize_zero_matrix_in_a_stack_gives_zeros_and_leaves_the_others(dtype):
    x = matrix(3, 4, 6)
    x[1] = 0
    ours = np.asarray(jax.jit(lambda x: orthogonalize(x, dtype=dtype))(x))
    np.testing.assert_array_equal(ours[1], 0)
    alone = np.asarray(jax.jit(lambda x: orthogonalize(x, dtype=dtype))(x[2]))
    np.testing.assert_allclose(ours[2], alone, rtol=0, atol=STACK_ATOL)


def test_orthogonalize_stack_equals_a_loop():
    x = matrix(2, 3, 6, 4)
    looped = np.stack([[fp32(m) for m in row] for row in x])
    np.testing.assert_allclose(fp32(x), looped, rtol=0, atol=STACK_ATOL)


def test_orthogonalize_large_stack_taken_in_parts_equals_a_loop():
    x = matrix(5, 256, 300)  # more than a CPU takes at a time, and no multiple of it
    looped = np.stack([fp32(m) for m in x])
    np.testing.assert_allclose(fp32(x.reshape(5, 1, 256, 300))[:, 0], looped, rtol=0, atol=STACK_ATOL)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_orthogonalize_keeps_shape_and_dtype(dtype):
    out = orthogonalize(jnp.asarray(matrix(2, 3, 5), dtype))
    assert (out.shape, out.dtype) == ((2, 3, 5), dtype)
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_orthogonalize_vector_is_refused():
    with pytest.raises(ValueError, match="x.ndim=1"):
        orthogonalize(jnp.ones(3))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(8, 5), (5, 8), (6, 6)]))
def test_orthogonalize_permuted_and_transposed_input_permutes_and_transposes_the_result(seed, shape):
    x = matrix(*shape, seed=seed)
    rng = np.random.default_rng(seed + 1)
    rows, columns = rng.permutation(shape[0]), rng.permutation(shape[1])
    ours = fp32(x)
    np.testing.assert_allclose(fp32(x[rows][:, columns]), ours[rows][:, columns], rtol=0, atol=EQUIVARIANCE_ATOL)
    np.testing.assert_allclose(fp32(x.T), ours.T, rtol=0, atol=EQUIVARIANCE_ATOL)
