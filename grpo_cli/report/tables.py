"""Compared runs as tables of short texts, the same for the terminal and for HTML; and as JSON, with every digit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from grpo_cli.report.asked import Setting, shown
from grpo_cli.report.compare import Arm, Comparison, Estimate
from grpo_cli.report.curves import spoken
from grpo_cli.report.read import Run
from grpo_cli.support.formatting import duration, short, size, sparkline

NOTHING = "–"
SAID = "said of it"
SPARKS, SPARK_WIDTH = "accuracy by step", 16
MEANS = ("training time", "generated tokens", "trained tokens", "peak memory", "last entropy")


@dataclass(frozen=True)
class Table:
    """Rows of texts under column names. `numeric` columns stand to the right; `marked` is the row of the best arm."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()
    marked: int | None = None

    def without(self, *columns: str) -> Table:
        kept = [place for place, name in enumerate(self.columns) if name not in columns]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in kept), rows=rows)


def arm_table(comparison: Comparison, intervals: bool = False, settings: bool = True) -> Table:
    """One row per arm: its settings, or else its number, then means over its completed runs.

    Accuracies come with their intervals (a star marks one over problems), the rest if `intervals` asks for them.
    """
    target = comparison.target
    reaching = "time to target" if target is None else f"time to {target:.3f}"
    numbers = ("runs", "final accuracy", "best accuracy", reaching, *MEANS)
    besides = ("not averaged",) if comparison.left_out else ()
    sparks = _sparks(comparison)
    rows = []
    columns = comparison.columns if settings else ("arm",)
    for place, (arm, spark) in enumerate(zip(comparison.arms, sparks, strict=True), start=1):
        told: list[tuple[Estimate | None, Callable[[float], str]]] = [
            (arm.seconds, _seconds),
            (arm.generated_tokens, short),
            (arm.trained_tokens, short),
            (arm.peak_bytes, size),
            (arm.entropy, "{:.3f}".format),
        ]
        named = _settings(arm.settings, columns) if settings else [str(place)]
        reached = NOTHING if target is None else _reached(arm, target)
        accuracies = [with_interval(e, "{:.3f}".format) for e in (arm.final_accuracy, arm.best_accuracy)]
        means = [with_interval(e, form) if intervals else _mean(e, form) for e, form in told]
        counts = Counter(run.state.value for run in arm.others)
        set_apart = [", ".join(f"{number} {state}" for state, number in counts.items())] if besides else []
        rows.append((*named, str(len(arm.runs)), *accuracies, reached, *means, spark, *set_apart))
    marked = comparison.arms.index(comparison.best) if comparison.best else None
    table = Table((*columns, *numbers, SPARKS, *besides), tuple(rows), frozenset(numbers), marked)
    return table if any(arm.entropy for arm in comparison.arms) else table.without(MEANS[4])  # older runs have none


def run_table(comparison: Comparison, runs: Sequence[Run], settings: bool = True) -> Table:
    """One row per run: how it ended, its settings or else its arm, how far it came, and what was said of it."""
    columns = comparison.columns if settings else ("arm",)
    places = {id(run): i for i, arm in enumerate(comparison.arms, start=1) for run in (*arm.runs, *arm.others)}
    rows = [
        (
            run.name,
            run.state.value,
            *(_settings(run.asked.settings, columns) if settings else [str(places[id(run)])]),
            NOTHING if run.asked.seed is None else shown(run.asked.seed),
            "/".join([str(run.steps), *([shown(asked)] if (asked := run.asked.settings.get("train.steps")) else [])]),
            NOTHING if run.final_accuracy is None else f"{run.final_accuracy:.3f}",
            NOTHING if run.seconds is None else _seconds(run.seconds),
            "; ".join(filter(None, (run.reason, *run.notes))),
        )
        for run in runs
    ]
    names = ("seed", "steps", "last accuracy", "training time")
    return Table(("run", "state", *columns, *names, SAID), tuple(rows), frozenset(names))


def settings_table(comparison: Comparison) -> Table:
    """What the numbers of arms stand for."""
    rows = [
        (str(number), *_settings(arm.settings, comparison.columns))
        for number, arm in enumerate(comparison.arms, start=1)
    ]
    return Table(("arm", *comparison.columns), tuple(rows))


def settings_lines(comparison: Comparison) -> list[str]:
    """The same in words: the settings that most arms have, then for each arm in what it is another."""
    rows = settings_table(comparison).rows
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*rows, strict=True)][1:]
    lines = [f"usual: {' '.join(f'{key}={value}' for key, value in zip(comparison.columns, usual, strict=True))}"]
    for number, *values in rows:
        told = zip(comparison.columns, values, usual, strict=True)
        other = [f"{key}={value}" for key, value, common in told if value != common]
        lines.append(f"arm {number}: {' '.join(other) or 'as usual'}")
    return lines


def _settings(settings: Mapping[str, Setting], columns: Sequence[str]) -> list[str]:
    return [shown(settings[column]) if column in settings else NOTHING for column in columns]


def footnotes(comparison: Comparison) -> list[str]:
    """What a reader of the tables has to know."""
    arms, said = comparison.arms, []
    averaged = sum(len(arm.runs) for arm in arms)
    said.append(
        f"Means over the {averaged} completed of {len(comparison.runs)} runs, with Student's 95 % interval over seeds "
        f"where they differ; accuracy is the held-out {spoken(comparison.metric)}."
    )
    if any(arm.final_accuracy and arm.final_accuracy.over == "problems" for arm in arms):
        said.append(
            "* One seed, or seeds that agree: the interval is over the held-out problems, and says nothing of other "
            "seeds."
        )
    if comparison.target is not None:
        said.append(
            f"Time to an accuracy of {comparison.target:.3f} ({comparison.target_is}): training seconds up to the "
            "first evaluation that has it, mean over the runs that get there."
        )
    else:
        said.append("No run was evaluated, so there is no accuracy (eval.every).")
    differing = _code_differences([run.code for arm in arms for run in arm.runs])
    if differing:
        said.append(f"These runs are of different code, and compared all the same: {'; '.join(differing)}.")
    of_source: dict[str, list[str]] = {}
    for key, source in comparison.implied.items():
        if key != f"{source}._target_":  # that is what the choice is
            of_source.setdefault(source, []).append(key)
    if of_source:
        lists = "; ".join(f"with {source}: {', '.join(keys)}" for source, keys in of_source.items())
        said.append(f"Also different, but only along with another setting: {lists}.")
    return said


def _code_differences(codes: Sequence[Mapping[str, str]]) -> list[str]:
    """What the runs were not all run with, and how many with which version of it."""
    differing = []
    for name in dict.fromkeys(name for code in codes for name in code):
        counts = Counter(code.get(name, "not recorded") for code in codes)
        if len(counts) > 1:
            told = (f"{version} ({number} {'run' if number == 1 else 'runs'})" for version, number in counts.items())
            differing.append(f"{name} {', '.join(told)}")
    return differing


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All numbers of the report, and every run's curve."""
    return {
        "metric": comparison.metric,
        "columns": comparison.columns,
        "implied": comparison.implied,
        "target_accuracy": comparison.target,
        "arms": [_arm_json(arm, comparison.target) for arm in comparison.arms],
    }


def _arm_json(arm: Arm, target: float | None) -> dict[str, Any]:
    names = (
        "final_accuracy",
        "best_accuracy",
        "seconds",
        "generated_tokens",
        "trained_tokens",
        "peak_bytes",
        "entropy",
    )
    estimates = {name: getattr(arm, name) for name in names}
    return {
        "settings": arm.settings,
        **{name: None if found is None else asdict(found) for name, found in estimates.items()},
        "step_seconds": arm.step_seconds,
        "target": None if target is None else asdict(arm.reaching(target)),
        "runs": [_run_json(run, averaged=True) for run in arm.runs],
        "not_averaged": [_run_json(run, averaged=False) for run in arm.others],
    }


def _run_json(run: Run, averaged: bool) -> dict[str, Any]:
    return {
        "folder": run.folder,
        "state": run.state.value,
        "reason": run.reason,
        "notes": run.notes,
        "averaged": averaged,
        "seed": run.asked.seed,
        "overrides": run.asked.given,
        "steps": run.steps,
        "seconds": run.seconds,
        "generated_tokens": run.generated_tokens,
        "trained_tokens": run.trained_tokens,
        "peak_bytes": run.peak_bytes,
        "entropy": run.entropy,
        "step_seconds": run.step_seconds,
        "code": run.code,
        "curve": asdict(run.curve),
    }


def with_interval(estimate: Estimate | None, form: Callable[[float], str]) -> str:
    if estimate is None:
        return NOTHING
    if not estimate.over:
        return form(estimate.mean)
    star = "*" if estimate.over == "problems" else ""
    return f"{form(estimate.mean)} ({form(estimate.low)}–{form(estimate.high)}){star}"


def _mean(estimate: Estimate | None, form: Callable[[float], str]) -> str:
    return NOTHING if estimate is None else form(estimate.mean)


def _seconds(seconds: float) -> str:
    if not math.isfinite(seconds):
        return str(seconds)
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _reached(arm: Arm, target: float) -> str:
    found = arm.reaching(target)
    if found.seconds is None:
        return "never" if found.never else NOTHING
    some = f" ({found.reached} of {found.reached + found.never})" if found.never else ""
    return f"{_seconds(found.seconds)}{some}"


def _sparks(comparison: Comparison) -> list[str]:
    """Each arm's mean accuracy over its steps, all drawn between the least and the greatest of any arm."""
    curves = [arm.mean_curve for arm in comparison.arms]
    everything = [value for curve in curves for value in curve.accuracy]
    low, high = min(everything, default=0.0), max(everything, default=1.0)
    sparks = []
    for curve in curves:
        if not curve.steps:
            sparks.append("")
            continue
        places = np.linspace(curve.steps[0], curve.steps[-1], min(SPARK_WIDTH, len(curve.steps)))
        sparks.append(sparkline(np.interp(places, curve.steps, curve.accuracy).tolist(), low, high))
    return sparks
