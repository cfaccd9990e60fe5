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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grpo_cli.evaluate import evaluate_with
from grpo_cli.interfaces import Parts
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, Allocations
from grpo_cli.profile.estimate import EXACT, KINDS, OPTIMIZER, OTHER, REFERENCE, WEIGHTS
from grpo_cli.profile.forced_lengths import ProfiledEngine
from grpo_cli.profile.shapes import KV, Sizes, Workload
from grpo_cli.settings import ProfileSettings, RunSettings
from grpo_cli.step import Step
from grpo_cli.support.memory import AllocatedPeak, PhasePeaks, ResidentPeak, storage_bytes
from grpo_cli.support.meter import WallMeter
from grpo_cli.tracking.progress import Progress
from grpo_cli.types import EngineStats

# The phases of a step in order, none nested in another; `eval` is outside the step. The first two are engine=ray's.
PHASES = (
    *("weights", "dealing", "prefill", "decode", "reward", "policy_logprobs", "ref_logprobs"),
    *("forward", "backward", "optimizer", "eval"),
)
_WITH_KV = ("prefill", "decode", "eval")
_TOKENS = {  # which tokens a phase's tokens per second count
    "prefill": "prefilled",
    "decode": "generated",
    "policy_logprobs": "trained",
    "ref_logprobs": "trained",
    "forward": "trained",
    "backward": "trained",
    "eval": "generated",
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


@dataclass(frozen=True)
class Measured:
    """Phases by name, including `step` and the part of it outside any phase (`rest`); the engine's figures; what the
    fullest phase held; the kinds that can be counted exactly, each at its peak; what the engine was asked for."""

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
        self.trace = False
        self._meter = WallMeter(device, self._on_phase)

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._traced(name) if self.trace else self._meter.span(name)

    @contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name), self._meter.span(name):
            yield

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

    @property
    def model(self) -> Any:
        return self.parts.bench.model

    @property
    def reference(self) -> list[Tensor]:
        """Weights of the reference, if it is a separate model."""
        return held(self.parts.reference) if isinstance(self.parts.reference, torch.nn.Module) else []

    def rehearse(self, steps: Sequence[int], evaluate: bool) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Runs each step, then an evaluation if asked; yields `step` or `eval` and its metrics."""
        settings, progress = self.settings, Progress()
        for step in steps:
            yield "step", self.step.run(step, progress).metrics
        if evaluate:
            with self.probe.span("eval"), self.step.learner.autocast():
                result = evaluate_with(self.parts.bench, settings.eval, settings.sampling, settings.seed)
            yield "eval", result.metrics


class _Update:
    """The state of the optimizers on the model's device, and the model's gradients, read when they step."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self._optimizers: dict[Optimizer, None] = {}
        self.gradients = 0

    @property
    def state(self) -> list[Tensor]:
        """Asked for anew: kept here, what is parked elsewhere would not leave."""
        ours = set(self._model.parameters())
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        copies = [p for group in groups for p in group["params"] if p not in ours]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        values = [*copies, *(value for state in states for value in state.values())]
        return [v for v in values if isinstance(v, Tensor) and v.device.type == self._device.type]

    @contextmanager
    def seen(self) -> Iterator[None]:
        before, after = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.gradients = storage_bytes([p.grad for p in self._model.parameters() if p.grad is not None])

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[optimizer] = None


def held(model: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@dataclass
class _Tally:
    """Totals over measured steps and evaluations."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    kv: dict[str, int] = field(default_factory=dict)  # by kind (step or eval), like `tokens`
    tokens: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, kind: str, metrics: Mapping[str, float], probe: Probe, stats: EngineStats, trained: float) -> None:
        times, highest = probe.take(), probe.peaks.take()
        for name in PHASES[-1:] if kind == "eval" else (*PHASES[:-1], "step"):
            if f"time/{name}" in times:
                self.seconds.setdefault(name, []).append(times[f"time/{name}"])
            if name in highest:
                self.peaks[name] = max(self.peaks.get(name, 0), highest[name])
        if kind == "step":
            inside = sum(times.get(f"time/{name}", 0.0) for name in PHASES[:-1])
            self.seconds.setdefault("rest", []).append(times["time/step"] - inside)
            self.engine = {name: value for name, value in metrics.items() if name.startswith("engine/")}
        self.kv[kind] = max(self.kv.get(kind, 0), stats.kv_peak_bytes)
        counts = {"generated": stats.generated_tokens, "trained": trained, "prefilled": stats.prefill_tokens}
        self.tokens[kind] = {name: float(value) for name, value in counts.items()}

    def phase(self, name: str) -> Phase:
        tokens = self.tokens["eval" if name == "eval" else "step"]
        counted = tokens[_TOKENS[name]] if name in _TOKENS else None
        return Phase(tuple(self.seconds[name]), counted, self.peaks.get(name, 0))


def measure(subject: Subject, profile: ProfileSettings, evaluate: bool, say: Callable[[str], None]) -> Measured:
    """Warm up, measure, and track every tensor for one more step."""
    probe, update, tally = subject.probe, _Update(subject.model, subject.probe.device), _Tally()
    works: dict[str, Workload] = {}
    count = profile.warmup + profile.steps
    with probe, update.seen():
        done, trained, fullest_step = 0, 0.0, 0
        say(f"warming up ({profile.warmup} of {count} steps)")
        for kind, metrics in subject.rehearse(range(count), evaluate):
            done += kind == "step"
            work, stats = subject.engine.take()
            before, trained = trained, metrics.get("tokens/trained", trained)
            if kind == "step" and done <= profile.warmup:
                probe.take(), probe.peaks.take()
                continue
            tally.add(kind, metrics, probe, stats, trained - before)
            if kind == "step":
                say(f"step {done - profile.warmup} of {profile.steps}: {tally.seconds['step'][-1]:.2f} s")
            if _keep_larger(works, kind, work) and kind == "step":
                fullest_step = done - 1
        peaks = tally.peaks
        fullest = max((name for name in peaks if name != "step"), key=lambda name: peaks[name])
        say("one more step, to see what holds memory")
        inside = _anatomy(subject, update, fullest_step, evaluate, works)
    kv = tally.kv.get("eval" if fullest == "eval" else "step", 0) if fullest in _WITH_KV else 0
    memory = _breakdown(subject, update, inside.get(fullest, {}), kv, peaks[fullest])
    exact = {**{kind: memory[kind] for kind in EXACT}, GRADIENTS: update.gradients, KV: max(tally.kv.values())}
    phases = {name: tally.phase(name) for name in tally.seconds}
    return Measured(phases, tally.engine, fullest, peaks[fullest], memory, exact, works["step"], works.get("eval"))


def _keep_larger(works: dict[str, Workload], kind: str, work: Workload) -> bool:
    """Whether this is the largest of its kind so far."""
    larger = kind not in works or work.tokens > works[kind].tokens
    if larger:
        works[kind] = work
    return larger


def _anatomy(
    subject: Subject, update: _Update, step: int, evaluate: bool, works: dict[str, Workload]
) -> dict[str, Sizes]:
    """What each phase of a step held at its peak, beyond what is always allocated. Updates `works` with larger ones."""
    found: dict[str, Sizes] = {}
    open_spans: tuple[str, ...] = ()
    with Allocations(subject.model) as allocations:
        allocations.leave_out([*update.state, *subject.reference])

        def note(names: tuple[str, ...]) -> None:
            nonlocal open_spans
            peak = allocations.take_peak()
            for name in open_spans:
                if sum(peak.values()) >= sum(found.get(name, {}).values()):
                    found[name] = peak
            open_spans = names

        subject.probe.listener = note
        try:
            for kind, _ in subject.rehearse([step], evaluate):
                _keep_larger(works, kind, subject.engine.take()[0])
        finally:
            subject.probe.listener = lambda names: None
    return found


def _breakdown(subject: Subject, update: _Update, inside: Sizes, kv: int, peak: int) -> Sizes:
    parts = dict.fromkeys(KINDS, 0) | dict(inside)
    parts[WEIGHTS] = storage_bytes(held(subject.model))
    # A reference that is the model without its adapters has no weights of its own.
    parts[REFERENCE] = storage_bytes(held(subject.model) + subject.reference) - parts[WEIGHTS]
    parts[OPTIMIZER] = storage_bytes(update.state)
    parts[KV] = kv
    parts[ACTIVATIONS] = max(0, parts[ACTIVATIONS] - kv)
    parts[OTHER] = peak - sum(parts.values())
    return parts


def write_trace(subject: Subject, folder: Path) -> list[Path]:
    """One more step as a Chrome trace and, on a GPU, a snapshot of the allocator that PyTorch's viewer opens."""
    cuda = subject.probe.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.memory._record_memory_history()
    subject.probe.trace = True
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in subject.rehearse([0], False):
            pass
    subject.probe.trace = False
    written = [folder / "trace.json.gz"]
    profiler.export_chrome_trace(str(written[0]))
    if cuda:
        written.append(folder / "memory_snapshot.pickle")
        torch.cuda.memory._dump_snapshot(str(written[1]))
        torch.cuda.memory._record_memory_history(enabled=None)
    return written
