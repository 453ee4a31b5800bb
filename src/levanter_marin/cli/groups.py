# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin groups`: which parameter of a config's model the Hyperball optimizer trains how."""

import argparse
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from levanter.trainer_state import trainables_only
from rich import box
from rich.console import Console
from rich.table import Table

from levanter_marin import axes
from levanter_marin.cli.describe import load_raw, vocab_size_and_source
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.groups import Group, Rule, group_table
from levanter_marin.optim.parameters import MatrixAxes, Parameter

DESCRIPTION = """Print path, axes, group and matrix axes of every parameter, and what share of all parameters it is.

The model may be any that Levanter knows; nothing is allocated. The `groups` of an optimizer of type hyperball count
too; with another optimizer the table shows what hyperball would do."""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code, or raises `UserError`."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin groups", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file as for `levanter-marin train`")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="size of the vocabulary, instead of the config's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    vocab_size, vocab_source = vocab_size_and_source(load_raw(options.config), options.vocab_size)
    rows = describe_groups(str(options.config), vocab_size)
    if options.json:
        print(json.dumps({"vocab_size": vocab_size, "vocab_size_source": vocab_source, "parameters": rows}, indent=2))
        return 0
    console = Console(highlight=False)
    console.print(f"vocabulary {vocab_size} ({vocab_source})", markup=False)
    console.print(_parameter_table(rows))
    console.print(_summary_table(rows))
    return 0


def describe_groups(config_path: str, vocab_size: int) -> list[dict[str, Any]]:
    """One row a parameter, as plain numbers and strings."""
    config = load_train_config(config_path, [])
    extra = config.optimizer.groups if isinstance(config.optimizer, HyperballConfig) else {}
    model = eqx.filter_eval_shape(config.model.build, Axis(axes.VOCAB, vocab_size), key=jax.random.PRNGKey(0))
    try:
        table = group_table(trainables_only(model, True), extra)
    except ValueError as error:
        raise UserError(str(error)) from error
    total = sum(parameter.value.size for parameter, _ in table)
    return [_row(parameter, rule, total) for parameter, rule in table]


def _row(parameter: Parameter, rule: Rule, total: int) -> dict[str, Any]:
    value = parameter.value
    named = isinstance(value, NamedArray)
    return {
        "path": parameter.path,
        "axes": [axis.name for axis in value.axes] if named else [],
        "shape": [axis.size for axis in value.axes] if named else list(value.shape),
        "group": str(rule.group),
        "matrix": None if rule.group is Group.adam else _matrix(value, parameter.matrix_axes),
        "is_gate_or_router": rule.is_gate_or_router,
        "count": value.size,
        "share": value.size / total,
    }


def _matrix(weight: NamedArray, matrix: MatrixAxes) -> dict[str, Any]:
    sizes = {axis.name: axis.size for axis in weight.axes}
    return {
        "inputs": list(matrix.inputs),
        "outputs": list(matrix.outputs),
        "experts": list(matrix.experts),
        "shape": [hax.axis_size([Axis(n, sizes[n]) for n in side]) for side in (matrix.inputs, matrix.outputs)],
    }


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _parameter_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("Parameters", ("path", "axes", "group", "inputs x outputs"), ("share",))
    for row in rows:
        shape = " ".join(f"{name} {size}" for name, size in zip(row["axes"], row["shape"], strict=True))
        role = " (gate or router)" if row["is_gate_or_router"] else ""
        table.add_row(row["path"], shape, row["group"] + role, _sides(row["matrix"]), f"{row['share']:.4%}")
    return table


def _sides(matrix: dict[str, Any] | None) -> str:
    if matrix is None:
        return ""
    inputs, outputs = (" ".join(matrix[side]) for side in ("inputs", "outputs"))
    return f"{inputs} x {outputs}: {matrix['shape'][0]} x {matrix['shape'][1]}"


def _summary_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("Groups", ("group",), ("parameters", "numbers", "share"))
    for group in Group:
        members = [row for row in rows if row["group"] == group]
        numbers, share = sum(row["count"] for row in members), sum(row["share"] for row in members)
        table.add_row(group, str(len(members)), str(numbers), f"{share:.4%}")
    return table
