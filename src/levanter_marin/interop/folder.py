# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A Hugging Face checkpoint folder on disk: reading its headers, and writing it whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from levanter.compat.hf_checkpoints import SAFE_TENSORS_INDEX_NAME, SAFE_TENSORS_MODEL
from safetensors import SafetensorError, safe_open

CONFIG_NAME = "config.json"
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


class StoredTensor(NamedTuple):
    """A tensor as the header of its file describes it; `dtype` is safetensors' name, such as BF16."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


def read_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by name, from the headers alone; the sizes of the files are checked.

    Raises:
        ValueError: a file is missing, truncated or no safetensors file, two files hold one tensor, or the index names
            other tensors than the files hold. The message names the file.
    """
    index = folder / SAFE_TENSORS_INDEX_NAME
    if not index.is_file():
        return _read_header(folder / SAFE_TENSORS_MODEL)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {type(error).__name__} {error}") from error
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in _read_header(folder / file).items():
            if weight_map.get(name) != file:
                raise ValueError(f"{folder / file} holds {name}, which {index.name} expects in {weight_map.get(name)}")
            found[name] = tensor
    absent = [name for name in weight_map if name not in found]
    if absent:
        raise ValueError(f"{folder / weight_map[absent[0]]} lacks {absent[0]}, which {index.name} promises")
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}
            return {name: StoredTensor(tuple(s.get_shape()), s.get_dtype(), file) for name, s in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged ({error}); copy or export it again") from error


def check_replaceable(path: Path) -> None:
    """Refuse a target that is neither absent, nor empty, nor an earlier checkpoint of this kind.

    Raises:
        ValueError: writing would delete files of something else.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / CONFIG_NAME).is_file()):
        raise ValueError(f"{path} exists and is no Hugging Face checkpoint; name a new folder")


def begin(path: Path) -> Path:
    """An empty folder beside `path` to write into; `complete` gives it its name.

    An interruption leaves it with the suffix `.unfinished`, and the next `begin` deletes it.

    Raises:
        ValueError: as `check_replaceable`.
    """
    check_replaceable(path)
    unfinished = unfinished_name(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def complete(path: Path) -> None:
    """Rename what was written after `begin(path)` to `path`; an earlier checkpoint there is deleted after that."""
    replaced = path.with_name(path.name + _REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        os.rename(path, replaced)
    os.rename(unfinished_name(path), path)
    shutil.rmtree(replaced, ignore_errors=True)


def unfinished_name(path: Path) -> Path:
    """The folder that `begin(path)` makes."""
    return path.with_name(path.name + _UNFINISHED)
