# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The config of a run beside its checkpoints, so that a checkpoint can be used by its path alone.

A run that continues with another config adds a file: `config-000300.yaml` is that of all steps from the 300th on.
"""

import os
import re
import uuid
from collections.abc import Mapping
from typing import Any

from draccus import cfgparsing
from rigging.filesystem.storage_path import StoragePath

from levanter_marin.cli.errors import UserError

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
