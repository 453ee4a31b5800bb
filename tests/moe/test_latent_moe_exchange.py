# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The whole MoE layer, router included, with tokens travelling between four devices."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import on_mesh
from haliax import Axis

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
from levanter_marin.moe.latent_moe import LatentMoe

GRADIENT_RTOL = 1e-6  # of the largest entry
LOSS_RTOL = 1e-6
BIAS_ATOL = 2e-6
STEP = 1e-5  # of the finite differences, in fp64
MESH = "expert4"
EPS = 1e-5

Pos, Embed = Axis("position", 8), Axis("embed", 12)
CONFIG = MoeConfig(
    num_experts=8,
    num_experts_per_token=2,
    expert_dim=10,
    latent_dim=8,
    # the quantile of the whole batch, where top-k averages those of the devices
    quantile_balancing=QuantileBalancingConfig(QuantileEstimator.histogram),
    dispatch=DispatchConfig(DispatchImplementation.ragged_all_to_all, capacity_factor=None),
)


def _step(module, x, valid, cotangent):
    """Loss, statistics and the gradient of the module."""

    @eqx.filter_jit
    def run(module, x, valid, cotangent):
        def loss(module):
            out, statistics = module(hax.auto_sharded(x), valid, training=True)
            return hax.sum(out * cotangent).scalar(), statistics

        return eqx.filter_value_and_grad(loss, has_aux=True)(module)

    with on_mesh(MESH):
        (loss, statistics), gradient = run(module, x, valid, cotangent)
    return float(loss), statistics, gradient


def _oracle_weights(module):
    bank = module.experts
    return {
        "router": numpy(module.router.weight),
        "gate": numpy(bank.gate_proj.weight),
        "up": numpy(bank.up_proj.weight),
        "down": numpy(bank.down_proj.weight),
        "latent_down": numpy(module.latent_down_proj.weight),
        "latent_norm": numpy(module.latent_norm.weight),
        "latent_up": numpy(module.latent_up_proj.weight),
    }


def test_latent_moe_exchange_gradient_of_the_router_equals_finite_differences_in_fp64():
    Batch = Axis("batch", 4)
    module = LatentMoe.init(Embed, CONFIG, 0.3, EPS, key=jax.random.key(0))
    x, cotangent = normal((Batch, Pos, Embed), 1), normal((Batch, Pos, Embed), 2)
    _, _, gradient = _step(module, x, None, cotangent)

    weights = _oracle_weights(module)
    inputs, direction = numpy(x).reshape(-1, Embed.size), numpy(cotangent).reshape(-1, Embed.size)
    bias = numpy(module.router.bias.value())

    def loss(router):
        moved = weights | {"router": router}
        return (direction * oracles.latent_moe(inputs, moved, bias, None, top=2, eps=EPS)).sum()

    router = weights["router"]
    expected = np.zeros_like(router)
    for index in np.ndindex(router.shape):
        change = np.zeros_like(router)
        change[index] = STEP
        expected[index] = (loss(router + change) - loss(router - change)) / (2 * STEP)
    compare.assert_close(gradient.router.weight, expected, GRADIENT_RTOL)


@pytest.mark.parametrize("capacity_factor", [None, 1.0], ids=["dropless", "capacity 1.0"])
def test_latent_moe_exchange_padding_changes_no_bias_load_drop_or_loss(capacity_factor):
    """32 tokens against the same 32 and 32 of padding: twice the rows on every device, of other tokens."""
    dispatch = dataclasses.replace(CONFIG.dispatch, capacity_factor=capacity_factor)
    config = dataclasses.replace(CONFIG, dispatch=dispatch)
    module = LatentMoe.init(Embed, config, 0.3, EPS, key=jax.random.key(0))
    Batch, Long = Axis("batch", 4), Axis("batch", 8)
    x, cotangent = normal((Batch, Pos, Embed), 1), normal((Batch, Pos, Embed), 2)
    loss, alone, gradient = _step(module, x, hax.ones((Batch, Pos), dtype=jnp.bool_), cotangent)

    padding = normal((Batch, Pos, Embed), 3)
    valid = (hax.arange(Long) < Batch.size).broadcast_to((Long, Pos))
    padded_loss, padded, padded_gradient = _step(
        module,
        hax.concatenate(Long.name, [x, padding]),
        valid,
        hax.concatenate(Long.name, [cotangent, padding]),
    )
    assert padded_loss == pytest.approx(loss, rel=LOSS_RTOL)
    np.testing.assert_array_equal(padded.expert_load.array, alone.expert_load.array)
    biases = [g.router.bias.value().array for g in (padded_gradient, gradient)]
    np.testing.assert_allclose(*biases, rtol=0, atol=BIAS_ATOL)
    kept, sender_dropped, receiver_dropped, ignored = (int(c.array) for c in alone.dispatch)
    assert [int(c.array) for c in padded.dispatch] == [kept, sender_dropped, receiver_dropped, 32 * 2]
    assert (ignored, sender_dropped) == (0, 0) and (receiver_dropped > 0) == (capacity_factor is not None)
