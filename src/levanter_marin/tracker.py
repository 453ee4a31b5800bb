# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics of a run as one JSON record a line in a file, without any account or network.

Upstream's `json_logger` writes the same records to the log, between all other lines; `json_file` keeps the last
values only and writes them when the run ends well.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import jax
from levanter.tracker.json_logger import JsonLoggerTracker
from levanter.tracker.tracker import NoopTracker, Tracker, TrackerConfig

_TAIL_BYTES = 1 << 20  # more than any record


class JsonLinesTracker(JsonLoggerTracker):
    """Appends `hparams`, `log` (with `step`), `summary`, `artifact` and `finish` records to `path`.

    A record reaches the file before the call returns. A resumed run appends, so of two records of one step the later
    counts.
    """

    name = "json_lines"

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_record(path)
        self.handler = logging.FileHandler(path, mode="a", encoding="utf-8")
        logger = logging.Logger(self.name)  # not from getLogger: two runs of one process must not share handlers
        logger.addHandler(self.handler)
        super().__init__(logger)

    def finish(self):
        super().finish()
        self.handler.close()


@TrackerConfig.register_subclass("json_lines")
@dataclass
class JsonLinesConfig(TrackerConfig):
    """Writes `<output_dir>/<run id>/metrics.jsonl`."""

    output_dir: str = "logs"

    def path(self, run_id: str) -> Path:
        return Path(self.output_dir).expanduser() / run_id / "metrics.jsonl"

    def init(self, run_id: str | None) -> Tracker:
        if jax.process_index() != 0:
            return NoopTracker()
        return JsonLinesTracker(self.path(run_id or "unknown"))


def _drop_torn_record(path: Path) -> None:
    """Cuts off the line that a killed run did not finish."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)
