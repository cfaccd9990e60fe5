"""Every part of the torch path once on a device, each by itself; a fault is noted, and the next one tried.

    python scripts/gpu/contact.py --out contact.json [--device cpu] [--few]

A check is two steps of `grpo train` in a folder of its own, made of words: its rollouts have to be drawn from the
policy to rounding where the whole cache is kept (mismatch/*), and every metric has to be finite.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_cli import experiment
from grpo_cli.config.compose import settings_of
from grpo_cli.runs.layout import METRICS
from grpo_cli.support.processor import settle

BASE = ("train.steps=2", "train.prompts=4", "n=8", "m=8", "eval.every=0", "sampling.max_new_tokens=24", "logger=jsonl")
TRIED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# Log ratios of sampler and policy: by how much a mean may be off, and how far the smallest thousandth may lie.
CLOSE, FAR = {"float32": 1e-3, "bfloat16": 0.02, "autocast": 0.02}, {"float32": 0.01, "bfloat16": 0.5, "autocast": 0.5}
ON_A_GPU = ("as graphs", "offloaded activations")


def checks(few: bool) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By name, the precision and the words."""
    precisions, families = TRIED["precisions"], {"embedded": ["model=tiny"]} if few else TRIED["families"]
    found = {
        f"{family}, {precision}": (precision, (*words, *more))
        for family, words in families.items()
        for precision, more in precisions.items()
    }
    return found | {way: ("float32", (*words, *precisions["float32"])) for way, words in TRIED["ways"].items()}


def tried(words: tuple[str, ...], precision: str, device: str, folder: Path) -> dict[str, float]:
    """What the last of two steps says of sampler and policy. AssertionError if that is too far, or not finite."""
    settings = settings_of(*BASE, *words, f"device={device}", f"run_dir={folder}")
    experiment.build(settings).fit()
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert all(math.isfinite(value) for row in rows for value in row.values()), rows
    last: dict[str, float] = [row for row in rows if "mismatch/kl" in row][-1]  # a step without a gradient has none
    found = {name: last[f"mismatch/{name}"] for name in ("ratio_mean", "log_ratio_q001", "kl")}
    if "correction=sparse_rl" not in words:
        assert abs(found["ratio_mean"] - 1) < CLOSE[precision] and found["log_ratio_q001"] > -FAR[precision], found
    return found | {"peak_bytes": last["memory/peak_bytes"]}


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--few", action="store_true", help="the embedded model only")
    args = made.parse_args()
    settle()
    found: dict[str, dict[str, Any]] = {}
    for name, (precision, words) in checks(args.few).items():
        if args.device == "cpu" and name.endswith(ON_A_GPU):
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = {"ok": True, **tried(words, precision, args.device, Path(folder))}
            except Exception as error:  # whatever it is, it is what was looked for
                traceback.print_exc(limit=-4)
                found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
        seconds = time.perf_counter() - start
        found[name]["seconds"] = seconds
        print(f"{'ok   ' if found[name]['ok'] else 'FAULT'} {name} ({seconds:.1f} s)", flush=True)
        args.out.write_text(json.dumps(found, indent=1))  # so far, should the machine go away
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
    return int(not all(one["ok"] for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
