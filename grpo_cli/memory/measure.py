"""A few real steps under a meter: the seconds, the tokens and the peak memory of each phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from grpo_cli import experiment
from grpo_cli.config.prepare import Prepared
from grpo_cli.evaluate import evaluate_with
from grpo_cli.interfaces import Advantage
from grpo_cli.settings import ProfileRunSettings
from grpo_cli.step import Step
from grpo_cli.support.memory import peak_bytes, start_peak
from grpo_cli.support.meter import WallMeter
from grpo_cli.tracking.progress import Progress
from grpo_cli.types import ScoredGroup

# The phases of a step in order, none nested in another; `eval` is outside the step. The first two are engine=ray's.
PHASES = (
    *("weights", "dealing", "prefill", "decode", "reward", "policy_logprobs", "ref_logprobs"),
    *("forward", "backward", "optimizer", "eval"),
)
NEVER = -1  # the end-of-sequence token of rollouts of full length: a token that no model produces
_TOKENS = {  # which tokens a phase's tokens per second count
    **{"decode": "generated", "eval": "generated"},
    **dict.fromkeys(("policy_logprobs", "ref_logprobs", "forward", "backward"), "trained"),
}


@dataclass(frozen=True)
class Phase:
    """The measurements of a phase: seconds, tokens of one (None where they mean nothing), peak bytes (0: not read)."""

    times: int
    seconds_median: float
    seconds_least: float
    seconds_most: float
    tokens: int | None
    tokens_per_second: float | None
    peak_bytes: int


@dataclass(frozen=True)
class Measured:
    """Phases by name, including `step` and the part of it outside any phase (`rest`); the engine's figures."""

    phases: Mapping[str, Phase]
    engine: Mapping[str, float]

    @property
    def fullest(self) -> str:
        """The phase with the highest peak."""
        return max((name for name in self.phases if name in PHASES), key=lambda name: self.phases[name].peak_bytes)


class PhasePeaks:
    """Peak memory of each phase: called with the open spans at each transition (`WallMeter(on_phase=...)`)."""

    def __init__(self, read: Callable[[], int]) -> None:
        """`read` returns the peak since it was last called, in bytes."""
        self._read = read
        self._open: tuple[str, ...] = ()
        self._peaks: dict[str, int] = {}

    def __call__(self, names: tuple[str, ...]) -> None:
        peak = self._read()
        for name in self._open:
            self._peaks[name] = max(self._peaks.get(name, 0), peak)
        self._open = names

    def take(self) -> Mapping[str, int]:
        """Return bytes by name of phase since the last `take`."""
        peaks, self._peaks = self._peaks, {}
        return peaks


@dataclass(frozen=True)
class _Reading:
    """The figures of one step or evaluation: seconds as `time/<phase>`, peak bytes by phase, and tokens by kind."""

    times: Mapping[str, float]
    peaks: Mapping[str, int]
    tokens: Mapping[str, int]


def _phase(name: str, readings: Sequence[_Reading]) -> Phase:
    seconds = [one.times[f"time/{name}"] for one in readings]
    tokens, middle = readings[-1].tokens.get(_TOKENS.get(name, "")), float(median(seconds))
    speed = None if tokens is None or not middle else tokens / middle
    peak = max(one.peaks.get(name, 0) for one in readings)
    return Phase(len(seconds), middle, min(seconds), max(seconds), tokens, speed, peak)


def measure(run: Prepared[ProfileRunSettings], say: Callable[[str], None], warn: Callable[[str], None]) -> Measured:
    """Warm up and measure steps, then an evaluation; nothing is saved or logged but a trace, if one is wanted."""
    settings, wanted, readings = run.settings, run.settings.profile, list[_Reading]()
    peaks = PhasePeaks(partial(_peak_since, run.device))
    meter = WallMeter(run.device, peaks)
    ends = {"eos_token_ids": (NEVER,)} if wanted.lengths == "full" else {}
    bench = experiment.set_up(run, settings.model, meter=meter, warn=warn, **ends)
    rules = replace(run.rules, advantage=partial(_never_all_equal, run.rules.advantage))
    parts = experiment.parts_of(replace(run, made=rules), bench, (), meter, say, warn)
    step, progress, figures = Step(settings, parts), Progress(), dict[str, float]()
    for number in range(-wanted.warmup, wanted.steps):
        before = replace(progress)
        record = step.run(number + wanted.warmup, progress)
        times, highest = dict(meter.take()), peaks.take()
        say(f"step {number + 1} of {wanted.steps}: {times['time/step']:.2f} s" if number >= 0 else "warming up")
        if number < 0:
            continue
        figures = {name: value for name, value in record.metrics.items() if name.startswith("engine/")}
        times["time/rest"] = times["time/step"] - sum(times.get(f"time/{name}", 0.0) for name in PHASES)
        trained = progress.trained_tokens - before.trained_tokens
        made = progress.generated_tokens - before.generated_tokens
        readings.append(_Reading(times, highest, {"generated": made, "trained": trained}))
    if wanted.eval and settings.eval.every > 0:
        with meter.span("eval"), step.learner.autocast():
            evaluate_with(bench, settings.eval, settings.sampling, settings.seed)
        times = {"time/eval": meter.take()["time/eval"]}
        readings.append(_Reading(times, peaks.take(), {"generated": bench.engine.stats().generated_tokens}))
    if wanted.trace:
        path = Path(settings.run_dir) / "trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as profiler:
            step.run(0, progress)
        profiler.export_chrome_trace(str(path))
        say(f"wrote {path}")
    of_phase = {name: [one for one in readings if f"time/{name}" in one.times] for name in (*PHASES, "rest", "step")}
    return Measured({name: _phase(name, found) for name, found in of_phase.items() if found}, figures)


def _peak_since(device: torch.device) -> int:
    """Return the peak memory since the last call."""
    peak = peak_bytes(device)
    start_peak(device)
    return peak


def _never_all_equal(rule: Advantage, group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
    """Return a group's advantages, ones where all are 0. Completions of forced length often all earn nothing, and
    without a gradient the optimizer would neither step nor allocate its state."""
    advantages = rule(group, kept)
    return advantages if advantages.any() else torch.ones_like(advantages)
