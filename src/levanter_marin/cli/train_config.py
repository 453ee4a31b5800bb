# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""From a YAML file and command-line overrides to Levanter's `TrainLmConfig`, with one line for every mistake."""

import argparse
import os
from pathlib import Path
from typing import Any

import draccus
import mergedeep
from draccus import cfgparsing
from draccus.argparsing import ArgumentParser
from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.utils import DraccusException, ParsingError
from levanter.config import DEFAULT_CONFIG_DIR
from levanter.main.train_lm import TrainLmConfig

import levanter_marin.registration  # noqa: F401
from levanter_marin.cli import misspellings
from levanter_marin.cli.errors import UserError, did_you_mean

STAGES_KEY = "context_stages"

# Fields for which a bare name stands for {type: name}.
_NAMEABLE = (("model",), ("optimizer",), ("trainer", "tracker"))


def load_train_config(config_path: str, overrides: list[str]) -> TrainLmConfig:
    """Reads `config_path` as upstream's `train_lm --config_path` does, with the same overrides.

    Beyond upstream, `model: NAME` means `model: {type: NAME}`; likewise `optimizer` and `trainer.tracker`. A tracker
    among the overrides replaces the file's, where upstream merges the two.

    Args:
        config_path: a file, its name without .yaml, or the name of a file among Levanter's own configs.
        overrides: `--trainer.num_train_steps 20` and the like; values are YAML.

    Raises:
        UserError: the file is absent or no YAML mapping, an option, type or field is unknown, a value is refused.
    """
    raw = load_raw_config(config_path, overrides)
    if STAGES_KEY in raw:
        raise UserError(f"{config_path} has {STAGES_KEY}; run it with `levanter-marin stages {config_path}`")
    return decode_train_config(raw, config_path)


def load_raw_config(config_path: str, overrides: list[str]) -> dict[str, Any]:
    """The config as a plain mapping: file and overrides merged, bare names expanded, nothing decoded."""
    raw = _read(find_config(config_path))
    _expand_bare_names(raw)
    changes = _parse(overrides)
    if "tracker" in changes.get("trainer", {}) and isinstance(raw.get("trainer"), dict):
        raw["trainer"].pop("tracker", None)  # merged, the fields of two trackers would not fit together
    # A bare name among the overrides replaces the whole mapping of the file, so it is expanded after merging.
    mergedeep.merge(raw, changes)
    _expand_bare_names(raw)
    return raw


def decode_train_config(raw: dict[str, Any], config_path: str) -> TrainLmConfig:
    """`raw` as `TrainLmConfig`; errors as `load_train_config`, in the name of `config_path`."""
    try:
        return draccus.decode(TrainLmConfig, raw)
    except DraccusException as error:
        line = misspellings.explain(TrainLmConfig, raw) or _refusal(error)
        raise UserError(f"{config_path}: {line}") from error


def find_config(config_path: str) -> str:
    """The path of an existing config file, searched where upstream searches it."""
    names = [config_path, f"{config_path}.yaml", f"{config_path}.yml"]
    candidates = names + [os.path.join(DEFAULT_CONFIG_DIR, name) for name in names]
    for candidate in candidates:
        if os.path.isfile(candidate):
            return candidate
    folder, name = os.path.split(config_path)
    neighbours = [path.stem for path in Path(folder).glob("*.yaml")]
    raise UserError(f"no config file {config_path}{did_you_mean(os.path.splitext(name)[0], neighbours)}")


def _read(config_path: str) -> dict[str, Any]:
    try:
        with open(config_path, encoding="utf-8") as file:
            content = cfgparsing.load_config(file, file=config_path)
    except ParsingError as error:
        raise UserError(f"{config_path} is not readable as YAML: {error.__cause__}") from error
    if not isinstance(content, dict):
        raise UserError(f"{config_path} holds no mapping of fields such as `model:`, `data:` and `trainer:`")
    return content


def _parse(overrides: list[str]) -> dict[str, Any]:
    """Upstream's options as a nested mapping, undecoded."""
    parser: ArgumentParser[Any] = ArgumentParser(TrainLmConfig, exit_on_error=False)
    parser.config_class = dict[str, Any]
    for action in parser.parser._actions:
        action.choices = None  # a wrong type is explained like one in the file
    try:
        return parser.parse_args(overrides)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from error
    except DraccusException as error:
        options = parser.parser._option_string_actions
        names = [word.partition("=")[0] for word in overrides if word.startswith("--")]
        unknown = next((name for name in names if name not in options), None)
        if unknown is None:
            raise UserError(str(error)) from error
        raise UserError(f"no option `{unknown}`{did_you_mean(unknown, options)}") from error


def _expand_bare_names(raw: dict[str, Any]) -> None:
    for *parents, key in _NAMEABLE:
        holder: Any = raw
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(holder.get(key), str):
            holder[key] = {CHOICE_TYPE_KEY: holder[key]}


def _refusal(error: BaseException) -> str:
    """The text of the check that refused a value, or else draccus's own."""
    link: BaseException | None = error
    while link is not None:
        # How draccus wraps what a config's __post_init__ raises.
        if type(link) is ParsingError and isinstance(link.__cause__, ValueError):
            return str(link.__cause__)
        if type(link) is ParsingError and isinstance(link.__cause__, TypeError):
            return f"{link} ({link.__cause__})"
        link = link.__cause__
    return str(error)
