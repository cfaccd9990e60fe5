"""Groups runs into arms: what differs between runs, which are repetitions with other seeds, what each arm reached.

Only completed runs are averaged. The others are listed, with state and reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_cli.report.curves import GREEDY, Curve, mean_curve
from grpo_cli.report.read import Run, State
from grpo_cli.report.recorded_settings import RecordedSettings, Setting
from grpo_cli.support.errors import UserError, closest
from grpo_cli.support.formatting import shown
from grpo_cli.support.intervals import student_95

# Settings that name a run or its folder and change no measurement, and the seed, which is averaged over.
NO_DIFFERENCE = ("seed", "run_dir", "resume", "accept_damage", "logger", "hydra")
DEFAULT_TARGET = 0.95  # of the best arm's best mean accuracy


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; `over` is what was sampled: "seeds", "problems", or "" without an interval."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    over: str = ""


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

    def less(self, base: Arm) -> Estimate | None:
        """Return the difference in final accuracy, seed by seed: what two runs share by their seed cancels out."""
        of_base = {run.recorded.seed: run.final_accuracy for run in base.runs}
        pairs = [(run.final_accuracy, of_base.get(run.recorded.seed)) for run in self.runs]
        return estimate(mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None)

    def speedup(self, base: Arm, accuracy: float) -> Estimate | None:
        """Return how many times faster than `base` it reaches an accuracy: the geometric mean over the seeds with which
        both do."""
        mine, theirs = (
            {run.recorded.seed: run.curve.first_reaching(accuracy) for run in arm.runs} for arm in (self, base)
        )
        pairs = ((seconds, theirs.get(seed)) for seed, seconds in mine.items())
        found = estimate(math.log(of_base / seconds) for seconds, of_base in pairs if seconds and of_base)
        return found and Estimate(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.over)

    def mean(self, figure: str) -> Estimate | None:
        """Return the mean over seeds of a nonnegative figure of the runs such as `peak_bytes`."""
        return estimate((getattr(run, figure) for run in self.runs), 0.0)

    def reaching(self, accuracy: float) -> tuple[float | None, int]:
        """Return the mean seconds of the runs that reach an accuracy, and their number."""
        seconds = [second for curve in self.curves if (second := curve.first_reaching(accuracy)) is not None]
        return statistics.fmean(seconds) if seconds else None, len(seconds)


@dataclass(frozen=True)
class Comparison:
    """Arms in the order of their first runs, by `columns`; settings in `also` differ only along with these.

    `unknown` are runs without a record. Differences are to the arm `base`.
    """

    columns: tuple[str, ...]
    also: tuple[str, ...]
    arms: tuple[Arm, ...]
    unknown: tuple[Run, ...]
    base: Arm | None
    target: float | None
    metric: str

    @property
    def left_out(self) -> list[Run]:
        """Return the runs that are not averaged."""
        return [*(run for arm in self.arms for run in arm.others), *self.unknown]

    @property
    def best(self) -> Arm | None:
        """Return the arm with the highest mean final accuracy, if several have one."""
        found = [(arm.final_accuracy.mean, arm) for arm in self.arms if arm.final_accuracy]
        return max(found, key=lambda pair: pair[0])[1] if len(found) > 1 else None


def compare(
    runs: Sequence[Run], target: float | None = None, metric: str = GREEDY, base: str | None = None
) -> Comparison:
    """Group the runs into arms. `target` is the accuracy that is timed, by default DEFAULT_TARGET of the best; `base`
    the label of the arm that the others are compared with, by default the first.

    `metric` is the one that the runs were read with.
    """
    if target is not None and not 0 < target <= 1:
        raise UserError(f"--target={target:g} must be an accuracy above 0 and at most 1")
    known = [run for run in runs if run.recorded.known]
    columns, also = differences([run.recorded for run in known])
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in known:
        members.setdefault(tuple(_value(run.recorded, column) for column in columns), []).append(run)
    arms = tuple(_arm(columns, of_arm) for of_arm in members.values())
    named = {arm.label: arm for arm in arms}
    if base is not None and base not in named:
        raise UserError(
            f"--base={base} is no arm of these runs{closest(base, list(named))}; there is: {', '.join(named)}"
        )
    if target is None:
        best = max((max(arm.mean_curve.accuracy) for arm in arms if arm.mean_curve.accuracy), default=None)
        target = None if best is None else DEFAULT_TARGET * best
    unknown = tuple(run for run in runs if not run.recorded.known)
    found = named[base] if base else arms[0] if arms else None
    return Comparison(columns, also, arms, unknown, found, target, metric)


def differences(recorded: Sequence[RecordedSettings]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the settings that tell the runs apart, and those that differ only along with these.

    What was typed comes first, in the order of typing, then choices, then what still differs between runs that are
    alike in all of these.
    """
    keys = dict.fromkeys(key for one in recorded for key in one.settings)
    differing = [key for key in keys if key.partition(".")[0] not in NO_DIFFERENCE and _count([key], recorded) > 1]
    typed = list(dict.fromkeys(key for one in recorded for key in one.typed))
    columns = [key for key in typed if key in differing]
    groups = frozenset[str]().union(*(one.groups for one in recorded))
    for key in sorted(differing, key=lambda key: key not in groups):
        if key not in columns and _count([*columns, key], recorded) > _count(columns, recorded):
            columns.append(key)
    return tuple(columns), tuple(key for key in differing if key not in columns)


def _count(keys: Sequence[str], recorded: Sequence[RecordedSettings]) -> int:
    """Return how many different values these settings have together."""
    return len({tuple(_value(one, key) for key in keys) for one in recorded})


def _value(recorded: RecordedSettings, key: str) -> str:
    return shown(recorded.settings[key]) if key in recorded.settings else ""


def _arm(columns: Sequence[str], runs: Sequence[Run]) -> Arm:
    """Build an arm. Two completed runs of one seed are one sample: the later run counts, the earlier ones are set
    apart, with the reason."""
    counted = {run.recorded.seed: run for run in runs if run.state == State.COMPLETED}
    others = [run for run in runs if counted.get(run.recorded.seed) is not run]
    for i, run in enumerate(others):
        if run.state == State.COMPLETED:
            again = f"seed {shown(run.recorded.seed)} is there again in {counted[run.recorded.seed].name}"
            others[i] = replace(run, state=State.REPEATED, reason=again)
    settings = runs[0].recorded.settings
    kept = {column: settings[column] for column in columns if column in settings}
    return Arm(kept, tuple(counted.values()), tuple(others))


def estimate(values: Iterable[float | None], least: float = -math.inf, most: float = math.inf) -> Estimate | None:
    """Return the mean of the values that are not None, with Student's 95 % interval if they differ; None without
    values.

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
