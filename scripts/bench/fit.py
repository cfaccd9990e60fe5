"""`fit=<bytes>` in a control group of that many bytes: whether it survives, and its speed beside the fastest settings.

    sudo python scripts/bench/fit.py --json scripts/baselines/bench_fit.json
    sudo python scripts/bench/fit.py --cases "embedded, n=64 m=16" --shares 0.5

For each workload every other way is tried first, without a limit: the layer recomputed or not, logits in parts or not,
three sizes of a pass, all slots or a quarter. Then come limits between the least memory that `fit` says would do and
what the run takes as it is. Under each, `fit=<limit>` and the fastest way that took no more than the limit take turns.
Seconds are of a step, the fastest of those after the first; planning is not counted, and printed. Linux, as root: it
makes a control group.

Exits with 1 when a run was killed, or was slower than the fastest by more than 15 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Check, Figures, finish, parsed, parser, settings_of, show
from memory import LARGER

from grpo_cli.config.prepare import prepare
from grpo_cli.memory.planner import Planner
from grpo_cli.support.formatting import parse_bytes

LEAN = ("logger=jsonl", "device=cpu", "eval.every=0", "record.rollouts=0", "train.checkpoint_every=1000")
# Replies that nearly all reach the limit: a plan must hold where all of them do.
TINY = ("sampling.max_new_tokens=24",)
# Random weights are right in nothing. With rewards that all differ no way of these leaves a group out of its updates.
UNEVEN = "import zlib\n\n\ndef reward(reply):\n    return zlib.crc32(reply.encode()) / 2**32\n"
ROWS = "".join(json.dumps({"question": f"{i} + {i} =", "answer": str(2 * i)}) + "\n" for i in range(64))
FIFTY = (*LARGER, "train.prompts=2", "sampling.max_new_tokens=48")
FIFTY += ("task=jsonl", "task.path=rows.jsonl", "task.reward=uneven:reward")
CASES: Mapping[str, tuple[str, ...]] = {
    "embedded, n=16": (*TINY, "n=16"),
    "embedded, n=64 m=16": (*TINY, "n=64", "m=16"),
    "embedded, n=64": (*TINY, "n=64"),
    "embedded, with a reference": (*TINY, "n=32", "loss.kl_coef=0.05"),
    # A decode step has each number of rows, and oneDNN keeps memory for each product in bfloat16.
    "embedded, bfloat16": ("sampling.max_new_tokens=96", "n=32", "train.prompts=16", "model.autocast=bfloat16"),
    "50 M": (*FIFTY, "n=8"),
    "50 M, n=32 m=4": (*FIFTY, "n=32", "m=4"),
    "50 M, adapters": (*FIFTY, "n=8", "model.lora.rank=8"),
}
WAYS = ((), ("train.logprob_chunk=128",), ("model.gradient_checkpointing=full",))
WAYS += ((*WAYS[1], *WAYS[2]),)
PARTS = (1, 2, 4)  # of the tokens of an update, in a pass
SLOTS = (1, 4)  # of the rollouts of a step, at once
MIB = 2**20
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Ran:
    seconds: float  # of a step
    peak: int  # bytes
    output: str


@contextmanager
def control_group(limit: int | None) -> Iterator[Path]:
    """Make a group of that many bytes; yield the file to which a process writes its number to be in it."""
    old = (GROUPS / "memory").exists()
    group = (GROUPS / "memory" if old else GROUPS) / f"grpo_fit_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as why:
        raise SystemExit(f"{group}: no control group can be made ({why.strerror}); it takes Linux, as root") from why
    try:
        if limit is not None:
            (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


@contextmanager
def a_folder() -> Iterator[str]:
    """Make a folder with the rows and the reward of the workloads that have their own."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "rows.jsonl").write_text(ROWS)
        (Path(place) / "uneven.py").write_text(UNEVEN)
        yield place


def grpo(words: Sequence[str], args: argparse.Namespace, place: str, members: Path | str = "/dev/null") -> Any:
    """Run `grpo train` in a control group."""
    command = [sys.executable, "-P", "-m", "grpo_cli", "train", *words, *LEAN, f"train.steps={args.steps}"]
    inside = ["sh", "-c", f'echo $$ > "{members}"; exec "$@"', "sh", *command, f"hydra.run.dir={place}/run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads)}
    return subprocess.run(inside, env=environment, cwd=place, capture_output=True, text=True)


def ran(words: Sequence[str], args: argparse.Namespace, limit: int | None = None) -> Ran | None:
    """Run a few steps; None if the run was killed for memory."""
    with a_folder() as place, control_group(limit) as members:
        done = grpo(words, args, place, members)
        if done.returncode in (-9, 137):
            return None
        if done.returncode:
            raise SystemExit(f"grpo train {' '.join(words)}: {done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((Path(place) / "run" / "summary.json").read_text())
    seconds = min(row["time/step"] for row in rows[1:])
    return Ran(seconds, summary["peak_memory_bytes"], done.stdout + done.stderr)


def ways(args: argparse.Namespace, words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every way of making this step."""
    sys.path.append("")  # the current folder, as for `grpo`
    with a_folder() as place, chdir(place):
        run = prepare(settings_of(*words, *LEAN))
        step = Planner.of(run, torch.device("cpu")).step  # with completions of full length
    for way, parts, slots in itertools.product(args.ways, args.parts, args.slots):
        few = () if slots == 1 else ("sampler=infinite", f"sampler.slots={max(1, step.rollouts.rollouts // slots)}")
        yield (*words, *way, f"train.micro_batch_tokens={-(-step.tokens_of_update // parts)}", *few)


def workload(name: str, args: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures of each limit."""
    words = CASES[name]
    tried: dict[tuple[str, ...], Ran] = {}
    for way in ways(args, words):
        done = ran(way, args)
        assert done is not None, "killed without a limit"
        tried[way] = done
    plain = next(iter(tried.values()))
    with a_folder() as place:
        refused = grpo((*words, "fit=1MiB"), args, place).stderr
    enough = re.search(r"give fit=([\d.]+[MG]iB)", refused)
    if enough is None:
        raise SystemExit(f"grpo train {' '.join(words)} fit=1MiB: {refused[-2000:]}")
    low, found = parse_bytes(enough[1]), dict[str, Figures]()
    for share in args.shares:
        limit = int(low + share * max(0, plain.peak - low))
        chosen, best, way = in_turns(words, tried, limit, args)
        label = f"{name}, {share:.0%}: {limit // MIB} MiB"
        figures = {"limit": limit, "plain_peak": plain.peak, "plain_seconds": plain.seconds, "killed": chosen is None}
        if chosen is not None:
            figures |= {"peak": chosen.peak, "seconds": chosen.seconds}
            figures |= {} if best is None else {"fastest": best.seconds, "ratio": chosen.seconds / best.seconds}
        found[label] = figures
        choices = re.findall(r"^  ([a-z_.]+=\S+)", chosen.output, re.MULTILINE) if chosen else ["killed"]
        print(f"{label}: {figures}\n  fit: {' '.join(choices)}")
        print(f"  fastest: {' '.join(way[len(words) :]) if best else 'none of them lives'}", flush=True)
    return found


def in_turns(
    words: Sequence[str], tried: Mapping[tuple[str, ...], Ran], limit: int, args: argparse.Namespace
) -> tuple[Ran | None, Ran | None, tuple[str, ...]]:
    """Return what `fit` chose and the fastest way that lives, each at its best of some turns; None for what was killed.
    A way that is killed makes room for the next."""
    candidates = sorted((way for way, done in tried.items() if done.peak <= limit), key=lambda way: tried[way].seconds)
    chosen, best, way = None, None, ()
    for turn in range(args.rounds):
        again = ran((*words, f"fit={limit}"), args, limit)
        if again is None:
            return None, best, way
        chosen = again if chosen is None or again.seconds < chosen.seconds else chosen
        while candidates:
            other = ran(candidates[0], args, limit)
            if other is not None:
                way = candidates[0]
                best = other if best is None or other.seconds < best.seconds else best
                break
            assert turn == 0, f"{candidates[0]} lived and then did not"
            candidates.pop(0)
    return chosen, best, way


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__, threads=1)
    made.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    made.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.5, 0.8], help="of the way from least to all")
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--rounds", type=int, default=2)
    args = parsed(made, words, cases=["embedded, n=16"], shares=[0.5], steps=2, rounds=1)
    args.ways, args.parts, args.slots = (WAYS[::3], PARTS[::2], SLOTS[:1]) if args.quick else (WAYS, PARTS, SLOTS)
    found: dict[str, Figures] = {}
    for name in args.cases:
        found |= workload(name, args)
        if args.json:
            finish(args, {"results": found}, checks(found))
    columns = {"killed": ("killed", ".0f"), "s": ("seconds", ".3f"), "fastest, s": ("fastest", ".3f")}
    columns |= {"over the fastest": ("ratio", ".2f"), "s without limit": ("plain_seconds", ".3f")}
    columns |= {"limit": ("limit", ",.0f"), "peak": ("peak", ",.0f")}
    show("fit=<limit> in a control group of as much", found, columns)
    return finish(args, {"results": found}, checks(found))


def checks(found: Mapping[str, Figures]) -> list[Check]:
    ratios = [figures["ratio"] for figures in found.values() if "ratio" in figures]
    killed = sum(figures["killed"] for figures in found.values())
    slow = sum(ratio > 1.15 for ratio in ratios)
    return [
        Check(f"of {len(found)} runs killed for memory", killed, most=0),
        Check(f"of {len(ratios)} slower than the fastest by more than 15 %", slow, most=0),
    ]


if __name__ == "__main__":
    sys.exit(main())
