"""What engine=ray costs over the engine of one process, what a second worker brings, and what killed ones change.

    python scripts/bench/ray_engine.py rate --model models/smollm2 --json out.json
    python scripts/bench/ray_engine.py weights --model models/smollm2
    python scripts/bench/ray_engine.py lost --model models/smollm2
    python scripts/bench/ray_engine.py kills --kills 50              # --episodes: of several turns

rate     rollouts of a model with a thread for each process: in this process, by one worker and by two on this machine.
         The arms take turns, each in a process of its own, which makes one problem's until all workers are there.
         Seconds are of the clock, since the workers' are not this process's: it wants a quiet machine.
weights  putting a model's weights into Ray's store, as an update does, over one copy of the same bytes in memory.
lost     what rollouts by three workers take when one of them is killed half-way, and how long until it is replaced.
kills    `grpo train` with three workers, of which a random one is killed at random moments until enough were; records
         and rollouts are compared with those of engine=torch, which nobody disturbs. Episodes, which engine=torch
         answers in place, are compared with those of three workers that nobody disturbs.

Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from common import (
    MEASURED,
    ROOT,
    Check,
    Figures,
    bench_parser,
    finish,
    in_a_process,
    in_turns,
    lasting,
    medians,
    over,
    parsed,
    positive,
    settings_of,
    show,
)

from grpo_cli.collect.requests import requests_for
from grpo_cli.config.overrides import overrides
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import set_up

ARMS = {
    "in this process": ("engine=torch",),
    "one worker": ("engine=ray", "engine.workers=1", "engine.threads=1"),
    "two workers": ("engine=ray", "engine.workers=2", "engine.threads=1"),
}
THREE = ("engine=ray", "engine.workers=3", "engine.threads=1")
MODEL = ("model=smollm2_135m", "model.autocast=none", "task=word_problems", "device=cpu", "logger=jsonl")
KILLED = ("n=16", "m=4", "train.prompts=8", "logger=jsonl", "eval.every=1000", "eval.problems=4", "eval.k=1")
EPISODES = ("task=guess", "sampling.max_turn_tokens=4")
# Metrics that tell of time, memory and who did what; all others must agree.
OF_THE_WAY = ("engine/", *MEASURED)


def bench_of(args: argparse.Namespace, *words: str) -> Any:
    path = tuple(word.lstrip("+") for word in overrides({"model.path": str(args.model)}))
    settings = settings_of(*MODEL, f"sampling.max_new_tokens={args.tokens}", *path, *words)
    return settings, set_up(prepare(settings), settings.model, print)


def rate_child(words: Sequence[str], out: Path) -> None:
    """One arm: once to warm up, then measured."""
    args = argparse.Namespace(**json.loads(words[0]))
    settings, bench = bench_of(args, *ARMS[args.arm], f"sampler={args.sampler}", f"sampler.slots={args.slots}")
    problems = bench.task.prompts("train")
    requests = requests_for([problems[i] for i in range(args.prompts)], args.n, settings.sampling, settings.seed, 0)
    wanted = dict(settings.parts["engine"]).get("workers", 0)
    # The memory of the first two weights in Ray's store is touched for the first time, as it is once in a run.
    for _ in range(2):
        bench.engine.update_weights()
        while True:
            list(bench.engine.generate(requests[: args.n]))
            if bench.engine.stats().details.get("engine/workers", 0) >= wanted:
                break
    bench.engine.update_weights()
    start = time.perf_counter()
    tokens = sum(len(rollout) for rollout in bench.engine.generate(requests))
    seconds, stats = time.perf_counter() - start, bench.engine.stats()
    figures = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
    figures |= {"decode_steps": stats.decode_steps, "weights": stats.details.get("engine/weight_update_seconds", 0.0)}
    out.write_text(json.dumps(figures))


def rate(args: argparse.Namespace) -> int:
    def measured(arm: str) -> Figures:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        asked = {name: given[name] for name in ("model", "tokens", "sampler", "slots", "prompts", "n")} | {"arm": arm}
        with tempfile.TemporaryDirectory() as folder:
            found, reason = in_a_process(__file__, json.dumps(asked), threads=1, folder=Path(folder))
        if found is None:
            raise SystemExit(f"{arm}: {reason}")
        figures: Figures = found
        print(f"{arm}: {figures['tokens_per_second']:.1f} tokens/s", flush=True)
        return figures

    turns = in_turns({arm: lambda arm=arm: measured(arm) for arm in ARMS}, args.rounds)
    arms = {arm: [turn[arm] for turn in turns] for arm in ARMS}
    one = over(arms["one worker"], arms["in this process"], "tokens_per_second")
    two = over(arms["two workers"], arms["one worker"], "tokens_per_second")
    columns = {
        "tokens/s": ("tokens_per_second", ",.1f"),
        "seconds": ("seconds", ".2f"),
        "decode steps": ("decode_steps", ",.0f"),
        "weights, s": ("weights", ".2f"),
    }
    show(f"{args.prompts} x {args.n} rollouts, sampler={args.sampler}", medians(turns), columns)
    checks = [Check("one worker over in this process", one, least=0.9), Check("two over one", two, least=1.6)]
    return finish(args, {"turns": turns, "arms": medians(turns)}, checks, "ray")


def weights(args: argparse.Namespace) -> int:
    settings, bench = bench_of(args, *ARMS["one worker"])
    problems = bench.task.prompts("train")
    requests = requests_for([problems[0]], 1, settings.sampling, settings.seed, 0)
    list(bench.engine.generate(requests))
    parameters = [p.detach() for p in bench.model.parameters()]
    copies = [torch.empty_like(p) for p in parameters]
    turns: list[dict[str, Figures]] = []
    for _ in range(args.rounds + 1):
        start = time.perf_counter()
        for mine, its in zip(copies, parameters, strict=True):
            mine.copy_(its)
        copied = time.perf_counter() - start
        bench.engine.update_weights()
        list(bench.engine.generate(requests))
        taken = bench.engine.stats().details["engine/weight_update_seconds"]
        turns.append({"copy": {"seconds": copied}, "weights": {"seconds": taken}})
    turns = turns[1:]  # the first touches new memory
    size = sum(p.numel() * p.element_size() for p in parameters)
    ratio = over([turn["weights"] for turn in turns], [turn["copy"] for turn in turns], "seconds")
    found = medians(turns)
    print(f"{size / 2**20:,.0f} MiB: copied in {found['copy']['seconds']:.3f} s, ", end="")
    print(f"in the store in {found['weights']['seconds']:.3f} s")
    return finish(args, {"turns": turns, "bytes": size}, [Check("over a copy", ratio, most=2)], "ray")


def lost(args: argparse.Namespace) -> int:
    settings, bench = bench_of(args, *THREE, f"sampler={args.sampler}", f"sampler.slots={args.slots}")
    problems = bench.task.prompts("train")
    requests = requests_for([problems[i] for i in range(args.prompts)], args.n, settings.sampling, settings.seed, 0)
    engine, wanted = bench.engine, settings.parts["engine"]["workers"]

    def until_all_are_there() -> float:
        start = time.perf_counter()
        while True:
            list(engine.generate(requests[: args.n]))
            if engine.stats().details["engine/workers"] >= wanted:
                return time.perf_counter() - start

    def made(kill: bool) -> Figures:
        start, killed, count = time.perf_counter(), 0.0, 0
        for count, _ in enumerate(engine.generate(requests), 1):
            if kill and 2 * count >= len(requests) and not killed:
                os.kill(engine.facts()["workers"]["0"]["pid"], signal.SIGKILL)
                killed = time.perf_counter()
        assert count == len(requests), "nothing is lost, nothing comes twice"
        end, again = time.perf_counter(), engine.stats().details.get("engine/requests_again", 0.0)
        back = end - killed + until_all_are_there() if kill else 0.0
        return {"seconds": end - start, "again": again, "back": back}

    until_all_are_there()
    arms = {"undisturbed": lambda: made(False), "one of three killed": lambda: made(True)}
    turns = in_turns(arms, args.rounds)
    columns = {
        "seconds": ("seconds", ".1f"),
        "dealt again": ("again", ".0f"),
        "until it is replaced, s": ("back", ".1f"),
    }
    found = medians(turns)
    show(f"{args.prompts} x {args.n} rollouts by three workers", found, columns)
    whole, killed = found["undisturbed"]["seconds"], found["one of three killed"]
    checks = [
        Check("seconds more, of its share and the restart", killed["seconds"] - whole, most=whole / 3 + killed["back"])
    ]
    return finish(args, {"turns": turns, "arms": found}, checks, "ray")


def kills(args: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="grpo_kills_"))
    try:
        return _kills(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(folder: Path, name: str, steps: int, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "grpo_cli", "train", *KILLED, *words, f"train.steps={steps}"]
    command += ["record.rollouts=-1", f"hydra.run.dir={folder / name}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / f"{name}.txt").open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment)


def _kills(args: argparse.Namespace, folder: Path) -> int:
    draw = random.Random(args.seed)
    task = EPISODES if args.episodes else ()
    done, seen, run = 0, 0, _train(folder, "killed", args.steps, *THREE, *task)
    while run.poll() is None:
        time.sleep(draw.uniform(0.2, args.pause))
        own = [p for p in psutil.Process(run.pid).children(recursive=True) if p.name().startswith("ray::RolloutWorker")]
        rows = _rows(folder / "killed")
        # Three that are killed as fast as they start are given up, as they should be: a step comes between two kills,
        # and two were at work in it.
        if own and done < args.kills and len(rows) > seen and rows[-1].get("engine/workers", 0) >= 2:
            draw.choice(own).kill()
            done, seen = done + 1, len(rows)
    if run.returncode:
        raise SystemExit((folder / "killed.txt").read_text()[-2000:])
    left = _train(folder, "left", args.steps, *(THREE if args.episodes else ()), *task)
    assert left.wait() == 0, "the run that nobody disturbs ends well"
    found = [lasting(folder / name, OF_THE_WAY) for name in ("killed", "left")]
    texts = [(folder / name / "rollouts.jsonl").read_bytes() for name in ("killed", "left")]
    again = sum(row.get("engine/requests_again", 0.0) for row in _rows(folder / "killed"))
    same = float(found[0] == found[1] and texts[0] == texts[1])
    print(f"{done} kills in {args.steps} steps; {again:.0f} requests were dealt again")
    checks = [Check("kills", done, least=args.kills), Check("records and rollouts are equal", same, least=1)]
    return finish(args, {"kills": done, "requests_again": again, "equal": bool(same)}, checks, "ray")


def _rows(run: Path) -> list[dict[str, Any]]:
    """The records so far; of a run that goes on the last line may be half written."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def main(words: Sequence[str] | None = None) -> int:
    made = bench_parser(__doc__, rounds=3, threads=1)
    made.add_argument("what", choices=("rate", "weights", "lost", "kills"))
    made.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", help="made by scripts/get_smollm2.sh")
    made.add_argument("--tokens", type=positive, default=64, help="of a reply, at most")
    made.add_argument("--prompts", type=positive, default=8)
    made.add_argument("--n", type=positive, default=16)
    made.add_argument("--sampler", default="infinite")
    made.add_argument("--slots", type=positive, default=32, help="of each worker")
    made.add_argument("--kills", type=positive, default=50)
    made.add_argument("--steps", type=positive, default=600, help="of kills")
    made.add_argument("--episodes", action="store_true", help="kills: of several turns")
    made.add_argument("--pause", type=float, default=3.0, help="seconds between two kills, at most")
    args = parsed(made, words, tokens=8, prompts=2, n=4, kills=1, steps=6, rounds=1)
    args.model = args.model.resolve()
    return {"rate": rate, "weights": weights, "lost": lost, "kills": kills}[args.what](args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        rate_child(sys.argv[2:-1], Path(sys.argv[-1]))
    else:
        sys.exit(main())
