"""A few real steps under a meter: the seconds, the tokens and the peak memory of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from grpo_cli import experiment
from grpo_cli.config.prepare import Prepared
from grpo_cli.evaluate import evaluate_with
from grpo_cli.interfaces import Advantage, SetUp
from grpo_cli.memory.plan import UPDATE
from grpo_cli.settings import ProfileRunSettings
from grpo_cli.step import Step
from grpo_cli.support.memory import peak_bytes, start_peak
from grpo_cli.support.meter import Meter
from grpo_cli.tracking.progress import Progress
from grpo_cli.types import ScoredGroup

# The phases of a step in order, none nested in another; `eval` is outside the step. The first is engine=ray's.
PHASES = (*("weights", "prefill", "decode", "reward", "old_logprobs", "ref_logprobs"), *UPDATE, "eval")
NEVER = -1  # the end-of-sequence token of rollouts of full length: a token that no model produces


def _phase(seconds: Sequence[float], tokens: int | None, peak: int) -> dict[str, Any]:
    """Return the measurements of a phase: seconds of each step, tokens of the last (None where they mean nothing), peak
    bytes (0: not read)."""
    middle = median(seconds)
    speed = tokens / middle if tokens is not None and middle else None
    timed = {"seconds": seconds, "seconds_median": middle, "tokens_per_second": speed, "tokens": tokens}
    return {**timed, "peak_bytes": peak}


def measure(
    run: Prepared[ProfileRunSettings], say: Callable[[str], None], warn: Callable[[str], None]
) -> dict[str, Any]:
    """Warm up and measure steps, then an evaluation; nothing is saved or logged. Return phases by name, including
    `step` and the part of it outside any phase (`rest`); the peak; the engine's figures."""
    settings, wanted = run.settings, run.settings.profile
    if wanted.lengths == "full":
        settings = replace(settings, sampling=replace(settings.sampling, stop=()))
    peaks, opened = dict[str, int](), list[str]()

    def note_peak(names: Sequence[str]) -> None:
        peak = peak_bytes(run.device)  # of the spans that were open until now
        start_peak(run.device)
        peaks.update({name: max(peaks.get(name, 0), peak) for name in opened})
        opened[:] = names

    meter = Meter(run.device, note_peak)
    ends = {"eos_token_ids": (NEVER,)} if wanted.lengths == "full" else {}
    runtime = experiment.set_up(run, settings.model, span=meter.span, warn=warn, **ends)
    rules = replace(run.rules, advantage=partial(_never_all_equal, run.rules.advantage))
    if isinstance(run.rules.advantage, SetUp):
        run.rules.advantage.setup(runtime)
    parts = replace(experiment.parts_of(replace(run, rules=rules), runtime, meter, say, warn), warmup=None)
    step, progress, seconds = Step(settings, parts), Progress(), defaultdict[str, list[float]](list)
    for number in range(-wanted.warmup, wanted.steps):
        if number == 0:
            peaks.clear()
        before = replace(progress)
        record = step.run(number + wanted.warmup, progress)
        times = meter.take()
        say(f"step {number + 1} of {wanted.steps}: {times['time/step']:.2f} s" if number >= 0 else "warming up")
        rest = times["time/step"] - sum(times.get(f"time/{name}", 0.0) for name in PHASES)
        for name, taken in {**times, "time/rest": rest}.items() if number >= 0 else ():
            seconds[name.removeprefix("time/")].append(taken)
    trained = progress.trained_tokens - before.trained_tokens
    tokens = dict.fromkeys(("old_logprobs", "ref_logprobs", "forward", "backward"), trained)
    tokens["decode"], highest = progress.generated_tokens - before.generated_tokens, dict(peaks)
    if wanted.eval and settings.eval.every > 0:
        with meter.span("eval"), step.learner.autocast():
            found = evaluate_with(runtime, settings.eval, settings.sampling, settings.seed)
        seconds["eval"], highest["eval"] = [meter.take()["time/eval"]], peaks["eval"]
        tokens["eval"] = found.stats.generated_tokens
    names = [name for name in (*PHASES[:-1], "rest", "step", "eval") if name in seconds]
    phases = {name: _phase(seconds[name], tokens.get(name), highest.get(name, 0)) for name in names}
    fullest = max((name for name in names if name in PHASES), key=lambda name: highest.get(name, 0))
    engine = {name: value for name, value in record.metrics.items() if name.startswith("engine/")}
    return {"phases": phases, "engine": engine, "peak": {"phase": fullest, "bytes": highest.get(fullest, 0)}}


def _never_all_equal(rule: Advantage, group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
    """Return a group's advantages, ones where all are 0. Completions of forced length often all earn nothing, and
    without a gradient the optimizer would neither step nor allocate its state."""
    advantages = rule(group, kept)
    return advantages if advantages.any() else torch.ones_like(advantages)
