# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Pictures of a run. The only module that imports matplotlib, an optional dependency (`pip install .[plots]`)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

_FEW = 60  # points, below which each gets a marker


@dataclass(frozen=True)
class Panel:
    """Curves over one x axis, by label; empty ones are left out."""

    title: str
    curves: Mapping[str, Points]


@dataclass(frozen=True)
class Mark:
    """A dashed line through all panels, with its text in the first."""

    x: float
    text: str


def draw_panels(path: Path, title: str, x_label: str, panels: Sequence[Panel], marks: Sequence[Mark] = ()) -> None:
    """Writes a PNG of panels below each other that share their x axis; the file appears when it is complete."""
    figure = Figure(figsize=(9, 1 + 2.1 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel)
        for mark in marks:
            axis.axvline(mark.x, color="gray", linestyle="--", linewidth=0.8)
    for mark in marks:
        axes[0].annotate(
            mark.text,
            (mark.x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -9),
            textcoords="offset points",
            size=8,
        )
    axes[0].set_title(title, fontsize=10)
    axes[-1].set_xlabel(x_label)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)


def _draw(axis, panel: Panel) -> None:
    for label, points in panel.curves.items():
        if points:
            x, y = zip(*points, strict=True)
            axis.plot(x, y, marker="." if len(points) < _FEW else None, linewidth=1, label=label)
    axis.set_ylabel(panel.title, fontsize=8)
    axis.grid(alpha=0.3)
    if len(panel.curves) > 1:
        axis.legend(fontsize=8)
