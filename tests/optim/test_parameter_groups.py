# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Groups of every preset and of Levanter's own models, and what an update does to the latter."""

from collections import Counter

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from haliax.quantization import partition_for_grad_overwrite
from levanter.layers.attention import AttentionConfig, AttentionMask, GatedAttention
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.mixtral import MixtralConfig
from levanter.models.qwen3_moe import Qwen3MoeConfig
from levanter.trainer_state import TrainerState, trainables_only

from levanter_marin.models import presets
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.groups import Group, group_labels, group_table, rule_of
from levanter_marin.optim.newton_schulz import NewtonSchulzDtype
from levanter_marin.optim.parameters import parameters

NORM_RTOL = 1e-6

Vocab = Axis("vocab", 64)
PRESETS = ("nano", "d256", "d512", "d768", "d1024", "d1536", "d2048", "hero_535b_a23b")
_SIZES = {"max_seq_len": 16, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "num_heads": 4}
_SIZES |= {"num_kv_heads": 2}
UPSTREAM = {
    "llama": LlamaConfig(**_SIZES),
    "mixtral": MixtralConfig(**_SIZES, n_routed_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, moe_intermediate_dim=16, num_experts=4, num_experts_per_tok=2),
}

MARIN = {
    Group.muonh: {
        f"{norm}_proj"
        for gated in ("embeddings.gated_norm", "layers.attn_gated_norm", "layers.mlp_gated_norm", "final_gated_norm")
        for norm in (f"{gated}.down", f"{gated}.up")
    }
    | {f"layers.self_attn.{x}_proj" for x in "qkvo"}
    | {f"layers.mlp.experts.{x}_proj" for x in ("gate", "up", "down")}
    | {f"layers.mlp.latent_{x}_proj" for x in ("down", "up")}
    | {f"layers.shared_experts.{j}.{x}_proj" for j in (0, 1) for x in ("gate", "up", "down")},
    Group.adamh: {"lm_head"},
    Group.adam: {
        "embeddings.token_embeddings",
        "embeddings.norm",
        "norm",
        "layers.input_layernorm",
        "layers.post_attention_layernorm",
        "layers.mlp.latent_norm",
        "layers.mlp.router",
        "layers.self_attn.attn_gate",
        "layers.self_attn.sconv_k",
        "layers.sconv_attn",
        "layers.sconv_mlp",
    },
}
UPSTREAM_ADAM = {"embeddings.token_embeddings", "norm", "layers.input_layernorm", "layers.post_attention_layernorm"}
_ATTENTION = {f"layers.self_attn.{x}_proj" for x in "qkvo"}
UPSTREAM_GROUPS = {
    "llama": {
        Group.muonh: _ATTENTION | {f"layers.mlp.{x}_proj" for x in ("gate", "up", "down")},
        Group.adamh: {"lm_head"},
        Group.adam: UPSTREAM_ADAM,
    },
    "mixtral": {
        Group.muonh: _ATTENTION | {f"layers.block_sparse_moe.experts.w{i}" for i in (1, 2, 3)},
        Group.adamh: {"lm_head"},
        Group.adam: UPSTREAM_ADAM | {"layers.block_sparse_moe.gate"},
    },
    "qwen3_moe": {
        Group.muonh: _ATTENTION | {f"layers.mlp.experts.{x}_proj" for x in ("gate", "up", "down")},
        Group.adamh: {"lm_head"},
        Group.adam: UPSTREAM_ADAM | {"layers.mlp.gate", "layers.self_attn.q_norm", "layers.self_attn.k_norm"},
    },
}


def shapes(config):
    """The parameters of a model that the trainer gives to an optimizer, without allocating them."""
    model = eqx.filter_eval_shape(config.build, Vocab, key=jax.random.PRNGKey(0))
    return partition_for_grad_overwrite(trainables_only(model, True))[1]


def by_group(tree) -> dict[Group, set[str]]:
    """Paths without what scanning, the transformer's own name and the field `weight` add."""
    groups = {group: set() for group in Group}
    for parameter, rule in group_table(tree):
        path = parameter.path.removeprefix("transformer.").replace("layers.stacked.", "layers.")
        groups[rule.group].add(path.removesuffix(".weight"))
    return groups


@pytest.mark.parametrize("name", PRESETS)
def test_group_table_of_a_preset_is_exact(name):
    table = shapes(getattr(presets, name)())
    assert by_group(table) == MARIN
    assert Counter(rule.group for _, rule in group_table(table)) == {"muonh": 23, "adamh": 1, "adam": 11}
    decayed = {parameter.path for parameter, rule in group_table(table) if rule.is_gate_or_router}
    layers = "transformer.layers.stacked"
    assert decayed == {f"{layers}.self_attn.attn_gate.weight", f"{layers}.mlp.router.weight"}


def test_group_table_of_unrolled_layers_has_each_layer():
    config = presets.nano()
    table = group_table(shapes(type(config)(**{**vars(config), "scan_layers": False, "num_layers": 4})))
    assert Counter(rule.group for _, rule in table) == {"muonh": 4 + 19 * 4, "adamh": 1, "adam": 3 + 8 * 4}


@pytest.mark.parametrize("name", UPSTREAM)
def test_group_table_of_an_upstream_model_is_exact(name):
    assert by_group(shapes(UPSTREAM[name])) == UPSTREAM_GROUPS[name]


def test_group_table_tied_embeddings_are_adam_and_there_is_no_head():
    groups = by_group(shapes(LlamaConfig(**_SIZES, tie_word_embeddings=True)))
    assert groups[Group.adamh] == set()
    assert "embeddings.token_embeddings" in groups[Group.adam]


def test_group_table_biases_and_upstream_head_gates_are_adam():
    config = AttentionConfig(Embed=Axis("embed", 32), num_heads=4, num_kv_heads=2, use_bias=True, gated="headwise")
    attention = eqx.filter_eval_shape(GatedAttention.init, config, key=jax.random.PRNGKey(0))
    groups = by_group(trainables_only(attention, True))
    assert groups[Group.muonh] == {f"{x}_proj" for x in "qkvo"}
    assert groups[Group.adam] == {"gate_proj"} | {f"{x}_proj.bias" for x in ("q", "k", "v", "o", "gate")}


class Strange(eqx.Module):
    scale: NamedArray
    inner: hnn.Linear


def strange() -> Strange:
    In, Out = Axis("in", 3), Axis("out", 4)
    return Strange(hax.ones(In), hnn.Linear.init(In, Out, key=jax.random.PRNGKey(0), use_bias=False))


def test_group_labels_parameter_without_a_rule_is_an_error_naming_it():
    with pytest.raises(ValueError, match=r"parameter \[?'?x'?\]?.*scale \(Strange.scale\) is in no group"):
        group_labels({"x": strange()})
    labels = group_labels({"x": strange()}, {"Strange.scale": Group.adam})
    assert labels["x"].scale == "adam" and labels["x"].inner.weight == "muonh"


def test_group_labels_role_comes_before_type():
    extra = {"Strange.scale": Group.adam, "Strange.inner": Group.adamh}
    assert group_labels(strange(), extra).inner.weight == "adamh"


def test_group_labels_parameter_in_two_groups_is_an_error_naming_it():
    extra = {"Strange.scale": Group.adam, "Linear.weight": Group.adam}
    with pytest.raises(
        ValueError, match="inner.weight is in two groups .* muonh as Linear.weight, adam as Linear.weight"
    ):
        group_labels(strange(), extra)


def test_group_labels_matrix_group_for_what_is_no_matrix_is_an_error():
    with pytest.raises(ValueError, match="scale .* is in group muonh, which needs the input and output axes"):
        group_labels(strange(), {"Strange.scale": Group.muonh})


def test_group_labels_extra_group_that_nothing_has_is_an_error():
    with pytest.raises(ValueError, match="optimizer.groups names Strange.sclae"):
        group_labels(strange(), {"Strange.scale": Group.adam, "Strange.sclae": Group.adam})


def test_parameters_of_a_model_leave_out_the_router_bias():
    model = eqx.filter_eval_shape(presets.nano().build, Vocab, key=jax.random.PRNGKey(0))
    paths = [parameter.path for parameter in parameters(trainables_only(model, True))]
    assert "transformer.layers.stacked.mlp.router.weight" in paths
    assert not [path for path in paths if "bias" in path]


def matrix_norms(tree):
    """Of every matrix stack that keeps its norm, by path; a bank as one, which is the default."""
    out = {}
    for parameter in parameters(tree):
        if rule_of(parameter).group is not Group.adam:
            axes = parameter.matrix_axes
            square = hax.sum(hax.square(parameter.value), axis=(*axes.inputs, *axes.outputs, *axes.experts))
            out[parameter.path] = np.sqrt(np.asarray(square.array, np.float64))
    return out


@pytest.mark.parametrize("name", UPSTREAM)
def test_hyperball_upstream_model_takes_a_step_that_keeps_matrix_norms(name):
    config = UPSTREAM[name]
    model = config.build(Vocab, key=jax.random.PRNGKey(0))
    optimizer = HyperballConfig(learning_rate=0.02, warmup=0, newton_schulz_dtype=NewtonSchulzDtype.fp32).build(10)
    state = TrainerState.init(optimizer, model, key=jax.random.PRNGKey(0))

    @eqx.filter_jit
    def step(state):
        if name == "mixtral":  # its loss cannot be differentiated on CPU
            params = state.trainable_model
            gradient = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
        else:
            tokens = hax.named(jnp.arange(32).reshape(2, 16) % 7, (Axis("batch", 2), Axis("position", 16)))
            example = LmExample(tokens, hax.ones(tokens.axes), AttentionMask.causal())
            gradient = eqx.filter_grad(lambda m: m.compute_next_token_loss(example).scalar())(state.model)
        return state.take_step(gradient, key=state.training_key)[0]

    with hax.partitioning.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        after = step(state).model
    start, end = matrix_norms(state.trainable_model), matrix_norms(trainables_only(after, True))
    assert len([path for path in start if ".experts." in path]) == (0 if name == "llama" else 3)
    before = {parameter.path: parameter.value for parameter in parameters(state.trainable_model)}
    for parameter in parameters(trainables_only(after, True)):
        assert not np.array_equal(parameter.value.array, before[parameter.path].array), parameter.path
    for path, norms in start.items():
        np.testing.assert_allclose(end[path], norms, rtol=NORM_RTOL, err_msg=path)
