"""What a scheduler makes of known lengths, counted in decode steps: the torch engine's clock without a model.

As in that engine, a request of L tokens holds a slot for L - 1 decode steps (its first token comes from the prompt's
logits), and a slot that falls free is refilled for the very next step. Memory, prefill and seconds are not simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import NormalDist

import numpy as np

from grpo_cli.engine.interfaces import Plan, Running, Scheduler, Waiting
from grpo_cli.engine.lengths import LengthMeans, TraceRow, kendall_tau
from grpo_cli.engine.makespan import lower_bound
from grpo_cli.engine.schedule import Fifo, Fptas, Lpt, Sjf

# The last is the same plan with the other refill rule.
SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {
    "fifo": Fifo,
    "sjf": Sjf,
    "lpt": Lpt,
    "fptas": partial(Fptas, epsilon=0.1, max_states=20_000, refill="sjf"),
    "fptas+lpt": partial(Fptas, epsilon=0.1, max_states=20_000, refill="lpt"),
}
PREDICTORS = ("none", "mean", "prefix", "oracle")
SAMPLERS = ("micro", "infinite")
DISTRIBUTIONS = ("lognormal", "uniform", "bimodal")


@dataclass(frozen=True)
class Simulation:
    """What one simulated `generate` cost, its probing included.

    `admitted` has the index, slot and first step of each request, in order of admission, without the probing.
    """

    decode_steps: int
    slots: int
    slot_utilisation: float
    lower_bound: int
    admitted: tuple[tuple[int, int, int], ...]

    @property
    def bound_ratio(self) -> float:
        """Decode steps over the lower bound: the longest request, or an equal share of all steps for each slot."""
        return self.decode_steps / self.lower_bound if self.lower_bound else 1.0


def simulate(
    lengths: Sequence[int],
    predicted: Sequence[float | None],
    scheduler: Scheduler,
    slots: int,
    rounds: bool = False,
    prefix_tokens: int = 0,
) -> Simulation:
    """Run `scheduler` over requests of these true `lengths` in tokens, of which it sees only `predicted`.

    `rounds` asks it only when all slots are free (`micro`), else it is asked whenever one is (`infinite`). No more
    slots are used than there are requests. With `prefix_tokens` = k, and fewer slots than requests, every request first
    takes k steps, or all it has, in order of index, so that a predictor can look at it; then the rest of each is
    scheduled anew, and `predicted` is about the tokens after the first k.
    """
    slots = min(slots, len(lengths))
    steps = {index: length - 1 for index, length in enumerate(lengths)}
    probing = 0
    if prefix_tokens and slots < len(lengths):
        views = [Waiting(index, "", prefix_tokens + 1, None) for index in steps]
        probe = {index: min(count, prefix_tokens) for index, count in steps.items()}
        probing, _ = _serve(probe, views, Fifo(), slots, rounds)
    limit = max(lengths) - prefix_tokens
    rest = {index: count - prefix_tokens for index, count in steps.items() if count > prefix_tokens}
    if not probing:
        rest = steps
    makespan, admitted = _serve(rest, [Waiting(i, "", limit, predicted[i]) for i in rest], scheduler, slots, rounds)
    total = probing + makespan
    return Simulation(
        decode_steps=total,
        slots=slots,
        slot_utilisation=sum(steps.values()) / (slots * total) if total else 1.0,
        lower_bound=lower_bound(list(steps.values()), slots),
        admitted=tuple(admitted),
    )


def _serve(
    steps: Mapping[int, int], views: Sequence[Waiting], scheduler: Scheduler, slots: int, rounds: bool
) -> tuple[int, list[tuple[int, int, int]]]:
    """The step after the last one, and who was admitted where and when. `steps` is how long each holds its slot."""
    waiting = {view.index: view for view in views}
    running: list[tuple[int, int, int]] = []  # a heap of (step after its last, slot, index)
    started: dict[int, int] = {}
    admitted: list[tuple[int, int, int]] = []
    free = list(range(slots))
    now = 0
    scheduler.start(tuple(views), slots)
    while waiting or running:
        if waiting and (not running or not rounds):
            seen = tuple(Running(index, slot, now - started[index], None) for _, slot, index in sorted(running))
            plan = scheduler.plan(tuple(waiting.values()), seen, tuple(free))
            _check(plan, waiting, free, bool(running))
            for index, slot in plan.admit:
                del waiting[index]
                free.remove(slot)
                started[index] = now
                admitted.append((index, slot, now))
                heapq.heappush(running, (now + steps[index], slot, index))
        now = running[0][0]
        while running and running[0][0] == now:
            free.append(heapq.heappop(running)[1])
        free.sort()
    return now, admitted


def _check(plan: Plan, waiting: Mapping[int, Waiting], free: Sequence[int], anything_runs: bool) -> None:
    indices = [index for index, _ in plan.admit]
    slots = [slot for _, slot in plan.admit]
    assert len(set(indices)) == len(indices) and waiting.keys() >= set(indices), "a plan admits who waits, once"
    assert len(set(slots)) == len(slots) and set(free) >= set(slots), "a plan gives each free slot once"
    assert indices or anything_runs, "a scheduler must admit somebody when nothing is running"


@dataclass(frozen=True)
class Outcome:
    """A scheduler, predictor and sampler over all steps of a trace. `kendall_tau` is None if nothing was predicted."""

    sampler: str
    scheduler: str
    predictor: str
    decode_steps: int
    slot_utilisation: float
    bound_ratio: float
    kendall_tau: float | None


def compare(trace: Sequence[TraceRow], slots: int, tau: float, prefix_tokens: int, seed: int) -> list[Outcome]:
    """Every sampler, predictor and scheduler over the same trace, step by step, but for those that need lengths and get
    none. `prefix` is simulated: true remaining lengths, disturbed until their rank correlation is `tau`."""
    steps = [list(rows) for _, rows in groupby(sorted(trace, key=lambda row: row.step), key=lambda row: row.step)]
    outcomes = []
    for predictor in PREDICTORS:
        predictions = predict_trace(predictor, steps, tau, prefix_tokens, np.random.default_rng(seed))
        for sampler in SAMPLERS:
            for name, make in SCHEDULERS.items():
                if predictor == "none" and make().needs_lengths:
                    continue
                prefix = prefix_tokens if predictor == "prefix" else 0
                runs = [
                    simulate([row.length for row in rows], predicted, make(), slots, sampler == "micro", prefix)
                    for rows, predicted in zip(steps, predictions, strict=True)
                ]
                outcomes.append(_outcome(sampler, name, predictor, runs, _mean_tau(steps, predictions)))
    return outcomes


def _outcome(
    sampler: str, scheduler: str, predictor: str, runs: Sequence[Simulation], kendall: float | None
) -> Outcome:
    total = sum(run.decode_steps for run in runs)
    busy = sum(run.slot_utilisation * run.slots * run.decode_steps for run in runs)
    return Outcome(
        sampler=sampler,
        scheduler=scheduler,
        predictor=predictor,
        decode_steps=total,
        slot_utilisation=busy / max(1, sum(run.slots * run.decode_steps for run in runs)),
        bound_ratio=total / max(1, sum(run.lower_bound for run in runs)),
        kendall_tau=kendall,
    )


def _mean_tau(steps: Sequence[Sequence[TraceRow]], predictions: Sequence[Sequence[float | None]]) -> float | None:
    taus = []
    for rows, predicted in zip(steps, predictions, strict=True):
        known = [(guess, row.length) for guess, row in zip(predicted, rows, strict=True) if guess is not None]
        if known:
            taus.append(kendall_tau(*zip(*known, strict=True)))
    return sum(taus) / len(taus) if taus else None


def predict_trace(
    predictor: str, steps: Sequence[Sequence[TraceRow]], tau: float, prefix_tokens: int, rng: np.random.Generator
) -> list[list[float | None]]:
    """What `predictor` would have said about each row of each step, before the step was made."""
    means = LengthMeans(decay=0.9)
    predictions: list[list[float | None]] = []
    for rows in steps:
        lengths = [row.length for row in rows]
        if predictor == "none":
            predictions.append([None] * len(rows))
        elif predictor == "mean":
            predictions.append([means.mean(row.prompt_id) for row in rows])
            means.add((row.prompt_id, row.length) for row in rows)
        elif predictor == "prefix":
            predictions.append([max(1.0, n - prefix_tokens) for n in disturb(lengths, tau, rng)])
        else:
            predictions.append([float(length) for length in lengths])
    return predictions


def disturb(lengths: Sequence[int], tau: float, rng: np.random.Generator) -> list[float]:
    """What a well calibrated predictor would say whose ranking has about this Kendall correlation with the true one.

    A Gaussian copula: normal scores of the true ranks are mixed with noise (tau = 2 / pi * asin(rho)), and the
    prediction is the mean length given the mixture. So a weak predictor says nearly the same of all, and tau = 1 says
    the truth.
    """
    normal, count = NormalDist(), len(lengths)
    score = np.array([normal.inv_cdf((rank + 0.5) / count) for rank in range(count)])
    rho = math.sin(math.pi / 2 * tau)
    noise = math.sqrt(1 - rho**2)
    mixed = rho * score[np.argsort(np.argsort(lengths, kind="stable"))] + noise * rng.standard_normal(count)
    ordered = np.sort(lengths)
    return [float(np.interp(rho * value + noise * score, score, ordered).mean()) for value in mixed]


def synthetic_trace(
    distribution: str, steps: int, prompts: int, n: int, mean: float, cv: float, limit: int, seed: int
) -> list[TraceRow]:
    """Lengths from 1 to `limit` of `n` samples of the same `prompts` in each step.

    `lognormal` has this mean and coefficient of variation before it is cut off at the limit, a third of its variance
    (of the logarithm) being between prompts; `uniform` covers 1 to `limit`; `bimodal` is a normal around half the mean
    with a quarter of the samples at the limit, as of a model that sometimes never ends. The last two do not depend on
    the prompt.
    """
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(math.log(1 + cv**2))
    level = rng.normal(0.0, sigma * math.sqrt(1 / 3), prompts)
    rows = []
    for step in range(steps):
        for prompt in range(prompts):
            if distribution == "lognormal":
                noise = rng.normal(0.0, sigma * math.sqrt(2 / 3), n)
                values = np.exp(math.log(mean) - sigma**2 / 2 + level[prompt] + noise)
            elif distribution == "uniform":
                values = rng.integers(1, limit, n, endpoint=True).astype(float)
            else:
                values = np.where(rng.random(n) < 0.25, limit, rng.normal(mean / 2, mean / 8, n))
            for sample, value in enumerate(values):
                rows.append(TraceRow(step, f"prompt-{prompt}", sample, int(np.clip(round(value), 1, limit))))
    return rows
