# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Evaluates checkpoints of a staged run with Levanter's `eval_lm`, all at the length of the first stage.

As a program it evaluates one: `python -m levanter_marin.cli.stage_evaluation EVAL_LM_CONFIG`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draccus
from draccus import cfgparsing
from levanter.checkpoint import discover_checkpoint_candidates
from levanter.main import eval_lm
from rigging.filesystem.storage_path import StoragePath

import levanter_marin.registration  # noqa: F401
from levanter_marin.cli.training import close_data_loaders
from levanter_marin.schedule.driver import Children
from levanter_marin.schedule.metrics import EVAL_LOSS, read_steps
from levanter_marin.schedule.render import eval_config
from levanter_marin.schedule.stages import Plan, Stage
from levanter_marin.tracker import JsonLinesTracker


class Evaluations:
    """The evaluations of a run, recorded as `eval/...` at the step of their checkpoint among the run's metrics."""

    def __init__(
        self,
        folder: Path,
        checkpoints: str,
        metrics: Path,
        run_id: str,
        plan: Plan,
        rendered: Mapping[int, Mapping[str, Any]],
    ):
        self.folder = folder
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.run_id = run_id
        self.plan = plan
        self.rendered = rendered
        self.failed: list[int] = []

    def catch_up(self, until: Stage, children: Children) -> int:
        """Evaluates every kept checkpoint up to the end of a stage that is not evaluated yet.

        An evaluation that fails is kept in `failed` and stops nothing.

        Returns:
            0, or the code of a process that a signal ended.
        """
        if not self._has_validation_data():
            return 0
        recorded = read_steps(self.metrics)
        for candidate in discover_checkpoint_candidates(self.checkpoints):
            step = candidate.step
            if step >= until.end or EVAL_LOSS in recorded.get(step, {}) or _is_temporary(candidate.path):
                continue
            code = self._evaluate(step, candidate.path, children)
            if children.signal is not None:
                return code
        return 0

    def _evaluate(self, step: int, checkpoint: str, children: Children) -> int:
        stage, first = self.plan.stage_after(step), self.plan.stages[0]
        assert stage is not None
        print(f"\n=== evaluation after {step + 1} steps at {first.seq_len} tokens ===", flush=True)
        name = f"eval-step-{step}"
        config = eval_config(self.rendered[stage.number], first, checkpoint, name, str(self.folder))
        path = self.folder / f"{name}.yaml"
        with path.open("w", encoding="utf-8") as file:
            cfgparsing.save_config(config, file, sort_keys=False)
        result = self.folder / name / "metrics.jsonl"
        result.unlink(missing_ok=True)
        code = children.run([sys.executable, "-m", __spec__.name, str(path)])
        # The exit code alone would not tell: the record does.
        metrics = read_steps(result).get(0, {})
        if EVAL_LOSS not in metrics:
            self.failed.append(step)
            return code
        tracker = JsonLinesTracker(self.metrics)
        tracker.log({name: value for name, value in metrics.items() if name.startswith("eval/")}, step=step)
        tracker.handler.close()
        return 0

    def _has_validation_data(self) -> bool:
        components = self.rendered[1].get("data", {}).get("components", {}).values()
        sources = [component.get("source") for component in components]
        return any(
            source is None or source.get("type") != "url" or source.get("validation_urls") for source in sources
        )


def _is_temporary(checkpoint: str) -> bool:
    metadata = (StoragePath(checkpoint) / "metadata.json").read_text()
    return bool(json.loads(metadata).get("is_temporary", False))


def run(config_path: str) -> int:
    """Evaluates as `python -m levanter.main.eval_lm --config_path CONFIG_PATH` does, and ends its threads."""
    with open(config_path, encoding="utf-8") as file:
        config = draccus.decode(eval_lm.EvalLmConfig, cfgparsing.load_config(file, file=config_path))
    try:
        eval_lm.main(config)
    finally:
        close_data_loaders()
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
