# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin describe`: what a training config amounts to, without allocating a weight."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import draccus
from draccus import cfgparsing
from draccus.utils import DraccusException, ParsingError
from levanter.schedule import BatchSchedule, IntSchedule
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from levanter_marin.analysis import counts
from levanter_marin.cli import misspellings
from levanter_marin.cli.errors import UserError
from levanter_marin.models import parameter_counts
from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.models.parameter_counts import Family
from levanter_marin.models.presets import PUBLISHED_VOCAB_SIZE
from levanter_marin.optim.config import HyperballConfig

DESCRIPTION = """Print the layer schedule, parameter counts, FLOPs and initial norms of a training config.

Read from CONFIG: model, train_seq_len, trainer.train_batch_size, trainer.num_train_steps, and for the vocabulary
data.vocab_size or the local tokenizer folder data.tokenizer."""

MODEL_TYPE = "marin_moe"
OPTIMIZER_TYPE = "hyperball"


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code, or raises `UserError`."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin describe", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file as for `levanter-marin train`")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="size of the vocabulary, instead of the config's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    raw = load_raw(options.config)
    model = _decode_model(raw)
    description = describe(model, raw, vocab_size_and_source(raw, options.vocab_size))
    if options.json:
        print(json.dumps(description, indent=2))
    else:
        _print(model, description)
    return 0


def describe(model: MarinMoeConfig, raw: dict[str, Any], vocab: tuple[int, str]) -> dict[str, Any]:
    """Everything the command prints, as plain numbers and strings.

    Args:
        model: the decoded `model` section.
        raw: the whole config as read, for sequence length, batch size and steps.
        vocab: size of the vocabulary and where it comes from.
    """
    vocab_size, vocab_source = vocab
    context_length = _positive_int(raw, "train_seq_len") or model.max_seq_len
    return {
        "vocab_size": vocab_size,
        "vocab_size_source": vocab_source,
        "layers": [dataclasses.asdict(row) for row in counts.layer_schedule(model)],
        "total_parameters": parameter_counts.total_parameters(model, vocab_size),
        "trainable_parameters": parameter_counts.trainable_parameters(model, vocab_size),
        "active_parameters": parameter_counts.active_parameters(model),
        "parameters_by_family": parameter_counts.parameters_by_family(model, vocab_size),
        "active_by_family": parameter_counts.active_by_family(model),
        "context_length": context_length,
        "flops_per_token": parameter_counts.flops_per_token(model, vocab_size, context_length),
        "published_flops_per_token": counts.published_flops_per_token(model, context_length),
        "training": _training(model, raw, vocab_size, context_length),
        "optimizer": _optimizer(raw),
        "init_std": model.init_std,
        "initial_norms": counts.initial_norms(model, vocab_size),
    }


def _training(model: MarinMoeConfig, raw: dict, vocab_size: int, context_length: int) -> dict[str, Any] | None:
    trainer = _section(raw, "trainer")
    steps, batch = _positive_int(trainer, "num_train_steps", "trainer."), trainer.get("train_batch_size")
    if steps is None or batch is None:
        return None
    try:
        schedule = BatchSchedule(draccus.decode(int | IntSchedule, batch))
    except DraccusException as error:
        raise UserError(f"trainer.train_batch_size: {_refusal(error)}") from error
    tokens = schedule.global_data_offset_by_step(steps) * context_length
    flops_per_token = parameter_counts.flops_per_token(model, vocab_size, context_length)
    return {
        "steps": steps,
        "tokens": tokens,
        "tokens_per_active_parameter": tokens / parameter_counts.active_parameters(model),
        "flops": counts.BACKWARD_AND_FORWARD * tokens * flops_per_token,
        "published_flops": counts.published_training_flops(model, tokens, context_length),
    }


def _optimizer(raw: dict[str, Any]) -> dict[str, Any] | None:
    """What the scaling rule and the defaults of hyperball come to; None of any other optimizer."""
    section = {"type": raw["optimizer"]} if isinstance(raw.get("optimizer"), str) else _section(raw, "optimizer")
    if section.get("type") != OPTIMIZER_TYPE:
        return None
    fields = {key: value for key, value in section.items() if key != "type"}
    try:
        return dataclasses.asdict(draccus.decode(HyperballConfig, fields).resolved())
    except DraccusException as error:
        line = misspellings.explain(HyperballConfig, fields, ("optimizer",))
        raise UserError(line or f"optimizer: {_refusal(error)}") from error


def load_raw(path: Path) -> dict[str, Any]:
    """The config as written."""
    try:
        with path.open() as stream:
            raw = cfgparsing.load_config(stream, file=path)
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from error
    except ParsingError as error:
        raise UserError(f"{path} is not readable as YAML: {error.__cause__}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no mapping; a config has sections such as `model:` and `trainer:`")
    return raw


def _section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    section = raw.get(name) or {}
    if not isinstance(section, dict):
        raise UserError(f"`{name}` is {section!r}; make it a section of `key: value` lines")
    return section


def _decode_model(raw: dict[str, Any]) -> MarinMoeConfig:
    section = {"type": raw["model"]} if isinstance(raw.get("model"), str) else _section(raw, "model")
    type_name = section.get("type")
    if type_name != MODEL_TYPE:
        raise UserError(f"describe counts models of `type: {MODEL_TYPE}`; the config's model.type is {type_name}")
    fields = {key: value for key, value in section.items() if key != "type"}
    try:
        return draccus.decode(MarinMoeConfig, fields)
    except DraccusException as error:
        line = misspellings.explain(MarinMoeConfig, fields, ("model",))
        raise UserError(line or f"model: {_refusal(error)}") from error


def _refusal(error: BaseException) -> str:
    """The text of the config's own check when there is one; draccus wraps it in an exception that hides it."""
    while type(error) is ParsingError and error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def _positive_int(section: dict[str, Any], key: str, prefix: str = "") -> int | None:
    value = section.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or value <= 0:
        raise UserError(f"{prefix}{key}={value} must be a positive whole number")
    return value


def vocab_size_and_source(raw: dict[str, Any], option: int | None) -> tuple[int, str]:
    """The size of the vocabulary, and in words where it comes from."""
    if option is not None:
        if option <= 0:
            raise UserError(f"--vocab-size {option} must be positive")
        return option, "--vocab-size"
    data = _section(raw, "data")
    given = _positive_int(data, "vocab_size", "data.")
    if given is not None:
        return given, "data.vocab_size"
    folder = data.get("tokenizer")
    if folder is None:
        return PUBLISHED_VOCAB_SIZE, "published size; the config names no tokenizer"
    tokenizer = Path(folder) / "tokenizer.json"
    if not tokenizer.is_file():
        return PUBLISHED_VOCAB_SIZE, f"published size; no local tokenizer at {folder}"
    try:
        return Tokenizer.from_file(str(tokenizer)).get_vocab_size(with_added_tokens=True), str(tokenizer)
    except Exception as error:  # the only type that `tokenizers` raises
        raise UserError(f"{tokenizer} is no tokenizer: {error}; give --vocab-size") from error


def _print(model: MarinMoeConfig, description: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"vocabulary {description['vocab_size']} ({description['vocab_size_source']})", markup=False)
    console.print(_layer_table(model))
    console.print(_parameter_table(description))
    console.print(_flops_table(description))
    if description["optimizer"] is not None:
        console.print(_optimizer_table(description["optimizer"]))
    console.print(_norm_table(model, description))


def _table(title: str, *columns: str, text_columns: int = 1) -> Table:
    """Text on the left, numbers right-aligned after it."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right", overflow="fold")
    return table


def _layer_table(model: MarinMoeConfig) -> Table:
    table = _table("Layers", "kind", "layers", "count", "window", "KV heads", "RoPE", text_columns=2)
    attention = model.attention
    rows = counts.layer_schedule(model)
    for kind in dict.fromkeys(row.kind for row in rows):
        members = [row for row in rows if row.kind is kind]
        first = members[0]
        rope = f"{first.rope_dim} of {attention.head_dim}, {attention.rope_pairing}" if first.rope_dim else "none"
        table.add_row(
            kind,
            _ranges([row.index for row in members]),
            str(len(members)),
            "every key" if first.window is None else str(first.window),
            f"{first.kv_heads} of {attention.num_kv_heads}",
            rope,
        )
    return table


def _ranges(indices: list[int]) -> str:
    """Rising integers as `0-2 4-6 8`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parameter_table(description: dict[str, Any]) -> Table:
    table = _table("Parameters", "family", "stored", "active")
    active = description["active_by_family"]
    for family, stored in description["parameters_by_family"].items():
        label = f"{family} (state, not trained)" if family is Family.ROUTER_BIAS else family
        table.add_row(label, str(stored), str(active[family]))
    table.add_section()
    total, active_total = description["total_parameters"], description["active_parameters"]
    table.add_row("total", str(total), str(active_total))
    table.add_row("", _short(total), _short(active_total))
    table.add_row("trainable", str(description["trainable_parameters"]), "")
    return table


def _short(count: int) -> str:
    return f"{count / 1e9:.3f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _flops_table(description: dict[str, Any]) -> Table:
    table = _table(
        f"FLOPs at {description['context_length']} tokens a row", "", "of the model", "published convention"
    )
    forward, published = description["flops_per_token"], description["published_flops_per_token"]
    table.add_row("forward, per token", f"{forward:.4e}", f"{published:.4e}")
    training = description["training"]
    if training is not None:
        label = f"training, {training['steps']} steps, {training['tokens']} tokens"
        table.add_row(label, f"{training['flops']:.4e}", f"{training['published_flops']:.4e}")
        table.caption = (
            f"{training['tokens_per_active_parameter']:.1f} tokens per active parameter. "
            "Published convention: no lm_head, gates or convolutions; a last layer off the stride counts as local."
        )
    return table


def _optimizer_table(values: dict[str, float]) -> Table:
    table = _table("Optimizer: hyperball", "peak of the schedule", "value")
    for name, value in values.items():
        table.add_row(name, f"{value:.7g}")
    return table


def _norm_table(model: MarinMoeConfig, description: dict[str, Any]) -> Table:
    table = _table(
        f"Initial norms, std {description['init_std']:.7g}", "weight", "copies x shape", "norm", text_columns=2
    )
    for row in parameter_counts.weight_table(model, description["vocab_size"]):
        shape = " x ".join(str(size) for size in row.shape)
        copies = f"{row.copies} x " if row.copies > 1 else ""
        table.add_row(row.name, f"{copies}[{shape}]", f"{description['initial_norms'][row.name]:.5g}")
    return table
