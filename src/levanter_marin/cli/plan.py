# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin plan`: memory, all-to-all bytes and FLOPs of a training step, without devices and without arrays."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from levanter.utils.mesh import MeshConfig
from rich import box
from rich.console import Console
from rich.table import Table

from levanter_marin import axes
from levanter_marin.analysis.device_plan import DevicePlan, plan_device
from levanter_marin.analysis.train_state import (
    EXPERT_PARALLEL_MAPPINGS,
    abstract_mesh,
    mapped_mesh_axes,
    with_mesh_sizes,
)
from levanter_marin.cli.describe import load_raw, vocab_size_and_source
from levanter_marin.cli.errors import UserError, did_you_mean
from levanter_marin.cli.preflight import check_sizes
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation

DESCRIPTION = """Print what one training step of CONFIG costs each device of a mesh that need not exist.

Fields of the config are overridden as in `levanter-marin train`, for example --trainer.per_device_parallelism 2.
Parameters, optimizer state and gradients are exact; activations and buffers are an estimate (docs/plan.md)."""

MESH_HELP = """sizes of the mesh axes, instead of the config's; the config's mappings stay, but an axis `expert` that
none of them names gets those of config/mesh"""

GIB = 2**30
GB = 10**9


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code, or raises `UserError`."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin plan",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file as for `levanter-marin train`")
    parser.add_argument("--mesh", metavar="AXIS=N,...", help=MESH_HELP)
    parser.add_argument("--seq", type=int, metavar="N", help="tokens in a row, instead of train_seq_len")
    parser.add_argument("--batch", type=int, metavar="N", help="rows of a step, instead of trainer.train_batch_size")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a device; says whether the step fits")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="size of the vocabulary, instead of the config's")
    parser.add_argument("--cpu", action="store_true", help="count the CPU kernel of the experts, not an accelerator's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = parser.parse_known_args(argv)
    # Nothing here needs an accelerator, and looking for one would reserve its memory.
    jax.config.update("jax_platforms", "cpu")

    config = load_train_config(str(options.config), _overrides(options, overrides))
    if not isinstance(config.model, MarinMoeConfig):
        raise UserError(f"plan knows models of `type: marin_moe`; the config's is {type(config.model).__name__}")
    check_sizes(config)
    vocab_size, vocab_source = vocab_size_and_source(load_raw(options.config), options.vocab_size)
    kernel = GroupedMatmulImplementation.blocked if options.cpu else GroupedMatmulImplementation.ragged_dot
    try:
        if options.mesh is not None:
            config.trainer.mesh = _resized(config.trainer.mesh, parse_mesh(options.mesh))
        _require_used(config.trainer.mesh)
        plan = plan_device(config, vocab_size, abstract_mesh(config.trainer.mesh), kernel)
    except ValueError as error:
        raise UserError(str(error)) from error
    if options.json:
        print(json.dumps({"vocab_size": vocab_size, **as_json(plan, options.memory)}, indent=2))
    else:
        _print(plan, f"vocabulary {vocab_size} ({vocab_source})", options.memory)
    return 0


def parse_mesh(text: str) -> dict[str, int]:
    """`data=1,expert=64` as a mapping.

    Raises:
        UserError: a part is not NAME=SIZE, a size is not positive, a name stands twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not name or not equals or not size.isdigit() or int(size) == 0 or name in sizes:
            raise UserError(f"--mesh {text}: `{part}` is no AXIS=SIZE; write for example data=2,expert=4")
        sizes[name] = int(size)
    return sizes


def as_json(plan: DevicePlan, memory_gib: float | None) -> dict[str, Any]:
    """The plan as plain numbers."""
    fields: dict[str, Any] = dataclasses.asdict(plan)
    fields["bytes"] |= {"working": plan.bytes.working, "peak": plan.bytes.peak}
    fields["bytes"]["activations"] |= {"peak": plan.bytes.activations.peak}
    fields["num_devices"] = plan.num_devices
    fields["all_to_all"] = {
        "bytes_per_layer": plan.layer_all_to_all_bytes,
        "bytes_per_step": plan.all_to_all_bytes,
        "bytes_per_step_all_devices": plan.all_to_all_bytes * plan.num_devices,
    }
    fields["memory"] = None if memory_gib is None else {"bytes": memory_gib * GIB, "fits": fits(plan, memory_gib)}
    return fields


def fits(plan: DevicePlan, memory_gib: float) -> bool:
    return plan.bytes.peak <= memory_gib * GIB


def _overrides(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    for value, field in ((options.seq, "train_seq_len"), (options.batch, "trainer.train_batch_size")):
        if value is not None:
            if value <= 0:
                raise UserError(f"{field}={value} must be positive")
            overrides = [*overrides, f"--{field}", str(value)]
    return overrides


def _resized(mesh: MeshConfig, sizes: dict[str, int]) -> MeshConfig:
    """`mesh` with these sizes; with the mapping for expert parallelism if an expert axis needs one and has none."""
    if sizes.get(axes.EXPERT_MESH_AXIS, 1) > 1 and axes.EXPERT_MESH_AXIS not in mapped_mesh_axes(mesh):
        mesh = dataclasses.replace(mesh, **EXPERT_PARALLEL_MAPPINGS)
    return with_mesh_sizes(mesh, sizes)


def _require_used(mesh: MeshConfig) -> None:
    """Refuse a mesh axis that no mapping names: its devices would all do the same."""
    mapped = mapped_mesh_axes(mesh)
    for name, size in {**mesh.axes, **mesh.dcn_axes}.items():
        if size > 1 and name not in mapped:
            raise UserError(
                f"mesh axis {name}={size} shards nothing: trainer.mesh maps no tensor axis to it"
                f"{did_you_mean(name, mapped)}"
            )


def _print(plan: DevicePlan, vocabulary: str, memory_gib: float | None) -> None:
    console = Console(highlight=False)
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1) or "one device"
    console.print(f"{plan.num_devices} devices: {mesh}; {vocabulary}", markup=False)
    tokens = plan.batch_size * plan.seq_len
    console.print(
        f"{plan.batch_size} rows x {plan.seq_len} tokens = {tokens} a step; "
        f"a device computes {plan.rows} rows at a time, {plan.microbatches} times",
        markup=False,
    )
    console.print(_bytes_table(plan))
    console.print(_exchange_table(plan))
    console.print(_flops_table(plan))
    if memory_gib is not None:
        verdict = "fits" if fits(plan, memory_gib) else "does NOT fit"
        spare = memory_gib * GIB - plan.bytes.peak
        console.print(f"{verdict} {memory_gib:g} GiB: {spare / GIB:+.1f} GiB to spare", markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


def _bytes_table(plan: DevicePlan) -> Table:
    held = plan.bytes
    table = _table("Memory of a device", "", "GB", "")
    rows = (
        ("parameters", held.parameters, "exact"),
        ("optimizer state", held.optimizer_state, "exact"),
        ("gradients", held.gradients, "exact"),
        ("gradient accumulator", held.gradient_accumulator, "exact"),
        ("weights in the compute dtype", held.cast_weights, "exact"),
        ("their gradients", held.cast_gradients, "exact"),
        ("gathered weights of a layer", held.gathered_weights, "estimate"),
        ("activations kept, all layers", held.activations.saved, "estimate"),
        ("activations of one layer's backward pass", held.activations.recomputed + held.activations.layer, "estimate"),
        ("exchange buffers and expert rows", held.expert_rows + held.expert_row_gradients, "estimate"),
        ("logits", held.activations.head, "estimate"),
    )
    for label, size, kind in rows:
        table.add_row(label, _gb(size), kind)
    table.add_section()
    table.add_row("peak", _gb(held.peak), "estimate")
    table.caption = "The peak is no sum: logits, a layer's backward pass and the update do not meet."
    return table


def _gb(size: int) -> str:
    return f"{size / GB:.3f}" if size >= GB / 1000 else f"{size / GB:.6f}"


def _exchange_table(plan: DevicePlan) -> Table:
    exchange = plan.exchange
    table = _table(f"All-to-all: {exchange.implementation}", "", "GB")
    if not exchange.sends:
        table.add_row("nothing is sent", "0")
        return table
    table.add_row("a device, one trip of one layer", _gb(exchange.sent_bytes_per_trip))
    table.add_row(
        f"a device, one layer, {exchange.trips} trips x {plan.microbatches}", _gb(plan.layer_all_to_all_bytes)
    )
    table.add_row(f"a device, {plan.num_layers} layers: a step", _gb(plan.all_to_all_bytes))
    table.add_row("all devices, a step", _gb(plan.all_to_all_bytes * plan.num_devices))
    table.caption = (
        f"{exchange.assignments} assignments x {exchange.row_bytes} bytes; receive buffers hold "
        f"{exchange.receive_rows} rows."
    )
    return table


def _flops_table(plan: DevicePlan) -> Table:
    table = _table("FLOPs of a step", "", "all devices", "a device")
    for label, flops in (("of the model", plan.flops), ("with recomputation", plan.executed_flops)):
        table.add_row(label, f"{flops:.4e}", f"{flops / plan.num_devices:.4e}")
    return table
