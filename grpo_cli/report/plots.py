"""Pictures of compared runs. Needs matplotlib (the extra `plot`), which is imported only when something is drawn."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_cli.report.compare import Arm, Comparison
from grpo_cli.report.curves import AXES, SERIES, Curve, accuracy_label, interval, mean_curve
from grpo_cli.report.overview import overview

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colour-blind safe palette, without the yellow and the light blue, which are too faint on white paper.
# With seven markers no two of 56 arms look alike.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#882255", "#000000", "#8C6D31")
MARKERS = "os^DvXP"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.titlesize": 8,
    "pdf.fonttype": 42,  # which journals take
}
WIDTH, HEIGHT, LINE, DPI = 4.2, 2.6, 0.16, 200  # of a panel and a line below in inches: legible on a phone
BAND = "95% interval over "
LABEL_WIDTH = 48  # characters of a label in a picture; longer ones are broken into lines


def pictures(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG and PDF files by name: accuracy (of one arm by step only) and training by step, if measured."""
    import matplotlib

    drawn = [arm for arm in comparison.arms if any(run.curve.steps for run in (*arm.runs, *arm.others))]
    axes, label = list(AXES) if len(drawn) > 1 else ["step"] * len(drawn), accuracy_label(comparison.metric)
    measured = [name for name in SERIES if any(run.series[name].steps for arm in comparison.arms for run in arm.runs)]
    figures = {"accuracy": [(axis, comparison.metric, f"held-out {label}") for axis in axes]}
    figures |= {"training": [("step", name, SERIES[name]) for name in measured]}
    files, undated = dict[str, bytes](), {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a name that the font cannot write
        for name, panels in figures.items():
            figure = _figure(comparison, panels)
            for kind, metadata in undated.items() if panels else ():
                figure.savefig(buffer := io.BytesIO(), format=kind, dpi=DPI, metadata=metadata)
                files[f"{name}.{kind}"] = buffer.getvalue()
    return files


def _figure(comparison: Comparison, panels: Sequence[tuple[str, str, str]]) -> Figure:
    """Return panels below each other, given as axis, metric and its label: each arm's mean over its runs, and its 95%
    interval as a band. Curves that are not averaged are dotted, the target accuracy is dashed."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    named: dict[str, Artist] = {}
    for i, (axis, metric, label) in enumerate(panels, 1):
        smoothed = any(
            _window(run.series[metric]) > 1 for arm in comparison.arms for run in arm.runs if metric in SERIES
        )
        label += "\n(running mean)" * smoothed
        panel = figure.add_subplot(len(panels), 1, i, xlabel=AXES[axis], ylabel=label)
        for j, arm in enumerate(comparison.arms):
            _draw(panel, arm, axis, metric, COLOURS[j % len(COLOURS)], MARKERS[j % len(MARKERS)])
        if metric == comparison.metric and comparison.target is not None:
            words = f"target {comparison.target:.3f}: {comparison.target_is}"
            panel.axhline(comparison.target, color="black", ls="--", lw=0.8, label=words)
        panel.set_xlim(left=0)
        panel.locator_params("x", integer=axis == "step")
        panel.xaxis.set_major_formatter(_tick)
        named |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    named = dict(sorted(named.items(), key=lambda pair: pair[0].startswith(BAND)))  # after the arms
    lines = [line for label in named for line in label.split("\n")]
    columns = max(1, min(len(named), 60 // (max(map(len, lines), default=0) + 8)))
    figure.set_size_inches(WIDTH, HEIGHT * len(panels) + LINE * len(lines) / columns)
    figure.suptitle(_broken(next(overview(comparison), "")))
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, fontsize=8)
    return figure


def _draw(panel: Axes, arm: Arm, axis: str, metric: str, colour: str, marker: str) -> None:
    """Draw an arm: accuracies as they are, other metrics as running means over a twentieth of the steps."""
    curves = [curve for run in arm.runs if (curve := run.series.get(metric, run.curve)).steps]
    mean, is_accuracy = mean_curve(curves), metric not in SERIES
    if mean.steps:
        several, x = len(curves) > 1, mean.axes[axis]
        ends = interval(curves) if several else np.transpose(curves[0].intervals)
        ends = np.clip(ends, 0 if min(mean.values) >= 0 else -np.inf, 1 if is_accuracy else np.inf)
        if several and is_accuracy:  # no interval where all agree, as in the table
            ends[:, ends[0] == ends[1]] = np.nan
        width = 1 if is_accuracy else _window(mean)
        y, low, high = (np.convolve(line, np.ones(width) / width, mode="valid") for line in (mean.values, *ends))
        style: Any = {"marker": marker, "ms": 4, "mec": "white", "markevery": max(1, len(y) // 8)}
        panel.plot(x[width - 1 :], y, color=colour, lw=1.5, label=_broken(arm.label), clip_on=False, zorder=3, **style)
        panel.fill_between(x[width - 1 :], low, high, color=colour, alpha=0.13, lw=0)
        if np.isfinite(low).any():
            panel.plot((), (), color="grey", alpha=0.3, lw=6, label=BAND + ("seeds" if several else "problems"))
    name = _broken(f"{arm.label}, not averaged")
    for curve in [run.curve for run in arm.others if is_accuracy and run.curve.steps]:
        panel.plot(curve.axes[axis], curve.values, color=colour, lw=1.0, ls=":", label=name)


def _window(curve: Curve) -> int:
    """Return over how many steps a curve is averaged in a picture."""
    return max(1, len(curve.steps) // 20)


def _tick(value: float, _: Any) -> str:
    """Return a number of an axis with all its digits.

    >>> _tick(0.05, 0), _tick(250.0, 0), _tick(1250.0, 1), _tick(2e6, 2)
    ('0.05', '250', '1.25k', '2M')
    """
    size, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / size:g}{unit}"


def _broken(label: str) -> str:
    """Return a label in lines of LABEL_WIDTH characters, as literal text: a dollar would begin a formula, and a leading
    underscore hide the label from the legend."""
    text = "\n".join(textwrap.wrap(label, LABEL_WIDTH)).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
