# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoint folders for tests: goldens as their authors stored them, and a small model of odd sizes."""

import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from safetensors.numpy import save_file

import golden_cases
from levanter_marin import axes
from levanter_marin.config import AttentionConfig, MoeConfig
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel
from levanter_marin.moe.router_bias import RouterBias

HF_CONFIGS = json.loads((golden_cases.EMBEDDED / "hf_configs.json").read_text())
SCHEMA_2_KEYS = (
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

ODD = MarinMoeConfig(
    max_seq_len=16,
    hidden_dim=40,
    num_layers=3,
    global_every=2,
    attention=AttentionConfig(num_heads=4, head_dim=6 * 2, num_kv_heads=2, sliding_window=5, rope_fraction=0.5),
    moe=MoeConfig(
        num_experts=6,
        num_experts_per_token=3,
        expert_dim=20,
        latent_dim=24,
        num_shared_experts=1,
        shared_expert_dim=12,
    ),
)
ODD_VOCAB = 51


def write_folder(folder: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    """A checkpoint of one file, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def golden_folder(folder: Path, name: str) -> Path:
    return write_folder(folder, golden_cases.load(name).group("w/"), HF_CONFIGS[name])


def as_schema_1(tensors: dict[str, np.ndarray], config: dict) -> tuple[dict[str, np.ndarray], dict]:
    config = {key: value for key, value in config.items() if key not in SCHEMA_2_KEYS}
    renamed = {name.replace(".shared_experts.0.", ".shared_expert."): value for name, value in tensors.items()}
    return renamed, config | {"grugmoe_artifact_schema_version": 1}


def split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One matrix an expert instead of banks."""
    out = {}
    for name, value in tensors.items():
        if ".mlp.experts." in name:
            bank, rest = name.split(".experts.")
            out |= {f"{bank}.experts.{i}.{rest}": matrix for i, matrix in enumerate(value)}
        else:
            out[name] = value
    return out


def random_model(config: MarinMoeConfig = ODD, vocab_size: int = ODD_VOCAB) -> MarinMoeLMHeadModel:
    """Every leaf random, the router biases too: fresh ones would hide a leaf that is not carried over."""
    shapes = eqx.filter_eval_shape(config.build, Axis(axes.VOCAB, vocab_size), key=jax.random.PRNGKey(0))
    random = np.random.default_rng(0)

    def fill(leaf):
        if isinstance(leaf, RouterBias):
            bias_axes = leaf.bias.high.axes
            value = random.normal(size=[axis.size for axis in bias_axes]).astype(np.float32) / 3
            # no token count: a checkpoint in the published formats has none
            return RouterBias.from_value(
                hax.named(jnp.asarray(value), bias_axes), hax.zeros(leaf.weight.high.axes, dtype=jnp.float32)
            )
        if isinstance(leaf, NamedArray):
            value = random.normal(size=leaf.array.shape).astype(np.float32) * 0.2
            return hax.named(jnp.asarray(value), leaf.axes)
        return leaf

    return jax.tree.map(fill, shapes, is_leaf=lambda leaf: isinstance(leaf, RouterBias | NamedArray))


def assert_equal_leaves(ours, theirs):
    ours, theirs = (jax.tree_util.tree_leaves_with_path(tree) for tree in (ours, theirs))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))
