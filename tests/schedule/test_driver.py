# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The driver runs the stage of the newest checkpoint until none is left, with processes that only count steps."""

import signal
import subprocess
import sys

import pytest
from levanter.data.text.datasets import BlockShuffleConfig

from levanter_marin.schedule.driver import RunInProgressError, children_of_run, drive
from levanter_marin.schedule.stages import Run, StageConfig, Until, plan_stages

PLAN = plan_stages(
    [StageConfig(64, Until(step=8)), StageConfig(128, Until(step=16)), StageConfig(256)],
    Run(24, 8, 256, {"text": 1.0}, BlockShuffleConfig(8, 4), 8),
)


@pytest.fixture
def run(tmp_path):
    """Drives PLAN where a stage's process writes the steps it has done and exits as told."""
    progress = tmp_path / "steps"
    progress.write_text("0")

    def driven(codes=None, lag=0):
        codes = codes or {}
        commands = {
            s.number: [
                sys.executable,
                "-c",
                f"open({str(progress)!r}, 'w').write('{s.end - lag}'); raise SystemExit({codes.get(s.number, 0)})",
            ]
            for s in PLAN.stages
        }
        seen = []
        with children_of_run(tmp_path / "folder") as children:
            code = drive(
                PLAN,
                commands,
                children,
                lambda: int(progress.read_text()),
                lambda stage, done: seen.append((stage.number, done)),
                lambda stage: seen.append(f"border {stage.number}") or 0,
            )
        return code, seen

    driven.progress = progress
    return driven


def test_run_from_the_start_passes_every_stage_and_border(run):
    assert run() == (0, [(1, 0), "border 1", (2, 8), "border 2", (3, 16), "border 3"])


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (11, ["border 1", (2, 11), "border 2", (3, 16), "border 3"]),
        (16, ["border 2", (3, 16), "border 3"]),
        (24, ["border 3"]),
    ],
)
def test_run_goes_on_in_the_stage_of_its_checkpoint(done, expected, run):
    run.progress.write_text(str(done))
    assert run() == (0, expected)


def test_stage_that_fails_ends_the_run_with_its_code(run):
    assert run({2: 7}) == (7, [(1, 0), "border 1", (2, 8)])


def test_stage_without_its_last_checkpoint_is_no_success(run, capsys):
    code, seen = run(lag=1)
    assert code == 1
    assert seen == [(1, 0)]
    assert "its newest checkpoint has 7 of 8 steps" in capsys.readouterr().out


def test_signal_is_passed_on_and_told_by_the_exit_code(tmp_path):
    # The stage sends the signal to the driver, and ends only when it comes back.
    code = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    before = signal.getsignal(signal.SIGTERM)
    with children_of_run(tmp_path) as children:
        commands = {stage.number: [sys.executable, "-c", code] for stage in PLAN.stages}
        assert drive(PLAN, commands, children, lambda: 0, lambda *_: None, lambda _: 0) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_second_driver_of_a_run_is_refused_as_long_as_a_child_lives(tmp_path):
    with children_of_run(tmp_path) as children:
        orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(children._lock,))
    with pytest.raises(RunInProgressError, match=r"\d+"), children_of_run(tmp_path):
        pass
    orphan.communicate(b"\n")
    with children_of_run(tmp_path):
        pass
