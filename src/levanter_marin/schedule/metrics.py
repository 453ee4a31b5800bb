# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Reads the metrics of a staged run back, for its closing table and its picture."""

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from levanter_marin.schedule.stages import Plan, Stage

LOSS = "train/loss"
DROP_FRACTION = "train/moe/drop_fraction/mean"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
LEARNING_RATE = "optim/learning_rate"
EVAL_LOSS = "eval/loss"

_WARM_UP = 2  # steps of a process that compile


@dataclass(frozen=True)
class StageSummary:
    """A stage as it went; None where nothing was recorded."""

    stage: Stage
    steps_done: int
    loss: float | None
    """Mean of the last tenth of the stage."""
    drop_fraction: float | None
    """Mean over the stage."""
    tokens_per_second: float | None
    """Median over the stage."""
    eval_loss: float | None
    """Of the stage's last evaluation at the length of the first stage."""


def read_steps(path: Path) -> dict[int, dict[str, float]]:
    """All metrics of every step, as recorded last: a resumed run records some steps twice."""
    steps: dict[int, dict[str, float]] = {}
    if not path.exists():
        return steps
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break  # still being written
            record: dict[str, Any] = json.loads(line)
            if record.get("event") == "log" and record.get("step") is not None:
                steps.setdefault(record["step"], {}).update(record["metrics"])
    return dict(sorted(steps.items()))


def summarize(plan: Plan, steps: dict[int, dict[str, float]], steps_done: int) -> list[StageSummary]:
    """One summary for each stage that has begun."""
    summaries = []
    for stage in plan.stages:
        if stage.start >= steps_done:
            break
        end = min(stage.end, steps_done)
        of_stage = [steps[step] for step in range(stage.start, end) if step in steps]
        tail = of_stage[-max(1, len(of_stage) // 10) :]
        evals = _values(of_stage, EVAL_LOSS)
        speeds = _values(of_stage[_WARM_UP:], TOKENS_PER_SECOND)
        summaries.append(
            StageSummary(
                stage=stage,
                steps_done=end - stage.start,
                loss=_mean(_values(tail, LOSS)),
                drop_fraction=_mean(_values(of_stage, DROP_FRACTION)),
                tokens_per_second=statistics.median(speeds) if speeds else None,
                eval_loss=evals[-1] if evals else None,
            )
        )
    return summaries


def _values(steps: Iterable[dict[str, float]], name: str) -> list[float]:
    return [metrics[name] for metrics in steps if name in metrics]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def tokens_at(plan: Plan, steps_done: int) -> int:
    """Tokens seen after so many steps of the run."""
    return sum(max(0, min(s.end, steps_done) - s.start) * s.tokens_per_step for s in plan.stages)


def over_tokens(plan: Plan, steps: dict[int, dict[str, float]], name: str) -> list[tuple[float, float]]:
    """(tokens seen, value) of every step at which a metric was recorded."""
    return [(tokens_at(plan, step + 1), metrics[name]) for step, metrics in steps.items() if name in metrics]
