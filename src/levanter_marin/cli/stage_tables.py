# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""How `levanter-marin stages` prints stages, what they read, and how they went."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from levanter_marin.schedule.metrics import StageSummary
from levanter_marin.schedule.reads import Read
from levanter_marin.schedule.stages import Plan

_WIDTH = 119


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    return {
        "stages": [
            dataclasses.asdict(stage)
            | {"steps": stage.steps, "tokens_per_step": stage.tokens_per_step, "tokens": stage.tokens}
            for stage in plan.stages
        ],
        "num_steps": plan.num_steps,
        "tokens": plan.tokens,
        "notes": list(plan.notes),
    }


def print_plan(plan: Plan) -> None:
    rows = [
        (
            f"{stage.number}",
            f"{stage.seq_len:,}",
            f"{stage.batch:,}",
            f"{stage.start:,} - {stage.end:,}",
            f"{stage.tokens_per_step:,}",
            short(stage.tokens),
            _number(stage.qk_mult, ".4f"),
            "dropless" if stage.capacity_factor is None else f"{stage.capacity_factor:.3g}",
        )
        for stage in plan.stages
    ]
    _print(("stage", "length", "batch", "steps", "tokens/step", "tokens", "qk_mult", "capacity"), rows)
    print(f"total: {plan.num_steps:,} steps, {short(plan.tokens)} tokens ({plan.tokens:,})")
    for note in plan.notes:
        print(f"note: {note}")


def print_reads(plan: Plan, found: Sequence[Mapping[str, Read]], token_counts: Mapping[str, int]) -> None:
    """One line a source: what is read of it, and what borders skip."""
    for name, tokens in token_counts.items():
        of_source = [reads[name] for reads in found]
        used = sum(read.end - read.start for read in of_source)
        skipped = sum(later.start - earlier.end for earlier, later in itertools.pairwise(of_source))
        print(
            f"{name}: {tokens:,} tokens, the {len(plan.stages)} stages read {used:,}, borders skip {skipped:,}",
            flush=True,
        )


def print_summaries(plan: Plan, summaries: Iterable[StageSummary]) -> None:
    rows = [
        (
            f"{summary.stage.number}",
            f"{summary.stage.seq_len:,}",
            f"{summary.steps_done:,} of {summary.stage.steps:,}",
            short(summary.steps_done * summary.stage.tokens_per_step),
            _number(summary.loss, ".3f"),
            _number(summary.eval_loss, ".3f"),
            _number(None if summary.drop_fraction is None else 100 * summary.drop_fraction, ".3f"),
            _number(summary.tokens_per_second, ",.0f"),
        )
        for summary in summaries
    ]
    at = f"loss at {plan.stages[0].seq_len:,}"
    _print(("stage", "length", "steps", "tokens", "train loss", at, "drop %", "tokens/s"), rows)


def short(tokens: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.3f}{name}"
    return f"{tokens:.0f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=_WIDTH, markup=False, highlight=False).print(table)
