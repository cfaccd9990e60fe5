"""Searches at evaluation: accuracy against what was drawn, by search and size (of frontier_c).

`searches`: the embedded model as it comes, on sums of 2 to 10 numbers, of which a sample is right about once in four
times; `searches_trained`: what it is after 50 steps. `searches_real`: SmolLM2-135M-Instruct on word problems, at
a lower temperature, without which it is hardly ever right (scripts/get_smollm2.sh makes models/smollm2). Every search
answers the same problems; seeds are of its draws. `refined`, one draft after the other, has as many rounds as make it
draw about as many tokens as `majority` does: long and sequential against the best of many.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT
from study import check_model, run_all, run_of

from grpo_cli.config.overrides import overrides

KEPT = ("search/accuracy", "search/tokens", "search/sequential", "eval/accuracy", "eval/pass@1")
KEPT += ("search/accuracy_low", "search/accuracy_high")
SUMS = ("task.max_terms=10", "eval.problems=200", "eval.k=1")
STORIES = (
    "model=smollm2_135m",
    "task=word_problems",
    "model.autocast=bfloat16",
    "sampling.max_new_tokens=96",
    "eval.temperature=0.6",
    "eval.problems=30",
    "eval.k=1",
)


# Of `refined`, beside 8 replies: its replies grow shorter than first ones, by how much depends on the model.
ROUNDS = {"searches": 12, "searches_trained": 10, "searches_real": 7}


def words_of(sizes: Sequence[int], rounds: int) -> dict[str, dict[int, tuple[str, ...]]]:
    """Of each search by its size: how many replies are made at a time; `refined` makes one after the other."""
    keys = {"majority": "k", "best": "k", "particle": "particles", "dora": "width", "ets": "width"}
    found = {name: {n: (f"search={name}", f"search.{key}={n}") for n in sizes} for name, key in keys.items()}
    one = ("search=pdr", "search.drafts=1", "search.keep=1")
    found["pdr"] = {n: ("search=pdr", f"search.drafts={n - 1}", "search.keep=2", "search.rounds=1") for n in sizes}
    return found | {"refined": {n: (*one, f"search.rounds={rounds}") for n in sizes}}


def searches(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """By search, size and seed."""
    return _tried("searches", {seed: SUMS for seed in args.seeds}, (8,), args, out)


def searches_trained(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The same of the policies at the end of the baseline of `read`, one for each seed."""
    runs = {seed: run_of(args, "read", "grpo n=8", seed) for seed in args.seeds}
    run_all("train", {run.name: run.words for run in runs.values()}, out, args)
    given = {seed: overrides({"checkpoint": str(out / run.name)}) for seed, run in runs.items()}
    words = {seed: (*(word.lstrip("+") for word in its), *SUMS) for seed, its in given.items()}
    return _tried("searches_trained", words, (8,), args, out)


def searches_real(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The same."""
    folder = ROOT / "models" / "smollm2"
    check_model(folder)
    words = (*STORIES, f"model.path='{folder.resolve()}'")
    return _tried("searches_real", {seed: words for seed in args.seeds}, (8,), args, out)


def _tried(
    place: str, first: Mapping[int, Sequence[str]], sizes: Sequence[int], args: argparse.Namespace, out: Path
) -> dict[str, Any]:
    common = ("logger=jsonl", "device=cpu", *(("eval.problems=10",) if args.quick else ()))
    cells = [
        (search, n, its, seed)
        for seed in first
        for search, of in words_of(sizes, ROUNDS[place]).items()
        for n, its in of.items()
    ]
    words = {
        f"{place}/{search}/{n}/seed{seed}": tuple(
            {word.partition("=")[0]: word for word in (*first[seed], *its, *common, f"seed={seed}")}.values()
        )
        for search, n, its, seed in cells
    }
    run_all("eval", words, out, args)
    result: dict[str, Any] = {}
    for search, n, _, seed in cells:
        file = out / place / search / str(n) / f"seed{seed}" / "summary.json"
        summary = json.loads(file.read_text(encoding="utf-8"))
        of_size = result.setdefault(search, {}).setdefault(str(n), {})
        of_size[str(seed)] = {metric: summary[metric] for metric in KEPT}
    return result
