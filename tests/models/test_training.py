# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The model under Levanter's unmodified Trainer: router-bias state, microbatches, resuming, evaluation, retracing."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
import toy
from levanter.checkpoint import latest_checkpoint_path, load_checkpoint
from levanter.grad_accum import microbatched
from levanter.trainer_state import TrainerState

from levanter_marin import axes
from levanter_marin.config import QuantileEstimator
from levanter_marin.moe.router_bias import RouterBias

# two groups and no remainder: less to compile
CONFIG = toy.config(num_layers=4)

CENTRED_ATOL = 1e-6  # mean over experts of a centred bias
ORACLE_ATOL = 1e-5  # biases of order one
PADDING_RTOL = 1e-6


def _router_bias(state) -> RouterBias:
    return state.model.transformer.layers.stacked.mlp.router.bias


def _value(state) -> np.ndarray:
    return np.asarray(_router_bias(state).value().array)


def _without_layers(tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize("precision", ("f32", "p=f32,c=bf16"))
def test_router_bias_after_three_steps_is_in_the_checkpoint_and_in_no_optimizer_state(tmp_path, precision):
    trainer = toy.trainer_config(tmp_path, mp=jmp.get_policy(precision))
    batches = [toy.batch(16, seed) for seed in range(3)]
    state, _ = toy.train(trainer, CONFIG, batches, stop_after=3)

    checkpoint = latest_checkpoint_path(trainer.checkpointer.expanded_path("toy"))
    shape = eqx.filter_eval_shape(toy.build, CONFIG)
    with trainer.use_device_mesh():
        restored = load_checkpoint(shape, checkpoint, subpath="model")
    bias = np.asarray(restored.transformer.layers.stacked.mlp.router.bias.value().array)
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(bias, _value(state))
    assert np.all(np.abs(bias).max(axis=1) > 1e-3), "a layer's bias is still zero"
    np.testing.assert_allclose(bias.mean(axis=1), 0.0, atol=CENTRED_ATOL)
    # not a bf16 number: the whole fp32 value went through bf16 compute
    assert np.any(bias != np.asarray(jnp.asarray(bias).astype(jnp.bfloat16).astype(jnp.float32)))

    optimizer_leaves = _without_layers(state.opt_state)
    assert any("router" in path for path in optimizer_leaves)
    assert not any("bias" in path for path in optimizer_leaves)


@pytest.mark.slow
def test_router_bias_of_microbatches_is_their_mean_weighted_by_valid_tokens(tmp_path):
    """1 x 64 rows against 4 x 16, three steps, with the padding all in the first microbatches."""
    config = CONFIG
    model = toy.build(config)
    state = TrainerState.init(optax.with_extra_args_support(optax.set_to_zero()), model, key=jax.random.PRNGKey(0))
    Batch = hax.Axis(axes.BATCH, 64)

    def gradient(model, example):
        def scalar_loss(model):
            loss, metrics = toy.loss(model, example, key=jax.random.PRNGKey(0))
            return loss.scalar(), metrics

        return eqx.filter_value_and_grad(scalar_loss, has_aux=True)(model)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    mapping = {axes.BATCH: "data"}
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(mapping):
        accumulated = eqx.filter_jit(
            lambda model, example: microbatched(lambda example: gradient(model, example), Batch, 16, mapping, mapping)(
                example
            )
        )
        single = eqx.filter_jit(gradient)
        for step in range(3):
            example = _uneven_padding(toy.batch(64, step))
            (_, metrics), overall = accumulated(state.model, example)
            parts = [_rows(example, slice(16 * i, 16 * i + 16)) for i in range(4)]
            results = [single(state.model, part) for part in parts]
            weights = [float(np.sum(part.attn_mask.segment_ids[0].array >= 0)) for part in parts]
            assert len(set(weights)) > 1
            biases = [np.asarray(_gradient_bias(g), np.float64) for _, g in results]
            expected = sum(w * b for w, b in zip(weights, biases, strict=True)) / sum(weights)
            np.testing.assert_allclose(_gradient_bias(overall), expected, rtol=0, atol=ORACLE_ATOL)

            if step == 0:
                in_parts = sum(_expert_load(state.model, part) for part in parts)
                np.testing.assert_array_equal(in_parts, _expert_load(state.model, example))

            for name in ("moe/routing_entropy/layer_00", "moe/router_z_loss/layer_00"):
                mean = np.mean([float(m[name]) for (_, m), _ in results])
                assert float(metrics[name]) == pytest.approx(mean, rel=1e-5)
            state, _ = state.take_step(overall, key=jax.random.PRNGKey(step))
            np.testing.assert_allclose(_value(state), expected, rtol=0, atol=ORACLE_ATOL)


@eqx.filter_jit
def _expert_load(model, example) -> jax.Array:
    return model.activations_and_statistics(example.tokens, example.attn_mask)[1].expert_load.array


def _gradient_bias(gradient) -> np.ndarray:
    return np.asarray(gradient.transformer.layers.stacked.mlp.router.bias.value().array)


def _rows(example, rows: slice):
    return jax.tree.map(
        lambda a: a[axes.BATCH, rows] if a.has_axis(axes.BATCH) else a,
        example,
        is_leaf=lambda a: isinstance(a, hax.NamedArray),
    )


def _uneven_padding(example):
    segments = example.attn_mask.segment_ids[0]
    first = hax.arange(segments.resolve_axis(axes.BATCH)) < 10
    segments = hax.where(first.broadcast_axis(segments.resolve_axis(axes.POSITION)), -1, segments)
    return dataclasses.replace(
        example, attn_mask=example.attn_mask.with_segment_ids(segments.rearrange((axes.BATCH, axes.POSITION)))
    )


@pytest.mark.slow
def test_training_resumed_from_a_checkpoint_is_bit_equal_to_uninterrupted_training(tmp_path):
    batches = [toy.batch(16, seed) for seed in range(6)]
    straight, losses = toy.train(toy.trainer_config(tmp_path / "straight"), CONFIG, batches)
    interrupted = toy.trainer_config(tmp_path / "interrupted")
    half, first = toy.train(interrupted, CONFIG, batches, stop_after=3)
    assert int(half.step) == 3
    resumed, second = toy.train(interrupted, CONFIG, batches)

    assert first + second == losses
    ours, theirs = jax.tree.leaves(resumed), jax.tree.leaves(straight)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


@pytest.mark.slow
def test_training_with_an_evaluation_after_every_step_has_bit_identical_losses(tmp_path):
    batches = [toy.batch(16, seed) for seed in range(4)]
    _, losses = toy.train(toy.trainer_config(tmp_path / "never"), CONFIG, batches)
    evaluations = []

    @hax.named_jit
    def evaluate(model, example):
        return model.compute_next_token_loss(example)

    def after_step(trainer, example, state):
        with hax.axis_mapping(trainer.compute_axis_mapping):
            evaluations.append(float(evaluate(state.eval_model, example).array))

    trainer = toy.trainer_config(tmp_path / "every step")
    _, evaluated = toy.train(trainer, CONFIG, batches, after_step=after_step)
    assert evaluated == losses
    assert len(evaluations) == 4 and np.all(np.isfinite(evaluations))


def test_training_five_steps_with_changing_bias_and_learning_rate_traces_once(tmp_path):
    traces = []

    def counted(updates, state, params=None, **_):
        traces.append(None)
        return updates, state

    transform = optax.chain(
        toy.optimizer(), optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), counted)
    )
    after_each_step = []
    toy.train(
        toy.trainer_config(tmp_path),
        CONFIG,
        [toy.batch(16, seed) for seed in range(5)],
        after_step=lambda trainer, example, state: after_each_step.append((len(traces), _value(state).tobytes())),
        optimizer_transform=transform,
    )
    # named_jit traces a first time for the shape of the output
    counts, biases = zip(*after_each_step, strict=True)
    assert set(counts) == {counts[0]}
    assert len(set(biases)) == 5


@pytest.mark.parametrize("estimator", (QuantileEstimator.histogram, QuantileEstimator.topk))
def test_batch_with_padding_rows_gives_the_same_bias_loads_drops_and_loss(estimator):
    """32 tokens against the same 32 and 32 of padding."""
    config = toy.with_estimator(CONFIG, estimator)
    model = toy.build(config)
    short = toy.batch(2, seed=5)
    long = jax.tree.map(
        lambda a: hax.concatenate(axes.BATCH, [a, a]),
        short,
        is_leaf=lambda a: isinstance(a, hax.NamedArray),
    )
    real = hax.arange(long.tokens.resolve_axis(axes.BATCH)) < 2
    Pos = long.tokens.resolve_axis(axes.POSITION)
    real = real.broadcast_axis(Pos).rearrange((axes.BATCH, axes.POSITION))
    segments = hax.where(real, long.attn_mask.segment_ids[0], -1)
    long = dataclasses.replace(
        long,
        loss_weight=hax.where(real, long.loss_weight, 0.0),
        attn_mask=long.attn_mask.with_segment_ids(segments),
    )

    def step(model, example):
        def scalar_loss(model):
            loss, metrics = toy.loss(model, example, key=jax.random.PRNGKey(0))
            _, statistics = model.activations_and_statistics(example.tokens, example.attn_mask)
            return loss.scalar(), (metrics, statistics)

        return eqx.filter_value_and_grad(scalar_loss, has_aux=True)(model)

    (loss, (metrics, statistics)), gradient = eqx.filter_jit(step)(model, short)
    (padded_loss, (padded_metrics, padded_statistics)), padded_gradient = eqx.filter_jit(step)(model, long)
    assert float(padded_loss) == pytest.approx(float(loss), rel=PADDING_RTOL)
    np.testing.assert_allclose(_gradient_bias(padded_gradient), _gradient_bias(gradient), rtol=0, atol=ORACLE_ATOL)
    np.testing.assert_array_equal(padded_statistics.expert_load.array, statistics.expert_load.array)
    fractions = {name for name in metrics if "padding_fraction" in name}
    assert {float(padded_metrics[name]) for name in fractions} == {0.5}
    for name, metric in metrics.items():
        if name in fractions:
            continue
        assert float(padded_metrics[name]) == pytest.approx(float(metric), rel=1e-5, abs=1e-6)
    k, layers = config.moe.num_experts_per_token, config.num_layers
    counts, padded = statistics.dispatch, padded_statistics.dispatch
    assert int(hax.sum(padded.padding).array) == 32 * k * layers and int(hax.sum(counts.padding).array) == 0
    assert int(hax.sum(padded.kept).array) == int(hax.sum(counts.kept).array) == 32 * k * layers


def test_packed_document_equals_the_document_alone_and_sends_no_gradient_back():
    """Documents of 5 and 7 tokens, boundaries different per row, each against itself at the same positions."""
    config = CONFIG
    model = toy.build(config)
    Batch, Pos = hax.Axis(axes.BATCH, 2), hax.Axis(axes.POSITION, 12)
    tokens = toy.batch(2, seed=3, seq_len=12).tokens
    first_lengths = (5, 7)
    first = np.arange(12)[None, :] < np.array(first_lengths)[:, None]

    def logits(model, tokens, segments):
        mask = toy.AttentionMask.causal().with_segment_ids(hax.named(jnp.asarray(segments), (Batch, Pos)))
        return model(tokens, mask)

    packed = eqx.filter_jit(logits)(model, tokens, np.where(first, 0, 1))
    # the first document replaced by padding, the second where it was
    other = hax.where(hax.named(jnp.asarray(first), (Batch, Pos)), 0, tokens)
    alone = eqx.filter_jit(logits)(model, other, np.where(first, -1, 1))
    np.testing.assert_allclose(packed.array[~first], alone.array[~first], rtol=0, atol=1e-5)

    def second_loss(embedded_noise, model):
        model = eqx.tree_at(lambda m: m.embeddings, model, _Embedded(model.embeddings, embedded_noise))
        out = logits(model, tokens, np.where(first, 0, 1))
        return jnp.sum(jnp.where(first[..., None], 0.0, out.rearrange((axes.BATCH, axes.POSITION, ...)).array))

    gradient = eqx.filter_jit(jax.grad(second_loss))(jnp.zeros((2, 12, config.hidden_dim)), model)
    assert np.all(np.asarray(gradient)[first] == 0.0)
    assert np.all(np.abs(np.asarray(gradient)[~first]).max(-1) > 0.0)


class _Embedded(eqx.Module):
    """An embedding with something added to its output, to differentiate with respect to it."""

    inner: eqx.Module
    added: jax.Array

    def __call__(self, input_ids):
        out = self.inner(input_ids)
        return out + hax.named(self.added, out.axes)
