# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What a run was trained in, kept beside its checkpoints, and the refusal to continue it otherwise.

Data positions follow from the stages behind the current step. Changing those would silently repeat or lose data.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rigging.filesystem.storage_path import StoragePath

from levanter_marin.schedule.stages import Plan, Stage

RECORD_FILE = "context_stages.json"

# Fields that decide which data a stage has read.
_DATA_FIELDS = ("seq_len", "start", "batch", "train_weights", "shuffle")


def write_record(folder: str, plan: Plan, settings: Mapping[str, Any]) -> None:
    """Replaces the record of a run; never leaves half of one.

    Args:
        folder: of the run's checkpoints, local or remote.
        settings: what else decides about data, such as the seed.
    """
    text = json.dumps({"stages": [_fields(stage) for stage in plan.stages], "settings": dict(settings)}, indent=2)
    if "://" in folder:
        (StoragePath(folder) / RECORD_FILE).write_text(text)
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    partial = Path(folder) / f".{RECORD_FILE}.{os.getpid()}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(Path(folder) / RECORD_FILE)


def check_against_record(folder: str, plan: Plan, settings: Mapping[str, Any], steps_done: int) -> None:
    """Refuses stages in which the run, `steps_done` steps old, has not been trained.

    Stages that have not begun may change, and so may the end of the current one, to a step not yet passed.

    Raises:
        ValueError: one line with what was and what is asked for.
    """
    if steps_done == 0:
        return
    if steps_done > plan.num_steps:
        raise ValueError(
            f"the checkpoint has done {steps_done} steps, above trainer.num_train_steps={plan.num_steps}; raise it, "
            "or start another run with --trainer.id"
        )
    path = StoragePath(folder) / RECORD_FILE
    if not path.exists():
        first = plan.stages[0]
        if steps_done > first.end:
            raise ValueError(
                f"the checkpoint has done {steps_done} steps without stages and so passed the border of stage 1 at "
                f"step {first.end}; set its `until` to step {steps_done} or more, or start another --trainer.id"
            )
        return
    recorded = json.loads(path.read_text())
    for name, value in settings.items():
        if recorded["settings"].get(name) != value:
            raise ValueError(
                f"{name}={value}, but the run was trained with {recorded['settings'].get(name)}; set it back, or "
                "start another run with --trainer.id"
            )
    before = [stage for stage in recorded["stages"] if stage["start"] < steps_done]
    for old, stage in zip(before, plan.stages, strict=False):
        _check_stage(old, stage, steps_done)
    if len(before) > len(plan.stages):
        raise ValueError(
            f"the checkpoint is in stage {len(before)}, the config has {len(plan.stages)} stages; restore the others"
        )
    now = [stage for stage in plan.stages if stage.start < steps_done]
    if len(now) > len(before):
        raise ValueError(
            f"stage {len(before)} would end at step {plan.stages[len(before) - 1].end}, which the checkpoint at "
            f"{steps_done} has passed; set its `until` to step {steps_done} or more"
        )


def _check_stage(old: Mapping[str, Any], stage: Stage, steps_done: int) -> None:
    new = _fields(stage)
    passed = old["end"] < steps_done
    for name in (*_DATA_FIELDS, *(("end",) if passed else ())):
        if old[name] != new[name]:
            raise ValueError(
                f"stage {stage.number} has {name}={new[name]}, but the run was trained with {old[name]}, behind its "
                f"{steps_done} steps; set it back, or start another run with --trainer.id"
            )


def _fields(stage: Stage) -> dict[str, Any]:
    """As JSON gives them back."""
    return json.loads(json.dumps(dataclasses.asdict(stage)))
