"""Pictures of compared runs. Needs matplotlib (the extra `plot`), which is imported only when something is drawn."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_cli.report.compare import Arm, Comparison
from grpo_cli.report.curves import AXES, SERIES, Curve, accuracy_label, half_width
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
WIDTH, HEIGHT, DPI = 4.2, 2.6, 200  # of a panel in inches: legible on a phone
LABEL_WIDTH = 48  # characters of a label in a picture; longer ones are broken into lines


def pictures(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG files by name: accuracy, if it was measured, and training by step."""
    import matplotlib

    drawn: dict[str, Figure] = {}
    buffers = dict[str, io.BytesIO]()
    with matplotlib.rc_context(STYLE):
        if any(arm.curves or _unfinished(arm) for arm in comparison.arms):
            drawn["accuracy.png"] = accuracy_figure(comparison.arms, comparison.target, comparison.metric)
        if figure := training_figure(comparison.arms):
            drawn["training.png"] = figure
        for name, figure in drawn.items():
            figure.savefig(buffers.setdefault(name, io.BytesIO()), dpi=DPI, metadata={"Software": None})
    return {name: buffer.getvalue() for name, buffer in buffers.items()}


def accuracy_figure(arms: Sequence[Arm], target: float | None, metric: str) -> Figure:
    """Return one panel per axis, below each other: mean accuracy of each arm, and its 95 % interval as a band.

    Curves that are not averaged are dotted, the target accuracy is dashed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT * len(PANELS)), layout="constrained")
    panels = figure.subplots(len(PANELS), sharey=True)
    for panel, (axis, caption) in zip(panels, PANELS.items(), strict=True):
        for arm, colour, marker in zip(arms, itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False):
            _draw(panel, arm, axis, colour, marker)
        if target is not None:
            panel.axhline(target, color="black", ls="--", lw=0.8, label="target accuracy")
        panel.set_xlabel(caption)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(lambda value, _: short(value).replace(".0", ""))
        panel.set_ylabel(f"held-out {accuracy_label(metric)}")
    _add_legend(figure, panels[0])
    return figure


def training_figure(arms: Sequence[Arm]) -> Figure | None:
    """Return one panel per metric of SERIES that was measured, below each other: each arm's mean over its runs, as
    running means over a twentieth of the steps. None without any."""
    from matplotlib.figure import Figure

    names = [name for name in SERIES if any(run.series[name] for arm in arms for run in arm.runs)]
    if not names:
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT * len(names)), layout="constrained")
    panels = figure.subplots(len(names), squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        for arm, colour in zip(arms, itertools.cycle(COLOURS), strict=False):
            by_step = [run.series[name] for run in arm.runs if run.series[name]]
            if steps := sorted(set.intersection(*map(set, by_step)) if by_step else ()):
                means = np.array([[one[step] for one in by_step] for step in steps]).mean(axis=1)
                width = max(1, len(steps) // 20)
                smooth = np.convolve(means, np.ones(width) / width, mode="valid")
                panel.plot(steps[width - 1 :], smooth, color=colour, lw=1.4, label=_broken(arm.label))
        panel.set_ylabel(SERIES[name])
        panel.set_xlabel("steps")
    _add_legend(figure, panels[0])
    return figure


def _add_legend(figure: Figure, panel: Axes) -> None:
    """Name what the panel shows below the figure."""
    handles, labels = panel.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    widest = max((len(line) for label in named for line in label.split("\n")), default=1)
    columns = max(1, min(len(named), 60 // (widest + 8)))
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, fontsize=8)


def _unfinished(arm: Arm) -> list[Curve]:
    return [run.curve for run in arm.others if len(run.curve.steps) > 1]


def _draw(panel: Axes, arm: Arm, axis: str, colour: str, marker: str) -> None:
    mean = arm.mean_curve
    if mean.steps:
        x, y = np.array(mean.along(axis)), np.array(mean.accuracy)
        every, name = max(1, len(x) // 8), _broken(arm.label)
        panel.plot(x, y, color=colour, lw=1.6, marker=marker, ms=4, markevery=every, mec="white", label=name)
        if len(arm.curves) > 1:
            band = half_width(arm.curves)
            panel.fill_between(x, np.maximum(y - band, 0), np.minimum(y + band, 1), color=colour, alpha=0.13, lw=0)
    for curve in _unfinished(arm):
        panel.plot(curve.along(axis), curve.accuracy, color=colour, lw=1.0, ls=":", label="not averaged")


def _broken(label: str) -> str:
    """Return a label in lines of LABEL_WIDTH characters, as literal text: a dollar would begin a formula, and a leading
    underscore hide the label from the legend."""
    text = "\n".join(textwrap.wrap(label, LABEL_WIDTH)).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
