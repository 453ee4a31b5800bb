# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The whole model with tokens travelling to their experts: loss, gradients and router biases of one device."""

import dataclasses
from functools import cache

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import AxisType
from levanter.grad_accum import microbatched

from levanter_marin import axes
from levanter_marin.config import DispatchConfig, DispatchImplementation
from levanter_marin.models.evaluation import loss_by_capacity
from levanter_marin.moe.router_bias import RouterBias

RTOL = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}  # loss, and the Frobenius norm of each gradient

MESHES = {
    "data 8": {"data": 8, "expert": 1},
    "expert 8": {"data": 1, "expert": 8},
    "data 2 expert 4": {"data": 2, "expert": 4},
    "data 4 expert 2": {"data": 4, "expert": 2},
    "data 2 expert 2 model 2": {"data": 2, "expert": 2, "model": 2},
}
SHARED = {axes.EXPERTS: "expert", axes.MLP: "model", axes.HEADS: "model"}
PARAMETERS = {axes.EMBED: ("data", "expert"), **SHARED}
COMPUTE = {axes.BATCH: ("data", "expert"), **SHARED}
Batch = Axis(axes.BATCH, 16)
MICROBATCH = 8


def _mapping(mapping, names):
    kept = {axis: tuple(n for n in ((m,) if isinstance(m, str) else m) if n in names) for axis, m in mapping.items()}
    return {axis: mesh_axes for axis, mesh_axes in kept.items() if mesh_axes}


def _config(latent, dispatch, dtype=jnp.float32):
    # The toy's weights are large, which in bf16 would make as much of a rounding.
    config = toy.config(num_layers=2, **({} if dtype == jnp.float32 else {"initializer_std": None}))
    moe = dataclasses.replace(config.moe, dispatch=dispatch, latent_dim=16 if latent else None)
    return dataclasses.replace(config, moe=moe)


def _step(dtype, mapping):
    """model, example -> loss and gradient, over two microbatches, scanned and with gradient checkpointing."""

    def loss(model, example):
        model = jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, model)
        loss, metrics = toy.loss(model, example, key=jax.random.PRNGKey(0))
        return loss.scalar(), metrics

    def gradient(model, example):
        run = microbatched(
            lambda example: eqx.filter_value_and_grad(loss, has_aux=True)(model, example),
            Batch,
            MICROBATCH,
            mapping,
            mapping,
        )
        return run(example)

    return eqx.filter_jit(gradient)


def _bias_of(model):
    return model.transformer.layers.stacked.mlp.router.bias


def _with_bias(model, bias):
    return eqx.tree_at(_bias_of, model, bias, is_leaf=lambda leaf: isinstance(leaf, RouterBias))


def _towards_two_experts(bias):
    """Every token takes the first two experts: one shard gets all rows, and the others, as most experts, none."""
    num_experts = bias.value().resolve_axis(axes.ROUTER_EXPERTS)
    raised = hax.where(hax.arange(num_experts) < 2, 100.0, 0.0)
    return RouterBias.from_value(raised.broadcast_to(bias.value().axes), bias.num_valid())


def _three_steps(config, dtype, mesh_shape, second_bias=None):
    """Loss and gradient of three batches: the second with the router bias that the first one asks for, or the given
    one, the third with all rows on one shard.
    """
    model = toy.build(config)
    step = _step(dtype, _mapping(COMPUTE, mesh_shape))
    results = []
    for seed in range(3):
        example = toy.batch(Batch.size, seed, padded_rows=3)
        (loss, _), gradient = step(model, example)
        results.append((float(loss), gradient))
        own = _bias_of(gradient)
        model = _with_bias(model, (second_bias or own) if seed == 0 else _towards_two_experts(own))
    return results


@cache
def _expected(latent, dtype):
    reference = DispatchConfig(DispatchImplementation.reference)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    # microbatches need a mesh, be it of one device
    with set_mesh(mesh), hax.axis_mapping({axes.BATCH: "data"}):
        return jax.device_get(_three_steps(_config(latent, reference, dtype), dtype, {"data": 1}))


def _assert_equal(actual, expected, rtol):
    for (loss, gradient), (expected_loss, expected_gradient) in zip(actual, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=rtol)
        pairs = zip(*(jax.tree_util.tree_leaves_with_path(g) for g in (gradient, expected_gradient)), strict=True)
        for (path, ours), (_, theirs) in pairs:
            ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
            assert np.all(np.isfinite(ours))
            if "'bias'" in jax.tree_util.keystr(path) or ".bias" in jax.tree_util.keystr(path):
                continue  # the terms of a router bias; compared as a whole below
            error = np.linalg.norm(ours - theirs)
            assert error <= rtol * np.linalg.norm(theirs), f"{jax.tree_util.keystr(path)}: {error}"
        biases = [_bias_of(g).value().array for g in (gradient, expected_gradient)]
        np.testing.assert_allclose(*biases, rtol=0, atol=rtol)


def _check(mesh_name, latent, dtype=jnp.float32):
    shape = MESHES[mesh_name]
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    ragged = DispatchConfig(DispatchImplementation.ragged_all_to_all, capacity_factor=None)
    expected = _expected(latent, dtype)
    # Balancing puts a token of every expert on the threshold: a bias rounded otherwise would select another.
    second_bias = None if dtype == jnp.float32 else _bias_of(expected[0][1])
    with set_mesh(mesh), hax.axis_mapping(_mapping(COMPUTE, shape)):
        actual = _three_steps(_config(latent, ragged, dtype), dtype, shape, second_bias)
    _assert_equal(actual, expected, RTOL[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "full width"])
@pytest.mark.parametrize("mesh", MESHES)
def test_model_with_travelling_tokens_gives_the_loss_and_gradients_of_one_device(mesh, latent):
    _check(mesh, latent)


@pytest.mark.slow
def test_model_with_travelling_tokens_in_bfloat16_gives_the_loss_and_gradients_of_one_device():
    _check("data 2 expert 4", True, jnp.bfloat16)


def _rows(example, rows):
    rows = hax.named(rows, axes.BATCH)
    return hax.tree_util.tree_map(lambda a: a.take(axes.BATCH, rows), example)


@pytest.mark.slow
def test_evaluation_of_documents_in_another_order_is_the_same_without_drops_and_not_with():
    """Four documents, eight times each: batches of one document, or of all."""
    config = dataclasses.replace(_config(True, DispatchConfig()), num_layers=1)
    model = toy.build(config)
    documents = toy.batch(4)
    orders = {"clumped": np.repeat(np.arange(4), 8), "mixed": np.tile(np.arange(4), 8)}
    shape = MESHES["expert 8"]
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    results = {}
    with set_mesh(mesh), hax.axis_mapping(_mapping(COMPUTE, shape)):
        evaluate = eqx.filter_jit(lambda model, example: loss_by_capacity(model, example, (None, 1.0)))
        for name, order in orders.items():
            batches = [evaluate(model, _rows(documents, rows)) for rows in np.split(order, 4)]
            results[name] = {key: np.mean([float(b[key].array) for b in batches]) for key in batches[0]}
    assert results["clumped"]["loss/dropless"] == pytest.approx(results["mixed"]["loss/dropless"], rel=1e-6)
    for of_order in results.values():
        assert of_order["drop_fraction/dropless"] == 0
    assert results["clumped"]["drop_fraction/capacity_1.0"] > results["mixed"]["drop_fraction/capacity_1.0"]
    assert abs(results["clumped"]["loss/capacity_1.0"] - results["clumped"]["loss/dropless"]) > 1e-3
