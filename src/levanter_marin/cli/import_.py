# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin import`: a native checkpoint from a Hugging Face folder, read back before it counts."""

import argparse
import logging
from enum import StrEnum
from pathlib import Path
from typing import Any

import draccus
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from levanter.checkpoint import load_checkpoint, save_checkpoint
from levanter.utils.jax_utils import local_cpu_mesh

from levanter_marin.cli.errors import UserError
from levanter_marin.cli.run_config import write_run_config
from levanter_marin.interop.converter import MarinMoeConverter
from levanter_marin.interop.folder import CONFIG_NAME
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel

DESCRIPTION = """Write the weights of a Hugging Face folder, of either format and layout, as a native checkpoint.

The output is a run folder: the checkpoint `step-0`, and a config beside it with the model and the tokenizer, so that
other commands take the folder by its path alone. Every array is compared with what was written."""

_DTYPES = ("float32", "bfloat16")


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code, or raises `UserError`."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin import", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with config.json and safetensors")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new folder for the checkpoint")
    parser.add_argument("--dtype", choices=_DTYPES, default=_DTYPES[0], help="(%(default)s)")
    options = parser.parse_args(argv)
    if not (options.folder / CONFIG_NAME).is_file():
        raise UserError(f"no {CONFIG_NAME} in {options.folder}; name the folder of a Hugging Face checkpoint")
    if options.output.exists() and any(options.output.iterdir()):
        raise UserError(f"{options.output} exists and is not empty; name a new folder")

    logging.getLogger("levanter.tensorstore_serialization").setLevel(logging.ERROR)
    checkpoint = options.output / "step-0"
    with local_cpu_mesh():
        model = load(options.folder, jnp.dtype(options.dtype))
        write_run_config(run_config(model.config, options.folder), str(options.output), 0)
        save_checkpoint({"model": model}, 0, checkpoint, is_temporary=False)
        check_written(model, checkpoint)
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    print(f"written     {checkpoint}, every array read back and equal")
    print(f"arrays      {len(leaves)}, {sum(leaf.nbytes for leaf in leaves)} bytes")
    print(f"parameters  {sum(value.size for value in model.flatten_for_export().tensors.values())}")
    if not (options.folder / "tokenizer.json").is_file():
        print(f"tokenizer   none in {options.folder}; `generate` and `export` need --tokenizer FOLDER")
    print(f"use         levanter-marin train CONFIG --initialize_model_from_checkpoint_path {checkpoint}")
    return 0


def load(folder: Path, dtype: jnp.dtype) -> MarinMoeLMHeadModel:
    """The model of a Hugging Face folder.

    Raises:
        UserError: config.json or the tensors are not of this family, or a file is damaged; in one line.
    """
    try:
        converter = MarinMoeConverter(MarinMoeConfig, reference_checkpoint=str(folder.resolve()))
        return converter.load_pretrained(MarinMoeLMHeadModel, dtype=dtype)
    except (ValueError, OSError) as error:  # the latter from transformers, of a config.json that is no JSON
        raise UserError(str(error)) from error


def run_config(model: MarinMoeConfig, folder: Path) -> dict[str, Any]:
    """The sections of a training config that the checkpoint fixes."""
    raw: dict[str, Any] = {"model": {"type": "marin_moe", **_without_enums(draccus.encode(model))}}
    if (folder / "tokenizer.json").is_file():
        raw["data"] = {"tokenizer": str(folder.resolve())}
    return raw


def _without_enums(value: Any) -> Any:
    """Enum members as the plain strings that YAML can hold."""
    if isinstance(value, dict):
        return {key: _without_enums(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_enums(entry) for entry in value]
    return str(value) if isinstance(value, StrEnum) else value


def check_written(model: MarinMoeLMHeadModel, checkpoint: Path) -> None:
    """Compare every array of a native checkpoint with the model.

    Raises:
        ValueError: names the first that differs.
    """
    stored = load_checkpoint(eqx.filter_eval_shape(lambda m: m, model), checkpoint, subpath="model")
    pairs = zip(jax.tree_util.tree_leaves_with_path(model), jax.tree.leaves(stored), strict=True)
    for (path, ours), theirs in pairs:
        if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
            raise ValueError(f"{checkpoint}: {jax.tree_util.keystr(path)} is not what was written")
