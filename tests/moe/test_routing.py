# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

import compare
import oracles
from compare import normal, numpy
from levanter_marin.config import MoeConfig, RouterDtype
from levanter_marin.moe.router_bias import RouterBias
from levanter_marin.moe.routing import Router, Routing, select_experts

TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 2e-2}
FINITE_DIFFERENCE_RTOL = 1e-6
FINITE_STEP = 1e-4
# One rounding to bf16.
BF16_RTOL = 2.0**-8 * 1.001

Batch, Pos, Embed = Axis("batch", 8), Axis("position", 4), Axis("embed", 24)
CONFIG = MoeConfig(num_experts=8, num_experts_per_token=2)
RouterExperts = CONFIG.RouterExperts
TOKENS = Batch.size * Pos.size
MAPPING = {"batch": "data"}


def _bias(values=None) -> NamedArray:
    return normal(RouterExperts, 7) if values is None else hax.named(jnp.asarray(values, jnp.float32), RouterExperts)


def _router(weight: NamedArray, bias: NamedArray | None = None, config: MoeConfig = CONFIG) -> Router:
    bias = hax.zeros(RouterExperts) if bias is None else bias
    return Router(weight, RouterBias.from_value(bias, hax.named(jnp.float32(1), ())), config)


def _flat(x: NamedArray) -> np.ndarray:
    """[token, rest], whatever is after the token axes."""
    return np.asarray(x.array).reshape(TOKENS, -1)


def _assert_routes_as_oracle(routing: Routing, logits: np.ndarray, bias, config: MoeConfig = CONFIG):
    selected, weights, alpha = oracles.select_experts(
        logits,
        numpy(bias),
        top=config.num_experts_per_token,
        renormalize=config.renormalize,
        total=config.combine_weight_sum,
    )
    np.testing.assert_array_equal(_flat(routing.selected_experts), selected)
    compare.assert_close(_flat(routing.combine_weights), weights, TOLERANCE[jnp.float32])
    compare.assert_close(_flat(routing.qb_alpha)[:, 0], alpha, TOLERANCE[jnp.float32])
    compare.assert_close(_flat(routing.logits), logits, TOLERANCE[jnp.float32])
    compare.assert_close(_flat(routing.margins), logits - alpha[:, None], TOLERANCE[jnp.float32])


@pytest.mark.parametrize(
    "change",
    (
        {},
        {"renormalize": False},
        {"combine_weight_sum": 1.0},
        {"num_experts_per_token": 1},
        {"num_experts_per_token": 7},
    ),
    ids=str,
)
def test_select_experts_equals_oracle(change):
    config = dataclasses.replace(CONFIG, **change)
    logits, bias = normal((Batch, Pos, RouterExperts), 0, 2.0), _bias()
    routing = select_experts(logits, bias, config)
    assert routing.selected_experts.axes == (Batch, Pos, config.TopExperts)
    assert routing.combine_weights.axes == (Batch, Pos, config.TopExperts)
    assert routing.qb_alpha.axes == (Batch, Pos) and routing.margins.axes == (Batch, Pos, RouterExperts)
    assert {a.dtype.name for a in routing} == {"float32", "int32"}
    _assert_routes_as_oracle(routing, _flat(logits).astype(np.float64), bias, config)


def test_select_experts_weights_come_from_logits_without_the_bias():
    """The bias makes experts 3 and 5 win everywhere; the weights follow the logits of these two."""
    logits, bias = normal((Batch, Pos, RouterExperts), 0), _bias([0, 0, 0, 20, 0, 30, 0, 0])
    routing = select_experts(logits, bias, CONFIG)
    np.testing.assert_array_equal(_flat(routing.selected_experts), np.tile([5, 3], (TOKENS, 1)))
    chosen = oracles.sigmoid(_flat(logits).astype(np.float64)[:, [5, 3]])
    compare.assert_close(
        _flat(routing.combine_weights), 2.5 * chosen / chosen.sum(1, keepdims=True), TOLERANCE[jnp.float32]
    )
    np.testing.assert_allclose(hax.sum(routing.combine_weights, "top_experts").array, 2.5, rtol=1e-6)


def test_select_experts_alpha_is_the_best_biased_logit_left_out():
    logits, bias = normal((Batch, Pos, RouterExperts), 0), _bias()
    routing = select_experts(logits, bias, CONFIG)
    biased = _flat(logits) + np.asarray(bias.array)
    np.testing.assert_array_equal(_flat(routing.qb_alpha)[:, 0], np.sort(biased, axis=1)[:, -3])
    # by the margin plus the bias exactly the selected experts are above zero
    np.testing.assert_array_equal((biased > _flat(routing.qb_alpha)).sum(1), 2)


def test_select_experts_ties_go_to_the_lower_index():
    logits = hax.zeros((Batch, Pos, RouterExperts))
    routing = select_experts(logits, _bias([0] * 8), CONFIG)
    np.testing.assert_array_equal(_flat(routing.selected_experts), np.tile([0, 1], (TOKENS, 1)))
    np.testing.assert_array_equal(routing.qb_alpha.array, 0)
    np.testing.assert_allclose(routing.combine_weights.array, 1.25, rtol=1e-6)
    # a tie across the border of the selection, made by the bias
    routing = select_experts(logits, _bias([0, 0, 1, 0, 3, 1, 0, 1]), CONFIG)
    np.testing.assert_array_equal(_flat(routing.selected_experts), np.tile([4, 2], (TOKENS, 1)))
    np.testing.assert_array_equal(routing.qb_alpha.array, 1)


@pytest.mark.parametrize("logit", (-120.0, 120.0))
def test_select_experts_extreme_logits_stay_finite(logit):
    logits = normal((Batch, Pos, RouterExperts), 0) + logit
    weights, vjp = jax.vjp(lambda x: select_experts(x, _bias([0] * 8), CONFIG).combine_weights, logits)
    assert np.all(np.isfinite(weights.array)) and np.all(np.isfinite(vjp(weights)[0].array))


@pytest.mark.parametrize("axes_order", ((RouterExperts, Pos, Batch), (Pos, RouterExperts, Batch)), ids=str)
def test_select_experts_axes_in_another_order_give_the_same(axes_order):
    logits, bias = normal((Batch, Pos, RouterExperts), 0), _bias()
    for ours, expected in zip(
        select_experts(logits.rearrange(axes_order), bias, CONFIG), select_experts(logits, bias, CONFIG), strict=True
    ):
        np.testing.assert_array_equal(ours.rearrange(expected.axes).array, expected.array)


@pytest.mark.parametrize("renormalize", (True, False))
def test_select_experts_gradient_in_fp64_equals_finite_differences(renormalize):
    config = dataclasses.replace(CONFIG, renormalize=renormalize)
    with jax.enable_x64(True):
        logits = hax.random.normal(jax.random.key(0), (Pos, RouterExperts), dtype=jnp.float64)
        bias = _bias().astype(jnp.float64)
        mix = hax.random.normal(jax.random.key(1), (Pos, config.TopExperts), dtype=jnp.float64)

        @jax.jit
        def loss(logits):
            return hax.sum(
                hax.sin(3 * select_experts(hax.named(logits, (Pos, RouterExperts)), bias, config)[2]) * mix
            ).scalar()

        gradient = np.asarray(jax.grad(loss)(logits.array))
        expected = np.zeros_like(gradient)
        for index in np.ndindex(*gradient.shape):
            step = jnp.zeros_like(logits.array).at[index].set(FINITE_STEP)
            expected[index] = (loss(logits.array + step) - loss(logits.array - step)) / (2 * FINITE_STEP)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=FINITE_DIFFERENCE_RTOL * np.abs(expected).max())
    np.testing.assert_array_equal((gradient != 0).sum(axis=1), config.num_experts_per_token)


def _weights_of(x, weight):
    return _router(weight, _bias())(x).combine_weights


def _weights_oracle(x, weight):
    logits = x.reshape(TOKENS, -1) @ weight
    return oracles.select_experts(logits, numpy(_bias()), top=2)[1].reshape(Batch.size, Pos.size, 2)


def test_router_gradients_equal_finite_differences_of_the_oracle():
    arrays = [normal((Batch, Pos, Embed), 0), normal((Embed, RouterExperts), 1, 0.4)]
    compare.assert_matches_oracle(_weights_of, _weights_oracle, arrays, TOLERANCE[jnp.float32])


def test_router_bf16_inputs_accumulate_in_fp32():
    x, weight = normal((Batch, Pos, Embed), 0, 1, jnp.bfloat16), normal((Embed, RouterExperts), 1, 0.4, jnp.bfloat16)
    _assert_routes_as_oracle(_router(weight, _bias())(x), _flat(x).astype(np.float64) @ numpy(weight), _bias())


def test_router_dtype_bf16_returns_the_rounded_product_of_rounded_inputs():
    x, weight = normal((Batch, Pos, Embed), 0), normal((Embed, RouterExperts), 1, 0.4)
    config = dataclasses.replace(CONFIG, router_dtype=RouterDtype.bf16)
    logits = _flat(_router(weight, config=config)(x).logits)
    np.testing.assert_array_equal(logits, np.asarray(jnp.asarray(logits).astype(jnp.bfloat16), np.float32))
    rounded = [numpy(a.astype(jnp.bfloat16)) for a in (x, weight)]
    exact = rounded[0].reshape(TOKENS, -1) @ rounded[1]
    np.testing.assert_allclose(logits, exact, rtol=BF16_RTOL, atol=1e-6)


@pytest.mark.parametrize(("router_dtype", "first"), ((RouterDtype.fp32, 5), (RouterDtype.bf16, 1)))
def test_router_close_logits_of_bf16_inputs_are_told_apart_in_fp32_alone(router_dtype, first):
    """Expert 5 is 1e-3 above expert 1 near 8, where bf16 logits are 1/32 apart and a tie takes the lower index."""
    weight = np.zeros((Embed.size, 8), np.float32)
    weight[0, [1, 5]] = 8.0
    weight[1, 5] = 1e-3
    x = hax.ones((Batch, Pos, Embed), dtype=jnp.bfloat16)
    config = dataclasses.replace(CONFIG, router_dtype=router_dtype)
    routing = _router(hax.named(jnp.asarray(weight, jnp.bfloat16), (Embed, RouterExperts)), config=config)(x)
    np.testing.assert_array_equal(_flat(routing.selected_experts)[:, 0], first)
    gap = _flat(routing.logits)[:, 5] - _flat(routing.logits)[:, 1]
    np.testing.assert_allclose(gap, 1e-3 if router_dtype is RouterDtype.fp32 else 0, rtol=BF16_RTOL)


def _routing_and_gradients(bias: NamedArray):
    """Everything a router gives and the gradient of its combine weights with respect to itself and its input."""
    x, weight = normal((Batch, Pos, Embed), 0), normal((Embed, RouterExperts), 1, 0.4)
    mix = normal((Batch, Pos, CONFIG.TopExperts), 2)

    @eqx.filter_jit
    def run(router, x):
        def loss(both):
            routing = both[0](both[1])
            return hax.sum(routing.combine_weights * mix).scalar(), routing

        return eqx.filter_value_and_grad(loss, has_aux=True)((router, x))

    (_, routing), (d_router, d_x) = run(_router(weight, bias), x)
    return routing, d_router, d_x


@pytest.mark.parametrize("shift", (-50.0, 50.0))
def test_router_bias_shifted_for_all_experts_changes_nothing(shift):
    routing, d_router, d_x = _routing_and_gradients(_bias())
    moved, d_moved_router, d_moved_x = _routing_and_gradients(_bias() + shift)
    np.testing.assert_array_equal(moved.selected_experts.array, routing.selected_experts.array)
    np.testing.assert_array_equal(moved.combine_weights.array, routing.combine_weights.array)
    np.testing.assert_array_equal(moved.logits.array, routing.logits.array)
    np.testing.assert_array_equal(d_moved_router.weight.array, d_router.weight.array)
    np.testing.assert_array_equal(d_moved_x.array, d_x.array)


def test_router_bias_raised_without_a_new_selection_changes_nothing():
    never_chosen = _bias([0, 0, 0, 0, 0, 0, 0, -30])
    routing, d_router, d_x = _routing_and_gradients(never_chosen)
    assert np.all(np.asarray(routing.selected_experts.array) != 7)
    raised, d_raised_router, d_raised_x = _routing_and_gradients(never_chosen + _bias([0] * 7 + [1]))
    for a, b in zip((*raised, d_raised_router.weight, d_raised_x), (*routing, d_router.weight, d_x), strict=True):
        np.testing.assert_array_equal(a.array, b.array)


def test_router_bias_gradient_is_exactly_zero():
    _, d_router, _ = _routing_and_gradients(_bias())
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(d_router.bias))
    assert np.any(d_router.weight.array)
    logits = normal((Batch, Pos, RouterExperts), 0)

    def loss(bias):
        return sum(hax.sum(hax.sin(a)).scalar() for a in select_experts(logits, bias, CONFIG)[2:])

    np.testing.assert_array_equal(jax.grad(loss)(_bias()).array, 0)


def _compiled(mesh: str | None):
    """Compiled HLO, routing and gradient of the router's weight."""
    x, weight = normal((Batch, Pos, Embed), 0), normal((Embed, RouterExperts), 1, 0.4)
    mix = normal((Batch, Pos, CONFIG.TopExperts), 2)

    @eqx.filter_jit
    def run(router, x):
        def loss(router):
            routing = router(hax.auto_sharded(x))
            return hax.sum(routing.combine_weights * mix).scalar(), routing

        return eqx.filter_value_and_grad(loss, has_aux=True)(router)

    with compare.on_mesh(mesh, MAPPING):
        compiled = run.lower(_router(weight, _bias()), x).compile()
        (_, routing), gradient = compiled(_router(weight, _bias()), x)
    return compiled.compiled.as_text(), routing, gradient.weight


@pytest.mark.parametrize("mesh", compare.MESHES)
def test_router_on_eight_devices_selects_the_same_without_gathering(mesh):
    _, expected, d_expected = _compiled(None)
    hlo, routing, d_weight = _compiled(mesh)
    assert not compare.rearranging_collectives(hlo)
    np.testing.assert_array_equal(routing.selected_experts.array, expected.selected_experts.array)
    for a, b in zip((*routing, d_weight), (*expected, d_expected), strict=True):
        compare.assert_close(a, numpy(b), TOLERANCE[jnp.float32])


def test_select_experts_rows_that_do_not_divide_over_the_devices_are_selected_too():
    logits = normal((Batch.resize(6), Pos, RouterExperts), 0)
    expected = select_experts(logits, _bias(), CONFIG)
    with compare.on_mesh("data8", MAPPING):
        routing = eqx.filter_jit(select_experts)(logits, _bias(), CONFIG)
    np.testing.assert_array_equal(routing.selected_experts.array, expected.selected_experts.array)
    np.testing.assert_array_equal(routing.qb_alpha.array, expected.qb_alpha.array)


@pytest.mark.parametrize("mesh", (None, "data8"))
def test_router_compiled_looks_for_the_largest_without_sorting_all(mesh):
    hlo, _, _ = _compiled(mesh)
    assert 'custom_call_target="TopK"' in hlo and " sort(" not in hlo
