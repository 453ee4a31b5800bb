# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""config.json: what is read, what is written, what is refused and how."""

import dataclasses

import pytest
from hf_cases import HF_CONFIGS, ODD, SCHEMA_2_KEYS, as_schema_1
from levanter.models import snowball

import golden_cases
from levanter_marin.config import QuantileBalancingConfig, RopePairing, RouterDtype
from levanter_marin.interop.hf_config import AUTO_MAP, ArtifactSchema, from_hf_dict, schema_of, to_hf_dict
from levanter_marin.models import presets
from levanter_marin.models.marin_moe import MarinMoeConfig

SNOWBALL = as_schema_1({}, HF_CONFIGS["snowball_like"])[1]


def architecture(config: MarinMoeConfig) -> MarinMoeConfig:
    """A config with defaults for what only training reads, and nothing left for `None` to stand for."""
    attention = config.attention
    return dataclasses.replace(
        config,
        initializer_std=config.init_std,
        attention=dataclasses.replace(
            attention,
            local_kv_heads=attention.local_kv_heads or attention.num_kv_heads,
            global_kv_heads=attention.global_kv_heads or attention.num_kv_heads,
        ),
        short_conv=config.short_conv if config.short_conv.sites else dataclasses.replace(ODD.short_conv, sites=()),
        moe=dataclasses.replace(
            config.moe, router_dtype=RouterDtype.fp32, quantile_balancing=QuantileBalancingConfig()
        ),
    )


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_hf_config_of_a_golden_reads_as_its_model(name):
    read = MarinMoeConfig(**from_hf_dict(HF_CONFIGS[name]))
    assert architecture(read) == architecture(golden_cases.model_config(golden_cases.load(name).config))


@pytest.mark.parametrize("name", ("hero_tiny", "hero_tiny_rope_split", "hero_tiny_sconv_v"))
def test_hf_config_written_for_a_golden_is_the_original(name):
    config = golden_cases.model_config(golden_cases.load(name).config)
    assert to_hf_dict(config, vocab_size=97) == HF_CONFIGS[name] | {"auto_map": AUTO_MAP}


def test_hf_config_of_the_67b_family_is_written_as_schema_1_and_read_by_levanters_snowball():
    config = golden_cases.model_config(golden_cases.load("snowball_like").config)
    written = to_hf_dict(config, vocab_size=97)
    assert written == SNOWBALL | {"auto_map": AUTO_MAP}
    theirs = snowball.SnowballConfig.from_hf_config(config.to_hf_config(97))
    snowball.validate_single_name_config(written, theirs)


@pytest.mark.parametrize(
    "config", (presets.nano(), presets.hero_535b_a23b(), ODD), ids=("nano", "hero_535b_a23b", "odd")
)
def test_hf_config_round_trip_keeps_the_architecture(config):
    assert schema_of(config) is ArtifactSchema.two
    written = to_hf_dict(config, vocab_size=128)
    assert not snowball.GRUG_MOE_BANNED_CONFIG_ALIASES & written.keys()
    assert architecture(MarinMoeConfig(**from_hf_dict(written))) == architecture(config)


def test_hf_config_old_spellings_and_neutral_keys_are_read():
    renamed = {
        "hidden_size": "hidden_dim",
        "num_experts_per_tok": "num_experts_per_token",
        "moe_intermediate_size": "intermediate_size",
        "rms_norm_eps": "layer_norm_eps",
    }
    old = {renamed.get(key, key): value for key, value in HF_CONFIGS["hero_tiny"].items() if key != "rope_theta"}
    old |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    old |= {
        "torch_dtype": "bfloat16",
        "eos_token_id": 3,
        "use_cache": True,
        "transformers_version": "4.0",
        "note": None,
    }
    assert from_hf_dict(old) == from_hf_dict(HF_CONFIGS["hero_tiny"])
    assert from_hf_dict(SNOWBALL | {"disable_pko": True}) == from_hf_dict(
        {key: value for key, value in SNOWBALL.items() if key != "grugmoe_artifact_schema_version"}
    )


REFUSED = {
    "schema": ({"grugmoe_artifact_schema_version": 3}, "grugmoe_artifact_schema_version=3; known are 1 and 2"),
    "attention_mode": ({"grugmoe_attention_mode": "pko"}, "grugmoe_attention_mode='pko'"),
    "model_type": ({"model_type": "llama"}, "model_type='llama'"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "pko": ({"disable_pko": False}, "disable_pko=False"),
    "site": ({"sconv_sites": ["k", "q"]}, r"sconv_sites=\['k', 'q'\]; known sites are k, v, attn, mlp"),
    "unknown": ({"partial_rotary_factor": 1.0}, "does not know partial_rotary_factor=1.0"),
    "twice": ({"hidden_dim": 32}, "hidden_size=64, hidden_dim=32 are spellings of one field; keep hidden_size"),
    "missing": ({"qk_mult": None}, "qk_mult is missing"),
    "type": ({"num_experts": "8"}, "num_experts='8' must be a whole number"),
    "boolean": ({"rope_fused": 1}, "rope_fused=1 must be true or false"),
    "scaling": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*unscaled"),
    "top_k": ({"num_experts_per_tok": 8}, "moe.num_experts_per_token=8 must be below moe.num_experts=8"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_hf_config_value_that_the_model_does_not_compute_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_dict(HF_CONFIGS["hero_tiny"] | change)


@pytest.mark.parametrize("absent", SCHEMA_2_KEYS)
def test_hf_config_schema_2_without_one_of_its_keys_is_refused_by_name(absent):
    with pytest.raises(ValueError, match=f"schema 2 without {absent}"):
        from_hf_dict({key: value for key, value in HF_CONFIGS["hero_tiny"].items() if key != absent})


OFF_RECIPE = {
    "gated_norm_rank": {"gated_norm_rank": None},
    "moe.renormalize": {"moe": dataclasses.replace(ODD.moe, renormalize=False)},
    "moe.latent_norm": {"moe": dataclasses.replace(ODD.moe, latent_norm=False)},
    "attention.exclusive": {"attention": dataclasses.replace(ODD.attention, exclusive=False)},
    "attention.rope_on_global": {"attention": dataclasses.replace(ODD.attention, rope_on_global=True)},
}


@pytest.mark.parametrize(("field", "change"), OFF_RECIPE.items(), ids=OFF_RECIPE)
def test_hf_config_of_an_ablation_without_a_key_is_refused_by_name(field, change):
    with pytest.raises(ValueError, match=f"schema 2, cannot say: {field}="):
        to_hf_dict(dataclasses.replace(ODD, **change), vocab_size=8)


def test_hf_config_schema_1_names_what_it_cannot_say():
    split_half = dataclasses.replace(
        ODD, attention=dataclasses.replace(ODD.attention, rope_pairing=RopePairing.split_half)
    )
    with pytest.raises(ValueError, match="global_every=2 .needs 4.; short_conv.sites=.*moe.latent_dim=24"):
        to_hf_dict(split_half, vocab_size=8, schema=ArtifactSchema.one)
