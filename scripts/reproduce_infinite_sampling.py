"""Infinite Sampling's claim on memory and throughput (arXiv 2506.22950): a group decoded at once, in micro groups, and
in slots that are refilled, on random weights with forced lengths.

    scripts/reproduce_infinite_sampling.sh                      # on a GPU Qwen3-1.7B's shape, else 50 M parameters
    scripts/reproduce_infinite_sampling.sh --model tiny --n 64 --rounds 1

Keys and values (exact, from shapes) and the peak of the device (of the allocator on a GPU, resident memory of the
process on a CPU) are two columns, because the published saving, 21.55 to 10.64 GB for Qwen3-1.7B, is of the second and
more than the keys of a group of 32 take: 32 x 1024 tokens of 112 KiB are 3.8 GB in bfloat16. What else grew with the
group in that measurement is not public. Here a prompt's keys are stored once for its group and no slot saves them, so
that slots = n/2 leaves half, and half of the prompt's share. Speed is per second of processor time, which neighbours on
a busy machine do not touch; on a GPU that is the host's, and `tokens_per_second` in the JSON is what counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from bench_rollout import (
    Check,
    Comparison,
    Row,
    a_console,
    as_json,
    measure_all,
    show_all,
    weights_folder,
    write_json,
)
from rich.table import Table
from rollout_arms import SHAPES, Case

from grpo_cli.processor import settle

PUBLISHED = 10.64 / 21.55
GIB = 2**30


def largest_model(device: str) -> str:
    """The largest shape that this machine serves in minutes: on a CPU that is a matter of time, not of memory."""
    if device == "cuda" and torch.cuda.get_device_properties(0).total_memory > 24 * 10**9:
        return "qwen3-1.7b"
    return "50m"


def rows_of(case: Case, shares: Sequence[int]) -> list[Row]:
    """`full`, then both ways of using fewer slots, from many to few."""
    rows = [Row("full", replace(case, slots=case.n))]
    for share in shares:
        fewer = replace(case, slots=max(1, case.n // share))
        rows += [Row("micro", fewer), Row("infinite", fewer)]
    return rows


def checks(rows: Sequence[Row]) -> list[Check]:
    """Fewer slots must take fewer keys, in proportion."""
    found = []
    for row in rows[1:]:
        ratio = row.over(rows[0], "kv_peak_bytes")
        if ratio is not None:
            share = row.case.slots / row.case.n
            words = f"{row.arm} in {row.case.slots} of {row.case.n} slots over full, keys and values"
            found.append(Check(words, ratio, most=share))
    return found


def shown(comparison: Comparison) -> Table:
    full = comparison.rows[0]
    table = Table(title=comparison.title, title_justify="left")
    for column in (
        "arm",
        "slots",
        "KV",
        "/full",
        "device peak",
        "/full",
        "above rest",
        "tokens/CPU-s",
        "/full",
        "steps",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in comparison.rows:
        if not row.rounds:
            table.add_row(row.arm, str(row.case.slots), row.reason)
            continue
        cells = [row.arm, str(row.case.slots)]
        for name in ("kv_peak_bytes", "peak_bytes"):
            cells += [f"{row.median(name) / GIB:.3f} GiB", f"{row.over(full, name) or 0:.3f}"]
        cells += [f"{row.median('working_bytes') / GIB:.3f} GiB", f"{row.median('tokens_per_cpu_second'):,.0f}"]
        table.add_row(*cells, f"{row.over(full, 'tokens_per_cpu_second') or 0:.2f}", f"{row.median('steps'):g}")
    return table


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=found)
    parser.add_argument("--model", choices=tuple(SHAPES), help="the largest that the machine serves, if not given")
    parser.add_argument("--n", nargs="+", type=int, default=[32], help="rollouts of the prompt; a table for each")
    parser.add_argument("--shares", nargs="+", type=int, default=[2, 4], help="slots are n over each of these")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument(
        "--lengths", choices=("forced", "full"), default="forced", help="log-normal, or all the longest"
    )
    parser.add_argument("--cv", type=float, default=0.9, help="coefficient of variation of forced lengths")
    parser.add_argument("--rounds", type=int, default=3, help="processes per arm")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    return parser.parse_args(words)


def comparison_of(args: argparse.Namespace, model: str, folder: str, n: int) -> Comparison:
    tokens = args.max_new_tokens or SHAPES[model].max_new_tokens
    given = (args.lengths, args.cv, args.threads, SHAPES[model].repeats, args.seed)
    case = Case(model, folder, args.device, n, 1, n, tokens, *given)
    title = f"{model} on {args.device}: a group of {n}, {args.lengths} lengths of at most {tokens}"
    return Comparison(title, rows_of(case, args.shares), checks)


def main(words: Sequence[str] | None = None) -> None:
    args = parsed(words)
    model = args.model or largest_model(args.device)
    console = a_console()
    loads = [os.getloadavg()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = weights_folder(model, args.device, args.seed, Path(scratch))
        compared = [comparison_of(args, model, folder, n) for n in args.n]
        measure_all(compared, args.rounds, Path(scratch), console)
    loads.append(os.getloadavg())
    show_all(compared, shown, console)
    console.print(f"published for Qwen3-1.7B, micro over full, device peak: {PUBLISHED:.2f}")
    if args.json:
        cuda = args.device == "cuda"
        device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
        document = {
            "command": ["scripts/reproduce_infinite_sampling.sh", *(sys.argv[1:] if words is None else words)],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "device": {"kind": args.device, "name": device, "cores": os.cpu_count(), "loads": loads},
            "comparisons": [as_json(comparison) for comparison in compared],
        }
        write_json(args.json, document)


if __name__ == "__main__":
    settle()
    main()
