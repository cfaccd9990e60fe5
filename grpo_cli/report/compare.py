"""Groups runs into arms: what differs between runs, which are repetitions with other seeds, what each arm reached.

Only completed runs are averaged. The others are listed with their arm, with state and reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_cli.report.asked import Asked, Setting
from grpo_cli.report.curves import GREEDY, Curve, mean_curve
from grpo_cli.report.read import PHASES, Run, State
from grpo_cli.runs.layout import RUN
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import shown
from grpo_cli.support.intervals import student_95

# Settings that name a run or its folder and change no measurement, and the seed, which is averaged over.
NO_DIFFERENCE = ("seed", "run_dir", "resume", "accept_damage", "logger", "hydra")
LONGEST_LABEL = 90  # characters
DEFAULT_TARGET = 0.95  # of the best arm's best mean accuracy


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; `over` is what was sampled: "seeds", "problems", or "" without an interval."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    over: str = ""


@dataclass(frozen=True)
class Reached:
    """When an arm's runs reach an accuracy: mean seconds and number of those that do, and how many never do."""

    seconds: float | None
    reached: int
    never: int


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed. `runs` are completed; `others` are not, or repeat a seed."""

    settings: Mapping[str, Setting]
    runs: tuple[Run, ...]
    others: tuple[Run, ...]

    @property
    def label(self) -> str:
        return " ".join(f"{key}={shown(value)}" for key, value in self.settings.items()) or "all runs"

    @cached_property
    def curves(self) -> list[Curve]:
        return [run.curve for run in self.runs if run.curve.steps]

    @cached_property
    def mean_curve(self) -> Curve:
        return mean_curve(self.curves)

    @property
    def final_accuracy(self) -> Estimate | None:
        """Return the mean over seeds; for one seed, or seeds that agree, with the interval over the problems of its
        evaluation."""
        evaluated = [run for run in self.runs if run.final_accuracy is not None]
        found = estimate((run.final_accuracy for run in evaluated), 0.0, 1.0)
        if found is None or found.over or evaluated[-1].accuracy_interval is None:
            return found
        return Estimate(found.mean, *evaluated[-1].accuracy_interval, over="problems")

    @property
    def best_accuracy(self) -> Estimate | None:
        return estimate((run.best_accuracy for run in self.runs), 0.0, 1.0)

    def mean(self, figure: str) -> Estimate | None:
        """Return the mean over seeds of a nonnegative figure of the runs such as `peak_bytes`."""
        return estimate((getattr(run, figure) for run in self.runs), 0.0)

    @property
    def step_seconds(self) -> dict[str, float]:
        """Return mean seconds per step of each phase, in the order of the phases."""
        timed = [run.step_seconds for run in self.runs if run.step_seconds]
        names = [name for name in (*PHASES, "other") if any(name in phases for phases in timed)]
        return {name: statistics.fmean(phases.get(name, 0.0) for phases in timed) for name in names}

    def reaching(self, accuracy: float) -> Reached:
        found = [curve.first_reaching(accuracy) for curve in self.curves]
        seconds = [second for second in found if second is not None]
        return Reached(statistics.fmean(seconds) if seconds else None, len(seconds), len(found) - len(seconds))


@dataclass(frozen=True)
class Comparison:
    """Arms in the order of their first runs. `implied` are settings that differ only because another one does."""

    columns: tuple[str, ...]
    implied: Mapping[str, str]
    arms: tuple[Arm, ...]
    target: float | None
    target_is: str
    metric: str

    @property
    def numbered(self) -> bool:
        """True if labels are so long that arms are called by their numbers."""
        return any(len(arm.label) > LONGEST_LABEL for arm in self.arms)

    @property
    def names(self) -> list[str]:
        """Return the name of each arm where its settings are not shown."""
        return [f"arm {number}" if self.numbered else arm.label for number, arm in enumerate(self.arms, start=1)]

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in (*arm.runs, *arm.others)]

    @property
    def left_out(self) -> list[Run]:
        """Runs that are not averaged."""
        return [run for arm in self.arms for run in arm.others]

    @property
    def best(self) -> Arm | None:
        """Return the arm with the highest mean final accuracy, if several have one."""
        found = [(arm.final_accuracy.mean, arm) for arm in self.arms if arm.final_accuracy]
        return max(found, key=lambda pair: pair[0])[1] if len(found) > 1 else None


def compare(runs: Sequence[Run], target: float | None = None, metric: str = GREEDY) -> Comparison:
    """Group the runs into arms. `target` is the accuracy that is timed, by default DEFAULT_TARGET of the best.

    `metric` is the one that the runs were read with.
    """
    if target is not None and not 0 < target <= 1:
        raise UserError(f"--target={target:g} must be an accuracy above 0 and at most 1")
    columns, implied = differences([run.asked for run in runs])
    arms = _arms(runs, columns)
    target_is = "as asked"
    if target is None:
        best = max((max(arm.mean_curve.accuracy) for arm in arms if arm.mean_curve.accuracy), default=None)
        target = None if best is None else DEFAULT_TARGET * best
        target_is = f"{100 * DEFAULT_TARGET:g} % of the highest mean accuracy of an arm"
    return Comparison(columns, implied, arms, target, target_is, metric)


def differences(asked: Sequence[Asked]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the settings in which the runs differ, and those among them that differ only because another setting does.

    The latter belong to a choice (`sampler._target_` to `sampler`), follow another setting (`m: ${n}`), or are set by a
    named experiment; never those that were given on a command line.
    """
    keys = dict.fromkeys(key for one in asked for key in one.settings)
    differing = [key for key in keys if key.partition(".")[0] not in NO_DIFFERENCE and _differs(key, asked)]
    typed = list(dict.fromkeys(key for one in asked for key in one.given))
    groups = frozenset[str]().union(*(one.groups for one in asked))
    sources = {key: _source(key, differing, groups, asked) for key in differing if key not in typed}
    implied = {key: source for key, source in sources.items() if source is not None}
    columns = [key for key in differing if key not in implied]
    # In the order in which they were typed, then the rest: choices before single settings.
    columns.sort(key=lambda key: (typed.index(key) if key in typed else len(typed), key not in groups))
    return tuple(columns), implied


def _source(key: str, differing: Sequence[str], groups: frozenset[str], asked: Sequence[Asked]) -> str | None:
    """Return the other differing setting that `key` follows, or that determines it in every run."""
    known = [one for one in asked if one.complete]
    referred = {one.references[key] for one in known if key in one.references}
    for source in (key.partition(".")[0], *referred, "experiment"):
        if source == key or source not in differing:
            continue
        pairs = {(_value(one, source), _value(one, key)) for one in known}
        decides = source in groups and len(pairs) == len({value for value, _ in pairs})
        if decides or all(one.references.get(key) == source for one in known):
            return source
    return None


def _differs(key: str, asked: Sequence[Asked]) -> bool:
    # Without a config only the given settings are known; in the other runs an absent setting is a value too.
    return len({_value(one, key) for one in asked if one.complete or key in one.settings}) > 1


def _value(asked: Asked, key: str) -> str:
    return shown(asked.settings[key]) if key in asked.settings else ""


def _arms(runs: Sequence[Run], columns: Sequence[str]) -> tuple[Arm, ...]:
    """Runs with equal columns, ordered by their first run; a run without a config joins the arm its overrides fit."""
    members: dict[tuple[str, ...], list[Run]] = {}
    settings: dict[tuple[str, ...], dict[str, Setting]] = {}
    for run in sorted(runs, key=lambda run: not run.asked.complete):
        key = tuple(_value(run.asked, column) for column in columns)
        if not run.asked.complete:
            fits = [known for known in members if all(a in ("", b) for a, b in zip(key, known, strict=True))]
            key = fits[0] if len(fits) == 1 else key
        members.setdefault(key, []).append(run)
        settings.setdefault(key, {c: run.asked.settings[c] for c in columns if c in run.asked.settings})
    place = {id(run): i for i, run in enumerate(runs)}
    groups = sorted(members, key=lambda key: min(place[id(run)] for run in members[key]))
    return tuple(_arm(settings[key], sorted(members[key], key=lambda run: place[id(run)])) for key in groups)


def _arm(settings: Mapping[str, Setting], runs: Sequence[Run]) -> Arm:
    """Build an arm. Two completed runs of one seed are one sample: the later run counts, the earlier ones are set
    apart."""
    counted = {run.asked.seed: run for run in runs if run.state == State.COMPLETED and run.asked.complete}
    others = [run for run in runs if counted.get(run.asked.seed) is not run]
    return Arm(settings, tuple(counted.values()), tuple(_set_apart(run, counted.get(run.asked.seed)) for run in others))


def _set_apart(run: Run, later: Run | None) -> Run:
    """Return a run that is not averaged; if it did complete, with the reason."""
    if run.state != State.COMPLETED:
        return run
    if later is None:
        return replace(run, reason=f"its settings are unknown: it has no {RUN} that can be read")
    return replace(run, state=State.REPEATED, reason=f"seed {shown(run.asked.seed)} is there again in {later.name}")


def estimate(values: Iterable[float | None], least: float = -math.inf, most: float = math.inf) -> Estimate | None:
    """Return mean of the values that are not None, with Student's 95 % interval if they differ; None without values.

    A few equal values do not justify an interval of width zero, so none is given. The mean must lie between `least` and
    `most`; an interval is clipped there, which does not reduce its coverage.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    if not all(map(math.isfinite, numbers)):
        return Estimate(math.nan)
    mean = statistics.fmean(numbers)
    if min(numbers) == max(numbers):
        return Estimate(mean)
    half = student_95(len(numbers) - 1) * statistics.stdev(numbers) / math.sqrt(len(numbers))
    return Estimate(mean, max(mean - half, least), min(mean + half, most), over="seeds")
