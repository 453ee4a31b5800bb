# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Every component can be switched off on its own, and then has no parameters and another result."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
import toy

from levanter_marin.config import QuantileBalancingConfig, QuantileEstimator, RopePairing, RouterDtype, ShortConvConfig
from levanter_marin.models.parameter_counts import trainable_parameters
from levanter_marin.moe.router_bias import RouterBias

BASE = toy.config(num_layers=2)


def _attention(**fields):
    return {"attention": dataclasses.replace(BASE.attention, **fields)}


def _moe(**fields):
    return {"moe": dataclasses.replace(BASE.moe, **fields)}


# component -> (override, whether parameters go with it)
ABLATIONS = {
    "latent experts": (_moe(latent_dim=None), True),
    "latent norm": (_moe(latent_norm=False), True),
    "shared experts": (_moe(num_shared_experts=0), True),
    "renormalised weights": (_moe(renormalize=False), False),
    "router in bf16": (_moe(router_dtype=RouterDtype.bf16), False),
    "exclusive attention": (_attention(exclusive=False), False),
    "head gate": (_attention(head_gate=False), True),
    "qk norm": (_attention(qk_norm=False), False),
    "rotary embedding": (_attention(rope_fraction=0.0), False),
    "whole-head rotary embedding": (_attention(rope_fraction=1.0), False),
    "split-half pairing": (_attention(rope_pairing=RopePairing.split_half), False),
    "position on global layers": (_attention(rope_on_global=True), False),
    "hybrid KV heads": (_attention(global_kv_heads=None), False),
    "local layers": ({"global_every": 1}, False),
    "gated norms": ({"gated_norm_rank": None}, True),
    "short convolutions": ({"short_conv": ShortConvConfig(sites=())}, True),
}


def _logits(config):
    """Of a model whose gates are open a little and whose convolutions mix, since their initial values do nothing."""
    model = toy.build(config)

    def disturbed(path, leaf):
        name = jax.tree_util.keystr(path)
        if "attn_gate" in name or "sconv" in name:
            return leaf + 0.1 * jax.random.normal(jax.random.PRNGKey(len(name)), leaf.shape)
        return leaf

    model = jax.tree_util.tree_map_with_path(disturbed, model)
    return np.asarray(eqx.filter_jit(lambda m, e: m(e.tokens, e.attn_mask).array)(model, toy.batch(2)))


@pytest.fixture(scope="module")
def base_logits():
    return _logits(BASE)


@pytest.mark.parametrize("component", ABLATIONS)
def test_component_switched_off_has_no_parameters_and_another_result(component, base_logits):
    overrides, changes_parameters = ABLATIONS[component]
    config = dataclasses.replace(BASE, **overrides)
    shape = eqx.filter_eval_shape(toy.build, config)
    counted = sum(
        leaf.size
        for leaf in jax.tree.leaves(shape, is_leaf=lambda leaf: isinstance(leaf, RouterBias))
        if not isinstance(leaf, RouterBias)
    )
    assert counted == trainable_parameters(config, toy.VOCAB_SIZE)
    assert (counted != trainable_parameters(BASE, toy.VOCAB_SIZE)) == changes_parameters

    logits = _logits(config)
    assert np.all(np.isfinite(logits))
    assert not np.array_equal(logits, base_logits)


def test_quantile_balancing_switched_off_leaves_the_bias_at_zero():
    config = dataclasses.replace(BASE, **_moe(quantile_balancing=QuantileBalancingConfig(QuantileEstimator.none)))
    model = toy.build(config)

    def loss(model, example):
        value, metrics = toy.loss(model, example, key=jax.random.PRNGKey(0))
        return value.scalar(), metrics

    gradient, metrics = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))(model, toy.batch(2))
    bias = gradient.transformer.layers.stacked.mlp.router.bias
    assert not np.any(np.asarray(bias.value().array))
    assert float(metrics["moe/bias_range/max"]) == 0.0
    assert int(hax.sum(bias.num_valid()).array) == 2 * 16 * config.num_layers
