"""Compared runs as tables of text; and as JSON, with every digit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from grpo_cli.report.asked import Setting
from grpo_cli.report.compare import Arm, Comparison, Estimate
from grpo_cli.report.curves import Curve, spoken
from grpo_cli.report.read import Run
from grpo_cli.support.formatting import duration, short, shown, size, sparkline

NOTHING = "–"
SPARKS, SPARK_WIDTH = "accuracy by step", 16
REMARKS, SET_APART = "remarks", "not averaged"


@dataclass(frozen=True)
class Table:
    """Rows of text under column names. `numeric` columns are right-aligned; `marked` is the row of the best arm."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()
    marked: int | None = None
    title: str = ""

    def without(self, *columns: str) -> Table:
        kept = [place for place, name in enumerate(self.columns) if name not in columns]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in kept), rows=rows)


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _share(share: float) -> str:
    return f"{share:.3f}"


# Columns of means over an arm's runs: the attribute of a run, and its format.
MEANS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "training time": ("seconds", _seconds),
    "generated tokens": ("generated_tokens", short),
    "trained tokens": ("trained_tokens", short),
    "peak memory": ("peak_bytes", size),
    "last entropy": ("entropy", _share),
    "last turns": ("turns", lambda turns: f"{turns:.2f}"),
}
SOMETIMES = ("last entropy", "last turns")  # runs of older versions lack the one, runs of one turn the other


def arm_table(comparison: Comparison, settings: bool = True) -> Table:
    """Return one row per arm: its settings (or its number), then means over its completed runs.

    Accuracies come with their intervals (a star marks one over problems).
    """
    target, arms = comparison.target, comparison.arms
    columns = comparison.columns if settings else ("arm",)
    reaching = "time to target" if target is None else f"time to {target:.3f}"
    numbers = ("runs", "final accuracy", "best accuracy", reaching, *MEANS)
    rows = []
    for place, (arm, spark) in enumerate(zip(arms, _sparks(arms), strict=True), start=1):
        counts = Counter(run.state.value for run in arm.others)
        rows.append(
            (
                *(_settings(arm.settings, columns) if settings else [str(place)]),
                str(len(arm.runs)),
                *(_with_interval(found) for found in (arm.final_accuracy, arm.best_accuracy)),
                NOTHING if target is None else _reached(arm, target),
                *(form(mean.mean) if (mean := arm.mean(name)) else NOTHING for name, form in MEANS.values()),
                spark,
                ", ".join(f"{number} {state}" for state, number in counts.items()),
            )
        )
    marked = arms.index(comparison.best) if comparison.best else None
    table = Table((*columns, *numbers, SPARKS, SET_APART), tuple(rows), frozenset(numbers), marked)
    without = [] if comparison.left_out else [SET_APART]
    without += [name for name in SOMETIMES if not any(arm.mean(MEANS[name][0]) for arm in arms)]
    return table.without(*without)


def run_table(comparison: Comparison, runs: Sequence[Run], settings: bool = True) -> Table:
    """Return one row per run: how it ended, its settings (or its arm), how far it got, and remarks."""
    columns = comparison.columns if settings else ("arm",)
    places = {id(run): i for i, arm in enumerate(comparison.arms, start=1) for run in (*arm.runs, *arm.others)}
    rows = [
        (
            run.name,
            run.state.value,
            *(_settings(run.asked.settings, columns) if settings else [str(places[id(run)])]),
            NOTHING if run.asked.seed is None else shown(run.asked.seed),
            "/".join([str(run.steps), *([shown(asked)] if (asked := run.asked.settings.get("train.steps")) else [])]),
            NOTHING if run.final_accuracy is None else _share(run.final_accuracy),
            NOTHING if run.seconds is None else _seconds(run.seconds),
            "; ".join(filter(None, (run.reason, *run.notes))),
        )
        for run in runs
    ]
    names = ("seed", "steps", "last accuracy", "training time")
    return Table(("run", "state", *columns, *names, REMARKS), tuple(rows), frozenset(names))


def _settings(settings: Mapping[str, Setting], columns: Sequence[str]) -> list[str]:
    return [shown(settings[column]) if column in settings else NOTHING for column in columns]


def footnotes(comparison: Comparison) -> list[str]:
    """Return notes below the tables."""
    arms = comparison.arms
    notes = [
        f"Means over the {sum(len(arm.runs) for arm in arms)} completed of {len(comparison.runs)} runs, with Student's "
        f"95 % interval over seeds where they differ; accuracy is the held-out {spoken(comparison.metric)}."
    ]
    if any(arm.final_accuracy and arm.final_accuracy.over == "problems" for arm in arms):
        notes.append(
            "* One seed, or seeds that agree: the interval is over the held-out problems and says nothing about other "
            "seeds."
        )
    if comparison.target is None:
        notes.append("No run was evaluated, so there is no accuracy (eval.every).")
    else:
        notes.append(
            f"Time to an accuracy of {comparison.target:.3f} ({comparison.target_is}): training seconds up to the "
            "first evaluation that reaches it, mean over the runs that get there."
        )
    differing = _code_differences([run.code for arm in arms for run in arm.runs])
    if differing:
        notes.append(f"These runs used different code but are compared as equals: {'; '.join(differing)}.")
    of_source: dict[str, list[str]] = {}
    for key, source in comparison.implied.items():
        if key != f"{source}._target_":  # the choice itself
            of_source.setdefault(source, []).append(key)
    if of_source:
        lists = "; ".join(f"with {source}: {', '.join(keys)}" for source, keys in of_source.items())
        notes.append(f"Also different, but only along with another setting: {lists}.")
    return notes


def _code_differences(codes: Sequence[Mapping[str, str]]) -> list[str]:
    """Return packages whose versions differ between the runs, with the number of runs per version."""
    differing = []
    for name in dict.fromkeys(name for code in codes for name in code):
        counts = Counter(code.get(name, "not recorded") for code in codes)
        if len(counts) > 1:
            told = (f"{version} ({number} {'run' if number == 1 else 'runs'})" for version, number in counts.items())
            differing.append(f"{name} {', '.join(told)}")
    return differing


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers of the report, and every run's curve."""
    return {
        "metric": comparison.metric,
        "columns": comparison.columns,
        "implied": comparison.implied,
        "target_accuracy": comparison.target,
        "arms": [_arm_json(arm, comparison.target) for arm in comparison.arms],
    }


def _arm_json(arm: Arm, target: float | None) -> dict[str, Any]:
    means = {figure: arm.mean(figure) for figure, _ in MEANS.values()}
    estimates = {"final_accuracy": arm.final_accuracy, "best_accuracy": arm.best_accuracy, **means}
    return {
        "settings": arm.settings,
        **{name: None if found is None else asdict(found) for name, found in estimates.items()},
        "step_seconds": arm.step_seconds,
        "target": None if target is None else asdict(arm.reaching(target)),
        "runs": [_run_json(run, averaged=True) for run in arm.runs],
        "not_averaged": [_run_json(run, averaged=False) for run in arm.others],
    }


_OF_A_RUN = ("folder", "reason", "notes", "steps", "step_seconds", "code", *(figure for figure, _ in MEANS.values()))


def _run_json(run: Run, averaged: bool) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in _OF_A_RUN},
        "state": run.state.value,
        "averaged": averaged,
        "seed": run.asked.seed,
        "overrides": run.asked.given,
        "curve": asdict(run.curve),
    }


def _with_interval(found: Estimate | None) -> str:
    if found is None:
        return NOTHING
    interval = f" ({_share(found.low)}–{_share(found.high)})" + "*" * (found.over == "problems")
    return _share(found.mean) + (interval if found.over else "")


def _reached(arm: Arm, target: float) -> str:
    found = arm.reaching(target)
    if found.seconds is None:
        return "never" if found.never else NOTHING
    some = f" ({found.reached} of {found.reached + found.never})" if found.never else ""
    return f"{_seconds(found.seconds)}{some}"


def _sparks(arms: Sequence[Arm]) -> list[str]:
    """Return each arm's mean accuracy over its steps, on a scale shared by all arms."""
    curves = [arm.mean_curve for arm in arms]
    everything = [value for curve in curves for value in curve.accuracy]
    low, high = min(everything, default=0.0), max(everything, default=1.0)

    def spark(curve: Curve) -> str:
        if not curve.steps:
            return ""
        places = np.linspace(curve.steps[0], curve.steps[-1], min(SPARK_WIDTH, len(curve.steps)))
        return sparkline(np.interp(places, curve.steps, curve.accuracy).tolist(), low, high)

    return list(map(spark, curves))
