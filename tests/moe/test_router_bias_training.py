# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Router-bias state under Levanter's train step, microbatching, model averaging and checkpoints."""

import functools
import itertools

import equinox as eqx
import haliax as hax
import jax
import jmp
import numpy as np
import optax
import pytest
from haliax import NamedArray
from jax.sharding import Mesh
from levanter.checkpoint import load_checkpoint, save_checkpoint
from levanter.grad_accum import microbatched
from levanter.optim.model_averaging import EmaModelAveragingConfig
from levanter.trainer_state import TrainerState
from toy_router import (
    BF16,
    FP32,
    Batch,
    Layers,
    Model,
    assert_same_state,
    batch_of,
    biases,
    gradient,
    loss_fn,
    next_biases_by_hand,
)

# Of a bias: beta moves by at most rounding when the program around it is compiled differently.
BIAS_ATOL = 2e-6
EMA_RTOL = 1e-6


@functools.cache
def optimizer():
    return optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2, weight_decay=0.1))


@functools.cache
def step_fn(microbatch_size: int | None, mp: jmp.Policy):
    """What `levanter.trainer.Trainer._train_step` does with the state, without its logging."""

    def step(state: TrainerState, x: NamedArray, token_valid: NamedArray) -> TrainerState:
        fn = functools.partial(eqx.filter_value_and_grad(functools.partial(loss_fn, mp=mp), has_aux=True), state.model)
        if microbatch_size is not None:
            fn = microbatched(fn, Batch, microbatch_size, {}, {"batch": "data"})
        with hax.axis_mapping({"batch": "data"}):
            _, grads = fn(x, token_valid)
        return hax.shard(state.take_step(grads, key=state.training_key)[0], {})

    return hax.named_jit(step)


def initial_state(mp: jmp.Policy = FP32, **kwargs) -> TrainerState:
    model = Model.init(jax.random.PRNGKey(5))
    return TrainerState.init(optimizer(), model, key=jax.random.PRNGKey(0), mp=mp, **kwargs)


def mesh():
    return hax.partitioning.set_mesh(Mesh(np.array(jax.devices()[:1]), ("data",)))


def trained(microbatch_size: int | None = None, mp: jmp.Policy = FP32, num_steps: int = 3, **kwargs):
    """The states before and after every step."""
    with mesh():
        states, step = [initial_state(mp, **kwargs)], step_fn(microbatch_size, mp)
        for i in range(num_steps):
            states.append(step(states[-1], *batch_of(i)))
    return states


@pytest.mark.parametrize("mp", [FP32, BF16], ids=["fp32", "bf16"])
def test_train_step_replaces_bias_with_that_of_the_next_step(mp):
    states = trained(mp=mp)
    for i, (before, after) in enumerate(itertools.pairwise(states)):
        bias = biases(after.model)
        assert np.abs(bias).max() > 0.1
        assert np.abs(bias.mean(axis=1)).max() < BIAS_ATOL
        np.testing.assert_array_equal(bias, biases(gradient(before.model, *batch_of(i), mp=mp)))
        if mp is FP32:
            expected = next_biases_by_hand(before.model, *batch_of(i))
            np.testing.assert_allclose(bias, expected, rtol=0, atol=BIAS_ATOL)
        num_valid = after.model.layers.stacked.state.num_valid().array
        np.testing.assert_array_equal(num_valid, np.full(Layers.size, batch_of(i)[1].array.sum()))


def test_train_step_keeps_bias_out_of_the_optimizer():
    state = initial_state()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert any("router" in path for path in paths)
    assert not [path for path in paths if "state.bias" in path or "state.weight" in path]


def test_train_step_clipping_does_not_see_the_bias():
    # Adam's first step has the same size at any gradient scale, SGD's does not.
    model, batch = Model.init(jax.random.PRNGKey(6)), batch_of(6)
    grads = gradient(model, *batch)
    scaled = eqx.tree_at(
        lambda g: g.layers.stacked.state, grads, replace_fn=lambda s: jax.tree.map(lambda leaf: leaf * 1e20, s)
    )
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    state = TrainerState.init(clipped, model, key=jax.random.PRNGKey(0))
    routers = [
        state.take_step(g, key=state.training_key)[0].model.layers.stacked.router.array for g in (grads, scaled)
    ]
    assert (routers[0] != model.layers.stacked.router.array).any()
    np.testing.assert_array_equal(*routers)


@pytest.mark.parametrize("mp", [FP32, BF16], ids=["fp32", "bf16"])
def test_train_step_microbatches_average_their_biases_by_valid_tokens(mp):
    states = trained(microbatch_size=16, mp=mp)
    for i, (before, after) in enumerate(itertools.pairwise(states)):
        x, valid = batch_of(i)
        parts = [(x["batch", hax.ds(k, 16)], valid["batch", hax.ds(k, 16)]) for k in range(0, 64, 16)]
        weights = np.array([part[1].array.sum() for part in parts], np.float64)
        assert weights.max() > 2 * weights.min() > 0
        by_part = np.stack([biases(gradient(before.model, *part, mp=mp)) for part in parts])
        expected = np.tensordot(weights / weights.sum(), by_part.astype(np.float64), 1)
        assert np.abs(expected - by_part.mean(axis=0)).max() > 100 * BIAS_ATOL
        np.testing.assert_allclose(biases(after.model), expected, rtol=0, atol=BIAS_ATOL)


def test_train_step_one_microbatch_of_all_equals_none_bitwise():
    whole, same = trained(num_steps=1)[-1], trained(microbatch_size=64, num_steps=1)[-1]
    np.testing.assert_array_equal(biases(whole.model), biases(same.model))


def test_train_step_changing_bias_compiles_once():
    traces = []

    @eqx.filter_jit
    def step(state, x, token_valid):
        traces.append(1)
        grads, _ = eqx.filter_grad(loss_fn, has_aux=True)(state.model, x, token_valid)
        return state.take_step(grads, key=state.training_key)[0]

    state = initial_state()
    for i in range(3):
        state = step(state, *batch_of(i))
    assert len(traces) == 1


def test_model_averaging_bias_is_the_average_of_biases():
    states = trained(num_steps=2, model_averaging=EmaModelAveragingConfig(beta=0.75))
    expected = np.zeros((Layers.size, 8))
    for state in states[1:]:
        expected = 0.75 * expected + 0.25 * biases(state.model)
    averaged = states[-1].eval_model
    np.testing.assert_allclose(biases(averaged), expected, rtol=EMA_RTOL, atol=EMA_RTOL)
    x, valid = batch_of(0)
    assert np.isfinite(averaged(x, valid).array).all()


@pytest.mark.parametrize("num_devices", [1, 8])
def test_checkpoint_of_train_state_restores_every_bit_of_the_bias(tmp_path, num_devices):
    trained_state = trained(num_steps=2, mp=BF16)[-1]
    mapping = {"batch": "data", "embed": "data"}
    device_mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    with hax.partitioning.set_mesh(device_mesh):
        save_checkpoint(hax.shard(trained_state, mapping), 2, tmp_path / "checkpoint")
        restored = load_checkpoint(
            initial_state(BF16), tmp_path / "checkpoint", axis_mapping=mapping, mesh=device_mesh
        )
    assert_same_state(restored.model.layers.stacked.state, trained_state.model.layers.stacked.state)
    assert np.abs(biases(restored.model)).max() > 0.1
