"""Rollouts side by side on the same weights, prompts and lengths: our samplers, `transformers` and vLLM.

    python scripts/bench_rollout.py --rounds 3 --json scripts/baselines/bench_rollout.json
    python scripts/bench_rollout.py --model 50m
    python scripts/bench_rollout.py --model qwen3-1.7b --device cuda --n 32 128 512
    python scripts/bench_rollout.py --case n512       # process peak of n=512 in 16 slots, KV peak at slots = n/4

Arms: `full`, `micro`, `infinite`; `generate` (everything in one padded batch) and `continuous` (continuous batching) of
`transformers`; `vllm` where it is installed. The last three also as `<arm>-slots`, with only `slots` rows at a time.

The embedded model answers problems of the embedded task and ends where it ends. A model of random weights would never
end by itself, so its lengths are drawn beforehand (log-normal, cut at the limit) and forced on every arm alike.

Each measurement is a process of its own that loads, warms up, forgets its peak and then measures; arms take turns, so
that a machine that slows down slows all. Reported are medians over the rounds, and medians of each round's ratios.
`/CPU-s` is tokens per second of processor time, which neighbours on a busy machine do not touch.
Steps: batched forwards that make one token per row; for `continuous` and `vllm` all forwards, as they mix in prompts.
KV: keys and values held at most, by shapes; for `continuous` and `vllm` what they were given, which is what their rows
need at full length. Memory: peak of the process (of the allocator on a GPU) after warm-up, weights and libraries
included; `working` is that peak less what was held just before.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table
from rollout_arms import ARMS, SHAPES, WARM_UP_TOKENS, Case, Ran, make_work
from transformers import AutoModelForCausalLM

from grpo_cli.memory import peak_bytes
from grpo_cli.processor import settle

DEFAULT_ARMS = ("full", "micro", "infinite", "generate", "generate-slots", "continuous", "continuous-slots", "vllm")
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """One process of an arm: medians over its repeats, and its memory."""

    tokens_per_second: float
    tokens_per_cpu_second: float
    seconds: float
    tokens: float
    steps: float
    length_mean: float
    length_cv: float
    length_max: float
    kv_peak_bytes: int
    peak_bytes: int
    working_bytes: int


@dataclass
class Row:
    """An arm of a comparison: what each round measured, or why there is nothing."""

    arm: str
    case: Case
    rounds: list[Measured] = field(default_factory=list)
    reason: str = ""

    def median(self, name: str) -> float:
        return statistics.median(getattr(measured, name) for measured in self.rounds)

    def over(self, other: Row | None, name: str) -> float | None:
        """The median over the rounds of this row's number over the other's; None where one of them has none."""
        if other is None or not self.rounds or not other.rounds:
            return None
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(getattr(mine, name) / getattr(theirs, name) for mine, theirs in pairs)


@dataclass(frozen=True)
class Check:
    """A number that was wanted, and what was found."""

    words: str
    found: float
    least: float = -np.inf
    most: float = np.inf

    @property
    def holds(self) -> bool:
        return self.least <= self.found <= self.most

    def __str__(self) -> str:
        bound = f">= {self.least}" if np.isfinite(self.least) else f"<= {self.most}"
        return f"{'holds ' if self.holds else 'MISSED'} {self.words}: {self.found:.3f} (wanted {bound})"


@dataclass(frozen=True)
class Comparison:
    """Rows that are shown together, and what is wanted of them."""

    title: str
    rows: list[Row]
    check: Callable[[Sequence[Row]], list[Check]]

    def row(self, arm: str) -> Row | None:
        return next((row for row in self.rows if row.arm == arm), None)


def measure(arm: str, case: Case) -> Measured:
    """Load, warm up, forget the peak so far, and run the case's requests as often as it says."""
    torch.set_num_threads(case.threads)
    work = make_work(case)
    with ExitStack() as stack:
        run = ARMS[arm](case, work, stack)
        # On a GPU graphs are captured and kernels chosen for widths that only the whole work comes to.
        run(work.requests if case.device == "cuda" else work.cut(WARM_UP_TOKENS))
        before = _forget_peak(case.device)
        runs: list[Ran] = []
        seconds: list[float] = []
        cpu_seconds: list[float] = []
        for _ in range(case.repeats):
            start, cpu_start = time.perf_counter(), time.process_time()
            runs.append(run(work.requests))
            if case.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        peak = peak_bytes(case.device)
    lengths = [np.array(ran.lengths) for ran in runs]
    return Measured(
        tokens_per_second=statistics.median(made.sum() / s for made, s in zip(lengths, seconds, strict=True)),
        tokens_per_cpu_second=statistics.median(made.sum() / s for made, s in zip(lengths, cpu_seconds, strict=True)),
        seconds=statistics.median(seconds),
        tokens=statistics.median(int(made.sum()) for made in lengths),
        steps=statistics.median(ran.steps for ran in runs),
        length_mean=statistics.median(float(made.mean()) for made in lengths),
        length_cv=statistics.median(float(made.std() / made.mean()) for made in lengths),
        length_max=max(int(made.max()) for made in lengths),
        kv_peak_bytes=max(ran.kv_bytes for ran in runs),
        peak_bytes=peak,
        working_bytes=peak - before,
    )


def _forget_peak(device: str) -> int:
    """Start the peak of memory anew where the system can; returns the bytes held now."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    references = Path("/proc/self/clear_refs")
    if os.access(references, os.W_OK):
        references.write_text("5")  # Linux: sets the peak of resident memory to what is resident now
    return psutil.Process().memory_info().rss


def measure_in_a_process(row: Row, folder: Path) -> None:
    """Add one round to `row`, measured by a new process; or the reason why it could not."""
    if row.reason:
        return
    if row.arm.startswith("vllm") and importlib.util.find_spec("vllm") is None:
        row.reason = "vllm is not installed"
        return
    out = folder / "measured.json"
    out.unlink(missing_ok=True)
    environment = {
        "OMP_NUM_THREADS": str(row.case.threads),
        "HF_HUB_OFFLINE": "1",
    }
    case = json.dumps(asdict(row.case))
    command = [sys.executable, __file__, "--child", row.arm, case, str(out)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if out.exists():
        row.rounds.append(Measured(**json.loads(out.read_text())))
    else:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        row.reason = f"exit status {done.returncode}: {said[-1] if said else 'it said nothing'}"


def wanted_of_rollouts(rows: Sequence[Row]) -> list[Check]:
    """The bounds on the continuous sampler, where they are claimed: several rounds of requests of unequal length."""
    of = {row.arm: row for row in rows if row.rounds}
    mine, micro, padded = (of.get(arm) for arm in ("infinite", "micro", "generate"))
    checks = []
    if mine and micro and mine.case.n >= 4 * mine.case.slots and mine.median("length_cv") >= 0.5:
        checks.append(Check("infinite over micro, tokens/s", mine.over(micro, "tokens_per_second") or 0, least=1.25))
        checks.append(Check("infinite over micro, decode steps", mine.over(micro, "steps") or 0, most=0.75))
    least = {"tiny": 2.5, "50m": 1.3}.get(rows[0].case.model)
    if mine and padded and least is not None and mine.case.device == "cpu":
        checks.append(Check("infinite over generate, tokens/s", mine.over(padded, "tokens_per_second") or 0, least))
    vllm = of.get("vllm")
    if mine and vllm and mine.case.model == "tiny" and mine.case.device == "cpu":
        checks.append(Check("infinite over vllm, tokens/s", mine.over(vllm, "tokens_per_second") or 0, least=1.5))
    return checks


def _second_over_first(words: str, name: str, most: float) -> Callable[[Sequence[Row]], list[Check]]:
    def check(rows: Sequence[Row]) -> list[Check]:
        ratio = rows[1].over(rows[0], name)
        return [] if ratio is None else [Check(words, ratio, most=most)]

    return check


def side_by_side(case: Case, arms: Sequence[str]) -> Comparison:
    title = f"{case.model} on {case.device}: {case.prompts} prompt(s), n={case.n}, slots={case.slots}"
    return Comparison(title, [Row(arm, case) for arm in arms], wanted_of_rollouts)


def memory_cases(case: Case) -> list[Comparison]:
    """512 rollouts where 16 fit, and a quarter of the slots for a quarter of the keys at full length."""
    many = replace(case, n=512, slots=16)
    few = replace(case, n=16, slots=16)
    even = replace(case, n=64, slots=16, lengths="full", repeats=1)
    return [
        Comparison(
            "n=512 in 16 slots beside n=16",
            [Row("full", few), Row("infinite", many)],
            _second_over_first("peak of n=512 in 16 slots over n=16", "peak_bytes", 1.1),
        ),
        Comparison(
            "all replies at full length, slots = n/4",
            [Row("full", even), Row("infinite", even)],
            _second_over_first("KV peak of infinite at slots = n/4 over full", "kv_peak_bytes", 0.27),
        ),
    ]


def shown(comparison: Comparison) -> Table:
    table = Table("arm", title=comparison.title, caption=_caption(comparison), caption_justify="left")
    micro, padded = comparison.row("micro"), comparison.row("generate")
    columns: dict[str, Callable[[Row], str]] = {
        "n": lambda row: str(row.case.n),
        "tokens/s": lambda row: f"{row.median('tokens_per_second'):,.0f}",
        "/CPU-s": lambda row: f"{row.median('tokens_per_cpu_second'):,.0f}",
        "steps": lambda row: f"{row.median('steps'):g}",
        "x micro": lambda row: _ratio(row.over(micro, "tokens_per_second")),
        "x generate": lambda row: _ratio(row.over(padded, "tokens_per_second")),
        "/micro": lambda row: _ratio(row.over(micro, "steps")),
        "KV MiB": lambda row: f"{row.median('kv_peak_bytes') / MIB:,.1f}",
        "memory MiB": lambda row: f"{row.median('peak_bytes') / MIB:,.1f}",
        "working": lambda row: f"{row.median('working_bytes') / MIB:,.1f}",
    }
    for column in columns:
        table.add_column(column, justify="right")
    for row in comparison.rows:
        if row.rounds:
            table.add_row(row.arm, *(cell(row) for cell in columns.values()))
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _caption(comparison: Comparison) -> str:
    """The lengths, and the arms that did not run."""
    measured = next((row for row in comparison.rows if row.rounds), None)
    lines = [f"{row.arm}: left out, {row.reason}" for row in comparison.rows if row.reason]
    if measured is not None:
        mean, cv, longest = (measured.median(f"length_{name}") for name in ("mean", "cv", "max"))
        words = f"lengths ({measured.case.lengths}, {measured.arm}): mean {mean:.1f}, cv {cv:.2f}, longest {longest:g}"
        lines.insert(0, words)
    return "\n".join(lines)


def as_json(comparison: Comparison) -> dict[str, Any]:
    rows = [_without_places(asdict(row)) for row in comparison.rows]
    checks = [asdict(check) | {"holds": check.holds} for check in comparison.check(comparison.rows)]
    finite = [{key: value for key, value in check.items() if value not in (np.inf, -np.inf)} for check in checks]
    return {"title": comparison.title, "rows": rows, "checks": finite}


def _without_places(row: dict[str, Any]) -> dict[str, Any]:
    """A result is kept without where on the machine its weights were."""
    return row | {"case": {key: value for key, value in row["case"].items() if key != "folder"}}


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


def measure_all(compared: Sequence[Comparison], rounds: int, scratch: Path, console: Console) -> None:
    """Every row once per round, the rows of all comparisons taking turns."""
    for turn in range(rounds):
        for row in (row for comparison in compared for row in comparison.rows):
            words = f"{row.arm}, {row.case.slots} slots, n={row.case.n}"
            console.log(f"round {turn + 1} of {rounds}: {words}")
            measure_in_a_process(row, scratch)


def show_all(compared: Sequence[Comparison], table: Callable[[Comparison], Table], console: Console) -> None:
    """Each comparison's table, and whether what was wanted of it holds."""
    for comparison in compared:
        console.print(table(comparison))
        for check in comparison.check(comparison.rows):
            console.print(str(check))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def a_console() -> Console:
    """As wide as the terminal, and wide enough for the tables in a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("rollout", "n512"), default="rollout")
    parser.add_argument("--model", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(DEFAULT_ARMS))
    parser.add_argument("--n", nargs="+", type=int, help="rollouts per prompt; a table for each")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--slots", type=int, help="n/4 if not given")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--lengths", choices=("natural", "forced", "full"), help="natural for tiny, forced for others")
    parser.add_argument("--cv", type=float, default=0.9, help="coefficient of variation of forced lengths")
    parser.add_argument("--rounds", type=int, default=3, help="processes per arm")
    parser.add_argument("--repeats", type=int, help="runs per process")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def comparisons(args: argparse.Namespace, folder: str) -> list[Comparison]:
    shape = SHAPES[args.model]
    sizes = args.n or [shape.n]
    case = Case(
        model=args.model,
        folder=folder,
        device=args.device,
        n=sizes[0],
        prompts=args.prompts,
        slots=args.slots or 0,
        max_new_tokens=args.max_new_tokens or shape.max_new_tokens,
        lengths=args.lengths or ("natural" if shape.config is None else "forced"),
        cv=args.cv,
        threads=args.threads,
        repeats=args.repeats or shape.repeats,
        seed=args.seed,
    )
    if args.case == "n512":
        return memory_cases(case)
    return [side_by_side(replace(case, n=n, slots=args.slots or max(1, n // 4)), args.arms) for n in sizes]


def main(words: Sequence[str] | None = None) -> None:
    args = parsed(words)
    loads = [os.getloadavg()]
    console = a_console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = weights_folder(args.model, args.device, args.seed, Path(scratch))
        compared = comparisons(args, folder)
        measure_all(compared, args.rounds, Path(scratch), console)
    loads.append(os.getloadavg())
    show_all(compared, shown, console)
    console.print(f"threads {args.threads}, load average before {loads[0][0]:.1f}, after {loads[1][0]:.1f}")
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "loads": loads}
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        found = {"settings": settings, "versions": versions, "machine": machine}
        write_json(args.json, found | {"comparisons": [as_json(comparison) for comparison in compared]})


def child(arm: str, case: str, out: str) -> None:
    measured = measure(arm, Case(**json.loads(case)))
    Path(out).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    settle()
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
