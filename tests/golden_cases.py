# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Goldens of the original implementation: loading, and the map between their names and our parameters.

`tests/data/goldens` holds what most tests need. Gradients of the variants are only in the full set, read from
`shared/goldens` beside the project when it is there.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from levanter_marin import axes
from levanter_marin.config import (
    AttentionConfig,
    MoeConfig,
    QuantileBalancingConfig,
    QuantileEstimator,
    RopePairing,
    ShortConvConfig,
)
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel
from levanter_marin.moe.router_bias import RouterBias

EMBEDDED = Path(__file__).parent / "data" / "goldens"
FULL = Path(__file__).parents[2] / "shared" / "goldens"

HERO_VARIANTS = ("hero_tiny_nosegs", "hero_tiny_padded", "hero_tiny_rope_split", "hero_tiny_sconv_v")
WHOLE_MODEL_CASES = ("hero_tiny", *HERO_VARIANTS, "snowball_like", "snowball_like_nosegs")


@dataclass(frozen=True)
class GoldenCase:
    name: str
    arrays: dict[str, np.ndarray]
    config: dict

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        return {k[len(prefix) :]: v for k, v in self.arrays.items() if k.startswith(prefix)}


@cache
def load(name: str) -> GoldenCase:
    meta = json.loads((EMBEDDED / f"{name}.json").read_text())
    arrays = dict(np.load(EMBEDDED / f"{name}.npz"))
    if meta["weights_from"] is not None:
        shared = load(meta["weights_from"]).arrays
        arrays = {k: v for k, v in shared.items() if k.startswith("w/")} | arrays
    return GoldenCase(name, arrays, meta["config"])


def gradients(name: str, prefix: str = "g/") -> dict[str, np.ndarray]:
    """Gradients by state-dict name; skips the test where the full set is needed and absent."""
    embedded = load(name).group(prefix)
    if embedded:
        return embedded
    if not FULL.is_dir():
        pytest.skip(f"the gradients of {name} are only in the full goldens, looked for at {FULL}")
    return GoldenCase(name, dict(np.load(FULL / f"{name}.npz")), {}).group(prefix)


def model_config(golden: dict, **overrides) -> MarinMoeConfig:
    """Our config for a golden's, with scan and gradient checkpointing as by default."""
    return MarinMoeConfig(
        **{
            "max_seq_len": golden["max_seq_len"],
            "hidden_dim": golden["hidden_dim"],
            "num_layers": golden["num_layers"],
            "global_every": golden["global_every"],
            "layer_norm_epsilon": golden["layer_norm_eps"],
            "initializer_std": golden["initializer_std"],
            "attention": AttentionConfig(
                num_heads=golden["num_heads"],
                head_dim=golden["head_dim"],
                num_kv_heads=golden["num_kv_heads"],
                local_kv_heads=golden["local_kv_heads"],
                global_kv_heads=golden["global_kv_heads"],
                sliding_window=golden["sliding_window"],
                rope_theta=golden["rope"]["theta"],
                rope_pairing=RopePairing.adjacent if golden["rope_fused"] else RopePairing.split_half,
                qk_mult=golden["qk_mult"],
            ),
            "short_conv": ShortConvConfig(
                sites=tuple(golden["sconv_sites"]) if golden["sconv"] else (), kernel_size=golden["sconv_kernel"]
            ),
            "moe": MoeConfig(
                num_experts=golden["num_experts"],
                num_experts_per_token=golden["num_experts_per_token"],
                expert_dim=golden["intermediate_dim"],
                latent_dim=golden["latent_dim"],
                num_shared_experts=golden["num_shared_experts"],
                shared_expert_dim=golden["shared_expert_intermediate_dim"],
                quantile_balancing=QuantileBalancingConfig(
                    estimator=(
                        QuantileEstimator.topk if golden["qb_estimator"] == "topk" else QuantileEstimator.histogram
                    ),
                    num_bins=golden["qb_hist_bins"],
                ),
            ),
            **overrides,
        }
    )


def layer_leaves(block) -> dict[str, NamedArray]:
    """State-dict name within a layer -> the leaf of a block, an expert bank as one entry."""
    attn, moe = block.self_attn, block.mlp
    leaves = {
        "input_layernorm.weight": block.input_layernorm.weight,
        "post_attention_layernorm.weight": block.post_attention_layernorm.weight,
        "self_attn.q_proj.weight": attn.q_proj.weight,
        "self_attn.k_proj.weight": attn.k_proj.weight,
        "self_attn.v_proj.weight": attn.v_proj.weight,
        "self_attn.o_proj.weight": attn.o_proj.weight,
        "self_attn.attn_gate.weight": attn.attn_gate.weight,
        "mlp.router.weight": moe.router.weight,
        "mlp.experts.gate_proj.weight": moe.experts.gate_proj.weight,
        "mlp.experts.up_proj.weight": moe.experts.up_proj.weight,
        "mlp.experts.down_proj.weight": moe.experts.down_proj.weight,
    }
    for name, norm in (("attn_gated_norm", block.attn_gated_norm), ("mlp_gated_norm", block.mlp_gated_norm)):
        leaves |= {f"{name}.down_proj.weight": norm.down_proj.weight, f"{name}.up_proj.weight": norm.up_proj.weight}
    convs = {
        "self_attn.sconv_k": attn.sconv_k,
        "self_attn.sconv_v": attn.sconv_v,
        "sconv_attn": block.sconv_attn,
        "sconv_mlp": block.sconv_mlp,
    }
    leaves |= {f"{name}.weight": conv.weight for name, conv in convs.items() if conv is not None}
    if moe.latent_down_proj is not None:
        leaves |= {
            "mlp.latent_down_proj.weight": moe.latent_down_proj.weight,
            "mlp.latent_norm.weight": moe.latent_norm.weight,
            "mlp.latent_up_proj.weight": moe.latent_up_proj.weight,
        }
    for j, shared in enumerate(block.shared_experts):
        for proj in ("gate_proj", "up_proj", "down_proj"):
            leaves[f"shared_experts.{j}.{proj}.weight"] = getattr(shared, proj).weight
    return leaves


def outer_leaves(model: MarinMoeLMHeadModel) -> dict[str, NamedArray]:
    """State-dict name -> the leaf, outside the layers."""
    return {
        "model.embed_tokens.weight": model.embeddings.token_embeddings.weight,
        "model.embed_norm.weight": model.embeddings.norm.weight,
        "model.embed_gated_norm.down_proj.weight": model.embeddings.gated_norm.down_proj.weight,
        "model.embed_gated_norm.up_proj.weight": model.embeddings.gated_norm.up_proj.weight,
        "model.norm.weight": model.transformer.norm.weight,
        "model.final_gated_norm.down_proj.weight": model.transformer.final_gated_norm.down_proj.weight,
        "model.final_gated_norm.up_proj.weight": model.transformer.final_gated_norm.up_proj.weight,
        "lm_head.weight": model.lm_head.weight,
    }


# The state dict stores linear weights [out, in] with articulated axes flattened; ours differ in three leaves.
_OURS_IN_OUT = ("mlp.router.weight",)


def _to_golden(name: str, leaf: NamedArray) -> np.ndarray:
    """One layer's leaf, or an outer one, in the state-dict's layout."""
    if name in _OURS_IN_OUT:
        leaf = leaf.rearrange((axes.ROUTER_EXPERTS, axes.EMBED))
    elif name.startswith("mlp.experts.down"):
        leaf = leaf.rearrange((axes.EXPERTS, axes.LATENT, axes.MLP))
    elif name.startswith("mlp.experts."):
        leaf = leaf.rearrange((axes.EXPERTS, axes.MLP, axes.LATENT))
    for heads in (axes.HEADS, axes.KV_HEAD):
        if leaf.has_axis(heads) and leaf.has_axis(axes.HEAD_SIZE):
            leaf = leaf.flatten_axes((heads, axes.HEAD_SIZE), heads)
    return np.asarray(leaf.array)


def _from_golden(name: str, value: np.ndarray, like: NamedArray) -> NamedArray:
    flat = _to_golden(name, hax.named(np.arange(like.array.size).reshape(like.array.shape), like.axes))
    assert flat.shape == value.shape, f"{name}: {flat.shape} against {value.shape}"
    out = np.empty(like.array.size, value.dtype)
    out[flat.reshape(-1)] = value.reshape(-1)
    return hax.named(jnp.asarray(out.reshape(like.array.shape)), like.axes)


def state_dict(model: MarinMoeLMHeadModel) -> dict[str, np.ndarray]:
    """Every parameter (or gradient) of a model by state-dict name; router biases are state and left out."""
    out = {name: _to_golden(name, leaf) for name, leaf in outer_leaves(model).items()}
    for i, block in enumerate(model.transformer.layers.unstacked()):
        out |= {f"model.layers.{i}.{name}": _to_golden(name, leaf) for name, leaf in layer_leaves(block).items()}
    return out


def build_model(
    case: GoldenCase, config: MarinMoeConfig, router_bias: np.ndarray | None = None
) -> MarinMoeLMHeadModel:
    """A model with the golden's weights and router biases ([layers, experts]; None takes those of the case)."""
    Vocab = Axis(axes.VOCAB, case.config["vocab_size"])
    model = eqx.filter_eval_shape(config.build, Vocab, key=jax.random.PRNGKey(0))
    weights = case.group("w/")
    if router_bias is None:
        router_bias = np.stack([weights[f"model.layers.{i}.mlp.router.bias"] for i in range(config.num_layers)])

    outer = outer_leaves(model)
    model = eqx.tree_at(
        lambda m: list(outer_leaves(m).values()),
        model,
        [_from_golden(name, weights[name], leaf) for name, leaf in outer.items()],
        is_leaf=lambda x: isinstance(x, NamedArray),
    )

    def fill(block, i):
        leaves = layer_leaves(block)
        values = [_from_golden(n, weights[f"model.layers.{i}.{n}"], leaf) for n, leaf in leaves.items()]
        block = eqx.tree_at(
            lambda b: list(layer_leaves(b).values()), block, values, is_leaf=lambda x: isinstance(x, NamedArray)
        )
        bias = RouterBias.from_value(hax.named(jnp.asarray(router_bias[i]), config.moe.RouterExperts), hax.zeros(()))
        return eqx.tree_at(lambda b: b.mlp.router.bias, block, bias, is_leaf=lambda x: isinstance(x, RouterBias))

    layers = model.transformer.layers
    if config.scan_layers:
        template = eqx.filter_eval_shape(layers.get_layer, 0)
        blocks = [fill(template, i) for i in range(config.num_layers)]
        stacked = hax.tree_util.tree_map(lambda *leaves: hax.stack(config.Layers, leaves), *blocks)
        return eqx.tree_at(lambda m: m.transformer.layers.stacked, model, stacked)
    blocks = [fill(block, i) for i, block in enumerate(layers.blocks)]
    return eqx.tree_at(lambda m: m.transformer.layers.blocks, model, blocks)


def example(arrays: dict[str, np.ndarray], prefix: str = "in/") -> LmExample:
    """The golden's batch as Levanter packs it."""
    tokens = arrays[f"{prefix}tokens"]
    Batch, Pos = Axis(axes.BATCH, tokens.shape[0]), Axis(axes.POSITION, tokens.shape[1])
    mask = AttentionMask.causal()
    if f"{prefix}segment_ids" in arrays:
        mask = mask.with_segment_ids(hax.named(jnp.asarray(arrays[f"{prefix}segment_ids"]), (Batch, Pos)))
    weight = hax.named(jnp.asarray(arrays[f"{prefix}loss_weight"]), (Batch, Pos))
    return LmExample(hax.named(jnp.asarray(tokens), (Batch, Pos)), weight, mask)
