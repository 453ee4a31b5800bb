# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The same numbers however the model is run: scanned or not, checkpointed or not, on one device or eight."""

import dataclasses
from functools import cache

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
import toy
from haliax import ScanCheckpointPolicy
from jax.sharding import Mesh

from levanter_marin import axes
from levanter_marin.config import QuantileEstimator
from levanter_marin.moe.router_bias import RouterBias

RTOL = 1e-5  # loss and metrics, and the Frobenius norm of each gradient

PARAMETER_MAPPING = {axes.EMBED: "data", axes.EXPERTS: "data", axes.MLP: "model", axes.HEADS: "model"}
COMPUTE_MAPPING = {axes.BATCH: "data", axes.MLP: "model", axes.HEADS: "model"}


def _step(model, example):
    return eqx.filter_value_and_grad(
        lambda m: (lambda out: (out[0].scalar(), out[1]))(toy.loss(m, example, key=jax.random.PRNGKey(0))),
        has_aux=True,
    )(model)


def _unstacked(gradient):
    """Per-layer leaves of a gradient, whether its layers are stacked or a list; router biases by their value."""

    def leaves(tree):
        values = jax.tree.map(
            lambda leaf: leaf.value() if isinstance(leaf, RouterBias) else leaf,
            tree,
            is_leaf=lambda leaf: isinstance(leaf, RouterBias),
        )
        return [np.asarray(leaf) for leaf in jax.tree.leaves(values)]

    outer = eqx.tree_at(lambda g: g.transformer.layers, gradient, None)
    return [a for block in gradient.transformer.layers.unstacked() for a in leaves(block)] + leaves(outer)


@cache
def _expected(estimator=QuantileEstimator.histogram):
    config = toy.with_estimator(toy.config(), estimator)
    (loss, metrics), gradient = eqx.filter_jit(_step)(toy.build(config), toy.batch(16, padded_rows=1))
    return float(loss), {k: float(m) for k, m in metrics.items()}, _unstacked(gradient)


def _assert_equal(result, expected):
    (loss, metrics), gradient = result
    expected_loss, expected_metrics, expected_gradient = expected
    assert float(loss) == pytest.approx(expected_loss, rel=RTOL)
    assert {k: float(m) for k, m in metrics.items()} == pytest.approx(expected_metrics, rel=RTOL, abs=RTOL)
    ours = _unstacked(gradient)
    assert len(ours) == len(expected_gradient)
    for mine, other in zip(ours, expected_gradient, strict=True):
        assert mine.shape == other.shape
        assert np.linalg.norm(mine - other) <= RTOL * np.linalg.norm(other)


@pytest.mark.parametrize(
    "overrides",
    (
        {"scan_layers": False},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": ScanCheckpointPolicy(nested=2, simple=True)},
        {"gradient_checkpointing": ScanCheckpointPolicy(save_block_internals=["blockwise_attention"])},
    ),
    ids=("unrolled", "no checkpoint", "nested", "save attention"),
)
def test_model_run_another_way_gives_the_same_loss_and_gradients(overrides):
    config = toy.with_estimator(toy.config(), QuantileEstimator.histogram)
    model = toy.build(config)
    other = dataclasses.replace(config, **overrides)
    shape = eqx.filter_eval_shape(toy.build, other)
    if not other.scan_layers:
        blocks = list(model.transformer.layers.unstacked())
        layers = dataclasses.replace(shape.transformer.layers, blocks=blocks)
    else:
        layers = dataclasses.replace(shape.transformer.layers, stacked=model.transformer.layers.stacked)
    transformer = dataclasses.replace(model.transformer, layers=layers, config=other)
    model = dataclasses.replace(model, transformer=transformer)
    _assert_equal(eqx.filter_jit(_step)(model, toy.batch(16, padded_rows=1)), _expected())


@pytest.mark.parametrize(
    ("shape", "names"), (((8,), ("data",)), ((4, 2), ("data", "model"))), ids=("data 8", "data 4 model 2")
)
def test_model_on_eight_devices_gives_the_same_loss_and_gradients(shape, names):
    config = toy.with_estimator(toy.config(), QuantileEstimator.histogram)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    parameters = {k: v for k, v in PARAMETER_MAPPING.items() if v in names}
    compute = {k: v for k, v in COMPUTE_MAPPING.items() if v in names}
    with hax.partitioning.set_mesh(mesh):
        model = hax.shard(toy.build(config), parameters)
        example = hax.shard(toy.batch(16, padded_rows=1), compute)

        @hax.named_jit(axis_resources=parameters, out_axis_resources=parameters)
        def step(model, example):
            with hax.axis_mapping(compute):
                return _step(model, example)

        result = step(model, example)
    _assert_equal(result, _expected())


def test_model_shorter_row_than_the_maximum_gives_the_prefix():
    """Causality of the whole stack: convolutions, attention, routing."""
    config = toy.config()
    model = toy.build(config)
    long = toy.batch(2)
    short = jax.tree.map(lambda a: a[axes.POSITION, :9], long, is_leaf=lambda a: isinstance(a, hax.NamedArray))
    logits = eqx.filter_jit(lambda m, e: m(e.tokens, e.attn_mask))
    whole, prefix = logits(model, long), logits(model, short)
    np.testing.assert_allclose(whole.array[:, :9], prefix.array, rtol=0, atol=RTOL * np.abs(whole.array).max())
