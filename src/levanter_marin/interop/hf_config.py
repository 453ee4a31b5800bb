# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`config.json` of the published formats and the fields of `MarinMoeConfig`, both ways.

Reading is tolerant of old spellings and of keys that say nothing about the architecture; anything else that this
model does not compute is refused by name. Writing emits one spelling a field.

Importing this module registers `MarinMoeHfConfig` with `AutoConfig` for the type "grug_moe". Levanter's own
`snowball` owns that type too and is imported first, so that the later registration, which both models can read,
stays.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import levanter.models.snowball  # noqa: F401
from transformers import AutoConfig, PretrainedConfig

from levanter_marin.config import AttentionConfig, ConvSite, MoeConfig, RopePairing, ShortConvConfig
from levanter_marin.interop.hf_code.configuration_marin_moe import MarinMoeHfConfig
from levanter_marin.models.parameter_counts import ModelShape

ARCHITECTURE = "GrugMoeForCausalLM"
SCHEMA_KEY = "grugmoe_artifact_schema_version"
CODE_FILES = ("configuration_marin_moe.py", "modeling_marin_moe.py")
AUTO_MAP = {
    "AutoConfig": "configuration_marin_moe.MarinMoeHfConfig",
    "AutoModelForCausalLM": f"modeling_marin_moe.{ARCHITECTURE}",
}


class ArtifactSchema(IntEnum):
    """1 is the format of the 67B model, 2 that of the 535B model."""

    one = 1
    two = 2


class ModelFields(ModelShape, Protocol):
    """What is read of a `MarinMoeConfig`."""

    @property
    def max_seq_len(self) -> int: ...

    @property
    def layer_norm_epsilon(self) -> float: ...


@dataclass(frozen=True)
class _Key:
    """One key of config.json: its name, our field, its type, older names."""

    name: str
    field: str
    type: type
    aliases: tuple[str, ...] = ()


_COMMON_KEYS = (
    _Key("hidden_size", "hidden_dim", int, ("hidden_dim",)),
    _Key("num_hidden_layers", "num_layers", int, ("num_layers",)),
    _Key("num_attention_heads", "attention.num_heads", int, ("num_heads",)),
    _Key("num_key_value_heads", "attention.num_kv_heads", int, ("num_kv_heads",)),
    _Key("head_dim", "attention.head_dim", int, ("attention_head_dim",)),
    _Key("max_position_embeddings", "max_seq_len", int, ("max_seq_len",)),
    _Key("sliding_window", "attention.sliding_window", int),
    _Key("rms_norm_eps", "layer_norm_epsilon", float, ("layer_norm_eps",)),
    _Key("initializer_range", "init_std", float, ("initializer_std",)),
    _Key("rope_theta", "attention.rope_theta", float),
    _Key("num_experts", "moe.num_experts", int, ("num_local_experts",)),
    _Key("num_experts_per_tok", "moe.num_experts_per_token", int, ("num_experts_per_token",)),
    _Key("moe_intermediate_size", "moe.expert_dim", int, ("intermediate_dim", "intermediate_size")),
    _Key("shared_expert_intermediate_size", "moe.shared_expert_dim", int, ("shared_expert_intermediate_dim",)),
    _Key("qk_mult", "attention.qk_mult", float),
)
_SCHEMA_2_KEYS = (
    "num_shared_experts",
    "latent_dim",
    "local_kv_heads",
    "global_kv_heads",
    "global_every",
    "rope_fused",
    "sconv",
    "sconv_kernel",
    "sconv_sites",
)

# No key of the format says these; a model that differs computes something else.
_RECIPE = {
    "gated_norm_rank": 128,
    "attention.rope_fraction": 0.5,
    "attention.rope_on_global": False,
    "attention.qk_norm": True,
    "attention.qk_norm_eps": 1e-6,
    "attention.exclusive": True,
    "attention.head_gate": True,
    "moe.renormalize": True,
    "moe.combine_weight_sum": 2.5,
}
_SCHEMA_1_RECIPE = {
    "global_every": 4,
    "attention.rope_pairing": RopePairing.split_half,
    "short_conv.sites": (),
    "moe.latent_dim": None,
    "moe.num_shared_experts": 1,
}

# Keys that may be absent and have one value that this model computes.
_FIXED = {
    "model_type": MarinMoeHfConfig.model_type,
    "tie_word_embeddings": False,
    "grugmoe_attention_mode": "production",
    "disable_pko": True,
    "disable_long_rope": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
_SAYS_NOTHING = frozenset(PretrainedConfig().to_dict()) | {
    "vocab_size",
    "auto_map",
    "torch_dtype",
    "use_cache",
    "name_or_path",
    "_name_or_path",
    "_attn_implementation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "begin_suppress_tokens",
}


def schema_of(model: ModelFields) -> ArtifactSchema:
    """The oldest schema that says everything about a model, which the most readers understand."""
    return ArtifactSchema.one if not _off_recipe(model, ArtifactSchema.one) else ArtifactSchema.two


def to_hf_dict(model: ModelFields, vocab_size: int, schema: ArtifactSchema | None = None) -> dict[str, Any]:
    """The keys of config.json, one spelling each.

    Args:
        model: the model's config. Fields that only training reads (quantile balancing, dispatch, checkpointing) have
            no key; neither has `moe.router_dtype`, with which a reader may differ from the training run.
        vocab_size: rows of the embedding.
        schema: None is `schema_of(model)`.

    Raises:
        ValueError: the schema has no place for a field; named with its value and the value that it would need.
    """
    schema = schema_of(model) if schema is None else schema
    problems = _off_recipe(model, schema)
    if problems:
        raise ValueError(
            f"Hugging Face format, schema {schema.value}, cannot say: {'; '.join(problems)}. Train with these values "
            "to export, or keep the native checkpoint"
        )
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "auto_map": dict(AUTO_MAP),
        "model_type": MarinMoeHfConfig.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "grugmoe_attention_mode": "production",
        SCHEMA_KEY: schema.value,
    }
    out |= {key.name: key.type(operator.attrgetter(key.field)(model)) for key in _COMMON_KEYS}
    if schema is ArtifactSchema.two:
        attention, conv, moe = model.attention, model.short_conv, model.moe
        out |= {
            "num_shared_experts": moe.num_shared_experts,
            "latent_dim": moe.latent_dim,
            "local_kv_heads": attention.local_kv_heads,
            "global_kv_heads": attention.global_kv_heads,
            "global_every": model.global_every,
            "rope_fused": attention.rope_pairing is RopePairing.adjacent,
            "sconv": bool(conv.sites),
            "sconv_kernel": conv.kernel_size,
            "sconv_sites": [str(site) for site in conv.sites],
        }
    return out


def _off_recipe(model: ModelFields, schema: ArtifactSchema) -> list[str]:
    wanted = _RECIPE | (_SCHEMA_1_RECIPE if schema is ArtifactSchema.one else {})
    if model.moe.latent_dim is not None:
        wanted = wanted | {"moe.latent_norm": True}
    if schema is ArtifactSchema.one:
        stored = model.attention.num_kv_heads
        for name in ("local_kv_heads", "global_kv_heads"):
            if getattr(model.attention, name) is not None:
                wanted = wanted | {f"attention.{name}": stored}
    found = {field: operator.attrgetter(field)(model) for field in wanted}
    return [f"{field}={found[field]} (needs {value})" for field, value in wanted.items() if found[field] != value]


def from_hf_dict(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `MarinMoeConfig` for the keys of a config.json, old spellings included.

    Raises:
        ValueError: a key is missing, has the wrong type, is spelt twice with two values, is unknown, or has a value
            that this model does not compute. Unknown keys whose value is null are let pass.
    """
    raw = dict(raw)
    schema = _read_schema(raw)
    for name, wanted in _FIXED.items():
        value = raw.pop(name, wanted)
        if value is not None and value != wanted:
            raise ValueError(f"config.json: {name}={value!r}; this model computes only {wanted!r}")
    _expand_rope(raw)
    common = {key.field: _take(raw, key) for key in _COMMON_KEYS}
    attention, moe = _section(common, "attention."), _section(common, "moe.")
    arguments = {field: value for field, value in common.items() if "." not in field}
    arguments["initializer_std"] = arguments.pop("init_std")

    if schema is ArtifactSchema.two:
        absent = [name for name in _SCHEMA_2_KEYS if name not in raw]
        if absent:
            raise ValueError(f"config.json: schema 2 without {', '.join(absent)}")
        second = {name: raw.pop(name) for name in _SCHEMA_2_KEYS}
        attention |= {name: _integer(second, name, optional=True) for name in ("local_kv_heads", "global_kv_heads")}
        pairing = RopePairing.adjacent if _boolean(second, "rope_fused") else RopePairing.split_half
        sites = _sites(second["sconv_sites"]) if _boolean(second, "sconv") else ()
        conv = ShortConvConfig(sites=sites, kernel_size=_integer(second, "sconv_kernel"))
        moe |= {
            "num_shared_experts": _integer(second, "num_shared_experts"),
            "latent_dim": _integer(second, "latent_dim", optional=True),
        }
        arguments["global_every"] = _integer(second, "global_every")
    else:
        attention |= {"local_kv_heads": None, "global_kv_heads": None}
        pairing, conv = RopePairing.split_half, ShortConvConfig(sites=())
        moe |= {"num_shared_experts": 1, "latent_dim": None}
        arguments["global_every"] = _SCHEMA_1_RECIPE["global_every"]

    unknown = [name for name, value in raw.items() if name not in _SAYS_NOTHING and value is not None]
    if unknown:
        listed = ", ".join(f"{name}={raw[name]!r}" for name in sorted(unknown))
        raise ValueError(f"config.json: schema {schema.value} does not know {listed}; remove what changes nothing")
    return arguments | {
        "attention": AttentionConfig(**attention, rope_pairing=pairing),
        "short_conv": conv,
        "moe": MoeConfig(**moe),
    }


def _read_schema(raw: dict[str, Any]) -> ArtifactSchema:
    value = raw.pop(SCHEMA_KEY, ArtifactSchema.one.value)  # the oldest exports have no version
    if value not in tuple(ArtifactSchema):
        raise ValueError(f"config.json: {SCHEMA_KEY}={value!r}; known are 1 and 2")
    return ArtifactSchema(value)


def _expand_rope(raw: dict[str, Any]) -> None:
    """The nested spelling that newer versions of transformers write, and a scaling that changes nothing."""
    for name in ("rope_parameters", "rope_scaling"):
        nested = raw.pop(name, None)
        if nested is None:
            continue
        kind = nested.get("rope_type", nested.get("type", "default")) if isinstance(nested, dict) else nested
        extra = set(nested) - {"rope_type", "type", "rope_theta"} if isinstance(nested, dict) else ()
        if kind != "default" or extra:
            raise ValueError(f"config.json: {name}={nested!r}; this model computes only unscaled rotary embeddings")
        theta = nested.get("rope_theta")
        if theta is not None and raw.setdefault("rope_theta", theta) != theta:
            raise ValueError(f"config.json: rope_theta={raw['rope_theta']} but {name}.rope_theta={theta}; keep one")


def _take(raw: dict[str, Any], key: _Key) -> Any:
    found = {name: raw.pop(name) for name in (key.name, *key.aliases) if raw.get(name) is not None}
    if not found:
        raise ValueError(f"config.json: {key.name} is missing")
    if len(set(found.values())) > 1:
        spelt = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"config.json: {spelt} are spellings of one field; keep {key.name}")
    name, value = next(iter(found.items()))
    accepted = (int,) if key.type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ValueError(
            f"config.json: {name}={value!r} must be {'a whole number' if key.type is int else 'a number'}"
        )
    return key.type(value)


def _section(common: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {field.removeprefix(prefix): value for field, value in common.items() if field.startswith(prefix)}


def _integer(raw: dict[str, Any], name: str, optional: bool = False) -> Any:
    value = raw[name]
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"config.json: {name}={value!r} must be a whole number{' or null' if optional else ''}")
    return value


def _boolean(raw: dict[str, Any], name: str) -> bool:
    if not isinstance(raw[name], bool):
        raise ValueError(f"config.json: {name}={raw[name]!r} must be true or false")
    return raw[name]


def _sites(value: Any) -> tuple[ConvSite, ...]:
    known = [str(site) for site in ConvSite]
    if not isinstance(value, list | tuple) or not set(value) <= set(known):
        raise ValueError(f"config.json: sconv_sites={value!r}; known sites are {', '.join(known)}")
    return tuple(ConvSite(site) for site in value)


AutoConfig.register(MarinMoeHfConfig.model_type, MarinMoeHfConfig, exist_ok=True)
