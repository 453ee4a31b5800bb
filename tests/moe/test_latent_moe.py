# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from haliax.nn.linear import MoELinear

import compare
import oracles
from compare import normal, numpy
from levanter_marin.config import (
    DispatchConfig,
    DispatchImplementation,
    MoeConfig,
    QuantileBalancingConfig,
    QuantileEstimator,
)
from levanter_marin.layers.norms import RmsNorm
from levanter_marin.moe.experts import ExpertBank
from levanter_marin.moe.latent_moe import LatentMoe
from levanter_marin.moe.router_bias import RouterBias
from levanter_marin.moe.routing import Router

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 4e-2}
BIAS_ATOL = 2e-6
EPS = 1e-5

Batch, Pos, Embed = Axis("batch", 8), Axis("position", 3), Axis("embed", 12)
TOKENS = Batch.size * Pos.size
CONFIG = MoeConfig(
    num_experts=6,
    num_experts_per_token=2,
    expert_dim=10,
    latent_dim=8,
    quantile_balancing=QuantileBalancingConfig(QuantileEstimator.topk),
)
BIAS = normal(CONFIG.RouterExperts, 20, 0.5)
VALID = hax.named(jnp.asarray(np.random.default_rng(0).random((8, 3)) < 0.7), (Batch, Pos))
MAPPING = {"batch": "data", "mlp": "model"}


def _weights(config: MoeConfig, dtype=jnp.float32) -> dict[str, NamedArray]:
    Latent, Mlp, Experts = config.Latent(Embed), config.Mlp, config.Experts
    shapes = {
        "router": (Embed, config.RouterExperts),
        "gate": (Experts, Latent, Mlp),
        "up": (Experts, Latent, Mlp),
        "down": (Experts, Mlp, Latent),
    }
    if config.latent_dim is not None:
        shapes |= {"latent_down": (Latent, Embed), "latent_up": (Embed, Latent)}
        if config.latent_norm:
            shapes["latent_norm"] = (Latent,)
    return {name: normal(axes, i, 0.5, dtype) for i, (name, axes) in enumerate(shapes.items(), start=1)}


def _module(weights: dict[str, NamedArray], config: MoeConfig, bias: NamedArray = BIAS) -> LatentMoe:
    Latent, Mlp, Experts = config.Latent(Embed), config.Mlp, config.Experts
    bank = ExpertBank(
        MoELinear(weights["gate"], None, Experts, Latent, Mlp, use_gmm=False),
        MoELinear(weights["up"], None, Experts, Latent, Mlp, use_gmm=False),
        MoELinear(weights["down"], None, Experts, Mlp, Latent, use_gmm=False),
    )
    router = Router(weights["router"], RouterBias.from_value(bias, hax.named(jnp.float32(1), ())), config)
    latent_down = weights.get("latent_down")
    return LatentMoe(
        router,
        bank,
        None if latent_down is None else hnn.Linear(latent_down, None, Embed, Latent),
        RmsNorm(Latent, weights["latent_norm"], None, EPS) if "latent_norm" in weights else None,
        None if latent_down is None else hnn.Linear(weights["latent_up"], None, Latent, Embed),
        config,
    )


def _assert_matches_oracle(config=CONFIG, valid=None, dtype=jnp.float32, **mesh) -> str:
    weights = _weights(config, dtype)
    mask = None if valid is None else np.asarray(valid.array).reshape(-1)

    def ours(x, *arrays):
        return _module(dict(zip(weights, arrays, strict=True)), config)(hax.auto_sharded(x), valid)[0]

    def oracle(x, *arrays):
        out = oracles.latent_moe(
            x.reshape(TOKENS, -1),
            dict(zip(weights, arrays, strict=True)),
            numpy(BIAS),
            mask,
            top=config.num_experts_per_token,
            eps=EPS,
            renormalize=config.renormalize,
        )
        return out.reshape(x.shape)

    arrays = [normal((Batch, Pos, Embed), 0, dtype=dtype), *weights.values()]
    return compare.assert_matches_oracle(ours, oracle, arrays, TOLERANCE[dtype], **mesh)


REFERENCE = DispatchConfig(implementation=DispatchImplementation.reference)


@pytest.mark.parametrize(
    "change",
    (
        {},
        {"latent_norm": False},
        {"latent_dim": None},
        {"renormalize": False, "num_experts_per_token": 3},
        {"dispatch": REFERENCE},
    ),
    ids=("latent", "no latent norm", "no latent", "raw weights", "reference dispatch"),
)
def test_latent_moe_equals_oracle(change):
    _assert_matches_oracle(dataclasses.replace(CONFIG, **change))


@pytest.mark.parametrize("latent_dim", (8, None), ids=("latent", "no latent"))
def test_latent_moe_with_padding_equals_oracle(latent_dim):
    _assert_matches_oracle(dataclasses.replace(CONFIG, latent_dim=latent_dim), VALID)


def test_latent_moe_bf16_equals_oracle():
    _assert_matches_oracle(valid=VALID, dtype=jnp.bfloat16)


@pytest.mark.parametrize("mesh", compare.MESHES)
def test_latent_moe_on_eight_devices_equals_oracle_without_moving_tokens(mesh):
    hlo = _assert_matches_oracle(valid=VALID, mesh=mesh, mapping=MAPPING)
    assert not compare.rearranging_collectives(hlo)


@eqx.filter_jit
def _step(module: LatentMoe, x: NamedArray, valid: NamedArray | None):
    """Output, statistics, and the gradient of module and input."""

    def loss(both):
        out, statistics = both[0](both[1], valid)
        return hax.sum(hax.sin(out)).scalar(), (out, statistics)

    (_, aux), gradient = eqx.filter_value_and_grad(loss, has_aux=True)((module, x))
    return *aux, *gradient


@pytest.mark.parametrize("latent_dim", (8, None), ids=("latent", "no latent"))
def test_latent_moe_padding_gives_zero_takes_no_gradient_and_counts_nowhere(latent_dim):
    config = dataclasses.replace(CONFIG, latent_dim=latent_dim)
    module, x = _module(_weights(config), config), normal((Batch, Pos, Embed), 0)
    out, statistics, d_module, d_x = _step(module, x, VALID)
    padding = ~np.asarray(VALID.array)
    for array in (out, d_x):
        assert not np.any(np.asarray(array.array)[padding]) and np.all(np.any(array.array, axis=-1)[~padding])
    assert [int(c.array) for c in statistics.dispatch] == [2 * (~padding).sum(), 0, 0, 2 * padding.sum()]

    other = hax.where(VALID, x, -3.0).rearrange(x.axes)
    for a, b in zip(
        jax.tree.leaves((out, statistics, d_module, d_x)), jax.tree.leaves(_step(module, other, VALID)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("valid", (None, VALID), ids=("full", "padding"))
def test_latent_moe_cotangent_of_the_bias_is_the_next_bias(valid):
    weights, x = _weights(CONFIG), normal((Batch, Pos, Embed), 0)
    _, statistics, d_module, _ = _step(_module(weights, CONFIG), x, valid)
    mask = np.ones(TOKENS, bool) if valid is None else np.asarray(valid.array).reshape(-1)
    logits = numpy(x).reshape(TOKENS, -1) @ numpy(weights["router"])
    expected = oracles.router_bias(logits, numpy(BIAS), mask, top=2)
    np.testing.assert_allclose(d_module.router.bias.value().array, expected, rtol=0, atol=BIAS_ATOL)
    assert int(d_module.router.bias.num_valid().array) == mask.sum()
    np.testing.assert_array_equal(statistics.bias.array, BIAS.array)


def test_latent_moe_nothing_valid_gives_zero_and_finite_gradients():
    out, _, *gradients = _step(_module(_weights(CONFIG), CONFIG), normal((Batch, Pos, Embed), 0), VALID & False)
    assert not np.any(out.array)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("change", (-50.0, 50.0, "a loser"), ids=str)
def test_latent_moe_bias_that_selects_the_same_gives_the_same_bits(change):
    """Raised or lowered for all experts, or for one that stays out of every selection."""
    weights, x = _weights(CONFIG), normal((Batch, Pos, Embed), 0)
    if change == "a loser":
        bias = hax.where(hax.arange(CONFIG.RouterExperts) == 4, -40.0, BIAS)
        moved = hax.where(hax.arange(CONFIG.RouterExperts) == 4, -39.0, BIAS)
    else:
        bias, moved = BIAS, BIAS + change
    results = [_step(_module(weights, CONFIG, b), x, VALID) for b in (bias, moved)]
    for (out, statistics, d_module, d_x), (moved_out, moved_statistics, d_moved, d_moved_x) in [results]:
        np.testing.assert_array_equal(moved_out.array, out.array)
        np.testing.assert_array_equal(moved_statistics.expert_load.array, statistics.expert_load.array)
        without_bias = [eqx.tree_at(lambda m: m.router.bias, d, None) for d in (d_moved, d_module)]
        for a, b in zip(*map(jax.tree.leaves, ((without_bias[0], d_moved_x), (without_bias[1], d_x))), strict=True):
            np.testing.assert_array_equal(a, b)


def test_latent_moe_without_differentiation_gives_the_same_output():
    module, x = _module(_weights(CONFIG), CONFIG), normal((Batch, Pos, Embed), 0)
    out, statistics = eqx.filter_jit(module)(x, VALID)
    expected, expected_statistics, *_ = _step(module, x, VALID)
    compare.assert_close(out, numpy(expected), TOLERANCE[jnp.float32])
    np.testing.assert_array_equal(statistics.expert_load.array, expected_statistics.expert_load.array)


def test_latent_moe_init_has_the_parts_its_config_names():
    for latent_dim, latent_norm, parts in ((8, True, 3), (8, False, 2), (None, True, 0)):
        config = dataclasses.replace(CONFIG, latent_dim=latent_dim, latent_norm=latent_norm)
        module = LatentMoe.init(Embed, config, 0.1, EPS, key=jax.random.key(0))
        found = [module.latent_down_proj, module.latent_up_proj, module.latent_norm]
        assert sum(part is not None for part in found) == parts
        assert eqx.filter_eval_shape(module, normal((Batch, Pos, Embed), 0), None)[0].axes == (Batch, Pos, Embed)
        np.testing.assert_array_equal(module.router.bias.value().array, 0)
