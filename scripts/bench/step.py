"""One training step of ours beside TRL's `GRPOTrainer`: same model, problems, n, length limit and threads, in one run.

    python scripts/bench/step.py --rounds 2 --steps 4 --json scripts/baselines/bench_step.json

Needs the `bench` extra. Both train the embedded model on the embedded task with AdamW at a rate too small to change how
long the replies are, without a KL term, with one update per round of rollouts. The two take turns, so that a machine
that slows down slows both, and the first step of each turn is warm-up. Reported: median seconds per step, generated
tokens per second of step, and the ratios. TRL runs as documented for generation with `transformers`; its micro-batch is
the whole batch, which is its fastest setting here (the same as ours, whose token budget holds the whole batch).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Figures, bench_parser, finish, parsed, settings_of, show

from grpo_cli.config.instantiate import make
from grpo_cli.model.load import load_model, load_tokenizer
from grpo_cli.tasks.arithmetic import final_answer

RATE = 1e-9
Steps = list[tuple[float, float]]  # seconds and generated tokens of each step
COLUMNS = {
    "s/step (median)": ("seconds_per_step", ".3g"),
    "fastest": ("fastest_step", ".3g"),
    "slowest": ("slowest_step", ".3g"),
    "tokens/step": ("tokens_per_step", ".0f"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "TRL over it, s/step": ("step_ratio", ".2f"),
}


def run_ours(args: argparse.Namespace, folder: Path) -> Steps:
    """`grpo train` of the same; each step's seconds and tokens are in its records."""
    words = (
        *(f"n={args.n}", f"seed={args.seed}", "device=cpu", "logger=jsonl", "record.rollouts=0", "eval.every=0"),
        *(f"train.steps={args.steps + 1}", f"train.prompts={args.prompts}", "train.micro_batch_tokens=1000000"),
        *("train.checkpoint_every=10000", f"sampling.max_new_tokens={args.max_new_tokens}", f"optim.lr={RATE}"),
        *("optim.warmup_steps=0", "optim.schedule=constant", "optim.weight_decay=0.0", f"hydra.run.dir={folder}"),
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-P", "-m", "grpo_cli", "train", *words], env=env, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    made = [0.0, *(row["tokens/generated"] for row in rows if row["step"])]
    seconds = [row["time/step"] for row in rows if row["step"]]
    return list(zip(seconds, (b - a for a, b in zip(made, made[1:], strict=False)), strict=True))[1:]


def run_trl(args: argparse.Namespace, folder: Path) -> Steps:
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    class StopWatch(TrainerCallback):
        """Notes each step's seconds."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._start = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self._start)

    torch.set_num_threads(args.threads)
    settings = settings_of(f"seed={args.seed}")
    model, tokenizer = load_model(settings.model, torch.device("cpu")), load_tokenizer(settings.model)
    task = make("task", settings.parts["task"], {"tokenizer": tokenizer, "seed": args.seed})
    problems = [task.prompts("train")[i] for i in range((args.steps + 1) * args.prompts)]
    rows = [{"prompt": task.text(p.token_ids), "answer": p.answer} for p in problems]
    tokens: list[float] = []

    def reward(completion_ids: list[list[int]], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        tokens.append(float(sum(map(len, completion_ids))))
        return [float(final_answer(text) == right) for text, right in zip(completions, answer, strict=True)]

    words: dict[str, Any] = dict(use_cpu=True, bf16=False, dataloader_pin_memory=False, gradient_checkpointing=False)
    words |= dict(report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=args.seed)
    words |= dict(per_device_train_batch_size=args.n * args.prompts, num_generations=args.n, temperature=1.0)
    words |= dict(max_completion_length=args.max_new_tokens, max_steps=args.steps + 1, loss_type="grpo", beta=0.0)
    words |= dict(learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=1.0, output_dir=str(folder))
    watch = StopWatch()
    trained = dict(train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[watch])
    trl.GRPOTrainer(model=model, reward_funcs=reward, args=trl.GRPOConfig(**words), **trained).train()
    return list(zip(watch.seconds, tokens, strict=True))[1:]


def summarised(steps: Steps) -> Figures:
    seconds, tokens = [s for s, _ in steps], [t for _, t in steps]
    return {
        "seconds_per_step": statistics.median(seconds),
        "fastest_step": min(seconds),
        "slowest_step": max(seconds),
        "tokens_per_step": statistics.mean(tokens),
        "tokens_per_second": sum(tokens) / sum(seconds),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=2)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per turn")
    args = parsed(parser, words, rounds=1, n=4, prompts=2, max_new_tokens=16, steps=1)
    ways = {"trl": run_trl, "grpo-cli": run_ours}
    if find_spec("trl") is None:
        print("trl is not installed (pip install 'grpo-cli[bench]'): ours alone")
        del ways["trl"]
    steps: dict[str, Steps] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            for name, way in ways.items():
                steps[name] += way(args, Path(folder) / f"{name}{turn}")
    found = {name: summarised(values) for name, values in steps.items()}
    if "trl" in found:
        for figures in found.values():
            figures["step_ratio"] = found["trl"]["seconds_per_step"] / figures["seconds_per_step"]
    show("one training step", found, COLUMNS)
    return finish(args, {"results": found}, (), "trl")


if __name__ == "__main__":
    sys.exit(main())
