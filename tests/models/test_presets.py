# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Presets against their YAML files and the published recipe, and counts against models that were really built."""

import dataclasses
import math
from pathlib import Path

import draccus
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from haliax.quantization import partition_for_grad_overwrite
from levanter.main.train_lm import TrainLmConfig
from levanter.trainer_state import trainables_only

from levanter_marin.analysis.counts import initial_norms, published_steps
from levanter_marin.config import ConvSite, ShortConvConfig
from levanter_marin.models import presets
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel
from levanter_marin.models.parameter_counts import trainable_parameters, weight_table
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.groups import group_table
from levanter_marin.optim.scaling import ScaleFrom

CONFIG_DIR = Path(__file__).parents[2] / "config"
PRESETS = {
    "marin_moe_nano": presets.nano,
    "d256": presets.d256,
    "d512": presets.d512,
    "d768": presets.d768,
    "d1024": presets.d1024,
    "d1536": presets.d1536,
    "d2048": presets.d2048,
    "hero_535b_a23b": presets.hero_535b_a23b,
}
PUBLISHED = [name for name in PRESETS if name not in ("marin_moe_nano", "d256")]

# Relative deviation of a norm of n random elements: four standard errors, or half a percent where that is more.
NORM_TOLERANCE = 0.005
NORM_STANDARD_ERRORS = 2.7
RULE_RTOL = 1e-12

ROUTER_BIAS = "router_bias"

SMALL_VOCAB = Axis("vocab", 512)
TINY = MarinMoeConfig(hidden_dim=80, num_layers=6, max_seq_len=32, gated_norm_rank=8)
VARIANTS = {
    "nano": presets.nano(),
    "hero": presets.hero_535b_a23b(),
    "tiny": TINY,
    "unrolled": dataclasses.replace(TINY, scan_layers=False),
    "conv_on_values": dataclasses.replace(TINY, short_conv=ShortConvConfig(sites=(ConvSite.v,), kernel_size=3)),
    "bare": dataclasses.replace(
        TINY,
        gated_norm_rank=None,
        short_conv=ShortConvConfig(sites=()),
        attention=dataclasses.replace(TINY.attention, head_gate=False),
        moe=dataclasses.replace(TINY.moe, latent_dim=None, num_shared_experts=0),
    ),
    "one_shared_expert_no_latent_norm": dataclasses.replace(
        TINY, moe=dataclasses.replace(TINY.moe, latent_norm=False, num_shared_experts=1)
    ),
}


def _load(name: str) -> TrainLmConfig:
    with (CONFIG_DIR / f"{name}.yaml").open() as stream:
        return draccus.load(TrainLmConfig, stream)


def _blocks(model: MarinMoeLMHeadModel) -> list:
    layers = model.transformer.layers
    return [layers.stacked] if model.config.scan_layers else list(layers.blocks)


def _weights(model: MarinMoeLMHeadModel) -> dict[str, list[jax.Array]]:
    """Arrays by name of their row in the weight table, from a list written by hand."""
    weights: dict[str, list[jax.Array]] = {}

    def add(name, named):
        if named is not None:
            weights.setdefault(name, []).append(named.array)

    def gated_norm(name, module):
        if module is not None:
            add(f"{name}.w_down", module.down_proj.weight)
            add(f"{name}.w_up", module.up_proj.weight)

    def glu(name, module):
        add(f"{name}.w_gate", module.gate_proj.weight)
        add(f"{name}.w_up", module.up_proj.weight)
        add(f"{name}.w_down", module.down_proj.weight)

    def weight_of(module):
        return None if module is None else module.weight

    add("embedding", model.embeddings.token_embeddings.weight)
    add("embed_norm", model.embeddings.norm.weight)
    gated_norm("embed_gated_norm", model.embeddings.gated_norm)
    for block in _blocks(model):
        attention, moe = block.self_attn, block.mlp
        add("attn_norm", block.input_layernorm.weight)
        gated_norm("attn_gated_norm", block.attn_gated_norm)
        for name, module in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj)):
            add(f"w_{name}", module.weight)
        add("w_o", attention.o_proj.weight)
        add("attn_gate", weight_of(attention.attn_gate))
        add("sconv_k", weight_of(attention.sconv_k))
        add("sconv_v", weight_of(attention.sconv_v))
        add("sconv_attn", weight_of(block.sconv_attn))
        add("mlp_norm", block.post_attention_layernorm.weight)
        gated_norm("mlp_gated_norm", block.mlp_gated_norm)
        add("router", moe.router.weight)
        add("latent.w_down", weight_of(moe.latent_down_proj))
        add("latent_norm", weight_of(moe.latent_norm))
        add("latent.w_up", weight_of(moe.latent_up_proj))
        glu("experts", moe.experts)
        for j, shared in enumerate(block.shared_experts):
            glu(f"shared_experts.{j}", shared)
        add("sconv_mlp", weight_of(block.sconv_mlp))
    add("final_norm", model.transformer.norm.weight)
    gated_norm("final_gated_norm", model.transformer.final_gated_norm)
    add("lm_head", model.lm_head.weight)
    return weights


def _size(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", PRESETS)
def test_preset_yaml_decodes_to_preset_function(name):
    config = _load(name)
    assert config.model == PRESETS[name]()
    assert config.train_seq_len == config.model.max_seq_len
    assert config.z_loss_weight == 1e-4


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_yaml_follows_the_published_scaling_rule(name):
    config = _load(name)
    tokens_per_step = config.trainer.train_batch_size * config.train_seq_len
    steps = published_steps(config.model, tokens_per_step)
    assert config.trainer.num_train_steps == steps
    tokens = steps * tokens_per_step
    optimizer = config.optimizer
    assert isinstance(optimizer, HyperballConfig)
    assert optimizer.scale_from == ScaleFrom(tokens, tokens_per_step, config.model.hidden_dim)
    rate = 0.087571 * tokens**-0.3461 * config.model.hidden_dim**-0.3448 * math.sqrt(tokens_per_step)
    used = optimizer.resolved()
    assert used.learning_rate == pytest.approx(rate * 13 / 3, rel=RULE_RTOL)
    assert used.adam_lr == pytest.approx(rate, rel=RULE_RTOL)
    assert used.beta2 == pytest.approx(max(0.999 ** (tokens_per_step / 131072), 0.95), rel=RULE_RTOL)
    assert used.epsilon == pytest.approx(9.676e-18 * math.sqrt(tokens / tokens_per_step), rel=RULE_RTOL)
    assert (optimizer.warmup, optimizer.min_lr_ratio, optimizer.max_grad_norm) == (0.01, 0.05, None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_built_model_stores_what_the_weight_table_says(variant):
    config = VARIANTS[variant]
    model = eqx.filter_eval_shape(config.build, SMALL_VOCAB, key=jax.random.PRNGKey(0))
    stored = {name: _size(arrays) for name, arrays in _weights(model).items()}
    counted = {row.name: row.size for row in weight_table(config, SMALL_VOCAB.size) if row.name != ROUTER_BIAS}
    assert stored == counted
    state = _size([block.mlp.router.bias for block in _blocks(model)])
    assert _size(model) - state == trainable_parameters(config, SMALL_VOCAB.size)


def _check_initial_norms(config: MarinMoeConfig) -> None:
    @eqx.filter_jit
    def squares(key):
        weights = _weights(config.build(SMALL_VOCAB, key=key))
        return {name: sum(jnp.sum(jnp.square(a)) for a in arrays) for name, arrays in weights.items()}

    measured = {name: math.sqrt(square) for name, square in squares(jax.random.PRNGKey(0)).items()}
    expected = initial_norms(config, SMALL_VOCAB.size)
    sizes = {row.name: row.size for row in weight_table(config, SMALL_VOCAB.size)}
    assert set(measured) == set(expected) - {ROUTER_BIAS}
    for name, norm in measured.items():
        tolerance = max(NORM_TOLERANCE, NORM_STANDARD_ERRORS / math.sqrt(sizes[name]))
        assert norm == pytest.approx(expected[name], rel=tolerance), name


def test_initial_norms_of_nano_match_real_initialisation():
    _check_initial_norms(presets.nano())


@pytest.mark.slow
def test_initial_norms_of_d512_match_real_initialisation():
    _check_initial_norms(presets.d512())


@pytest.mark.parametrize("name", PRESETS)
def test_preset_optimizer_puts_every_parameter_in_a_group(name):
    config = _load(name)
    assert isinstance(config.optimizer, HyperballConfig)
    model = eqx.filter_eval_shape(config.model.build, SMALL_VOCAB, key=jax.random.PRNGKey(0))
    trainable = partition_for_grad_overwrite(trainables_only(model, True))[1]
    state = eqx.filter_eval_shape(config.optimizer.build(config.trainer.num_train_steps).init, trainable)
    groups = {str(rule.group) for _, rule in group_table(trainable, config.optimizer.groups)}
    assert groups == {"muonh", "adamh", "adam"} == set(state.inner_state.inner_states)
