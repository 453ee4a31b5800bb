# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics of a run as one JSON record a line in a file, without any account or network.

Upstream's `json_logger` writes the same records to the log, between all other lines; `json_file` keeps the last
values only and writes them when the run ends well.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from levanter.tracker.json_logger import JsonLoggerTracker
from levanter.tracker.tracker import NoopTracker, Tracker, TrackerConfig

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 20  # more than any record
_DROP_WARNING = "train/moe/layers_over_drop_warning"


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
        records = logging.Logger(self.name)  # not from getLogger: two runs of one process must not share handlers
        records.addHandler(self.handler)
        super().__init__(records)
        self._dropping = False

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None):
        """Also warns in the log when layers start to drop more assignments than their config tolerates."""
        super().log(metrics, step=step, commit=commit)
        if _DROP_WARNING in metrics:
            layers = int(metrics[_DROP_WARNING])
            if layers > 0 and not self._dropping:
                logger.warning(
                    "step %s: %d layers drop more than moe.dispatch.drop_warning_fraction of their assignments; "
                    "see train/moe/drop_fraction, and raise moe.dispatch.capacity_factor if this lasts",
                    step,
                    layers,
                )
            self._dropping = layers > 0

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
