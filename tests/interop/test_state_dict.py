# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Tensor names and shapes, and leaves there and back."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from haliax.state_dict import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from hf_cases import ODD, assert_equal_leaves, random_model, split_experts

import golden_cases
from levanter_marin import axes
from levanter_marin.interop.hf_config import ArtifactSchema
from levanter_marin.interop.state_dict import (
    ExpertLayout,
    TensorFormat,
    canonical_tensors,
    check_tensors,
    detect_format,
    from_tensors,
    manifest,
    to_tensors,
)

# Written by hand: hidden 64, 4 heads of 16, 2 stored KV heads, 8 experts of 48 in a latent space of 32, 2 shared
# experts of 32, vocabulary 97, gate rank 128.
HERO_TINY_OUTER = {
    "model.embed_tokens.weight": (97, 64),
    "model.embed_norm.weight": (64,),
    "model.embed_gated_norm.down_proj.weight": (128, 64),
    "model.embed_gated_norm.up_proj.weight": (64, 128),
    "model.norm.weight": (64,),
    "model.final_gated_norm.down_proj.weight": (128, 64),
    "model.final_gated_norm.up_proj.weight": (64, 128),
    "lm_head.weight": (97, 64),
}
HERO_TINY_LAYER = {
    "input_layernorm.weight": (64,),
    "attn_gated_norm.down_proj.weight": (128, 64),
    "attn_gated_norm.up_proj.weight": (64, 128),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "self_attn.attn_gate.weight": (4, 64),
    "self_attn.sconv_k.weight": (4, 32),
    "sconv_attn.weight": (4, 64),
    "post_attention_layernorm.weight": (64,),
    "mlp_gated_norm.down_proj.weight": (128, 64),
    "mlp_gated_norm.up_proj.weight": (64, 128),
    "mlp.router.weight": (8, 64),
    "mlp.router.bias": (8,),
    "mlp.latent_down_proj.weight": (32, 64),
    "mlp.latent_norm.weight": (32,),
    "mlp.latent_up_proj.weight": (64, 32),
    "shared_experts.0.gate_proj.weight": (32, 64),
    "shared_experts.0.up_proj.weight": (32, 64),
    "shared_experts.0.down_proj.weight": (64, 32),
    "shared_experts.1.gate_proj.weight": (32, 64),
    "shared_experts.1.up_proj.weight": (32, 64),
    "shared_experts.1.down_proj.weight": (64, 32),
    "sconv_mlp.weight": (4, 64),
}
BANK = {
    "mlp.experts.gate_proj.weight": (8, 48, 32),
    "mlp.experts.up_proj.weight": (8, 48, 32),
    "mlp.experts.down_proj.weight": (8, 32, 48),
}
PER_EXPERT = {f"mlp.experts.{i}.{m}_proj.weight": (48, 32) for i in range(8) for m in ("gate", "up")} | {
    f"mlp.experts.{i}.down_proj.weight": (32, 48) for i in range(8)
}


def shapes_of(config, vocab_size):
    return eqx.filter_eval_shape(config.build, Axis(axes.VOCAB, vocab_size), key=jax.random.PRNGKey(0))


@pytest.mark.parametrize("scan_layers", (True, False))
@pytest.mark.parametrize(("layout", "experts"), ((ExpertLayout.bank, BANK), (ExpertLayout.per_expert, PER_EXPERT)))
def test_manifest_of_hero_tiny_is_the_one_written_by_hand(layout, experts, scan_layers):
    config = golden_cases.model_config(golden_cases.load("hero_tiny").config, scan_layers=scan_layers)
    found = manifest(shapes_of(config, 97), TensorFormat(experts=layout))
    layer = HERO_TINY_LAYER | experts
    wanted = HERO_TINY_OUTER | {f"model.layers.{i}.{name}": shape for i in range(4) for name, shape in layer.items()}
    assert {name: spec.shape for name, spec in found.items()} == wanted


def test_manifest_of_the_67b_family_has_one_shared_expert_under_its_own_name():
    config = golden_cases.model_config(golden_cases.load("snowball_like").config)
    found = manifest(shapes_of(config, 97), TensorFormat(schema=ArtifactSchema.one))
    assert found["model.layers.4.shared_expert.down_proj.weight"].shape == (64, 40)
    assert not any("shared_experts" in name or "latent" in name or "sconv" in name for name in found)


@pytest.mark.parametrize("name", ("hero_tiny_sconv_v", "snowball_like"))
def test_tensors_of_a_golden_are_the_originals(name):
    case = golden_cases.load(name)
    model = golden_cases.build_model(case, golden_cases.model_config(case.config))
    ours, originals = to_tensors(model), case.group("w/")
    assert set(ours) == set(originals)
    for key, value in originals.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)


@pytest.mark.parametrize("scanned_first", (True, False))
def test_tensors_round_trip_between_scanned_and_unrolled_layers_is_bit_equal(scanned_first):
    first = random_model(dataclasses.replace(ODD, scan_layers=scanned_first))
    second = shapes_of(dataclasses.replace(ODD, scan_layers=not scanned_first), first.Vocab.size)
    tensors = to_tensors(first)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (48, 40)
    there = from_tensors(second, tensors)
    back = from_tensors(first, to_tensors(there))
    assert_equal_leaves(first, back)


def test_tensors_round_trip_through_haliax_state_dicts_is_bit_equal():
    model = random_model()
    state = to_torch_compatible_state_dict(model)
    back = from_torch_compatible_state_dict(shapes_of(ODD, model.Vocab.size), state)
    assert_equal_leaves(model, back)


def test_canonical_tensors_stack_experts_in_order_of_their_number():
    tensors = {name: np.asarray(value) for name, value in to_tensors(random_model()).items()}
    split = dict(sorted(split_experts(tensors).items(), reverse=True))
    assert detect_format(split).experts is ExpertLayout.per_expert
    stacked = canonical_tensors(split)
    assert set(stacked) == set(tensors)
    name = "model.layers.1.mlp.experts.down_proj.weight"
    np.testing.assert_array_equal(stacked[name], tensors[name])


def without(name):
    return lambda shapes: {key: shape for key, shape in shapes.items() if key != name}


DAMAGES = {
    "missing": (without("model.layers.1.sconv_mlp.weight"), "missing tensors: model.layers.1.sconv_mlp.weight"),
    "missing_expert": (
        without("model.layers.0.mlp.experts.5.up_proj.weight"),
        "missing tensors: model.layers.0.mlp.experts.5.up_proj.weight",
    ),
    "added": (lambda s: s | {"model.bias": (3,)}, "tensors that the model does not have: model.bias"),
    "added_expert": (
        lambda s: s | {"model.layers.0.mlp.experts.6.up_proj.weight": (20, 24)},
        "does not have: model.layers.0.mlp.experts.6.up_proj.weight",
    ),
    "shape": (
        lambda s: s | {"model.norm.weight": (41,)},
        r"shapes that do not fit: model.norm.weight is \(41,\) where the config asks for \(40,\)",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_check_tensors_names_what_is_missing_added_or_of_another_shape(damage, message):
    model = shapes_of(ODD, 51)
    shapes = {
        name: spec.shape for name, spec in manifest(model, TensorFormat(experts=ExpertLayout.per_expert)).items()
    }
    assert check_tensors(model, shapes).experts is ExpertLayout.per_expert
    with pytest.raises(ValueError, match=message):
        check_tensors(model, damage(shapes))


@pytest.mark.slow
def test_tensors_of_a_gradient_carry_the_next_router_bias():
    model = random_model()
    Batch, Pos = Axis(axes.BATCH, 2), model.Pos
    tokens = hax.random.randint(jax.random.PRNGKey(0), (Batch, Pos), 0, model.Vocab.size)

    @eqx.filter_grad
    def gradient(model):
        return hax.mean(hax.square(model(tokens))).scalar()

    found = to_tensors(eqx.filter_jit(gradient)(model))["model.layers.2.mlp.router.bias"]
    assert float(np.abs(found).max()) > 0 and float(found.mean()) == pytest.approx(0, abs=1e-6)
