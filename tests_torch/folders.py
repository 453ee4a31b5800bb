# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoint folders as an export makes them, written without JAX."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests/data/goldens"
CODE = ROOT / "src/levanter_marin/interop/hf_code"
HF_CONFIGS = json.loads((GOLDENS / "hf_configs.json").read_text())
AUTO_MAP = {
    "AutoConfig": "configuration_marin_moe.MarinMoeHfConfig",
    "AutoModelForCausalLM": "modeling_marin_moe.GrugMoeForCausalLM",
}


def golden(name: str) -> dict[str, np.ndarray]:
    """Arrays of a golden, the weights included that it shares with another."""
    weights_from = json.loads((GOLDENS / f"{name}.json").read_text())["weights_from"]
    shared = {} if weights_from is None else dict(np.load(GOLDENS / f"{weights_from}.npz"))
    return {k: v for k, v in shared.items() if k.startswith("w/")} | dict(np.load(GOLDENS / f"{name}.npz"))


def weights(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("w/"): value for name, value in arrays.items() if name.startswith("w/")}


def as_schema_1(tensors: dict[str, np.ndarray], config: dict) -> tuple[dict[str, np.ndarray], dict]:
    second = "num_shared_experts latent_dim local_kv_heads global_kv_heads global_every rope_fused".split()
    config = {k: v for k, v in config.items() if k not in second and not k.startswith("sconv")}
    renamed = {name.replace(".shared_experts.0.", ".shared_expert."): value for name, value in tensors.items()}
    return renamed, config | {"grugmoe_artifact_schema_version": 1}


def split_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for name, value in tensors.items():
        if ".mlp.experts." in name:
            bank, rest = name.split(".experts.")
            out |= {f"{bank}.experts.{i}.{rest}": matrix for i, matrix in enumerate(value)}
        else:
            out[name] = value
    return out


def write_folder(folder: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": AUTO_MAP}))
    for file in CODE.glob("*_marin_moe.py"):
        shutil.copy(file, folder)
    return folder


def load(folder: Path, **options):
    """As a user loads an export; every tensor must have found its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        str(folder), trust_remote_code=True, output_loading_info=True, **options
    )
    left = {kind: keys for kind, keys in info.items() if keys}
    assert not left, left
    return model.eval()
