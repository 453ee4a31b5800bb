# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A run goes on only in the stages behind its newest checkpoint."""

import dataclasses

import pytest
from levanter.data.text.datasets import BlockShuffleConfig

from levanter_marin.schedule.record import RECORD_FILE, check_against_record, write_record
from levanter_marin.schedule.stages import Run, StageConfig, Until, plan_stages

SETTINGS = {"trainer.seed": 0, "data.components": ["text"]}
RUN = Run(
    num_steps=96,
    batch=16,
    max_seq_len=1024,
    train_weights={"text": 1.0},
    shuffle=BlockShuffleConfig(io_block_size=16, window_blocks=4),
    mixture_block_size=16,
)


def plan(first=32, second=64, total=96, length=256, batch=16):
    stages = [StageConfig(64, Until(step=first)), StageConfig(length, Until(step=second)), StageConfig(1024)]
    return plan_stages(stages, dataclasses.replace(RUN, num_steps=total, batch=batch))


# Steps done, the plan asked for, and what the refusal must say; the run was trained in `plan()`.
REFUSED = {
    "border_moved_behind": (48, plan(first=16), "stage 1 has end=16, but the run was trained with 32, behind its 48"),
    "border_passed": (48, plan(first=16, second=32), "stage 1 has end=16"),
    "current_border_passed": (60, plan(second=48), "stage 2 would end at step 48, which the checkpoint at 60 has pas"),
    "length_changed": (48, plan(length=512), "stage 2 has seq_len=512, but the run was trained with 256"),
    "batch_changed": (16, plan(batch=32), "stage 1 has batch=32, but the run was trained with 16"),
    "run_too_short": (90, plan(total=80), "has done 90 steps, above trainer.num_train_steps=80"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_stages_changed_behind_the_checkpoint_are_refused(case, tmp_path):
    done, asked, expected = REFUSED[case]
    write_record(str(tmp_path), plan(), SETTINGS)
    with pytest.raises(ValueError) as refusal:
        check_against_record(str(tmp_path), asked, SETTINGS, done)
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("done", "asked"),
    [
        (0, plan(length=512)),
        (16, plan(first=16)),
        (16, plan(first=48)),
        (32, plan(first=48)),
        (48, plan(second=80)),
        (60, plan(second=80, total=128)),
        (96, plan(total=128)),
        (96, plan()),
    ],
)
def test_stages_changed_ahead_of_the_checkpoint_are_accepted(done, asked, tmp_path):
    write_record(str(tmp_path), plan(), SETTINGS)
    check_against_record(str(tmp_path), asked, SETTINGS, done)
    write_record(str(tmp_path), asked, SETTINGS)
    check_against_record(str(tmp_path), asked, SETTINGS, done)


def test_other_seed_than_the_run_was_trained_with_is_refused(tmp_path):
    write_record(str(tmp_path), plan(), SETTINGS)
    with pytest.raises(ValueError, match="trainer.seed=1, but the run was trained with 0"):
        check_against_record(str(tmp_path), plan(), SETTINGS | {"trainer.seed": 1}, 8)


def test_run_without_record_beyond_the_first_border_is_refused(tmp_path):
    check_against_record(str(tmp_path), plan(), SETTINGS, 32)
    with pytest.raises(ValueError, match="has done 33 steps without stages .* border of stage 1 at step 32"):
        check_against_record(str(tmp_path), plan(), SETTINGS, 33)


def test_record_leaves_no_partial_file(tmp_path):
    write_record(str(tmp_path / "run"), plan(), SETTINGS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [RECORD_FILE]
