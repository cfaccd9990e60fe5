"""A picture of compared runs. Needs matplotlib (the extra `plot`), which is imported only when something is drawn."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_cli.report.compare import Arm, Comparison
from grpo_cli.report.curves import AXES, Curve, accuracy_label, deviation
from grpo_cli.support.formatting import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colour-blind safe palette, without the yellow, which is too faint on white paper. With seven markers
# no two of 56 arms look alike.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = "os^Dv*P"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
PANELS = {**AXES, "step": "steps"}
DPI = 200
LABEL_WIDTH = 48  # characters of a label in a picture; longer ones are broken into lines


def pictures(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG files by name; none if no run was evaluated."""
    import matplotlib

    if not any(arm.curves or _unfinished(arm) for arm in comparison.arms):
        return {}
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = accuracy_figure(comparison.arms, comparison.target, comparison.metric)
        figure.savefig(buffer, dpi=DPI, metadata={"Software": None})
    return {"accuracy.png": buffer.getvalue()}


def accuracy_figure(arms: Sequence[Arm], target: float | None, metric: str) -> Figure:
    """Return one panel per axis: mean accuracy of each arm, and a band of one standard deviation.

    Curves that are not averaged are dotted, the target accuracy is dashed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.8 * len(PANELS), 3.6), layout="constrained")
    panels = figure.subplots(1, len(PANELS), squeeze=False, sharey=True)[0]
    for panel, (axis, caption) in zip(panels, PANELS.items(), strict=True):
        for arm, colour, marker in zip(arms, itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False):
            _draw(panel, arm, axis, colour, marker)
        if target is not None:
            panel.axhline(target, color="black", ls="--", lw=0.8, label="target accuracy")
        panel.set_xlabel(caption)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(lambda value, _: short(value).replace(".0", ""))
    panels[0].set_ylabel(f"held-out {accuracy_label(metric)}")
    handles, labels = panels[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    widest = max((len(line) for label in named for line in label.split("\n")), default=1)
    columns = max(1, min(len(named), 60 * len(PANELS) // (widest + 8)))
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, fontsize=8)
    return figure


def _unfinished(arm: Arm) -> list[Curve]:
    return [run.curve for run in arm.others if len(run.curve.steps) > 1]


def _draw(panel: Axes, arm: Arm, axis: str, colour: str, marker: str) -> None:
    mean = arm.mean_curve
    if mean.steps:
        x, y = np.array(mean.along(axis)), np.array(mean.accuracy)
        every, name = max(1, len(x) // 8), _broken(arm.label)
        panel.plot(x, y, color=colour, lw=1.6, marker=marker, ms=4, markevery=every, mec="white", label=name)
        if len(arm.curves) > 1:
            band = deviation(arm.curves)
            panel.fill_between(x, np.maximum(y - band, 0), np.minimum(y + band, 1), color=colour, alpha=0.13, lw=0)
    for curve in _unfinished(arm):
        panel.plot(curve.along(axis), curve.accuracy, color=colour, lw=1.0, ls=":", label="not averaged")


def _broken(label: str) -> str:
    """Return a label in lines of LABEL_WIDTH characters, as literal text: a dollar would begin a formula, and a leading
    underscore hide the label from the legend."""
    text = "\n".join(textwrap.wrap(label, LABEL_WIDTH)).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
