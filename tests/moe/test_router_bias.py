# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Router-bias state by itself: exact terms, the microbatch rule, and the gradient path."""

import functools
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
import toy_router
from haliax import Axis
from haliax.nn.scan import BlockSeq, Stacked
from jax.sharding import Mesh
from toy_router import (
    BF16,
    FP32,
    Embed,
    Layer,
    Layers,
    Model,
    RouterExperts,
    assert_same_state,
    batch_of,
    biases,
    gradient,
    loss_fn,
    next_biases_by_hand,
    state_of,
)

from levanter_marin.config import QuantileBalancingConfig, QuantileEstimator
from levanter_marin.moe.router_bias import Bf16Terms, RouterBias, next_router_bias, record_bias

# Of a bias: beta moves by at most rounding when the program around it is compiled differently.
BIAS_ATOL = 2e-6
GRADIENT_RTOL = 1e-5
ACCUMULATE_RTOL = 1e-6


# Terms and values


def test_bf16_terms_any_magnitude_are_exact_after_bf16_cast():
    rng = np.random.default_rng(0)
    significand = rng.integers(2**23, 2**24, size=4096) * rng.choice([-1, 1], size=4096)
    values = np.ldexp(significand.astype(np.float32), rng.integers(-125, 104, size=4096)).astype(np.float32)
    values = np.concatenate([values, np.float32([0, -0.0, 1, 1 / 3, np.finfo(np.float32).max, -(2.0**-102)])])

    @jax.jit
    def round_trip(x):
        terms = Bf16Terms.from_value(hax.named(x, "router_experts"))
        return BF16.cast_to_compute(terms).value().array

    np.testing.assert_array_equal(round_trip(values), values)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_router_bias_value_is_exact_after_bf16_cast(jit):
    rng = np.random.default_rng(1)
    bias = (rng.normal(size=8) * 10.0 ** rng.integers(-9, 5, size=8)).astype(np.float32)

    def round_trip(bias, weight):
        state = BF16.cast_to_compute(RouterBias.from_value(hax.named(bias, RouterExperts), hax.named(weight, ())))
        return state, state.value().array, state.num_valid().array

    state, value, num_valid = (jax.jit(round_trip) if jit else round_trip)(
        bias, jnp.int32(11_264 * 4096 - 1).astype(float)
    )
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state))
    np.testing.assert_array_equal(value, bias)
    assert num_valid == np.float32(11_264 * 4096 - 1)


def test_router_bias_init_is_zero():
    assert_same_state(RouterBias.init(RouterExperts), state_of(np.zeros(8, np.float32), 0))
    np.testing.assert_array_equal(RouterBias.init(RouterExperts).value().array, np.zeros(8))


def test_router_bias_cast_to_fp16_raises():
    state = jmp.get_policy("float16").cast_to_compute(state_of(np.ones(8, np.float32), 1))
    with pytest.raises(ValueError, match="float16"):
        state.value()


def test_router_bias_terms_are_negligible_in_a_norm():
    state = state_of(np.full(8, 30.0, np.float32), 11_264 * 4096)
    assert optax.global_norm(state) < 1e-6


def test_next_router_bias_of_thresholds_is_centred_and_opposite():
    beta = np.random.default_rng(2).normal(size=8).astype(np.float32)
    bias = next_router_bias(hax.named(jnp.asarray(beta), RouterExperts)).array
    np.testing.assert_allclose(bias, -(beta - beta.mean()), rtol=0, atol=BIAS_ATOL)
    assert abs(bias.sum()) < BIAS_ATOL


@pytest.mark.parametrize("estimator", ["topk", "hist"])
def test_next_router_bias_published_thresholds_give_published_bias(request, estimator):
    goldens = np.load(request.path.parents[1] / "data" / "quantile_balancing.npz")
    for step in (1, 2, 3):
        beta = hax.named(
            jnp.asarray(goldens[f"train_{estimator}/step.{step}/beta"]), (Axis("layer", 4), RouterExperts)
        )
        expected = goldens[f"train_{estimator}/step.{step}/next_bias"]
        np.testing.assert_allclose(next_router_bias(beta).array, expected, rtol=0, atol=BIAS_ATOL)


# accumulate


def test_accumulate_state_without_tokens_changes_no_bit():
    state = state_of(np.random.default_rng(3).normal(size=8).astype(np.float32), 17)
    empty = state_of(np.full(8, 5.0, np.float32), 0)
    for zero in (jax.tree.map(jnp.zeros_like, state), empty):
        assert_same_state(zero.accumulate(state), state)
        assert_same_state(state.accumulate(zero), state)
    assert_same_state(empty.accumulate(empty), RouterBias.init(RouterExperts))


def test_accumulate_two_states_is_mean_weighted_by_tokens():
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, 8)).astype(np.float32)
    both = jax.jit(RouterBias.accumulate)(state_of(a, 30), state_of(b, 10))
    np.testing.assert_allclose(both.value().array, 0.75 * a + 0.25 * b, rtol=ACCUMULATE_RTOL, atol=ACCUMULATE_RTOL)
    assert both.num_valid().array == 40


def test_accumulate_equal_biases_is_exact():
    bias = np.random.default_rng(5).normal(size=8).astype(np.float32)
    both = state_of(bias, 3).accumulate(state_of(bias, 7))
    assert_same_state(both, state_of(bias, 10))


def test_accumulate_three_states_is_associative():
    rng = np.random.default_rng(6)
    a, b, c = (state_of(row, weight) for row, weight in zip(rng.normal(size=(3, 8)), (5, 1, 600), strict=True))
    left, right = a.accumulate(b).accumulate(c), a.accumulate(b.accumulate(c))
    np.testing.assert_allclose(left.value().array, right.value().array, rtol=0, atol=ACCUMULATE_RTOL)
    assert left.num_valid().array == right.num_valid().array == 606


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_accumulate_stacked_layers_equals_each_layer(dtype):
    rng = np.random.default_rng(7)
    biases, weights = rng.normal(size=(2, 3, 8)).astype(np.float32), np.float32([[4, 0, 0], [12, 5, 0]])
    stacked = [
        RouterBias.from_value(hax.named(bias, ("layer", RouterExperts)), hax.named(weight, "layer"))
        for bias, weight in zip(biases, weights, strict=True)
    ]
    stacked = jax.tree.map(lambda leaf: leaf.astype(dtype), stacked)
    both = stacked[0].accumulate(stacked[1])
    assert jax.tree.structure(both) == jax.tree.structure(stacked[0])
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(both))
    for layer in range(3):
        one = state_of(biases[0, layer], weights[0, layer]).accumulate(state_of(biases[1, layer], weights[1, layer]))
        np.testing.assert_array_equal(both.value()["layer", layer].array, one.value().array)
        np.testing.assert_array_equal(both.num_valid()["layer", layer].array, one.num_valid().array)


# The gradient path


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
@pytest.mark.parametrize("container", [Stacked, BlockSeq])
def test_record_bias_gradient_is_next_bias_of_every_layer(container, remat):
    model, batch = Model.init(jax.random.PRNGKey(0), container, remat), batch_of(0)
    by_hand = next_biases_by_hand(Model.init(jax.random.PRNGKey(0), BlockSeq), *batch)
    assert np.abs(by_hand).max() > 0.1
    np.testing.assert_allclose(biases(gradient(model, *batch)), by_hand, rtol=0, atol=BIAS_ATOL)


def test_record_bias_under_filter_checkpoint_equals_without_bitwise():
    layer, (x, valid) = Layer.init(jax.random.PRNGKey(1)), batch_of(1)

    def loss(layer, remat: bool):
        call = eqx.filter_checkpoint(Layer.__call__) if remat else Layer.__call__
        return hax.sum(call(layer, x, valid)).scalar()

    grads = [eqx.filter_jit(eqx.filter_grad(functools.partial(loss, remat=remat)))(layer) for remat in (False, True)]
    assert_same_state(grads[0].state, grads[1].state)


def test_record_bias_other_gradients_are_those_without_it(monkeypatch):
    model, batch = Model.init(jax.random.PRNGKey(2)), batch_of(2)
    recorded = gradient(model, *batch)
    monkeypatch.setattr(toy_router, "record_bias", lambda x, *_: x)
    plain = eqx.filter_jit(eqx.filter_grad(loss_fn, has_aux=True))(model, *batch)[0]
    np.testing.assert_array_equal(biases(plain), np.zeros((Layers.size, 8)))
    for name in ("router", "expert_scale"):
        actual, expected = (getattr(g.layers.stacked, name).array for g in (recorded, plain))
        assert np.linalg.norm(expected) > 0
        np.testing.assert_allclose(actual, expected, rtol=0, atol=GRADIENT_RTOL * np.linalg.norm(expected))


def test_record_bias_bf16_compute_gives_the_exact_fp32_bias():
    target = hax.named(jnp.asarray(np.random.default_rng(8).normal(size=8), jnp.float32), RouterExperts)

    def loss(state, x):
        state, x = BF16.cast_to_compute((state, x))
        return hax.sum(record_bias(x * 3, state, target, hax.named(jnp.int32(12_345), ()))).scalar()

    x = hax.ones(Embed)
    grads = eqx.filter_jit(eqx.filter_grad(loss))(RouterBias.init(RouterExperts), x)
    assert_same_state(grads, RouterBias.from_value(target, hax.named(jnp.float32(12_345), ())))


def test_record_bias_bf16_model_keeps_bias_to_the_last_bit_of_fp32():
    model, batch = Model.init(jax.random.PRNGKey(3)), batch_of(3)
    grads = gradient(model, *batch, mp=BF16)
    bias = biases(grads)
    assert (bias.astype(jnp.bfloat16).astype(np.float32) != bias).any()
    assert np.abs(bias.mean(axis=1)).max() < BIAS_ATOL
    # What is stored survives the next cast as well.
    np.testing.assert_array_equal(biases(BF16.cast_to_compute(grads)), bias)


def test_record_bias_sends_no_gradient_to_the_next_bias():
    def loss(target):
        named = hax.named(target, RouterExperts)
        x = record_bias(hax.ones(Embed), RouterBias.init(RouterExperts), named, hax.named(jnp.float32(1), ()))
        return hax.sum(x).scalar()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(8)), np.zeros(8))


def test_router_bias_read_alone_has_zero_gradient():
    grads = jax.grad(lambda state: hax.sum(state.value() ** 2).scalar())(state_of(np.ones(8, np.float32), 1))
    assert_same_state(grads, RouterBias.init(RouterExperts))


def test_record_bias_without_gradient_compiles_no_estimation():
    model, batch = Model.init(jax.random.PRNGKey(0), BlockSeq), batch_of(0)
    forward = jax.jit(Model.__call__).lower(model, *batch).compile().as_text()
    backward = jax.jit(jax.grad(loss_fn, has_aux=True)).lower(model, *batch).compile().as_text()
    # The search for the quantile is the only loop of this model.
    count_loops = functools.partial(re.findall, r" while\(")
    assert len(count_loops(forward)) == 0
    assert len(count_loops(backward)) == Layers.size


@pytest.mark.parametrize("mp", [FP32, BF16], ids=["fp32", "bf16"])
def test_router_bias_data_parallel_equals_one_device(mp):
    model, batch = Model.init(jax.random.PRNGKey(4), remat=True), batch_of(4, padding=False)
    grad_fn = hax.named_jit(eqx.filter_grad(functools.partial(loss_fn, mp=mp), has_aux=True))
    config = QuantileBalancingConfig(QuantileEstimator.histogram)
    with pytest.MonkeyPatch.context() as patch:
        # Only the histogram does not depend on the number of shards.
        patch.setattr(toy_router, "BALANCING", config)
        one = biases(grad_fn(model, *batch)[0])
        with hax.partitioning.set_mesh(Mesh(np.array(jax.devices()), ("data",))), hax.axis_mapping({"batch": "data"}):
            eight = biases(grad_fn(hax.shard(model), *hax.shard(batch))[0])
    np.testing.assert_allclose(eight, one, rtol=0, atol=BIAS_ATOL)
