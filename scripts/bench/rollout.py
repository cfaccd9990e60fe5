"""Rollouts side by side on the same weights, prompts and lengths: our samplers, `transformers` and vLLM.

    python scripts/bench/rollout.py --prompts 16 --n 16 --slots 64 --json out.json

Arms: `full`, `micro`, `infinite`, on a GPU `infinite-graph`; `generate` of `transformers` (everything in one padded
batch); `vllm` where it is installed. The last two also as `<arm>-slots`, with only `slots` rows at a time.

The embedded model answers problems of the embedded task and ends where it ends. A model of random weights would never
end by itself, so its lengths are drawn beforehand (log-normal, cut at the limit) and forced on every arm alike.

Each measurement is a process of its own that loads, warms up, forgets its peak and then measures; arms take turns.
Reported are medians over the rounds, and medians of each round's ratios.
`/CPU-s` is tokens per second of processor time, which neighbours on a busy machine do not touch (on a GPU the host's).
Steps: batched forwards that make one token per row; for `vllm` all forwards, as they mix in prompts. KV: keys and
values held at most, by shapes; for `vllm` what it was given, which is what its rows need at full length. Memory: peak
of the process (of the allocator on a GPU) after warm-up, weights and libraries included; `working` is that peak less
what was held just before.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from arms import ARMS, SHAPES, WARM_UP_TOKENS, Case, Ran, make_work
from common import Figures, bench_parser, clocked, finish, in_a_process, over, parsed, show
from transformers import AutoModelForCausalLM

from grpo_cli.support.memory import peak_bytes, resident_bytes, start_peak

DEFAULT_ARMS = ("full", "micro", "infinite", "generate", "generate-slots", "vllm")
SPEED, PROCESSOR, KV, PEAK = "tokens_per_second", "tokens_per_cpu_second", "kv_peak_bytes", "peak_bytes"
COLUMNS = {
    "tokens/s": (SPEED, ",.0f"),
    "/CPU-s": (PROCESSOR, ",.0f"),
    "x micro": ("of_micro", ".3f"),
    "x full": ("of_full", ".3f"),
    "steps": ("steps", "g"),
    "length": ("length_mean", ".1f"),
    "KV MiB": ("kv_mib", ",.1f"),
    "memory MiB": ("peak_mib", ",.1f"),
    "working": ("working_mib", ",.1f"),
}


@dataclass
class Row:
    """An arm of a comparison: what each round measured, or why there is nothing."""

    arm: str
    case: Case
    rounds: list[Figures] = field(default_factory=list)
    reason: str = ""

    def median(self, name: str) -> float:
        return statistics.median(figures[name] for figures in self.rounds)

    def over(self, other: Row | None, name: str) -> float | None:
        """The median over the rounds of this row's number over the other's; None where one of them has none."""
        return over(self.rounds, other.rounds, name) if other and self.rounds and other.rounds else None


@dataclass(frozen=True)
class Comparison:
    """Rows that are shown together."""

    title: str
    rows: list[Row]

    def row(self, arm: str) -> Row | None:
        return next((row for row in self.rows if row.arm == arm), None)


def measure(arm: str, case: Case) -> Figures:
    """Load, warm up, forget the peak so far, and run the case's requests as often as it says: medians, and peaks."""
    torch.set_num_threads(case.threads)
    work = make_work(case)
    with ExitStack() as stack:
        stack.enter_context(case.autocast())
        run = ARMS[arm](case, work, stack)
        # On a GPU graphs are captured and kernels chosen for widths that only the whole work comes to.
        run(work.requests if case.device == "cuda" else work.cut(WARM_UP_TOKENS))
        before = _forget_peak(case.device)
        runs = [clocked(lambda: run(work.requests)) for _ in range(case.repeats)]
        peak = peak_bytes(case.device)
    repeats = [_of_one(ran, clock) for ran, clock in runs]
    return {
        **{name: statistics.median(figures[name] for figures in repeats) for name in repeats[0]},
        "length_max": max(figures["length_max"] for figures in repeats),
        KV: max(ran.kv_bytes for ran, _ in runs),
        PEAK: peak,
        "working_bytes": peak - before,
    }


def _of_one(ran: Ran, clock: Figures) -> Figures:
    lengths = np.array(ran.lengths)
    return {
        SPEED: float(lengths.sum() / clock["seconds"]),
        PROCESSOR: float(lengths.sum() / clock["cpu_seconds"]),
        "seconds": clock["seconds"],
        "tokens": int(lengths.sum()),
        "steps": ran.steps,
        "length_mean": float(lengths.mean()),
        "length_cv": float(lengths.std() / lengths.mean()),
        "length_max": int(lengths.max()),
    }


def _forget_peak(device: str) -> int:
    """Start the peak of memory anew where the system can; returns the bytes held now."""
    gc.collect()
    start_peak(torch.device(device))
    return torch.cuda.memory_allocated() if device == "cuda" else resident_bytes()


def measure_in_a_process(row: Row, folder: Path) -> None:
    """Add one round to `row`, measured by a new process; or the reason why it could not."""
    if row.reason:
        return
    if row.arm.startswith("vllm") and importlib.util.find_spec("vllm") is None:
        row.reason = "vllm is not installed"
        return
    words = (row.arm, json.dumps(asdict(row.case)))
    figures, row.reason = in_a_process(__file__, *words, threads=row.case.threads, folder=folder)
    row.rounds = [*row.rounds, figures] if figures else []


def side_by_side(case: Case, arms: Sequence[str]) -> Comparison:
    shape = f"{case.prompts} prompt(s), n={case.n}, slots={case.slots}, at most {case.max_new_tokens} tokens"
    return Comparison(f"{case.model} on {case.device}: {shape}", [Row(arm, case) for arm in arms])


def show_comparison(comparison: Comparison) -> None:
    """The table, an arm's rollouts and slots with its name; below it the arms that did not run."""
    found: dict[str, Figures] = {}
    for row in (row for row in comparison.rows if row.rounds):
        figures = {name: row.median(name) for name in row.rounds[0]}
        figures |= {f"{name}_mib": figures[f"{name}_bytes"] / 2**20 for name in ("peak", "working")}
        figures["kv_mib"] = figures[KV] / 2**20
        for base in ("micro", "full"):
            ratio = row.over(comparison.row(base), SPEED)
            figures |= {} if ratio is None else {f"of_{base}": ratio}
        found[f"{row.arm} {row.case.n} in {row.case.slots}"] = figures
    left_out = (f"{row.arm}: left out, {row.reason}" for row in comparison.rows if row.reason)
    show(comparison.title, found, COLUMNS, "\n".join(left_out))


def as_found(comparison: Comparison) -> dict[str, Any]:
    """For JSON, without where on the machine the weights were."""
    rows = [asdict(row) for row in comparison.rows]
    for row in rows:
        del row["case"]["folder"]
    return {"title": comparison.title, "rows": rows}


def weights_folder(model: str, device: str, seed: int, scratch: Path) -> str:
    """Where every arm reads the same weights; random ones are made and saved there first."""
    config = SHAPES[model].config
    if config is None:
        return str(files("grpo_cli.model") / "tiny")
    folder = scratch / model
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return str(folder)


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, rounds=3)
    parser.add_argument("--model", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(DEFAULT_ARMS))
    parser.add_argument("--n", nargs="+", type=int, help="rollouts per prompt; a table for each")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--slots", type=int, help="default: n/4")
    parser.add_argument("--max-new-tokens", nargs="+", type=int, help="a table for each")
    parser.add_argument("--lengths", choices=("natural", "forced", "full"), help="natural for tiny, forced for others")
    parser.add_argument("--cv", type=float, default=0.9, help="coefficient of variation of forced lengths")
    parser.add_argument("--repeats", type=int, help="runs per process")
    args = parsed(parser, words, rounds=1, repeats=1, n=[8], max_new_tokens=[16], arms=["full", "micro", "infinite"])
    shape = SHAPES[args.model]
    natural = "natural" if shape.config is None else "forced"
    usual = {"n": [shape.n], "max_new_tokens": [shape.max_new_tokens], "repeats": shape.repeats}
    for name, value in ({"lengths": natural} | usual).items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    return args


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    with tempfile.TemporaryDirectory() as scratch:
        same = ("model", "device", "prompts", "lengths", "cv", "threads", "repeats", "seed")
        given = {name: getattr(args, name) for name in same}
        given["folder"] = weights_folder(args.model, args.device, args.seed, Path(scratch))
        compared = [
            side_by_side(Case(n=n, slots=args.slots or max(1, n // 4), max_new_tokens=tokens, **given), args.arms)
            for n in args.n
            for tokens in args.max_new_tokens
        ]
        for turn in range(args.rounds):
            for row in (row for comparison in compared for row in comparison.rows):
                print(
                    f"round {turn + 1} of {args.rounds}: {row.arm}, {row.case.slots} slots, n={row.case.n}", flush=True
                )
                measure_in_a_process(row, Path(scratch))
    for comparison in compared:
        show_comparison(comparison)
    return finish(args, {"comparisons": [as_found(comparison) for comparison in compared]})


def child(arm: str, case: str, out: str) -> None:
    Path(out).write_text(json.dumps(measure(arm, Case(**json.loads(case)))))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else sys.exit(main())
