"""How many decode steps each scheduler takes, with each predictor and sampler, on made-up lengths.

    python scripts/bench/schedules.py

This is the torch engine's clock without a model: as there, a request of L tokens holds a slot for L - 1 decode steps
(its first token comes from the prompt's logits), and a slot that falls free is refilled for the very next step. Memory,
prefill and seconds are not simulated. `prefix` is simulated: the true lengths, disturbed to a rank correlation of
--tau, and charged for the probing. Everything else is the schedulers that `grpo train` uses.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist

import numpy as np
from common import Figures, finish, parsed, parser, positive, settings_of, show

from grpo_cli.config.instantiate import make
from grpo_cli.engine.length_predictor import LengthMeans, kendall_tau
from grpo_cli.engine.makespan import lower_bound
from grpo_cli.engine.scheduling import Fifo, Running, Scheduler, Waiting
from grpo_cli.experimental.oracle import TraceRow

# The last is the same plan with the other refill rule.
SCHEDULERS = {
    "fifo": ("scheduler=fifo",),
    "sjf": ("scheduler=sjf",),
    "lpt": ("scheduler=lpt",),
    "fptas": ("scheduler=fptas",),
    "fptas+lpt": ("scheduler=fptas", "scheduler.refill=lpt"),
}
PREDICTORS = ("none", "mean", "prefix", "oracle")
SAMPLERS = ("micro", "infinite")
DISTRIBUTIONS = ("lognormal", "uniform", "bimodal")
MEAN, CV, LIMIT = 250.0, 0.7, 1024  # of made-up lengths, in tokens; CV of lognormal ones
PREFIX_TOKENS = 4  # that the prefix predictor looks at
COLUMNS = {
    "decode steps": ("decode_steps", ",.0f"),
    "x micro fifo": ("of_micro", ".3f"),
    "utilisation": ("slot_utilisation", ".3f"),
    "steps / bound": ("bound_ratio", ".3f"),
    "tau": ("kendall_tau", ".2f"),
}


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
            seen = tuple(Running(index, now - started[index], None) for _, _, index in sorted(running))
            plan = scheduler.plan(tuple(waiting.values()), seen, len(free))
            assert plan or running, "a scheduler must admit somebody when nothing is running"
            for index in plan:
                del waiting[index]
                slot, started[index] = free.pop(0), now
                admitted.append((index, slot, now))
                heapq.heappush(running, (now + steps[index], slot, index))
        now = running[0][0]
        while running and running[0][0] == now:
            free.append(heapq.heappop(running)[1])
        free.sort()
    return now, admitted


def makers() -> dict[str, Callable[[], Scheduler]]:
    """The schedulers as `grpo train` makes them."""
    parts = {name: settings_of(*words).parts["scheduler"] for name, words in SCHEDULERS.items()}
    return {name: lambda part=part: make("scheduler", part, {}) for name, part in parts.items()}


def compare(trace: Sequence[TraceRow], slots: int, tau: float, prefix_tokens: int, seed: int) -> dict[str, Figures]:
    """Every sampler, predictor and scheduler (the names of the figures) over the same trace, step by step, but for
    those that need lengths and get none. `prefix` is simulated: true remaining lengths, disturbed until their rank
    correlation is `tau`; without predictions there is no `kendall_tau`."""
    steps = [list(rows) for _, rows in groupby(sorted(trace, key=lambda row: row.step), key=lambda row: row.step)]
    schedulers, found = makers(), {}
    for predictor in PREDICTORS:
        predictions = predict_trace(predictor, steps, tau, prefix_tokens, np.random.default_rng(seed))
        prefix = prefix_tokens if predictor == "prefix" else 0
        for sampler in SAMPLERS:
            for name, maker in schedulers.items():
                if predictor == "none" and maker().needs_lengths:
                    continue
                runs = [
                    simulate([row.length for row in rows], predicted, maker(), slots, sampler == "micro", prefix)
                    for rows, predicted in zip(steps, predictions, strict=True)
                ]
                found[f"{sampler} {predictor} {name}"] = _outcome(runs) | _mean_tau(steps, predictions)
    reference = found["micro none fifo"]["decode_steps"]
    return {name: figures | {"of_micro": figures["decode_steps"] / reference} for name, figures in found.items()}


def _outcome(runs: Sequence[Simulation]) -> Figures:
    total = sum(run.decode_steps for run in runs)
    busy = sum(run.slot_utilisation * run.slots * run.decode_steps for run in runs)
    return {
        "decode_steps": total,
        "slot_utilisation": busy / max(1, sum(run.slots * run.decode_steps for run in runs)),
        "bound_ratio": total / max(1, sum(run.lower_bound for run in runs)),
    }


def _mean_tau(steps: Sequence[Sequence[TraceRow]], predictions: Sequence[Sequence[float | None]]) -> Figures:
    taus = []
    for rows, predicted in zip(steps, predictions, strict=True):
        known = [(guess, row.length) for guess, row in zip(predicted, rows, strict=True) if guess is not None]
        if known:
            taus.append(kendall_tau(*zip(*known, strict=True)))
    return {"kendall_tau": sum(taus) / len(taus)} if taus else {}


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


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--slots", type=positive, default=16)
    made.add_argument("--n", type=positive, default=32, help="rollouts per prompt")
    made.add_argument("--prompts", type=positive, default=4, help="per step")
    made.add_argument("--steps", type=positive, default=10)
    made.add_argument("--tau", type=float, default=0.4, help="Kendall's tau of the simulated prefix predictor")
    made.add_argument("--seed", type=int, default=0, help="of the made-up lengths and the disturbance")
    args = parsed(made, words, steps=1, prompts=1)
    found = {}
    for name in DISTRIBUTIONS:
        rows = synthetic_trace(name, args.steps, args.prompts, args.n, MEAN, CV, LIMIT, args.seed)
        found[name] = compare(rows, args.slots, args.tau, PREFIX_TOKENS, args.seed)
        show(f"{name}: {len(rows)} rollouts, {args.slots} slots", found[name], COLUMNS)
    return finish(args, {"results": found})


if __name__ == "__main__":
    sys.exit(main())
