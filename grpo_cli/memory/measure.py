"""A few real steps under a meter, and one more that tracks every tensor.

The first give the seconds and peaks of each phase at almost no cost; the last, slower, what the peaks consist of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from grpo_cli.evaluate import evaluate_with
from grpo_cli.interfaces import Parts
from grpo_cli.memory.allocations import ACTIVATIONS, GRADIENTS, Allocations
from grpo_cli.memory.lengths import ProfiledEngine
from grpo_cli.memory.plan import EXACT, KINDS, KV, OPTIMIZER, REFERENCE, WEIGHTS, WORKSPACE, Workload
from grpo_cli.memory.shapes import Sizes
from grpo_cli.settings import ProfileSettings, RunSettings
from grpo_cli.step import Step
from grpo_cli.support.memory import AllocatedPeak, PhasePeaks, ResidentPeak, storage_bytes
from grpo_cli.support.meter import WallMeter
from grpo_cli.tracking.progress import Progress

# The phases of a step in order, none nested in another; `eval` is outside the step. The first two are engine=ray's.
PHASES = (
    *("weights", "dealing", "prefill", "decode", "reward", "policy_logprobs", "ref_logprobs"),
    *("forward", "backward", "optimizer", "eval"),
)
_WITH_KV = ("prefill", "decode", "eval")
_TOKENS = {  # which tokens a phase's tokens per second count
    **{"prefill": "prefilled", "decode": "generated", "eval": "generated"},
    **dict.fromkeys(("policy_logprobs", "ref_logprobs", "forward", "backward"), "trained"),
}


@dataclass(frozen=True)
class Phase:
    """Seconds of each measurement, tokens of one (None where they mean nothing), peak bytes."""

    seconds: tuple[float, ...]
    tokens: float | None
    peak_bytes: int

    @property
    def median(self) -> float:
        return float(median(self.seconds))

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None or not self.median else self.tokens / self.median


@dataclass(frozen=True)
class Measured:
    """Phases by name, including `step` and the part of it outside any phase (`rest`); the engine's figures; what the
    fullest phase held; the kinds that can be counted exactly, each at its peak; what the engine generated."""

    phases: Mapping[str, Phase]
    engine: Mapping[str, float]
    fullest: str
    peak_bytes: int
    memory: Sizes
    exact: Sizes
    rollouts: Workload
    evaluation: Workload | None


class Probe:
    """The meter of a profile: spans with their seconds and peaks, reported to a `listener` too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._reader = AllocatedPeak(device) if device.type == "cuda" else ResidentPeak()
        self.peaks = PhasePeaks(self._reader.read)
        self.listener: Callable[[tuple[str, ...]], None] = lambda names: None
        self._meter = WallMeter(device, self._on_phase)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._meter.span(name)

    def take(self) -> Mapping[str, float]:
        return self._meter.take()

    def _on_phase(self, names: tuple[str, ...]) -> None:
        self.listener(names)
        self.peaks.phase(names)

    def __enter__(self) -> Probe:
        self._reader.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)


@dataclass(frozen=True)
class Subject:
    """A run's steps and evaluations to measure, with nothing saved or logged."""

    step: Step
    settings: RunSettings
    parts: Parts
    engine: ProfiledEngine
    probe: Probe

    def run(self, steps: Sequence[int], evaluate: bool) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Run each step, then an evaluation if wanted; yield `step` or `eval` and its metrics."""
        settings, progress = self.settings, Progress()
        for step in steps:
            yield "step", self.step.run(step, progress).metrics
        if evaluate:
            with self.probe.span("eval"), self.step.learner.autocast():
                result = evaluate_with(self.parts.bench, settings.eval, settings.sampling, settings.seed)
            yield "eval", result.metrics

    @property
    def reference(self) -> list[Tensor]:
        """The weights of the reference, if it is a separate model."""
        return held(self.parts.reference) if isinstance(self.parts.reference, torch.nn.Module) else []


def held(model: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@contextmanager
def _optimizer_state(model: Any, device: torch.device) -> Iterator[Callable[[], list[Tensor]]]:
    """Yield a function that returns the state, on the device, of all optimizers that stepped meanwhile."""
    seen: dict[Optimizer, None] = {}

    def state() -> list[Tensor]:
        ours = set(model.parameters())
        copies = [p for one in seen for group in one.param_groups for p in group["params"] if p not in ours]
        values = [*copies, *(value for one in seen for kept in one.state.values() for value in kept.values())]
        return [value for value in values if isinstance(value, Tensor) and value.device.type == device.type]

    hook = register_optimizer_step_post_hook(lambda optimizer, *given: seen.update({optimizer: None}))
    try:
        yield state
    finally:
        hook.remove()


@dataclass
class _Totals:
    """Over measured steps and evaluations; KV bytes and tokens by `step` or `eval`."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    kv: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, kind: str, probe: Probe) -> None:
        times, highest = probe.take(), probe.peaks.take()
        for name in PHASES[-1:] if kind == "eval" else (*PHASES[:-1], "step"):
            if f"time/{name}" in times:
                self.seconds.setdefault(name, []).append(times[f"time/{name}"])
            if name in highest:
                self.peaks[name] = max(self.peaks.get(name, 0), highest[name])
        if kind == "step":
            inside = sum(times.get(f"time/{name}", 0.0) for name in PHASES[:-1])
            self.seconds.setdefault("rest", []).append(times["time/step"] - inside)

    def phase(self, name: str) -> Phase:
        tokens = self.tokens["eval" if name == "eval" else "step"]
        return Phase(tuple(self.seconds[name]), tokens.get(_TOKENS.get(name, "")), self.peaks.get(name, 0))


def measure(subject: Subject, profile: ProfileSettings, evaluate: bool, say: Callable[[str], None]) -> Measured:
    """Warm up, measure, and track every tensor for one more step."""
    probe, totals, model = subject.probe, _Totals(), subject.parts.bench.model
    works: dict[str, Workload] = {}
    engine: Mapping[str, float] = {}
    count = profile.warmup + profile.steps
    with probe, _optimizer_state(model, probe.device) as state:
        done, trained, fullest_step = 0, 0.0, 0
        say(f"warming up ({profile.warmup} of {count} steps)")
        for kind, metrics in subject.run(range(count), evaluate):
            done += kind == "step"
            work, stats = subject.engine.take()
            before, trained = trained, metrics.get("tokens/trained", trained)
            if kind == "step" and done <= profile.warmup:
                probe.take(), probe.peaks.take()
                continue
            totals.add(kind, probe)
            totals.kv[kind] = max(totals.kv.get(kind, 0), stats.kv_peak_bytes)
            counts = {
                "generated": stats.generated_tokens,
                "trained": trained - before,
                "prefilled": stats.prefill_tokens,
            }
            totals.tokens[kind] = {name: float(value) for name, value in counts.items()}
            if kind == "step":
                engine = {name: value for name, value in metrics.items() if name.startswith("engine/")}
                say(f"step {done - profile.warmup} of {profile.steps}: {totals.seconds['step'][-1]:.2f} s")
            if kind not in works or work.tokens(work.n, False) > works[kind].tokens(works[kind].n, False):
                works[kind], fullest_step = work, done - 1 if kind == "step" else fullest_step
        fullest = max((name for name in totals.peaks if name != "step"), key=lambda name: totals.peaks[name])
        say("one more step, to see what holds memory")
        inside = _anatomy(subject, [*state(), *subject.reference], fullest_step, evaluate)
        kept = storage_bytes(state())
    peak, kv = totals.peaks[fullest], totals.kv.get("eval" if fullest == "eval" else "step", 0)
    memory = dict.fromkeys(KINDS, 0) | dict(inside.get(fullest, {}))
    memory[WEIGHTS], memory[OPTIMIZER] = storage_bytes(held(model)), kept
    # A reference that is the model without its adapters has no weights of its own.
    memory[REFERENCE] = storage_bytes(held(model) + subject.reference) - memory[WEIGHTS]
    memory[KV] = kv if fullest in _WITH_KV else 0
    memory[ACTIVATIONS] = max(0, memory[ACTIVATIONS] - memory[KV])
    memory[WORKSPACE] = peak - sum(memory.values())
    gradients = max(sizes.get(GRADIENTS, 0) for sizes in inside.values())
    exact = {**{kind: memory[kind] for kind in EXACT}, GRADIENTS: gradients, KV: max(totals.kv.values())}
    phases = {name: totals.phase(name) for name in totals.seconds}
    return Measured(phases, engine, fullest, peak, memory, exact, works["step"], works.get("eval"))


def _anatomy(subject: Subject, there: Sequence[Tensor], step: int, evaluate: bool) -> dict[str, Sizes]:
    """What each phase of a step held at its peak, beyond weights and what is `there`."""
    found: dict[str, Sizes] = {}
    open_spans: tuple[str, ...] = ()
    with Allocations(subject.parts.bench.model) as allocations:
        allocations.leave_out(there)

        def note(names: tuple[str, ...]) -> None:
            nonlocal open_spans
            peak = allocations.take_peak()
            for name in open_spans:
                if sum(peak.values()) >= sum(found.get(name, {}).values()):
                    found[name] = peak
            open_spans = names

        subject.probe.listener = note
        try:
            for _ in subject.run([step], evaluate):
                subject.engine.take()
        finally:
            subject.probe.listener = lambda names: None
    return found


def write_trace(subject: Subject, path: Path) -> None:
    """Write one more step as a Chrome trace."""
    with torch.profiler.profile() as profiler:
        for _ in subject.run([0], False):
            pass
    profiler.export_chrome_trace(str(path))
