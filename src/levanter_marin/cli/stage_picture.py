# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The picture of a staged run: loss, learning rate, tokens/s and drop fraction over tokens, with stage marks."""

from pathlib import Path

from levanter_marin.analysis.plots import Mark, Panel, draw_panels
from levanter_marin.schedule import metrics
from levanter_marin.schedule.render import IN_RUN_EVAL
from levanter_marin.schedule.stages import Plan


def draw(path: Path, title: str, plan: Plan, steps: dict[int, dict[str, float]]) -> None:
    """Writes the picture of what `metrics.read_steps` found."""
    first = plan.stages[0]
    losses = {"training": metrics.over_tokens(plan, steps, metrics.LOSS)}
    losses[f"eval/loss (at {first.seq_len})"] = metrics.over_tokens(plan, steps, metrics.EVAL_LOSS)
    for stage in plan.stages:
        prefix = IN_RUN_EVAL.format(length=stage.seq_len)
        losses[f"{prefix}/loss"] = metrics.over_tokens(plan, steps, f"{prefix}/loss")
    panels = [
        Panel("loss", {label: points for label, points in losses.items() if points}),
        Panel("learning rate", {"": metrics.over_tokens(plan, steps, metrics.LEARNING_RATE)}),
        Panel("tokens/s", {"": metrics.over_tokens(plan, steps, metrics.TOKENS_PER_SECOND)}),
        Panel("drop fraction", {"": metrics.over_tokens(plan, steps, metrics.DROP_FRACTION)}),
    ]
    marks = [
        Mark(metrics.tokens_at(plan, s.start), f"{s.seq_len} tokens")
        for s in plan.stages
        if s.start == 0 or s.start - 1 in steps
    ]
    draw_panels(path, title, "tokens", panels, marks)
