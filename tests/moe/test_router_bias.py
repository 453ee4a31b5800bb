# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The contract of router-bias state with bf16, remat, scan, microbatches, the train step and checkpoints."""

import functools
import itertools
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, Stacked
from jax.sharding import Mesh
from levanter.checkpoint import load_checkpoint, save_checkpoint
from levanter.grad_accum import microbatched
from levanter.optim.model_averaging import EmaModelAveragingConfig
from levanter.trainer_state import TrainerState

from levanter_marin.config import QuantileBalancingConfig, QuantileEstimator
from levanter_marin.moe.quantile_balancing import quantile_beta
from levanter_marin.moe.router_bias import Bf16Terms, RouterBias, next_router_bias, record_bias

# Of a bias: beta moves by at most rounding when the program around it is compiled differently.
BIAS_ATOL = 2e-6
GRADIENT_RTOL = 1e-5
ACCUMULATE_RTOL = 1e-6
EMA_RTOL = 1e-6

Batch, Pos, Embed, RouterExperts = Axis("batch", 64), Axis("position", 6), Axis("embed", 16), Axis("router_experts", 8)
Layers = Axis("layer", 2)
NUM_SELECTED = 2
BALANCING = QuantileBalancingConfig(QuantileEstimator.topk)
BF16 = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
FP32 = jmp.get_policy("float32")


class Layer(eqx.Module):
    """The least that routes: experts are scalars, chosen by biased logits and mixed by unbiased ones."""

    router: NamedArray
    expert_scale: NamedArray
    state: RouterBias

    @staticmethod
    def init(key) -> "Layer":
        router_key, scale_key = jax.random.split(key)
        return Layer(
            hax.random.normal(router_key, (Embed, RouterExperts)) * 0.5,
            hax.random.normal(scale_key, RouterExperts),
            RouterBias.init(RouterExperts),
        )

    def __call__(self, x: NamedArray, token_valid: NamedArray) -> NamedArray:
        logits = hax.dot(x, self.router, axis=Embed).astype(jnp.float32)
        biased = logits + self.state.value()
        ordered = hax.sort(biased, axis=RouterExperts)
        alpha = ordered[RouterExperts.name, RouterExperts.size - NUM_SELECTED - 1]
        beta = quantile_beta(logits - alpha, token_valid, num_experts_per_token=NUM_SELECTED, config=BALANCING)
        x = record_bias(x, self.state, next_router_bias(beta), hax.sum(token_valid.astype(jnp.int32)))
        chosen = jax.lax.stop_gradient(biased > alpha)
        weight = hax.nn.sigmoid(logits) * chosen
        return x + x * hax.tanh(hax.dot(weight, self.expert_scale, axis=RouterExperts)).astype(x.dtype)


call_layer = eqx.filter_jit(Layer.__call__)


class Model(eqx.Module):
    embed_scale: NamedArray
    layers: Stacked | BlockSeq

    @staticmethod
    def init(key, container=Stacked, remat=False) -> "Model":
        layers = container.init(Layers, Layer, gradient_checkpointing=remat)(jax.random.split(key, Layers.size))
        return Model(hax.ones(Embed), layers)

    def __call__(self, x: NamedArray, token_valid: NamedArray) -> NamedArray:
        return self.layers.fold(x * self.embed_scale, token_valid)


def loss_fn(model: Model, x: NamedArray, token_valid: NamedArray, *, mp: jmp.Policy = FP32, key=None):
    model, x = mp.cast_to_compute((model, x))
    out = model(x, token_valid).astype(jnp.float32)
    return hax.mean(out * out, where=token_valid).scalar(), {}


def batch_of(step: int, padding: bool = True) -> tuple[NamedArray, NamedArray]:
    """Inputs and a padding mask whose valid share grows along the batch, so that microbatches weigh differently."""
    x = hax.random.normal(jax.random.PRNGKey(100 + step), (Batch, Pos, Embed))
    share = np.linspace(0.1, 1.0, Batch.size)[:, None]
    valid = np.random.default_rng(step).random((Batch.size, Pos.size)) < share
    return x, hax.named(jnp.asarray(valid if padding else np.ones_like(valid)), (Batch, Pos))


@functools.cache
def gradient_fn(mp: jmp.Policy = FP32):
    return eqx.filter_jit(eqx.filter_grad(functools.partial(loss_fn, mp=mp), has_aux=True))


def gradient(model: Model, *batch, mp: jmp.Policy = FP32) -> Model:
    return gradient_fn(mp)(model, *batch)[0]


def biases(model: Model) -> np.ndarray:
    """[layer, expert], from a scanned or an unrolled model, or a gradient of one."""
    if isinstance(model.layers, Stacked):
        return np.asarray(model.layers.stacked.state.value().array)
    return np.stack([np.asarray(layer.state.value().array) for layer in model.layers.blocks])


def next_biases_by_hand(model: Model, x: NamedArray, token_valid: NamedArray) -> np.ndarray:
    """[layer, expert]: the rule in NumPy on each layer's own input, without any gradient."""
    rows = []
    x = x * model.embed_scale
    for layer in model.layers.unstacked():
        logits = np.asarray(hax.dot(x, layer.router, axis=Embed).array)[np.asarray(token_valid.array)]
        biased = logits + np.asarray(layer.state.value().array)
        margins = np.sort(logits - np.sort(biased, axis=1)[:, [-NUM_SELECTED - 1]], axis=0)[::-1]
        beta = margins[max(len(margins) * NUM_SELECTED // RouterExperts.size, 1) - 1]
        rows.append(beta.mean() - beta)
        x = call_layer(layer, x, token_valid)
    return np.stack(rows)


def state_of(bias, weight) -> RouterBias:
    return RouterBias.from_value(hax.named(jnp.asarray(bias), RouterExperts), hax.named(jnp.float32(weight), ()))


def assert_same_state(actual: RouterBias, expected: RouterBias):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


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
    monkeypatch.setattr(f"{__name__}.record_bias", lambda x, *_: x)
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
        patch.setattr(f"{__name__}.BALANCING", config)
        one = biases(grad_fn(model, *batch)[0])
        with hax.partitioning.set_mesh(Mesh(np.array(jax.devices()), ("data",))), hax.axis_mapping({"batch": "data"}):
            eight = biases(grad_fn(hax.shard(model), *hax.shard(batch))[0])
    np.testing.assert_allclose(eight, one, rtol=0, atol=BIAS_ATOL)


# The train step


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
