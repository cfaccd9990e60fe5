"""What partial rollouts save: decode steps per trained group, with given lengths and no training (of frontier_b).

A reply's length is drawn from a log-normal distribution by its problem and sample, so that all arms are given the same
replies, resumed or not. The engine is a run's own and its work is real, but only counts are told, which are the same on
every machine. A step is one update, as it is by default, so that what is carried grows old.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from common import Figures, engine_of, settings_of, write

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.requests import seed_of
from grpo_cli.config.instantiate import rules_of
from grpo_cli.config.prepare import prepare
from grpo_cli.engine.order.predict import key_of
from grpo_cli.experiment import set_up
from grpo_cli.history import History
from grpo_cli.interfaces import Bench, Engine
from grpo_cli.types import EngineStats, Finish, Request, Rollout, ScoredGroup

SAMPLERS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "micro": ("sampler=micro", "sampler.slots=32"),
    "infinite": ("sampler=infinite", "sampler.slots=32"),
}
COLLECTORS: Mapping[str, tuple[str, ...]] = {
    "equal": (),
    **{f"surplus {share:g}": ("collector=partial", f"collector.surplus={share}") for share in (0.0, 0.5, 1.0)},
}
MEAN, LONGEST, DEVIATION = 24.0, 192, 1.0  # tokens; the deviation as a share of the mean, before the longest are cut
SHAPE = ("n=8", "m=8", "downsample=all", "train.prompts=16", f"sampling.max_new_tokens={LONGEST}", "device=cpu")
NEVER = -1  # an end-of-sequence token that no model produces
BEFORE = 10  # steps that are not counted: what is carried from step to step has to come to its usual number
STEPS = 50


def length_of(problem: str, sample: int) -> int:
    sigma = np.sqrt(np.log1p(DEVIATION**2))
    drawn = np.random.default_rng(seed_of("length", problem, sample)).lognormal(np.log(MEAN) - sigma**2 / 2, sigma)
    return int(np.clip(round(drawn), 1, LONGEST))


class Given:
    """An engine whose replies are as long as `length_of` says."""

    def __init__(self, engine: Engine) -> None:
        self._inner = engine

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        asked = {key_of(request): request for request in requests}

        def given(rollout: Rollout) -> Rollout:
            request = asked[key_of(rollout.request)]
            ended = rollout.finish is Finish.LENGTH and len(rollout) < request.sampling.max_new_tokens
            return replace(rollout, request=request, finish=Finish.EOS if ended else rollout.finish)

        limited = []
        for request in requests:
            length = length_of(request.prompt.id.partition("+")[0], request.sample) - request.resumed
            limited.append(replace(request, sampling=replace(request.sampling, max_new_tokens=max(1, length))))
        stops = None if enough is None else lambda rollout: enough(given(rollout))
        yield from map(given, self._inner.generate(limited, stops))

    def stats(self) -> EngineStats:
        return self._inner.stats()


@cache
def bench() -> Bench:
    settings = settings_of(*SHAPE)
    return set_up(prepare(settings), settings.model)


def measured(sampler: str, collector: str, steps: int) -> Figures:
    """What `steps` steps of an arm took, after those that are not counted."""
    words = (*SHAPE, *SAMPLERS[sampler], *COLLECTORS[collector])
    settings, made = settings_of(*words), bench()
    rule, engine = rules_of(settings.parts).collector, Given(engine_of(made.model, (NEVER,), *words))
    curriculum = Epochs(made.task.prompts("train"), settings.train.prompts, settings.seed)
    history, found = History(), list[tuple[EngineStats, list[ScoredGroup], float]]()
    for step in range(BEFORE + steps):
        collection = StepCollection(
            n=settings.n,
            prompts=settings.train.prompts,
            sampling=settings.sampling,
            seed=settings.seed,
            step=step,
            curriculum=curriculum,
            engine=engine,
            task=made.task,
            history=history,
            version=step,
        )
        groups = collection.run(rule)
        found.append((collection.stats, groups, collection.metrics().get("collect/carried_tokens", 0.0)))
    return figures(found[BEFORE:], first=BEFORE)


def figures(steps: Sequence[tuple[EngineStats, Sequence[ScoredGroup], float]], first: int) -> Figures:
    """Of steps: what the engine did, the groups to train on, the tokens carried on. `first`: the first one's number."""
    stats, groups = [of for of, _, _ in steps], [group for _, of, _ in steps for group in of]
    lengths = [len(rollout) for group in groups for rollout in group.rollouts]
    spans = [
        (span.count, first + place - span.version)
        for place, (_, of, _) in enumerate(steps)
        for group in of
        for rollout in group.rollouts
        for span in rollout.spans
    ]
    room = sum(of.decode_steps * of.slots for of in stats)
    return {
        "decode_steps_per_group": sum(of.decode_steps for of in stats) / len(groups),
        "utilisation": sum(of.decode_steps * of.slots * of.slot_utilisation for of in stats) / room,
        "prefill_per_group": sum(of.prefill_tokens for of in stats) / len(groups),
        "groups_per_step": len(groups) / len(steps),
        "variation": statistics.pstdev(lengths) / statistics.mean(lengths),
        "length_mean": statistics.mean(lengths),
        "old_share": sum(count for count, lag in spans if lag) / sum(lengths),
        "lag_mean": sum(count * lag for count, lag in spans) / sum(lengths),
        "carried_tokens": statistics.mean(carried for _, _, carried in steps),
    }


def cost(args: argparse.Namespace, out: Path) -> dict[str, dict[str, Figures]]:
    """Figures by sampler and collector. What is there already is read; `args.jobs` are made at a time."""
    samplers, steps = (["full"], 2) if args.quick else (list(SAMPLERS), STEPS)
    arms = list(product(samplers, COLLECTORS))
    files = {arm: out / "cost" / f"{arm[0]}_{arm[1].replace(' ', '_')}.json" for arm in arms}
    left = [arm for arm, file in files.items() if not file.exists()]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, spawned, torch.set_num_threads, (args.threads,)) as pool:
        for arm, made in [(arm, pool.submit(measured, *arm, steps)) for arm in left]:
            write(files[arm], made.result())
    found = {arm: json.loads(file.read_text(encoding="utf-8")) for arm, file in files.items()}
    return {s: beside_equal({collector: found[s, collector] for collector in COLLECTORS}) for s in samplers}


def beside_equal(found: Mapping[str, Figures]) -> dict[str, Figures]:
    """One sampler's collectors, with their decode steps as a share of the plain collector's."""
    base = found["equal"]["decode_steps_per_group"]
    return {name: {**of, "of_equal": of["decode_steps_per_group"] / base} for name, of in found.items()}
