# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""MuonH and AdamH on single layers: the original's numbers, constant norms, and what may not matter."""

import functools
import warnings
from pathlib import Path

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_layers import array_of, bank, layer_of, linear, matrix

from levanter_marin.optim.hyperball import NormScope, scale_by_adamh, scale_by_hyperball, scale_by_muonh
from levanter_marin.optim.newton_schulz import NewtonSchulzDtype

GOLDEN_RTOL = 5e-5  # of the leaf's largest update
GOLDEN_BF16_MIN_COSINE = 0.9
NORM_RTOL = 1e-6
BF16_NORM_RTOL = 1e-3
EQUAL_ATOL = 1e-6
EQUIVARIANCE_ATOL = 5e-6

LR = 0.02
FP32 = NewtonSchulzDtype.fp32
UNITS = Path(__file__).parents[1] / "data" / "goldens" / "optimizer_units.npz"
SCOPES = {"layer": NormScope.all_experts, "matrix": NormScope.per_expert}


def muonh(**kwargs):
    return scale_by_muonh(**({"learning_rate": LR, "newton_schulz_dtype": FP32} | kwargs))


jitted = functools.cache(jax.jit)
DEFAULT = muonh()


def run(optimizer, layer, gradients):
    """Updates and parameters after every step."""
    update = jitted(optimizer.update)
    state, out = optimizer.init(layer), []
    for gradient in gradients:
        updates, state = update(gradient, state, layer)
        layer = eqx.apply_updates(layer, updates)
        out.append((array_of(updates), array_of(layer)))
    return out


def norms(array, scope=NormScope.per_expert):
    axes = (-3, -2, -1) if scope is NormScope.all_experts and array.ndim == 4 else (-2, -1)
    return np.sqrt(np.sum(np.square(array.astype(np.float64)), axis=axes))


def assert_golden(ours, arrays, prefix, t):
    expected = arrays[f"{prefix}/update{t}"]
    np.testing.assert_allclose(ours[0], expected, rtol=0, atol=GOLDEN_RTOL * np.abs(expected).max())
    np.testing.assert_allclose(
        ours[1], arrays[f"{prefix}/param{t}"], rtol=0, atol=3 * GOLDEN_RTOL * np.abs(expected).max()
    )


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("shape", ["7x5", "3x6x4", "2x3x6x4"])
def test_muonh_golden_gradients_give_updates_of_three_steps(shape, scope):
    arrays = np.load(UNITS)
    layer = layer_of(arrays[f"muonh/{shape}/param"])
    gradients = [layer_of(arrays[f"muonh/{shape}/grad{t}"]) for t in (1, 2, 3)]
    steps = run(muonh(norm_scope=SCOPES[scope]), layer, gradients)
    for t, ours in enumerate(steps, 1):
        assert_golden(ours, arrays, f"muonh/{shape}/fp32_{scope}", t)

    in_bf16 = run(muonh(norm_scope=SCOPES[scope], newton_schulz_dtype=NewtonSchulzDtype.bf16), layer, gradients)
    for t, (update, parameter) in enumerate(in_bf16, 1):
        expected = arrays[f"muonh/{shape}/bf16_{scope}/update{t}"]
        cosine = np.sum(update * expected) / np.linalg.norm(update) / np.linalg.norm(expected)
        assert cosine > GOLDEN_BF16_MIN_COSINE
        expected_norms = norms(arrays[f"muonh/{shape}/bf16_{scope}/param{t}"], SCOPES[scope])
        np.testing.assert_allclose(norms(parameter, SCOPES[scope]), expected_norms, rtol=NORM_RTOL)


def test_adamh_golden_gradients_give_updates_of_three_steps():
    arrays = np.load(UNITS)
    layer = linear(arrays["adamh/6x10/param"])
    gradients = [linear(arrays[f"adamh/6x10/grad{t}"]) for t in (1, 2, 3)]
    for t, ours in enumerate(run(scale_by_adamh(LR, 0.9, 0.95, 1e-8), layer, gradients), 1):
        assert_golden(ours, arrays, "adamh/6x10", t)


@pytest.mark.parametrize("make", [muonh, lambda **kwargs: scale_by_adamh(**({"learning_rate": LR} | kwargs))])
@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (64, 64)])
def test_hyperball_small_learning_rate_moves_by_that_share_of_the_norm(make, shape):
    layer, gradient = linear(matrix(*shape)), linear(matrix(*shape, seed=1))
    # Towards first order: the step has a component along the parameter, which normalising takes away again.
    for lr, rtol in ((1e-2, 0.2), (1e-3, 0.2)):
        ((update, _),) = run(make(learning_rate=lr), layer, [gradient])
        share = np.linalg.norm(update) / np.linalg.norm(array_of(layer))
        assert share == pytest.approx(lr, rel=rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, NORM_RTOL), (jnp.bfloat16, BF16_NORM_RTOL)])
def test_hyperball_three_hundred_steps_keep_the_norm(dtype, rtol):
    params = {"w": linear(0.05 * matrix(2, 16, 32), dtype=dtype), "bank": bank(0.05 * matrix(3, 32, 24), dtype=dtype)}
    optimizer = muonh(learning_rate=0.01, num_steps=1, norm_scope=NormScope.per_expert)
    start = {name: norms(array_of(layer)) for name, layer in params.items()}

    @jax.jit
    def steps(params, key):
        def step(carry, key):
            params, state = carry
            gradients = jax.tree.map(lambda p: jax.random.normal(key, p.shape, p.dtype), params)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, 300))[0][0]

    end = steps(params, jax.random.PRNGKey(0))
    for name, layer in end.items():
        assert layer.weight.dtype == dtype
        np.testing.assert_allclose(norms(array_of(layer)), start[name], rtol=rtol)
        assert np.abs(array_of(layer) - array_of(params[name])).max() > 0.01


def with_spike(array, expert, factor):
    array = array.copy()
    array[:, expert] *= factor
    return array


@pytest.mark.parametrize("scope", NormScope)
def test_muonh_expert_with_a_large_gradient_keeps_the_norms_of_its_scope(scope):
    weight, gradient = matrix(2, 3, 4, 6), with_spike(matrix(2, 3, 4, 6, seed=1), 1, 500)
    ((update, after),) = run(muonh(norm_scope=scope), bank(weight), [bank(gradient)])
    np.testing.assert_allclose(norms(after, scope), norms(weight, scope), rtol=NORM_RTOL)
    moved = norms(update) / norms(weight)
    assert moved.min() > LR / 2 and moved.max() < LR * 2
    if scope is NormScope.all_experts:
        assert np.abs(norms(after) / norms(weight) - 1).max() > 10 * NORM_RTOL


def test_hyperball_direction_dominated_by_one_expert_moves_others_by_scope():
    # Adam-like directions are not orthogonalized: here the scope decides how far a quiet expert moves.
    weight, direction = matrix(2, 3, 4, 6), with_spike(matrix(2, 3, 4, 6, seed=1), 1, 500)
    shares = {}
    for scope in NormScope:
        ((update, after),) = run(scale_by_hyperball(LR, scope), bank(weight), [bank(direction)])
        np.testing.assert_allclose(norms(after, scope), norms(weight, scope), rtol=NORM_RTOL)
        shares[scope] = norms(update)[:, 0] / norms(weight)[:, 0]
    assert (shares[NormScope.per_expert] > LR / 2).all()
    assert (shares[NormScope.all_experts] < LR / 5).all()


def test_muonh_zero_weight_stays_zero_others_move_and_one_warning_names_it():
    weights = {
        "flat": np.zeros((5, 4), np.float32),
        "stack": with_spike(matrix(3, 5, 4).swapaxes(0, 1), 1, 0).swapaxes(0, 1),
        "bank": with_spike(matrix(2, 3, 5, 4), 1, 0),
        "fine": matrix(5, 4),
    }
    params = {name: layer_of(weight) for name, weight in weights.items()}
    gradients = {name: layer_of(matrix(*weight.shape, seed=1)) for name, weight in weights.items()}
    optimizer = muonh(norm_scope=NormScope.per_expert)
    with pytest.warns(UserWarning) as caught:
        state = optimizer.init(params)
    named = [str(w.message) for w in caught if "norm of zero" in str(w.message)]
    assert len(named) == 1
    assert all(f"{name}.weight" in named[0] for name in ("flat", "stack", "bank")) and "fine" not in named[0]

    updates, _ = jax.jit(optimizer.update)(gradients, state, params)
    for name, weight in weights.items():
        update = array_of(updates[name])
        is_zero = norms(weight) == 0
        np.testing.assert_array_equal(norms(update)[is_zero], 0)
        assert (norms(update)[~is_zero] > LR / 2).all()


def test_muonh_init_under_jit_warns_of_a_zero_weight_too():
    optimizer = muonh()
    for weight, expected in ((np.zeros((3, 4), np.float32), 1), (matrix(3, 4), 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.block_until_ready(jax.jit(optimizer.init)(linear(weight)))
            jax.effects_barrier()
        assert len([w for w in caught if "weight (1)" in str(w.message)]) == len(caught) == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("make", [muonh, lambda norm_scope: scale_by_adamh(LR, norm_scope=norm_scope)])
@pytest.mark.parametrize("scope", NormScope)
def test_hyperball_expert_without_gradient_stays_and_the_rest_moves(make, scope, dtype):
    weight, gradient = matrix(2, 3, 4, 6), with_spike(matrix(2, 3, 4, 6, seed=1), 1, 0)
    layer = bank(weight, dtype=dtype)
    ((update, after),) = run(make(norm_scope=scope), layer, [bank(gradient, dtype=dtype)])
    np.testing.assert_array_equal(update[:, 1], 0)
    np.testing.assert_array_equal(after[:, 1], array_of(layer)[:, 1])
    others = np.delete(weight, 1, axis=1), np.delete(gradient, 1, axis=1)
    if scope is NormScope.per_expert:
        layers = [bank(x, dtype=dtype) for x in others]
        ((expected, _),) = run(make(norm_scope=scope), layers[0], layers[1:])
        np.testing.assert_allclose(np.delete(update, 1, axis=1), expected, rtol=0, atol=EQUAL_ATOL)
    if dtype == jnp.float32:
        np.testing.assert_allclose(norms(after, scope), norms(weight, scope), rtol=NORM_RTOL)
    assert (norms(update)[:, [0, 2]] > LR / 2).all()


def test_muonh_gradient_of_nan_is_not_hidden():
    gradient = matrix(4, 6)
    gradient[0, 0] = np.nan
    ((update, _),) = run(muonh(), linear(matrix(4, 6)), [linear(gradient)])
    assert np.isnan(update).any()


@pytest.mark.parametrize("shape", [(3, 6, 4), (2, 3, 6, 4)])
@pytest.mark.parametrize("make", [muonh, lambda **kwargs: scale_by_adamh(LR, **kwargs)])
def test_hyperball_stack_equals_a_loop_over_its_matrices(make, shape):
    weight, gradients = matrix(*shape), [matrix(*shape, seed=seed) for seed in (1, 2)]
    optimizer = make(norm_scope=NormScope.per_expert)
    stacked = run(optimizer, layer_of(weight), [layer_of(g) for g in gradients])[-1][1]
    for index in np.ndindex(*shape[:-2]):
        alone = run(optimizer, linear(weight[index]), [linear(g[index]) for g in gradients])[-1][1]
        np.testing.assert_allclose(stacked[index], alone, rtol=0, atol=EQUAL_ATOL)


def test_muonh_articulated_sides_equal_flat_ones():
    Embed, Heads, HeadSize, Layer = Axis("embed", 12), Axis("heads", 4), Axis("head_size", 3), Axis("layer", 2)
    weight, gradient = matrix(2, 4, 3, 12), matrix(2, 4, 3, 12, seed=1)

    def articulated(x, swapped):
        named = hax.named(jnp.asarray(x), (Layer, Heads, HeadSize, Embed))
        # rows after columns, and a layer axis in between: only names may count
        named = named.rearrange((Embed, Heads, Layer, HeadSize)) if swapped else named
        return hnn.Linear(named, None, Embed, (Heads, HeadSize))

    flat = run(muonh(), linear(weight.reshape(2, 12, 12)), [linear(gradient.reshape(2, 12, 12))])[0][0]
    for swapped in (False, True):
        layer = articulated(weight, swapped)
        updates, _ = muonh().update(articulated(gradient, swapped), muonh().init(layer), layer)
        assert updates.weight.axes == layer.weight.axes
        ours = updates.weight.rearrange((Layer, Heads, HeadSize, Embed)).array.reshape(2, 12, 12)
        np.testing.assert_allclose(ours, flat, rtol=0, atol=EQUAL_ATOL)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(8, 5), (5, 8), (6, 6)]), exponent=st.integers(-12, 12))
def test_muonh_keeps_norm_and_commutes_with_permutation_transposition_and_scale(seed, shape, exponent):
    weight, gradient = matrix(*shape, seed=seed), matrix(*shape, seed=seed + 1)
    rng = np.random.default_rng(seed + 2)
    rows, columns = rng.permutation(shape[0]), rng.permutation(shape[1])
    ((update, after),) = run(DEFAULT, linear(weight), [linear(gradient)])
    np.testing.assert_allclose(norms(after), norms(weight), rtol=NORM_RTOL)
    assert np.linalg.norm(update) > LR / 2 * np.linalg.norm(weight)

    ((permuted, _),) = run(DEFAULT, linear(weight[rows][:, columns]), [linear(gradient[rows][:, columns])])
    np.testing.assert_allclose(permuted, update[rows][:, columns], rtol=0, atol=EQUIVARIANCE_ATOL)
    ((transposed, _),) = run(DEFAULT, linear(weight.T), [linear(gradient.T)])
    np.testing.assert_allclose(transposed, update.T, rtol=0, atol=EQUIVARIANCE_ATOL)
    ((scaled, _),) = run(DEFAULT, linear(weight), [linear(gradient * np.float32(10.0**exponent))])
    np.testing.assert_allclose(scaled, update, rtol=0, atol=EQUIVARIANCE_ATOL)


def test_hyperball_parameter_that_is_no_matrix_is_refused_by_its_path():
    params = {"norm": hnn.RmsNorm.init(Axis("embed", 4), use_bias=False)}
    with pytest.raises(ValueError, match=r"norm.weight is not the weight of a haliax.nn.Linear"):
        muonh().init(params)


def test_hyperball_update_without_parameters_is_refused():
    layer = linear(matrix(3, 4))
    with pytest.raises(ValueError, match="needs the parameters"):
        muonh().update(layer, muonh().init(layer))
