"""What our own machinery costs, apart from any model.

    python scripts/bench/overhead.py downsample --json out.json
    OMP_NUM_THREADS=1 python scripts/bench/overhead.py meter --rounds 8 [overrides, as of grpo profile]

downsample  choosing from a million rewards, against `numpy.sort` of the same ones: the fastest of the rounds of each,
            taken in turns. `maxvar` may cost at most 3 sorts, whatever is kept.
meter       steps with the meter of `grpo profile` on and off, in turns, in one process. Every rollout is forced to one
            length, so that both do the same work. Processor seconds, the sampling thread included.

Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from common import Check, Figures, bench_parser, clocked, finish, in_turns, medians, over, parsed, settings_of, show

from grpo_cli import experiment
from grpo_cli.config.prepare import prepare
from grpo_cli.interfaces import Meter
from grpo_cli.memory.lengths import NEVER, ProfiledEngine
from grpo_cli.memory.measure import Probe
from grpo_cli.methods.pods import max_reward_indices, max_variance_indices, percentile_indices
from grpo_cli.step import Step
from grpo_cli.support.meter import NullMeter
from grpo_cli.tracking.progress import Progress

Found = tuple[dict[str, Any], list[Check]]
RULES = {"maxvar": max_variance_indices, "maxreward": max_reward_indices, "percentile": percentile_indices}


def downsample(args: argparse.Namespace) -> Found:
    size = 10_000 if args.quick else 1_000_000
    rng = np.random.default_rng(args.seed)
    kinds = {"continuous": rng.standard_normal(size), "binary": (rng.random(size) < 0.3).astype(np.float64)}
    found: dict[str, Figures] = {}
    for kind, rewards in kinds.items():
        for kept in (16, size // 4, size // 2, size - 1):
            rules = {name: partial(rule, rewards, kept, rng) for name, rule in RULES.items()}
            arms = {name: lambda work=work: clocked(work)[1] for name, work in rules.items()}
            turns = in_turns({"sort": lambda r=rewards: clocked(lambda: np.sort(r))[1], **arms}, args.rounds)
            fastest = {name: min(turn[name]["seconds"] for turn in turns) for name in turns[0]}
            ratios = {f"{name}_ratio": fastest[name] / fastest["sort"] for name in RULES}
            found[f"{kind}, {kept} of {size}"] = {"sort_seconds": fastest["sort"], **ratios}
    columns = {"sort, s": ("sort_seconds", ".4f"), **{f"{name} / sort": (f"{name}_ratio", ".2f") for name in RULES}}
    show("choosing from many rewards", found, columns)
    worst = max(figures["maxvar_ratio"] for figures in found.values())
    return {"results": found}, [] if args.quick else [Check("maxvar over a sort, at worst", worst, most=3.0)]


class Switch:
    """A meter that is now one, now another."""

    def __init__(self) -> None:
        self.meter: Meter = NullMeter()

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self.meter.span(name)

    def take(self) -> Mapping[str, float]:
        return self.meter.take()


def meter(args: argparse.Namespace) -> Found:
    torch.set_num_threads(args.threads)
    switch = Switch()
    small = ("n=4", "train.prompts=1") if args.quick else ()
    settings = settings_of("sampling.max_new_tokens=32", *small, *args.overrides, command="profile")
    run = prepare(settings)
    bench = experiment.set_up(run, settings.model, meter=switch, eos_token_ids=(NEVER,))
    bench = replace(bench, engine=ProfiledEngine(bench.engine, lambda count, longest: [longest] * count))
    step = Step(settings, experiment.parts_of(run, bench, (), switch, print, print))
    step.run(0, Progress())
    turns = in_turns({s: partial(_one_step, step, switch, s == "on") for s in ("off", "on")}, args.rounds)
    found, ratio = medians(turns), over([turn["on"] for turn in turns], [turn["off"] for turn in turns], "cpu_seconds")
    found["on"]["ratio"] = ratio
    show("a step, its meter off and on", found, {"CPU-s": ("cpu_seconds", ".3f"), "x off": ("ratio", ".3f")})
    return {"results": found, "ratio": ratio, "rounds": turns}, []


def _one_step(step: Step, switch: Switch, on: bool) -> Figures:
    if not on:
        switch.meter = NullMeter()
        return clocked(lambda: step.run(0, Progress()))[1]
    with Probe(torch.device("cpu")) as probe:
        switch.meter = probe
        time.sleep(0.5)  # its first look at the process's children, once in a run, is not of a step
        return clocked(lambda: (step.run(0, Progress()), probe.take(), probe.peaks.take()))[1]


WHAT: Mapping[str, tuple[Callable[[argparse.Namespace], Found], int]] = {
    "downsample": (downsample, 9),
    "meter": (meter, 8),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=0)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("overrides", nargs="*", help="of meter")
    args = parsed(parser, words, rounds=1)
    measure, rounds = WHAT[args.what]
    args.rounds = args.rounds or rounds
    return finish(args, *measure(args))


if __name__ == "__main__":
    sys.exit(main())
