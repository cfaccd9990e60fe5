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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_cli import experiment
from grpo_cli.config.compose import settings_of
from grpo_cli.runs.layout import METRICS
from grpo_cli.support.processor import settle

BASE = ("train.steps=2", "train.prompts=4", "n=8", "m=8", "eval.every=0", "sampling.max_new_tokens=24", "logger=jsonl")
PRECISIONS = {
    "float32": ("model.dtype=float32", "model.autocast=none"),
    "bfloat16": ("model.dtype=bfloat16", "model.autocast=none", "model.lora.rank=8"),
    "autocast": ("model.dtype=float32", "model.autocast=bfloat16"),
}
FAMILIES = {
    "qwen2": ("model=qwen2_5_0_5b",),
    "qwen3": ("model=qwen3_0_6b",),
    "llama": ("model=llama3_2_1b",),
    "smollm2": ("model=smollm2_135m",),
}
SHAPE = ("model.random_init=true", "model.architecture.num_hidden_layers=2")
SPARSE = ("sparsity.budget=8", "sparsity.buffer=4", "sparsity.window=4", "correction=sparse_rl")
WAYS: Mapping[str, tuple[str, ...]] = {
    "micro": ("sampler=micro", "sampler.slots=5"),
    "infinite": ("sampler=infinite", "sampler.slots=7"),
    "infinite, as graphs": ("sampler=infinite", "sampler.slots=7", "engine.cuda_graph=true"),
    "full, as graphs": ("engine.cuda_graph=true",),
    "a KV budget": ("sampler=infinite", "sampler.slots=null", "sampler.kv_budget=1MiB"),
    "longest first": ("sampler=infinite", "sampler.slots=7", "scheduler=lpt", "predictor=prefix"),
    "streaming": ("sparsity=streaming", *SPARSE),
    "h2o": ("sparsity=h2o", *SPARSE),
    "snapkv": ("sparsity=snapkv", *SPARSE),
    "rkv": ("sparsity=rkv", *SPARSE),
    "rkv, prompts too": ("sparsity=rkv", *SPARSE, "sparsity.protect_prompt=false"),
    "stop strings": ('sampling.stop=["3"]',),
    "adapters": ("model.lora.rank=8",),
    "adapters, checkpointing": ("model.lora.rank=8", "model.gradient_checkpointing=true"),
    "offloaded activations": ("model.gradient_checkpointing=true", "model.offload_activations=true"),
    "no padding": ("train.padding_free=true",),
    "shared prefixes": ("train.shared_prefix=true",),
    "micro-batches by memory": ("train.micro_batch_tokens=256",),
    "offloaded optimizer": ("optim.offload=true",),
    "a reference model": ("loss.kl_coef=0.1",),
    "two epochs": ("train.epochs=2", "train.minibatches=2"),
    "down-sampled": ("n=16", "m=4", "downsample=maxvar", "correction=sparse_rl"),
}
# Log ratios of sampler and policy: by how much a mean may be off, and how far the smallest thousandth may lie.
CLOSE, FAR = {"float32": 1e-3, "bfloat16": 0.02, "autocast": 0.02}, {"float32": 0.01, "bfloat16": 0.5, "autocast": 0.5}
ON_A_GPU = ("as graphs", "offloaded activations")


def checks(few: bool) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By name, the precision and the words."""
    families = {"embedded": ("model=tiny",)} if few else {name: (*words, *SHAPE) for name, words in FAMILIES.items()}
    found = {
        f"{family}, {precision}": (precision, (*words, *PRECISIONS[precision]))
        for family, words in families.items()
        for precision in PRECISIONS
    }
    return found | {way: ("float32", (*words, *PRECISIONS["float32"])) for way, words in WAYS.items()}


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
