"""One training step of ours beside TRL's `GRPOTrainer`: same model, problems, n, length limit and threads, in one run.

    python scripts/bench/step.py --rounds 2 --steps 4 --json scripts/baselines/bench_step.json

Needs the `bench` extra. Both train the embedded model on the embedded task with AdamW at a rate too small to change how
long the replies are, without a KL term, with one update per round of rollouts. The two take turns, each turn a process
of its own, so that a machine that slows down slows both, and the first step of each turn is warm-up. Reported: median
seconds per step, of the clock and of the processor, generated tokens per second of step, peak resident memory, and the
ratios of what one round measured. TRL runs as documented for generation with `transformers`; its micro-batch is
the whole batch, which is its fastest setting here (the same as ours, whose token budget holds the whole batch).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from arms import Case
from common import (
    Figures,
    bench_parser,
    clock_of,
    clocked,
    finish,
    in_a_process,
    medians,
    over,
    parsed,
    settings_of,
    show,
)

from grpo_cli.config.instantiate import make
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import parts_of, set_up
from grpo_cli.model.load import load_tokenizer
from grpo_cli.step import Step
from grpo_cli.support.memory import peak_bytes
from grpo_cli.support.meter import WallMeter
from grpo_cli.support.processor import flush_denormals
from grpo_cli.tracking.progress import Progress
from grpo_cli.types import Finish, Request, Rollout

RATE = 1e-9
PHASES = ("rollout", "forward", "backward")
COLUMNS = {
    "s/step (median)": ("seconds", ".3g"),
    "CPU-s/step": ("cpu_seconds", ".3g"),
    **{phase: (phase, ".3g") for phase in PHASES},
    "tokens/step": ("tokens", ".0f"),
    "peak MiB": ("peak_mib", ",.0f"),
    "TRL over it, s/step": ("seconds_ratio", ".2f"),
    "CPU-s": ("cpu_seconds_ratio", ".2f"),
}


def training(case: Case) -> tuple[str, ...]:
    """The words of `grpo train` for the rounds that are measured."""
    rate = (f"optim.lr={RATE}", "optim.warmup_steps=0", "optim.schedule=constant", "optim.weight_decay=0.0")
    return (*case.run, *rate, f"n={case.n}", f"train.prompts={case.prompts}", f"device={case.device}", "eval.every=0")


def run_ours(case: Case) -> list[Figures]:
    """Rounds of `grpo train`, nothing saved or logged; phases in processor seconds where there is one thread."""
    settings = settings_of(*training(case))
    meter = WallMeter(clock=clock_of(case.threads))
    run = prepare(settings)
    bench = set_up(run, settings.model, meter=meter)
    step = Step(settings, parts_of(run, bench, (), meter, print, print))
    progress, found = Progress(), list[Figures]()
    for number in range(case.repeats + 1):
        _, figures = clocked(lambda number=number: step.run(number, progress))
        times = meter.take()
        figures |= {phase: times[f"time/{phase}"] for phase in PHASES}
        found.append(figures | {"tokens": float(bench.engine.stats().generated_tokens)})
    return found


def run_trl(case: Case) -> list[Figures]:
    """As many steps of TRL's trainer, in autocast where the case is."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    class StopWatch(TrainerCallback):
        """Notes each step's seconds."""

        def __init__(self) -> None:
            self.steps: list[Figures] = []
            self._start = (0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._start = (time.perf_counter(), time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, processor = self._start
            self.steps.append({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - processor})

    settings = settings_of(*training(case))
    model, tokenizer = case.loaded(), load_tokenizer(settings.model)
    task = make("task", settings.parts["task"], {"tokenizer": tokenizer, "seed": case.seed, "warn": print})
    problems = [task.prompts("train")[i] for i in range((case.repeats + 1) * case.prompts)]
    texts = [tokenizer.decode(p.token_ids) for p in problems]
    assert [tuple(tokenizer(text)["input_ids"]) for text in texts] == [p.token_ids for p in problems], "same prompts"
    rows = [{"prompt": text, "problem": number} for number, text in enumerate(texts)]
    tokens: list[float] = []

    def reward(completion_ids: list[list[int]], problem: list[int], **_: Any) -> list[float]:
        tokens.append(float(sum(map(len, completion_ids))))
        asked = [Request(problems[number], 0, 0, settings.sampling) for number in problem]
        made = zip(asked, completion_ids, strict=True)
        rollouts = [Rollout(one, tuple(ids), (0.0,) * len(ids), Finish.EOS, 0) for one, ids in made]
        return [task.reward(rollout.request.prompt, rollout).total for rollout in rollouts]

    words: dict[str, Any] = dict(use_cpu=True, bf16=settings.model.autocast == "bfloat16", dataloader_pin_memory=False)
    words |= dict(report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=case.seed)
    words |= dict(per_device_train_batch_size=case.n * case.prompts, num_generations=case.n, temperature=1.0)
    words |= dict(max_completion_length=case.max_new_tokens, max_steps=case.repeats + 1, loss_type="grpo", beta=0.0)
    words |= dict(learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=1.0, gradient_checkpointing=False)
    watch = StopWatch()
    trained = dict(train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[watch])
    with tempfile.TemporaryDirectory() as folder:
        settled = trl.GRPOConfig(**words, output_dir=folder)
        trl.GRPOTrainer(model=model, reward_funcs=reward, args=settled, **trained).train()
    return [step | {"tokens": count} for step, count in zip(watch.steps, tokens, strict=True)]


WAYS: Mapping[str, Callable[[Case], list[Figures]]] = {"trl": run_trl, "grpo-cli": run_ours}


def measured(way: str, case: Case) -> Figures:
    """Medians over the steps after the first, and the peak of this process."""
    torch.set_num_threads(case.threads)
    flush_denormals()
    steps = WAYS[way](case)[1:]
    return {name: statistics.median(s[name] for s in steps) for name in steps[0]} | {"peak_bytes": peak_bytes("cpu")}


def main(words: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, rounds=2)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per turn")
    args = parsed(parser, words, rounds=1, n=4, prompts=2, max_new_tokens=16, steps=1)
    asked = dict(n=args.n, prompts=args.prompts, slots=0, max_new_tokens=args.max_new_tokens, threads=args.threads)
    more = dict(model="tiny", folder=str(files("grpo_cli.model") / "tiny"), device="cpu", lengths="natural", cv=0.0)
    whole = ("train.micro_batch_tokens=1000000",)
    case = Case(**asked, **more, repeats=args.steps, seed=args.seed, words=whole)
    ways = [way for way in WAYS if way != "trl" or find_spec("trl")]
    if "trl" not in ways:
        print("trl is not installed (pip install 'grpo-cli[bench]'): ours alone")
    with tempfile.TemporaryDirectory() as folder:
        turns = [{way: in_its_turn(way, case, Path(folder)) for way in ways} for _ in range(args.rounds)]
    found = medians(turns)
    for way, figures in found.items():
        figures["peak_mib"] = figures["peak_bytes"] / 2**20
        for name in ("seconds", "cpu_seconds"):
            figures[f"{name}_ratio"] = over([t[ways[0]] for t in turns], [t[way] for t in turns], name)
    show("one training step", found, COLUMNS)
    return finish(args, {"results": found}, (), "trl")


def in_its_turn(way: str, case: Case, folder: Path) -> Figures:
    figures, reason = in_a_process(__file__, way, json.dumps(asdict(case)), threads=case.threads, folder=folder)
    if reason:
        raise RuntimeError(f"{way}: {reason}")
    return figures


def child(way: str, case: str, out: str) -> None:
    Path(out).write_text(json.dumps(measured(way, Case(**json.loads(case)))))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else sys.exit(main())
