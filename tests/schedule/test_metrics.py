# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics of a staged run: recorded under the right prefix, read back once a step, summed up by stage."""

import json

import pytest
from levanter.data.text.datasets import BlockShuffleConfig

from levanter_marin.analysis.plots import Mark, Panel, draw_panels
from levanter_marin.eval_prefix import EvalPrefixTracker
from levanter_marin.schedule import metrics
from levanter_marin.schedule.stages import Run, StageConfig, Until, plan_stages
from levanter_marin.tracker import JsonLinesTracker

PLAN = plan_stages(
    [StageConfig(64, Until(step=8)), StageConfig(128, Until(step=16)), StageConfig(256)],
    Run(24, 8, 256, {"text": 1.0}, BlockShuffleConfig(8, 4), 8),
)


def record(path, tracker, first, last, loss):
    for step in range(first, last):
        tracker.log({metrics.LOSS: loss, metrics.TOKENS_PER_SECOND: 10.0 + step}, step=step)


def test_summaries_count_every_step_once_and_ignore_a_torn_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    record(path, tracker, 0, 11, loss=5.0)
    tracker.log({metrics.EVAL_LOSS: 4.5}, step=7)
    record(path, tracker, 8, 12, loss=3.0)  # resumed from the checkpoint at the border
    tracker.handler.close()
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "log", "step": 12})[:10])
    first, second = metrics.summarize(PLAN, metrics.read_steps(path), steps_done=12)
    assert (first.loss, first.eval_loss, first.steps_done, first.tokens_per_second) == (5.0, 4.5, 8, 14.5)
    assert (second.loss, second.eval_loss, second.steps_done) == (3.0, None, 4)
    assert first.drop_fraction is None


@pytest.mark.parametrize(("done", "tokens"), [(0, 0), (8, 8 * 512), (9, 9 * 512), (24, 24 * 512)])
def test_tokens_seen_follow_the_stages(done, tokens):
    assert metrics.tokens_at(PLAN, done) == tokens


def test_eval_prefix_renames_evaluation_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = EvalPrefixTracker(JsonLinesTracker(path), "eval_128")
    tracker.log({"eval/loss": 1.0, "eval/text/loss": 2.0, "train/loss": 3.0}, step=1)
    tracker.finish()
    assert metrics.read_steps(path) == {1: {"eval_128/loss": 1.0, "eval_128/text/loss": 2.0, "train/loss": 3.0}}


def test_panels_are_one_whole_png(tmp_path):
    path = tmp_path / "pictures" / "run.png"
    draw_panels(path, "a run", "tokens", [Panel("loss", {"a": [(0, 1), (1, 2)], "b": []})], [Mark(0.5, "border")])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
