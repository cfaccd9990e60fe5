"""One training step of ours beside TRL's `GRPOTrainer`: same model, problems, n, length limit and threads, in one run.

    python scripts/bench_step.py --rounds 2 --steps 4 --json scripts/baselines/bench_step.json

Needs the `bench` extra. Both train the embedded model on the embedded task with AdamW at a rate too small to change how
long the replies are, without a KL term, with one update per round of rollouts. The two take turns, so that a machine
that slows down slows both, and the first step of each turn is warm-up. Reported: median seconds per step, generated
tokens per second of step, and the ratios. TRL runs as documented for generation with `transformers`; its micro-batch is
the whole batch, which is its fastest setting here (the same as ours, whose token budget holds the whole batch).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from grpo_cli import advantage, downsample
from grpo_cli.config.compose import model_of, settings_of
from grpo_cli.config.instantiate import ready
from grpo_cli.correction import Correct
from grpo_cli.engine.engine import TorchEngine
from grpo_cli.engine.predict import NoPredictor
from grpo_cli.engine.schedule import Fifo
from grpo_cli.engine.sparsity import Dense
from grpo_cli.meter import WallMeter
from grpo_cli.model.load import eos_token_ids, load_model, load_tokenizer, pad_token_id
from grpo_cli.processor import settle
from grpo_cli.settings import Sampling
from grpo_cli.tasks.arithmetic import final_answer
from grpo_cli.train import Parts, Trainer
from grpo_cli.types import Record

RATE = 1e-9
MODEL = model_of("tiny")
Steps = list[tuple[float, float]]  # seconds and generated tokens of each step


class Collect:
    """A tracker that notes each step's seconds and tokens."""

    def __init__(self) -> None:
        self.steps: Steps = []
        self._generated = 0.0

    def log(self, record: Record) -> None:
        if record.step:
            generated = record.metrics["tokens/generated"]
            self.steps.append((record.metrics["time/step"], generated - self._generated))
            self._generated = generated

    def close(self, summary: Mapping[str, Any]) -> None:
        pass


def run_ours(args: argparse.Namespace, folder: Path) -> Steps:
    model, tokenizer = load_model(MODEL, torch.device("cpu")), load_tokenizer(MODEL)
    eos = eos_token_ids(model, tokenizer)
    collect = Collect()
    parts = Parts(
        model=model,
        reference=None,
        save_model=model.save_pretrained,
        task=ready("task", "arithmetic", {"tokenizer": tokenizer, "seed": args.seed}),
        engine=TorchEngine(model, eos, ready("sampler", "full"), Fifo(), NoPredictor(), Dense(), cuda_graph=False),
        pad_token_id=pad_token_id(tokenizer, eos),
        downsample=downsample.all_rollouts,
        advantage=partial(advantage.grpo, stats_over="kept", eps=1e-4),
        correction=Correct(),
        loss=ready("loss", "grpo"),
        trackers=(collect,),
        meter=WallMeter(),
        say=print,
        warn=print,
    )
    plain = settings_of("device=cpu", "optim.warmup_steps=0", "eval.every=0", "record.rollouts=0")
    train: dict[str, Any] = dict(
        steps=args.steps + 1, prompts=args.prompts, micro_batch_tokens=10**6, checkpoint_every=10_000
    )
    settings = replace(
        plain,
        n=args.n,
        m=args.n,
        seed=args.seed,
        run_dir=str(folder),
        train=replace(plain.train, **train, checkpoint_every=10_000, keep_checkpoints=1),
        sampling=Sampling.plain(args.max_new_tokens),
        optim=replace(plain.optim, lr=RATE),
    )
    Trainer(settings, parts, folder).fit()
    return collect.steps[1:]


class StopWatch(TrainerCallback):
    """Notes each TRL step's seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def run_trl(args: argparse.Namespace, folder: Path) -> Steps:
    model, tokenizer = load_model(MODEL, torch.device("cpu")), load_tokenizer(MODEL)
    task = ready("task", "arithmetic", {"tokenizer": tokenizer, "seed": args.seed})
    problems = [task.prompts("train")[i] for i in range((args.steps + 1) * args.prompts)]
    rows = [{"prompt": task.text(p.token_ids), "answer": p.answer} for p in problems]
    tokens: list[float] = []

    def reward(completion_ids: list[list[int]], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        tokens.append(float(sum(map(len, completion_ids))))
        return [float(final_answer(text) == right) for text, right in zip(completions, answer, strict=True)]

    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=args.n * args.prompts,
        num_generations=args.n,
        max_completion_length=args.max_new_tokens,
        temperature=1.0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="grpo",
        max_steps=args.steps + 1,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=args.seed,
    )
    watch = StopWatch()
    trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[watch],
    ).train()
    return list(zip(watch.seconds, tokens, strict=True))[1:]


def summarised(steps: Steps) -> dict[str, float]:
    seconds, tokens = [s for s, _ in steps], [t for _, t in steps]
    return {
        "seconds_per_step": statistics.median(seconds),
        "fastest_step": min(seconds),
        "slowest_step": max(seconds),
        "tokens_per_step": statistics.mean(tokens),
        "tokens_per_second": sum(tokens) / sum(seconds),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    steps: dict[str, Steps] = {"grpo-cli": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            steps["trl"] += run_trl(args, Path(folder) / f"trl{turn}")
            steps["grpo-cli"] += run_ours(args, Path(folder) / f"ours{turn}")
    found = {name: summarised(values) for name, values in steps.items()}
    ratio = found["trl"]["seconds_per_step"] / found["grpo-cli"]["seconds_per_step"]
    table = Table("", "s/step (median)", "fastest", "slowest", "tokens/step", "tokens/s", title="one training step")
    for name, numbers in found.items():
        columns = ("seconds_per_step", "fastest_step", "slowest_step", "tokens_per_step", "tokens_per_second")
        table.add_row(name, *(f"{numbers[column]:.3g}" for column in columns))
    console = Console()
    console.print(table)
    console.print(f"grpo-cli is {ratio:.2f}x as fast per step")
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
        words = {key: value for key, value in vars(args).items() if key != "json"}
        result = {"settings": words, "versions": versions, "machine": platform.processor() or platform.machine()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**result, "results": found, "step_ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    settle()
    main()
