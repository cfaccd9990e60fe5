"""What measuring costs: steps with the meter of `grpo profile` on and off, in turns, in one process.

    OMP_NUM_THREADS=1 python scripts/bench_meter.py --rounds 8 scripts/baselines/bench_meter.json

Every rollout is forced to one length, so that both do the same work. Seconds are of processor time, the sampling thread
included, which neighbours on a busy machine touch least; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import hydra
import torch

from grpo_cli import experiment
from grpo_cli.config.choices import config_dir
from grpo_cli.config.compose import parse_profile
from grpo_cli.config.instantiate import build_rules
from grpo_cli.interfaces import Meter
from grpo_cli.meter import NullMeter
from grpo_cli.processor import settle
from grpo_cli.profile.forced_lengths import NEVER, ProfiledEngine
from grpo_cli.profile.measure import Probe
from grpo_cli.progress import Progress
from grpo_cli.step import Step


class Switch:
    """A meter that is now one, now another."""

    def __init__(self) -> None:
        self.meter: Meter = NullMeter()

    def span(self, name: str) -> AbstractContextManager[Any]:
        return self.meter.span(name)

    def take(self) -> Mapping[str, float]:
        return self.meter.take()


def step_with(meter: Switch, tokens: int, words: list[str]) -> Step:
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = hydra.compose("profile", ["run_dir=outputs/bench_meter", f"sampling.max_new_tokens={tokens}", *words])
    settings = parse_profile(cfg)
    rules = build_rules(settings.parts, settings.n, settings.m)
    bench = experiment.set_up(settings, settings.model, meter=meter, eos_token_ids=(NEVER,))
    bench = replace(bench, engine=ProfiledEngine(bench.engine, lambda count, longest: [longest] * count))
    return Step(settings, experiment.parts_of(settings, rules, bench, (), meter, print, print))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of every rollout")
    parser.add_argument("words", nargs="*", help="overrides, as of grpo profile")
    args = parser.parse_args()
    switch = Switch()
    step = step_with(switch, args.tokens, args.words)
    step.run(0, Progress())
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    loads = [os.getloadavg()]
    for turn in range(args.rounds):
        for state in ("off", "on") if turn % 2 else ("on", "off"):
            seconds[state].append(timed(step, switch, state == "on"))
    loads.append(os.getloadavg())
    ratio = median(seconds["on"]) / median(seconds["off"])
    print(f"processor seconds per step: off {median(seconds['off']):.3f}, on {median(seconds['on']):.3f}, {ratio:.3f}")
    if args.json:
        found = {"seconds": seconds, "ratio": ratio, "threads": torch.get_num_threads(), "loads": loads}
        settings = {"rounds": args.rounds, "tokens": args.tokens, "words": args.words, "torch": torch.__version__}
        args.json.write_text(json.dumps({"settings": settings} | found, indent=2) + "\n")


def timed(step: Step, switch: Switch, on: bool) -> float:
    """Processor seconds of one step."""
    if not on:
        switch.meter = NullMeter()
        start = time.process_time()
        step.run(0, Progress())
        return time.process_time() - start
    with Probe(torch.device("cpu")) as probe:
        switch.meter = probe
        time.sleep(0.5)  # its first look at the process's children, once in a run, is not of a step
        start = time.process_time()
        step.run(0, Progress())
        probe.take(), probe.peaks.take()
        return time.process_time() - start


if __name__ == "__main__":
    settle()
    main()
