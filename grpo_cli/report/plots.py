"""Pictures of compared runs. Needs matplotlib (the extra `plot`), which is imported only when something is drawn."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Float

from grpo_cli.report.compare import Arm, Comparison
from grpo_cli.report.curves import AXES, CLOCK, Curve, deviation, mean_curve, spoken
from grpo_cli.support.extras import absent, installed
from grpo_cli.support.formatting import short, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colour-blind safe palette, without the yellow, which is too faint on white paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = "os^Dv*PX"
GREY = "#BBBBBB"
PHASE_COLOURS = {"rollout": "#0072B2", "reward": "#E69F00", "logprobs": "#009E73", "update": "#D55E00", "other": GREY}
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
DRAWN_AXES = {axis: AXES[axis] for axis in (CLOCK, "tokens/generated")} | {"step": "steps"}
DPI = 200
MOST_BARS = 60  # of a picture
NOT_AVERAGED, TARGET = "not averaged", "target accuracy"  # of the legend
NO_PICTURES = absent("matplotlib", "a picture")
LABEL_WIDTH = 48  # characters of a label in a picture; longer ones are broken into lines


T = TypeVar("T")


@dataclass(frozen=True)
class ArmLine:
    """One arm in a picture: the curves whose mean and band are drawn, and those that are not averaged."""

    label: str
    curves: Sequence[Curve]
    unfinished: Sequence[Curve] = ()


def can_draw() -> bool:
    return installed("matplotlib")


def pictures(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG files by name; only those for which some run has data."""
    arms = dict(zip(comparison.names, comparison.arms, strict=True))
    lines = [
        ArmLine(name, arm.curves, [run.curve for run in arm.others if len(run.curve.steps) > 1])
        for name, arm in arms.items()
    ]
    measured = {name: arm for name, arm in arms.items() if arm.mean("peak_bytes")}
    timed = {name: arm.step_seconds for name, arm in arms.items() if arm.step_seconds}
    drawn: dict[str, bytes] = {}
    with paper_style():
        if any(line.curves or line.unfinished for line in lines):
            drawn["accuracy.png"] = png(accuracy_figure(lines, comparison.target, comparison.metric))
        if measured:
            drawn["memory.png"] = png(memory_figure(measured))
        if timed:
            drawn["step_time.png"] = png(step_time_figure(timed))
    return drawn


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def paper_style() -> Iterator[None]:
    """Draws and saves figures in the style of this module."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def accuracy_figure(lines: Sequence[ArmLine], target: float | None, metric: str) -> Figure:
    """Return one panel per axis: mean accuracy of each line, and a band of one standard deviation.

    With more lines than colours, those that end highest are coloured and named and the rest are grey; curves that are
    not averaged are dotted, the target accuracy is dashed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.8 * len(DRAWN_AXES), 3.6), layout="constrained")
    panels = figure.subplots(1, len(DRAWN_AXES), squeeze=False, sharey=True)[0]
    colours = _colours(lines)
    handles: dict[str, Any] = {}
    for panel, (axis, caption) in zip(panels, DRAWN_AXES.items(), strict=True):
        for line in sorted(lines, key=lambda line: line.label in colours):  # grey ones below the others
            handles |= _draw(panel, line, axis, colours)
        if target is not None:
            handles[TARGET] = panel.axhline(target, color="black", ls="--", lw=0.8)
        panel.set_xlabel(caption)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(lambda value, _: short(value).replace(".0", ""))
    panels[0].set_ylabel(_safe(f"held-out {spoken(metric)}"))
    _legend(figure, handles, colours)
    return figure


def _colours(lines: Sequence[ArmLine]) -> dict[str, tuple[str, str]]:
    """Return colour and marker by label, for the labels with the highest last accuracy, as many as there are
    colours."""
    ends: dict[str, float] = {}
    for line in lines:
        last = [curve.accuracy[-1] for curve in (*line.curves, *line.unfinished) if curve.accuracy]
        if last:
            ends[line.label] = max(ends.get(line.label, -1.0), float(np.mean(last)))
    chosen = set(sorted(ends, key=lambda label: -ends[label])[: len(COLOURS)])
    labels = [label for label in ends if label in chosen]
    return {label: (COLOURS[i], MARKERS[i]) for i, label in enumerate(labels)}


def _draw(panel: Axes, line: ArmLine, axis: str, colours: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Draw one line; returns its legend entries."""
    colour, marker = colours.get(line.label, (GREY, ""))
    named: dict[str, Any] = {}
    if line.curves:
        mean = mean_curve(line.curves)
        x, y = np.array(mean.along(axis)), np.array(mean.accuracy)
        every = max(1, len(x) // 8)
        width = 1.6 if marker else 0.8
        named[line.label] = panel.plot(
            x, y, color=colour, lw=width, marker=marker or None, ms=4, markevery=every, mec="white", mew=0.4
        )[0]
        if len(line.curves) > 1 and marker:
            band = deviation(line.curves)
            panel.fill_between(x, np.maximum(y - band, 0), np.minimum(y + band, 1), color=colour, alpha=0.13, lw=0)
    for curve in line.unfinished:
        dots = panel.plot(curve.along(axis), curve.accuracy, color=colour, lw=1.0, ls=":")[0]
        panel.plot(curve.along(axis)[-1:], curve.accuracy[-1:], color=colour, marker="x", ms=5, ls="")
        named[NOT_AVERAGED] = dots
    return named


def _legend(figure: Figure, handles: Mapping[str, Any], colours: Mapping[str, Any]) -> None:
    named = {label: handles[label] for label in (*colours, TARGET, NOT_AVERAGED) if label in handles}
    grey = [label for label in handles if label not in named]
    if grey:
        named[f"{len(grey)} more, which end lower"] = handles[grey[0]]
    if named:
        labels = [_broken(label) for label in named]
        widest = max(len(line) for label in labels for line in label.split("\n"))
        fitting = max(1, min(len(named), 60 * len(DRAWN_AXES) // (widest + 8)))
        figure.legend(list(named.values()), labels, loc="outside lower center", ncols=fitting, fontsize=8)


def memory_figure(arms: Mapping[str, Arm]) -> Figure:
    """Return peak memory of each arm: the mean as a bar, every run as a dot."""
    arms, figure, (panel,) = bars(arms, "peak memory, MiB (dots: single runs)")
    for place, arm in enumerate(arms.values()):
        runs = [run.peak_bytes / 2**20 for run in arm.runs if run.peak_bytes is not None]
        panel.barh(place, float(np.mean(runs)), color=COLOURS[5], height=0.62)
        panel.plot(runs, [place] * len(runs), ls="", marker="o", ms=3, color=COLOURS[6], alpha=0.7)
        write_at_end(panel, size(float(np.mean(runs)) * 2**20), max(runs), place)
    return figure


def step_time_figure(arms: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return mean seconds of a step of each arm, stacked by phase."""
    arms, figure, (panel,) = bars(arms, "mean seconds per step, evaluation and checkpoints left out")
    totals = stacked(figure, panel, list(arms.values()), PHASE_COLOURS)
    for place, total in enumerate(totals):
        write_at_end(panel, f"{total:.3g} s", total, place)
    return figure


def stacked(
    figure: Figure, panel: Axes, bars: Sequence[Mapping[str, float]], colours: Mapping[str, str]
) -> Float[np.ndarray, " bars"]:
    """Draw stacked bars with a legend above; returns where the bars end."""
    ends = np.zeros(len(bars))
    names = [name for name in colours if any(bar.get(name) for bar in bars)]
    for name in names:
        lengths = np.array([bar.get(name, 0.0) for bar in bars])
        panel.barh(range(len(bars)), lengths, left=ends, color=colours[name], height=0.62, label=name)
        ends += lengths
    figure.legend(loc="outside upper center", ncols=len(names), fontsize=8)
    return ends


def write_at_end(panel: Axes, text: str, end: float, place: int) -> None:
    """Write text at the end of a bar."""
    panel.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center")


def bars(arms: Mapping[str, T], *captions: str) -> tuple[Mapping[str, T], Figure, Sequence[Axes]]:
    """Return the first MOST_BARS arms, and a figure for them with a panel per caption and a row per arm, the first
    on top."""
    from matplotlib.figure import Figure

    shown = dict(itertools.islice(arms.items(), MOST_BARS))
    labels = [_broken(name) for name in shown]
    lines = sum(max(1.6, 1 + label.count("\n")) for label in labels)
    figure = Figure(figsize=(3.6 + 3.6 * len(captions), 0.9 + 0.2 * lines), layout="constrained")
    panels = figure.subplots(1, len(captions), sharey=True, squeeze=False)[0]
    left_out = f"\nthe first {len(shown)} of {len(arms)} arms" if len(shown) < len(arms) else ""
    for panel, caption in zip(panels, captions, strict=True):
        panel.set_yticks(range(len(shown)), labels)
        panel.set_ylim(len(shown) - 0.5, -0.5)
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(caption + left_out)
        panel.margins(x=0.12)
    return shown, figure, panels


def _broken(label: str) -> str:
    """Return a label wrapped to LABEL_WIDTH characters and escaped for matplotlib."""
    return _safe("\n".join(textwrap.wrap(label, LABEL_WIDTH)))


def _safe(text: str) -> str:
    """Escape literal text: a dollar would begin a formula, and a leading underscore hides a label from the legend."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
