"""Groups runs into arms: what differs between runs, which are repetitions with other seeds, what each arm reached.

Only completed runs are averaged. The others are listed, with state and reason.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_cli.report.curves import GREEDY, Curve, mean_curve
from grpo_cli.report.read import Run, State
from grpo_cli.report.recorded_settings import RecordedSettings, Setting, words
from grpo_cli.settings import CHOSEN_TO_FIT
from grpo_cli.support.errors import UserError, closest
from grpo_cli.support.formatting import shown
from grpo_cli.support.intervals import student_95

# Settings that name a run or its folder and change no measurement, and the seed, which is averaged over.
NO_DIFFERENCE = ("seed", "run_dir", "resume", "accept_damage", "logger", "hydra")
DEFAULT_TARGET = 0.95  # of the best arm's best mean accuracy
# What decides which problems are held out, and how their answers are graded.
_PROBLEMS = re.compile(r"task(\.(path|name|grading|config\b.*|(default_)?eval_\w+|\w+_field|(min|max)_\w+))?")


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval; `over` is what was sampled: "seeds", "problems", or "" without an interval."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    over: str = ""


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seed. `runs` are completed; `others` are not, or repeat a seed."""

    label: str
    settings: Mapping[str, Setting]
    runs: tuple[Run, ...]
    others: tuple[Run, ...]

    @property
    def task(self) -> Set[tuple[str, Setting]]:
        settings = (*self.runs, *self.others)[0].recorded.settings
        return frozenset((key, value) for key, value in settings.items() if _PROBLEMS.fullmatch(key))

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
        if found is None or found.over or math.isnan(sum(evaluated[-1].curve.intervals[-1])):
            return found
        return Estimate(found.mean, *evaluated[-1].curve.intervals[-1], over="problems")

    def less(self, base: Arm) -> Estimate | None:
        """Return the difference in final accuracy, seed by seed: what two runs share by their seed cancels out."""
        of_base = {run.recorded.seed: run.final_accuracy for run in base.runs}
        pairs = [(run.final_accuracy, of_base.get(run.recorded.seed)) for run in self.runs]
        return estimate((mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None), -1.0, 1.0)

    def speedup(self, base: Arm, accuracy: float | None) -> Estimate | None:
        """Return how many times faster than `base` it reaches an accuracy: the geometric mean over the seeds with which
        both do."""
        mine, theirs = (
            {run.recorded.seed: run.curve.first_reaching(accuracy) for run in arm.runs} for arm in (self, base)
        )
        pairs = ((seconds, theirs.get(seed)) for seed, seconds in mine.items())
        ratios = (of_base / seconds for seconds, of_base in pairs if seconds and of_base)
        found = estimate(math.log(ratio) for ratio in ratios if ratio > 0)  # a damaged file has any number
        return found and Estimate(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.over)

    def mean(self, figure: str) -> Estimate | None:
        """Return the mean over seeds of a nonnegative figure of the runs such as `peak_bytes`."""
        return estimate((getattr(run, figure) for run in self.runs), 0.0)

    def reaching(self, accuracy: float | None) -> list[float]:
        """Return the seconds of the runs that reach an accuracy."""
        return [second for curve in self.curves if (second := curve.first_reaching(accuracy)) is not None]


@dataclass(frozen=True)
class Comparison:
    """Arms in the order of their first runs, by `columns`; settings in `also` differ only along with these.

    `unknown` are runs without a record. `bases` has for each arm the one that it is compared with, `base` in words.
    """

    columns: tuple[str, ...]
    also: tuple[str, ...]
    arms: tuple[Arm, ...]
    unknown: tuple[Run, ...]
    base: str
    bases: tuple[Arm | None, ...]
    target: float | None
    target_is: str
    metric: str

    @property
    def left_out(self) -> list[Run]:
        """Return the runs that are not averaged."""
        return [*(run for arm in self.arms for run in arm.others), *self.unknown]


def compare(
    runs: Sequence[Run], target: float | None = None, metric: str = GREEDY, base: str | None = None
) -> Comparison:
    """Group the runs, read with `metric`, into arms. `target` is the accuracy that is timed, by default DEFAULT_TARGET
    of the best; `base` is the label of the arm that the others are compared with, by default the first that has a
    completed run, or settings, where the rest is to be as in the arm that is compared. Arms of different tasks are not
    compared."""
    if target is not None and not 0 < target <= 1:
        raise UserError(f"--target={target:g} must be an accuracy above 0 and at most 1")
    known = [run for run in runs if run.recorded.known]
    columns, also = differences([run.recorded for run in known])
    members: dict[str, list[Run]] = {}
    for run in known:
        members.setdefault(words(run.recorded.settings, columns), []).append(run)
    first = [runs[0].recorded for runs in members.values()]
    short = [words(one.settings, [key for key in columns if key in one.typed]) for one in first]  # by what was typed
    alone = known[0].name if len(known) == 1 else "all runs"
    labels = short if len({*short, ""}) > len(short) else [whole or alone for whole in members]
    arms = tuple(_arm(*labelled, columns) for labelled in zip(labels, members.values(), strict=True))
    base = base or next((arm.label for arm in arms if arm.runs), next(iter(labels), ""))
    by_label, by_settings = ({name: arm for name, arm in zip(names, arms, strict=True)} for names in (labels, members))
    other = dict(word.partition("=")[::2] for word in base.split())
    keys = dict.fromkeys([*columns, *other])  # no arm has a key that is no column
    found = [by_label.get(base) or by_settings.get(words({**arm.settings, **other}, keys)) for arm in arms]
    if arms and not any(found):
        raise UserError(f"--base={base} is no arm of these runs{closest(base, labels)}; there is: {', '.join(labels)}")
    pairs = zip(arms, found, strict=True)
    bases = tuple(one if one is not arm and one and one.task == arm.task else None for arm, one in pairs)
    target_is = "--target" if target else f"{100 * DEFAULT_TARGET:g}% of the highest"
    if target is None and len({arm.task for arm in arms}) == 1:
        best = max((value for arm in arms for value in arm.mean_curve.values), default=None)
        target = DEFAULT_TARGET * best if best else None
    unknown = tuple(run for run in runs if not run.recorded.known)
    return Comparison(columns, also, arms, unknown, base, bases, target, target_is, metric)


def differences(recorded: Sequence[RecordedSettings]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the settings that tell the runs apart, and those that differ only along with these.

    What was typed comes first, in the order of typing, then choices, then what still differs between runs that are
    alike in all of these.
    """

    def many(keys: Sequence[str]) -> int:
        return len({words(one.settings, keys) for one in recorded})

    keys = dict.fromkeys(key for one in recorded for key in one.settings)
    typed = dict.fromkeys(key for one in recorded for key in one.typed)
    fitted = any(one.settings.get("fit", "none") != "none" for one in recorded)  # the sampler too
    chosen = CHOSEN_TO_FIT | ({"sampler", "sampler._target_", "sampler.kv_budget"} if fitted else set())
    counts = (key for key in keys if key in typed or key not in chosen)
    differing = [key for key in counts if key.partition(".")[0] not in NO_DIFFERENCE and many([key]) > 1]
    columns = [key for key in typed if key in differing]
    groups = frozenset[str]().union(*(one.groups for one in recorded))
    for key in sorted(differing, key=lambda key: key not in groups):
        if key not in columns and many([*columns, key]) > many(columns):
            columns.append(key)
    return tuple(columns), tuple(key for key in differing if key not in columns)


def _arm(label: str, runs: Sequence[Run], columns: Sequence[str]) -> Arm:
    """Build an arm. Two completed runs of one seed are one sample: the one that began later counts, the earlier ones
    are set apart, with the reason."""
    by_time = sorted(runs, key=lambda run: run.began)
    counted = {run.recorded.seed: run for run in by_time if run.state == State.COMPLETED}
    others = [run for run in runs if counted.get(run.recorded.seed) is not run]
    for i, run in enumerate(others):
        if run.state == State.COMPLETED:
            again = f"seed {shown(run.recorded.seed)} is there again in {counted[run.recorded.seed].name}"
            others[i] = replace(run, state=State.REPEATED, reason=again)
    settings = runs[0].recorded.settings
    kept = {column: settings[column] for column in columns if column in settings}
    return Arm(label, kept, tuple(run for run in runs if counted.get(run.recorded.seed) is run), tuple(others))


def estimate(values: Iterable[float | None], least: float = -math.inf, most: float = math.inf) -> Estimate | None:
    """Return the mean of the values that are not None, with Student's 95% interval if they differ; None without
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
