# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation, default_implementation, grouped_swiglu

REFERENCE = GroupedMatmulImplementation.reference
OTHERS = [i for i in GroupedMatmulImplementation if i is not REFERENCE]

# Relative to the largest element of the compared array.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}

ROWS, MODEL, WIDTH = 600, 24, 40
GROUP_SIZES = {
    "even": [75] * 8,
    "ragged": [1, 290, 31, 33, 0, 7, 2, 100],
    "empty_first_and_last": [0, 100, 200, 0, 0, 5, 1, 0],
    "all_in_one": [0, 0, 600, 0, 0, 0, 0, 0],
    "all_in_last": [0, 0, 0, 0, 0, 0, 0, 600],
    "nothing": [0] * 8,
    "one_row_each": [1] * 8,
    "chunk_borders": [48, 49, 47, 96, 97, 95, 80, 88],
    "largest_chunk_and_one": [96, 97, 192, 193, 1, 0, 0, 0],
}
OTHER_EXPERT_COUNTS = {
    "one_expert": [77],
    "more_experts_than_a_chunk_has_rows": [5, 0, 3, 17, 0, 0, 41, 2] * 8,
    "several_chunks_a_batch": [37 * e % 128 for e in range(64)],
    "several_chunks_a_batch_of_one_size": [64] * 64,
}


def _arguments(group_sizes, dtype=jnp.float32, unused=0.0):
    keys = jax.random.split(jax.random.key(0), 5)
    E, R = len(group_sizes), max(ROWS, sum(group_sizes))
    rows = jax.random.normal(keys[0], (R, MODEL), dtype)
    rows = rows.at[sum(group_sizes) :].set(unused)
    w_gate = (jax.random.normal(keys[1], (E, MODEL, WIDTH)) / MODEL**0.5).astype(dtype)
    w_up = (jax.random.normal(keys[2], (E, MODEL, WIDTH)) / MODEL**0.5).astype(dtype)
    w_down = (jax.random.normal(keys[3], (E, WIDTH, MODEL)) / WIDTH**0.5).astype(dtype)
    d_out = jax.random.normal(keys[4], (R, MODEL), dtype)
    return (rows, w_gate, w_up, w_down), jnp.array(group_sizes, jnp.int32), d_out


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(implementation, arguments, group_sizes, d_out):
    out, vjp = jax.vjp(lambda *a: grouped_swiglu(*a, group_sizes, implementation), *arguments)
    return out, *vjp(d_out)


def _assert_close(actual, expected, tolerance):
    for name, a, b in zip(("out", "rows", "w_gate", "w_up", "w_down"), actual, expected, strict=True):
        assert a.dtype == b.dtype, name
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.max(np.abs(a - b), initial=0) <= tolerance * np.max(np.abs(b), initial=0), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("implementation", OTHERS)
def test_grouped_swiglu_every_group_pattern_equals_reference(implementation, sizes, dtype):
    arguments, group_sizes, d_out = _arguments(sizes, dtype)
    expected = _value_and_gradients(REFERENCE, arguments, group_sizes, d_out)
    actual = _value_and_gradients(implementation, arguments, group_sizes, d_out)
    _assert_close(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("sizes", OTHER_EXPERT_COUNTS.values(), ids=OTHER_EXPERT_COUNTS)
@pytest.mark.parametrize("implementation", OTHERS)
def test_grouped_swiglu_other_expert_counts_equal_reference(implementation, sizes):
    arguments, group_sizes, d_out = _arguments(sizes)
    expected = _value_and_gradients(REFERENCE, arguments, group_sizes, d_out)
    actual = _value_and_gradients(implementation, arguments, group_sizes, d_out)
    _assert_close(actual, expected, TOLERANCE[jnp.float32])


@pytest.mark.parametrize("implementation", GroupedMatmulImplementation)
def test_grouped_swiglu_nan_in_unused_rows_stays_out(implementation):
    sizes = GROUP_SIZES["ragged"]
    clean, group_sizes, d_out = _arguments(sizes)
    dirty, _, _ = _arguments(sizes, unused=jnp.nan)
    expected = _value_and_gradients(implementation, clean, group_sizes, d_out)
    actual = _value_and_gradients(implementation, dirty, group_sizes, d_out.at[sum(sizes) :].set(jnp.nan))
    for a, b in zip(actual, expected, strict=True):
        assert np.array_equal(a, b)
    assert not np.any(actual[0][sum(sizes) :]) and not np.any(actual[1][sum(sizes) :])


@pytest.mark.parametrize("implementation", OTHERS)
def test_grouped_swiglu_in_rematerialized_scan_equals_reference(implementation):
    arguments, group_sizes, _ = _arguments(GROUP_SIZES["ragged"])

    def loss(arguments, implementation):
        rows, *weights = arguments

        def layer(rows, sizes):
            return rows + grouped_swiglu(rows, *weights, sizes, implementation), None

        out, _ = jax.lax.scan(jax.checkpoint(layer), rows, jnp.stack([group_sizes, group_sizes[::-1]]))
        return jnp.sum(jnp.sin(out))

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, gradients = grad(arguments, implementation)
    expected_value, expected = grad(arguments, REFERENCE)
    _assert_close((value, *gradients), (expected_value, *expected), TOLERANCE[jnp.float32])


def test_grouped_swiglu_without_implementation_is_the_default_one_bit_for_bit():
    arguments, group_sizes, d_out = _arguments(GROUP_SIZES["ragged"])
    actual = _value_and_gradients(None, arguments, group_sizes, d_out)
    expected = _value_and_gradients(default_implementation(), arguments, group_sizes, d_out)
    for a, b in zip(actual, expected, strict=True):
        assert np.array_equal(a, b)
