# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The config of a run beside its checkpoints, so that a checkpoint can be used by its path alone.

A run that continues with another config adds a file: `config-000300.yaml` is that of all steps from the 300th on.
"""

import dataclasses
import os
import re
import uuid
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
from draccus import cfgparsing
from haliax import Axis
from levanter.models.lm_model import LmConfig
from rigging.filesystem.storage_path import StoragePath

from levanter_marin import axes
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.train_config import decode_train_config, load_raw_config

_FILE = "config-{start:06d}.yaml"
_NAME = re.compile(r"config-(\d+)\.yaml")
_STEP = re.compile(r"step-(\d+)")


def write_run_config(raw: Mapping[str, Any], folder: str, start: int) -> None:
    """Writes the config of a run for its steps from `start` on; one that was written there before is replaced.

    Args:
        raw: the config as read; a tokenizer folder of this machine is written with its absolute path.
        folder: where the run's checkpoints are, on any file system that Levanter knows.
    """
    raw = dict(raw)
    tokenizer = raw.get("data", {}).get("tokenizer")
    if tokenizer is not None and os.path.isdir(tokenizer):
        raw["data"] = {**raw["data"], "tokenizer": os.path.abspath(tokenizer)}
    target = StoragePath(folder) / _FILE.format(start=start)
    target.parent.mkdirs()
    # every process of a run may write the same at once
    partial = target.parent / f"{target.name}.{uuid.uuid4().hex}.partial"
    with partial.open("w") as file:
        cfgparsing.save_config(raw, file, sort_keys=False)
    partial.rename(target)


def find_run_config(checkpoint: str) -> str:
    """The path of the config that `checkpoint`, a `step-N` folder or that of a run, was trained with.

    Raises:
        UserError: there is none.
    """
    path = StoragePath(checkpoint.rstrip("/"))
    step = _STEP.fullmatch(path.name)
    folder = path.parent if step else path
    entries = folder.ls() if folder.isdir() else []
    starts = {int(match[1]): str(entry) for entry in entries if (match := _NAME.fullmatch(entry.name))}
    known = [start for start in starts if step is None or start <= int(step[1])]
    if not known:
        raise UserError(
            f"no config-*.yaml in {folder} tells how {checkpoint} was trained, which `levanter-marin train` writes; "
            "give the training config with --config"
        )
    return starts[max(known)]


def check_same_weights(model: LmConfig, checkpoint: str) -> None:
    """Refuses to continue a checkpoint with a model of other weights, where the config beside it tells which it has.

    Raises:
        UserError: names the fields in which the two models differ, with both values.
    """
    try:
        path = find_run_config(checkpoint)
        raw = load_raw_config(path, [])
        trained = decode_train_config({key: raw[key] for key in ("model",) if key in raw}, path).model
    except UserError:  # none, or of another version
        return
    if _shapes(model) == _shapes(trained):
        return
    ours, theirs = ({"type": type(config).__name__, **_fields(config, "")} for config in (model, trained))
    differing = [name for name in ours if ours[name] != theirs.get(name, ours[name])]
    raise UserError(
        f"{checkpoint} has other weights than the model of the config: "
        + ", ".join(f"model.{name}={ours[name]} (checkpoint: {theirs[name]})" for name in differing)
        + "; take over the checkpoint's, or start another run with another --trainer.id"
    )


def _shapes(model: LmConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Of every weight, for a vocabulary of one token."""
    weights = eqx.filter_eval_shape(model.build, Axis(axes.VOCAB, 1), key=jax.random.PRNGKey(0))
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(weights, lambda leaf: hasattr(leaf, "shape")))
    return [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in leaves]


def _fields(config: Any, prefix: str) -> dict[str, Any]:
    """The fields of nested dataclasses by dotted name."""
    if not dataclasses.is_dataclass(config):
        return {prefix.removesuffix("."): config}
    return {
        name: value
        for field in dataclasses.fields(config)
        for name, value in _fields(getattr(config, field.name), f"{prefix}{field.name}.").items()
    }
