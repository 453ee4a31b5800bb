# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the stages of a run one after another, each as a process of its own.

One Levanter trainer cannot change its sequence length. The next stage is always that of the newest committed
checkpoint, so that a run continues wherever it was stopped. No device is touched here: the stages own them.
"""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from levanter_marin.schedule.stages import Plan, Stage

LOCK_FILE = "lock"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunInProgressError(Exception):
    """Another process trains this run."""


class Children:
    """Starts processes one at a time, with the output of this one, and passes signals on to them.

    Each holds the lock of the run for as long as it lives, also when this process is killed.
    """

    def __init__(self, lock: int):
        self._lock = lock
        self._process: subprocess.Popen | None = None
        self.signal: int | None = None
        """The first signal that was passed on."""

    def run(self, command: Sequence[str]) -> int:
        """The exit code of the process: negative is the signal that ended it."""
        if self.signal is not None:
            return -self.signal
        sys.stdout.flush()
        # In a session of its own, so that a terminal's Ctrl-C arrives once.
        self._process = subprocess.Popen(command, pass_fds=(self._lock,), start_new_session=True)
        try:
            return self._process.wait()
        finally:
            self._process = None

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = self.signal or number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


@contextmanager
def children_of_run(folder: Path) -> Generator[Children]:
    """`Children` that hold the lock in `folder`.

    Raises:
        RunInProgressError: names the process that holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunInProgressError(file.read().strip() or "unknown") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        children = Children(file.fileno())
        before = {number: signal.signal(number, children.pass_on) for number in _FORWARDED}
        try:
            yield children
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def drive(
    plan: Plan,
    commands: Mapping[int, Sequence[str]],
    children: Children,
    steps_done: Callable[[], int],
    announce: Callable[[Stage, int], None],
    at_border: Callable[[Stage], int],
) -> int:
    """Trains from the newest checkpoint to the end of the last stage.

    Args:
        commands: for every stage number what trains it to its end; the same command continues it.
        steps_done: steps in the newest committed checkpoint, the only measure of progress.
        announce: called with the stage and the steps done, before it runs.
        at_border: called after a stage that ran to its end, and before the first one to run; an exit code.

    Returns:
        0 when the run is complete, else the exit code of what failed, 128 + the number of a signal passed on.
    """
    done = steps_done()
    finished = [stage for stage in plan.stages if stage.end <= done]
    if finished:
        code = at_border(finished[-1])
        if code or children.signal:
            return _exit_code(code, children)
    while (stage := plan.stage_after(done)) is not None:
        announce(stage, done)
        code = children.run(commands[stage.number])
        before, done = done, steps_done()
        if children.signal is not None or code != 0:
            return _exit_code(code, children)
        if done < stage.end:
            print(
                f"stage {stage.number} ended without an error but its newest checkpoint has {done} of {stage.end} "
                f"steps (before: {before})"
            )
            return 1
        code = at_border(stage)
        if code or children.signal:
            return _exit_code(code, children)
    return 0


def _exit_code(code: int, children: Children) -> int:
    if children.signal is not None:
        return 128 + children.signal
    return code if code > 0 else 128 - code
