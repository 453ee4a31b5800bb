# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The hyperball config: schedules, what decays, what a resumed run finds, and one suite for every transformation."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from levanter.optim.config import LrSchedule
from toy_layers import linear, matrix

from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.hyperball import scale_by_adamh, scale_by_hyperball, scale_by_muonh
from levanter_marin.optim.newton_schulz import NewtonSchulzDtype
from levanter_marin.optim.scaling import ScaleFrom

SCHEDULE_ATOL = 5e-7  # of learning rates printed to six decimals
EQUAL_ATOL = 1e-6

HERO_STEPS = 390_251
HERO = HyperballConfig(scale_from=ScaleFrom(HERO_STEPS * 46_137_344, 46_137_344, 6144))
Layer, Embed, Out = Axis("layer", 2), Axis("embed", 6), Axis("out", 4)


class Toy(eqx.Module):
    """A leaf of each kind that the groups know, but for gates and LM head."""

    embedding: hnn.Embedding
    matrices: hnn.Linear
    norm: hnn.RmsNorm

    @staticmethod
    def init(seed: int = 0, dtype=jnp.float32) -> "Toy":
        k_embed, k_linear, k_norm = jax.random.split(jax.random.PRNGKey(seed), 3)
        toy = Toy(
            hnn.Embedding.init(Axis("vocab", 5), Embed, key=k_embed),
            hnn.Linear(hax.random.normal(k_linear, (Layer, Out, Embed)), None, Embed, Out),
            hnn.RmsNorm(Embed, hax.random.normal(k_norm, Embed), None),
        )
        return jax.tree.map(lambda x: x.astype(dtype), toy)


def config(**kwargs) -> HyperballConfig:
    fields = {"learning_rate": 0.02, "adam_lr": 0.01, "warmup": 0, "lr_schedule": "constant"}
    return HyperballConfig(**(fields | {"newton_schulz_dtype": NewtonSchulzDtype.fp32} | kwargs))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("step", "learning_rate"),
    [(54_000, 0.002885), (81_716, 0.002661), (108_000, 0.002448), (195_125, 0.001743), (312_192, 0.000796)],
)
def test_build_hero_schedule_gives_the_published_learning_rates(step, learning_rate):
    schedule = HERO.lr_scheduler(HERO_STEPS, override_lr=HERO.resolved().learning_rate)
    assert float(schedule(step)) == pytest.approx(learning_rate, abs=SCHEDULE_ATOL)


def test_resolved_own_fields_come_before_the_rule_and_the_rule_before_defaults():
    rule = HERO.resolved()
    mixed = dataclasses.replace(HERO, learning_rate=0.5, epsilon=1e-3).resolved()
    assert mixed == dataclasses.replace(rule, learning_rate=0.5, epsilon=1e-3)
    assert HyperballConfig().resolved().learning_rate == pytest.approx(13 / 3 * HyperballConfig().resolved().adam_lr)


@pytest.mark.parametrize(
    "schedule", ["constant", "cosine", "linear", "inv_sqrt", "inv", "polynomial", "inv_sqrt_decay"]
)
def test_build_any_upstream_schedule_injects_both_learning_rates(schedule):
    assert schedule in LrSchedule.get_known_choices()
    optimizer = config(lr_schedule=schedule, warmup=2, learning_rate=0.02, adam_lr=0.005).build(10)
    params, gradient = Toy.init(0), Toy.init(1)
    state, update, seen = optimizer.init(params), jax.jit(optimizer.update), []
    for _ in range(5):
        _, state = update(gradient, state, params)
        seen.append([float(state.hyperparams[name]) for name in ("learning_rate", "adam_lr")])
    rates, adam_rates = np.array(seen).T
    assert rates[0] == 0 and rates[1] == pytest.approx(0.01) and (rates[2:] > 0).all() and rates.max() < 0.0201
    np.testing.assert_allclose(adam_rates, rates / 4, rtol=1e-5)


def test_build_total_steps_pin_the_schedule_of_a_stage():
    whole = config(lr_schedule="linear", total_steps=100).build(100)
    stage = config(lr_schedule="linear", total_steps=100).build(40)
    params, gradient = Toy.init(0), Toy.init(1)
    states = [optimizer.init(params) for optimizer in (whole, stage)]
    for _ in range(3):
        states = [o.update(gradient, s, params)[1] for o, s in zip((whole, stage), states, strict=True)]
    assert_equal(*states)
    assert float(states[0].hyperparams["learning_rate"]) < 0.02
    with pytest.raises(ValueError, match="total_steps=100 is below the 101 steps"):
        config(total_steps=100).build(101)


def test_build_decay_switched_on_at_a_resume_keeps_the_state_structure():
    off, on = config().build(10), config(gate_router_weight_decay=0.02).build(10)
    params, gradient = Toy.init(0), Toy.init(1)
    updates_off, state = off.update(gradient, off.init(params), params)
    assert jax.tree.structure(state) == jax.tree.structure(on.init(params))
    _, resumed = on.update(gradient, state, params)
    assert float(resumed.hyperparams["gate_router_weight_decay"]) == pytest.approx(0.02 * 0.9)
    # without gates and routers there is nothing to decay
    updates_on, _ = on.update(gradient, on.init(params), params)
    assert_equal(updates_on, updates_off)


def test_build_state_has_the_norms_of_every_group():
    optimizer = config(max_grad_norm=1e-3).build(10)
    params, gradient = Toy.init(0), Toy.init(1)
    updates, state = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    for name, tree in (("grad_norm", gradient), ("update_norm", updates), ("param_norm", params)):
        matrices, others = tree.matrices.weight, (tree.embedding.weight, tree.norm.weight)
        norm = float(hax.sum(matrices**2).item()) ** 0.5
        assert float(state.hyperparams[f"muonh/{name}"]) == pytest.approx(norm)
        norm = sum(float(hax.sum(x**2).item()) for x in others) ** 0.5
        assert float(state.hyperparams[f"adam/{name}"]) == pytest.approx(norm)
    assert not [key for key in state.hyperparams if "adamh" in key]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight_decay": 0.1}, "weight_decay=0.1 has no place"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
        ({"num_steps": 0}, "num_steps=0 must be positive"),
        ({"beta2": 1.0}, "beta2=1.0 must lie in"),
        ({"gate_router_weight_decay": -0.1}, "gate_router_weight_decay=-0.1 must be 0 or more"),
    ],
)
def test_config_impossible_value_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        config(**kwargs)


def test_build_model_of_another_width_than_the_rule_is_refused():
    optimizer = HyperballConfig(scale_from=ScaleFrom(1e9, 1e6, 128)).build(10)
    with pytest.raises(ValueError, match="hidden_dim=128, but embedding.weight is 6 wide"):
        optimizer.init(Toy.init())


# One suite for all transformations, after optax's for its contributed ones. Each factory takes learning_rate.

FACTORIES = {
    "muonh": functools.partial(scale_by_muonh, newton_schulz_dtype=NewtonSchulzDtype.fp32),
    "adamh": scale_by_adamh,
    "hyperball": scale_by_hyperball,
    "config": lambda learning_rate: config(learning_rate=float(learning_rate)).build(100),
}
suite = pytest.mark.parametrize("name", FACTORIES)


def tree_for(name: str, seed: int, dtype=jnp.float32):
    if name == "config":
        return Toy.init(seed, dtype)
    return {
        "flat": linear(matrix(4, 6, seed=seed), dtype=dtype),
        "stack": linear(matrix(2, 5, 3, seed=seed), dtype=dtype),
    }


@suite
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_transformation_keeps_dtype_of_updates_and_dtype_shape_and_structure_of_state(name, dtype):
    optimizer = FACTORIES[name](0.02)
    params, gradient = tree_for(name, 0, dtype), tree_for(name, 1, dtype)
    state = jax.jit(optimizer.init)(params)
    updates, new_state = jax.jit(optimizer.update)(gradient, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert [u.dtype for u in jax.tree.leaves(updates)] == [p.dtype for p in jax.tree.leaves(params)]
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    described = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(s)] for s in (state, new_state)]
    assert described[0] == described[1]


@suite
def test_transformation_unknown_extra_arguments_and_new_values_compile_once(name):
    optimizer = optax.with_extra_args_support(FACTORIES[name](0.02))
    params, traces = tree_for(name, 0), []

    @jax.jit
    def step(gradient, state, params):
        traces.append(1)
        return optimizer.update(gradient, state, params, unknown_to_every_optimizer=1)

    state = jax.jit(optimizer.init)(params)
    for seed in (1, 2, 3):
        updates, state = step(tree_for(name, seed), state, params)
        params = optax.apply_updates(params, updates)
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["muonh", "adamh", "hyperball"])
def test_transformation_with_an_injected_schedule_follows_it(name):
    rates = jnp.array([0.02, 0.05, 0.01])
    injected = optax.inject_hyperparams(FACTORIES[name])(learning_rate=lambda count: rates[count])
    params, state = tree_for(name, 0), None
    fixed_state = FACTORIES[name](0.02).init(params)
    state = injected.init(params)
    for i in range(3):
        gradient = tree_for(name, i + 1)
        updates, state = injected.update(gradient, state, params)
        expected, fixed_state = FACTORIES[name](float(rates[i])).update(gradient, fixed_state, params)
        for ours, theirs in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=EQUAL_ATOL)
        assert float(state.hyperparams["learning_rate"]) == pytest.approx(float(rates[i]))


@suite
def test_transformation_gradient_accumulated_over_two_steps_equals_the_mean(name):
    optimizer, params = FACTORIES[name](0.02), tree_for(name, 0)
    gradients = [tree_for(name, seed) for seed in (1, 2)]
    accumulating = optax.MultiSteps(optimizer, every_k_schedule=2)
    state = accumulating.init(params)
    nothing, state = accumulating.update(gradients[0], state, params)
    updates, state = accumulating.update(gradients[1], state, params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *gradients)
    expected, _ = optimizer.update(mean, optimizer.init(params), params)
    assert all((x == 0).all() for x in jax.tree.leaves(nothing))
    for ours, theirs in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5 * EQUAL_ATOL)
