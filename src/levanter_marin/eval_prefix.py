# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A tracker that records evaluation under another prefix.

Levanter evaluates during training at the length of training. Under context stages that length changes, so that curve
goes to `eval_<length>/...`, and `eval/...` is left to evaluations at one length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import draccus
from levanter.tracker.tracker import Tracker, TrackerConfig

_EVAL = "eval/"


class EvalPrefixTracker(Tracker):
    """Passes everything to `inner`; metrics named `eval/...` become `<prefix>/...`."""

    def __init__(self, inner: Tracker, prefix: str):
        self.inner = inner
        self.prefix = prefix
        self.name = inner.name

    def _renamed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"{self.prefix}/{name.removeprefix(_EVAL)}" if name.startswith(_EVAL) else name: value
            for name, value in metrics.items()
        }

    def _prepare_log(self, metrics: Mapping[str, Any]) -> Any:
        return self.inner._prepare_log(metrics)

    def _prepare_summary(self, metrics: Mapping[str, Any]) -> Any:
        return self.inner._prepare_summary(metrics)

    def _prepare_hyperparameters(self, hparams: Mapping[str, Any]) -> Any:
        return self.inner._prepare_hyperparameters(hparams)

    def log_hyperparameters(self, hparams: dict[str, Any]):
        self.inner.log_hyperparameters(hparams)

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None):
        self.inner.log(self._renamed(metrics), step=step, commit=commit)

    def log_summary(self, metrics: Mapping[str, Any]):
        self.inner.log_summary(self._renamed(metrics))

    def log_artifact(self, artifact_path, *, name: str | None = None, type: str | None = None):
        self.inner.log_artifact(artifact_path, name=name, type=type)

    def validate_artifact(self, artifact_path, *, name: str | None = None, type: str | None = None) -> None:
        self.inner.validate_artifact(artifact_path, name=name, type=type)

    def log_html(self, key: str, html_path, *, step: int | None, commit: bool | None = None):
        self.inner.log_html(key, html_path, step=step, commit=commit)

    def capture_stall_diagnostics(self) -> None:
        self.inner.capture_stall_diagnostics()

    def finish(self):
        self.inner.finish()


@TrackerConfig.register_subclass("eval_prefix")
@dataclass
class EvalPrefixConfig(TrackerConfig):
    """`{type: eval_prefix, prefix: eval_16384, tracker: {type: wandb, ...}}`."""

    prefix: str = "eval"
    # A field of type TrackerConfig would send draccus into endless recursion over its own choices.
    tracker: dict[str, Any] = field(default_factory=lambda: {"type": "json_lines"})
    """The tracker itself, as its own section would be."""

    @cached_property
    def inner(self) -> TrackerConfig:
        return draccus.decode(TrackerConfig, self.tracker)

    def init(self, run_id: str | None) -> Tracker:
        return EvalPrefixTracker(self.inner.init(run_id), self.prefix)
