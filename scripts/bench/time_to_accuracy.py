"""Minutes of training until a real model answers half, and four fifths, of its samples on held-out problems rightly:
TRL's GRPOTrainer, plain GRPO here, our recipe, and the recipe with one ingredient less at a time.

    python scripts/bench/time_to_accuracy.py --model models/smollm2 --json scripts/baselines/bench_time_to_accuracy.json
    python scripts/bench/time_to_accuracy.py --stages rates --hours 3

Every run has the whole machine for itself. The clock counts training only, without evaluation and start-up. First each
arm's learning rate is chosen from the same few, by a seed that is not counted (`rates`): the one that is fastest to
four fifths, or else the most accurate in the end. Then come the seeds that count (`seeds`), in turns over the arms, and
what each ingredient gives (`without`). A run that is in the JSON is not made again, so that --hours may spread the
whole over several days; what is missing is printed. An accuracy is reached at the first evaluation that finds it, of
about 256 samples of held-out problems at temperature 1. The problems are stories with one sum (word_problems), or sums
of reasoning-gym behind two worked ones (--task chain_sum, extra `gym`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Check, document, engine_of, parsed, parser, settings_of

from grpo_cli.evaluate import evaluate
from grpo_cli.support.intervals import student_95
from grpo_cli.support.memory import peak_bytes
from grpo_cli.support.processor import flush_denormals

WANTED = (0.5, 0.8)
RATES = (1e-5, 2e-5, 4e-5)
APART = 100  # the seed by which rates are chosen
BASE = ("model=smollm2_135m", "train.prompts=4", "train.steps=100000")
LEAN = ("logger=jsonl", "record.rollouts=0", "train.checkpoint_every=100000", "train.keep_checkpoints=1")
EVERY = 5  # steps between two evaluations of ours
RECIPE = {
    "m of n": ("n=16 m=8 downsample=maxvar", "n=16 m=16"),
    "slots": ("sampler=infinite sampler.slots=64", "sampler=full"),
}


@dataclass(frozen=True)
class Lesson:
    """`words` of a task; the steps between evaluations of `problems` with `samples` each (for TRL at n=16);
    how many completions TRL takes in one pass, whose activations take up to 15 GiB."""

    words: tuple[str, ...]
    problems: int
    samples: int
    at_once: int
    trl_every: int


ASK = "State the final answer to the following arithmetic problem:"
SUMS = (  # reasoning-gym's easiest, behind two worked ones that are none of them
    "task.config={min_terms:2,max_terms:2,min_digits:1,max_digits:1}",
    "task.system_prompt=null",
    "task.use_chat_template=false",
    f"task.template='{ASK} 11 + 2 =\n13\n\n{ASK} 14 - 3 =\n11\n\n{{question}}\n'",
    "task.train_problems=4000",
    "sampling.max_new_tokens=16",
)
LESSONS: Mapping[str, Lesson] = {
    "word_problems": Lesson(("task=word_problems",), 128, 2, 64, 5),
    # Of these sums 52 are held out.
    "chain_sum": Lesson(("task=reasoning_gym", "task.name=chain_sum", *SUMS), 52, 5, 16, 2),
}


@dataclass(frozen=True)
class Arm:
    """`words` of `grpo train`; or `trl` completions of each prompt by TRL."""

    words: tuple[str, ...] = ()
    trl: int = 0


def recipe(without: str = "") -> Arm:
    words = (side[part == without] for part, side in RECIPE.items())
    return Arm((*BASE, *(word for side in words for word in side.split())))


ARMS: Mapping[str, Arm] = {
    "TRL, n=16": Arm(trl=16),
    "TRL, n=64": Arm(trl=64),
    "plain GRPO": Arm((*BASE, "n=16")),
    "recipe": recipe(),
    **{f"without {part}": recipe(part) for part in RECIPE},
}
Run = dict[str, Any]  # `curve`: pairs of minutes and accuracy; `peak_bytes`


@dataclass(frozen=True)
class Cell:
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}, {self.rate:g}, seed {self.seed}"


def taught(cell: Cell, args: argparse.Namespace) -> list[str]:
    """The words that all arms have in common."""
    lesson = LESSONS[args.task]
    exam = (f"eval.problems={lesson.problems}", f"eval.k={lesson.samples}")
    model = (f"model.path={args.model.resolve()}", f"model.autocast={args.autocast}")
    return [*lesson.words, *exam, f"seed={cell.seed}", *model]


def train_ours(cell: Cell, args: argparse.Namespace, folder: Path) -> Run:
    """`grpo train`, stopped once it is good enough, or has had its time."""
    arm = ARMS[cell.arm]
    words = [*arm.words, *taught(cell, args), *LEAN, f"optim.lr={cell.rate}", f"eval.every={EVERY}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads)}
    command = [sys.executable, "-P", "-m", "grpo_cli", "train", *words, f"hydra.run.dir={folder}/run"]
    with (folder / "log").open("w") as log:
        started = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        metrics = folder / "run" / "metrics.jsonl"
        try:
            while started.poll() is None and not _is_over(_curve(metrics), args):
                time.sleep(2)
        finally:
            started.send_signal(signal.SIGINT)
            try:
                started.wait(60)
            except subprocess.TimeoutExpired:  # it does not listen before it has begun
                started.kill()
    curve = _curve(metrics)
    if not curve:
        raise RuntimeError((folder / "log").read_text()[-2000:])
    summary = json.loads((folder / "run" / "summary.json").read_text())
    if summary["status"] == "failed":
        raise RuntimeError(summary["error"])
    return {"curve": curve, "peak_bytes": summary["peak_memory_bytes"]}


def _curve(metrics: Path) -> list[tuple[float, float]]:
    rows = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
    # the first evaluation comes before any training
    return [(row.get("clock/train_seconds", 0.0) / 60, row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]


def _is_over(curve: Sequence[tuple[float, float]], args: argparse.Namespace) -> bool:
    return bool(curve) and (curve[-1][1] >= max(WANTED) or curve[-1][0] >= args.minutes)


def train_trl(cell: Cell, args: argparse.Namespace) -> Run:
    """TRL's trainer in this process, evaluated by the same exam."""
    import trl
    from datasets import Dataset
    from step import StopWatch, problems_of, reward_of
    from transformers import TrainerCallback

    from grpo_cli.model.load import eos_token_ids, load_model, load_tokenizer

    n, lesson = ARMS[cell.arm].trl, LESSONS[args.task]
    every, in_bf16 = max(1, lesson.trl_every * 16 // n), args.autocast == "bfloat16"
    settings = settings_of(*BASE, *taught(cell, args))
    torch.manual_seed(cell.seed)
    model, tokenizer = load_model(settings.model, torch.device("cpu")), load_tokenizer(settings.model)
    task, prompts, rows = problems_of(settings, tokenizer, 4 * 1000)
    eos = eos_token_ids(model, tokenizer, settings.model.eos_tokens)
    engine = engine_of(model, eos, "sampler=infinite", "sampler.slots=64", f"seed={cell.seed}")
    held_out = [task.prompts("eval")[i] for i in range(settings.eval.problems)]
    curve: list[tuple[float, float]] = []
    clock = StopWatch()

    def examine() -> None:
        model.eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            found = evaluate(engine, task, held_out, settings.sampling.at(1.0), settings.eval.k, settings.seed)
        model.train()
        curve.append((sum(step["seconds"] for step in clock.steps) / 60, found.metrics["eval/pass@1"]))
        print(f"{cell.name}: {curve[-1][0]:.1f} min, {curve[-1][1]:.3f}", flush=True)

    class Exams(TrainerCallback):
        def on_step_end(self, given: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step % every == 0:
                examine()
                control.should_training_stop = _is_over(curve, args)
            return control

    words: dict[str, Any] = dict(use_cpu=True, bf16=in_bf16, dataloader_pin_memory=False, report_to="none")
    at_once = min(4 * n, lesson.at_once)
    words |= dict(save_strategy="no", logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=at_once)
    words |= dict(gradient_accumulation_steps=4 * n // at_once)
    words |= dict(num_generations=n, temperature=1.0, max_completion_length=settings.sampling.max_new_tokens)
    words |= dict(seed=cell.seed, max_steps=1000, beta=0.0, learning_rate=cell.rate)
    words |= dict(lr_scheduler_type="constant_with_warmup", warmup_steps=5, gradient_checkpointing=False)
    with tempfile.TemporaryDirectory() as folder:
        trained = dict(train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        settled = trl.GRPOConfig(**words, output_dir=folder)
        reward = reward_of(settings, task, prompts, [])
        trl.GRPOTrainer(model, reward, args=settled, callbacks=[clock, Exams()], **trained).train()
    return {"curve": curve, "peak_bytes": peak_bytes("cpu")}


def reached(run: Run, wanted: float) -> float | None:
    """Minutes until the accuracy was first found."""
    return next((minutes for minutes, accuracy in run["curve"] if accuracy >= wanted), None)


def best_rate(runs: Mapping[str, Run], arm: str) -> float | None:
    """The rate of an arm once all have been tried."""
    found = {rate: runs.get(Cell(arm, rate, APART).name) for rate in RATES}
    if not all(found.values()):
        return None

    def order(rate: float) -> tuple[float, float]:
        run = found[rate]
        assert run is not None
        soonest = reached(run, max(WANTED))
        return (float("inf") if soonest is None else soonest, -run["curve"][-1][1])

    return min(RATES, key=order)


def cells(runs: Mapping[str, Run], args: argparse.Namespace) -> Iterator[Cell]:
    """All that is to be run, as far as rates are known. What lacks an ingredient has the recipe's."""
    main = [arm for arm in args.arms if not arm.startswith("without")]
    if "rates" in args.stages:
        yield from (Cell(arm, rate, APART) for rate in RATES for arm in main)
    for seed in args.seeds:
        for arm in args.arms:
            stage = "without" if arm.startswith("without") else "seeds"
            rate = args.rate or best_rate(runs, "recipe" if stage == "without" else arm)
            if stage in args.stages and rate is not None:
                yield Cell(arm, rate, seed)


def interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ", ".join(f"{value:.2f}" for value in values)
    half = student_95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def told(runs: Mapping[str, Run], args: argparse.Namespace) -> list[Check]:
    """Minutes of each arm, and how many times faster the recipe was, seed by seed."""
    by_arm: dict[str, dict[int, Run]] = {
        arm: {seed: runs[name] for seed in args.seeds for name in runs if _is(name, arm, seed)} for arm in args.arms
    }
    for arm, found in by_arm.items():
        for wanted in WANTED:
            minutes = [reached(run, wanted) for run in found.values()]
            if minutes:
                there = [m for m in minutes if m is not None]
                print(f"{arm}: {wanted:.0%} in {len(there)} of {len(minutes)} runs, after {interval(there)} minutes")
        if found:
            print(f"{arm}: peak {max(run['peak_bytes'] for run in found.values()) / 2**30:.2f} GiB")
    checks = []
    for arm in [arm for arm in args.arms if arm.startswith("TRL")]:
        for seed in by_arm[arm].keys() & by_arm.get("recipe", {}).keys():
            theirs, ours = (reached(by_arm[of][seed], max(WANTED)) for of in (arm, "recipe"))
            if ours is not None:
                least = args.minutes if theirs is None else theirs  # at least, where it did not get there
                checks.append(Check(f"seed {seed}: times faster than {arm} at 80%", least / ours, least=4.0))
    return checks


def _is(name: str, arm: str, seed: int) -> bool:
    return name.startswith(f"{arm}, ") and name.endswith(f", seed {seed}")


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__, threads=os.cpu_count())
    made.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2")
    made.add_argument("--task", choices=tuple(LESSONS), default="word_problems")
    made.add_argument("--autocast", choices=("bfloat16", "none"), default="bfloat16", help="none: float32")
    made.add_argument("--minutes", type=float, default=30.0, help="of training that a run has at most")
    made.add_argument("--hours", type=float, default=float("inf"), help="after which no further run is begun")
    made.add_argument("--stages", nargs="+", default=["rates", "seeds", "without"])
    made.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--rate", type=float, help="learning rate of all, in place of the chosen ones")
    made.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parsed(made, words, minutes=0.01, arms=["recipe"], seeds=[0], rate=2e-5, stages=["seeds"])
    if args.child:
        torch.set_num_threads(args.threads)
        flush_denormals()
        arm, rate, seed, out = args.child
        run = train_trl(Cell(arm, float(rate), int(seed)), args)
        Path(out).write_text(json.dumps(run))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no run is left behind
    held = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    runs: dict[str, Run] = held.get("runs", {})
    ends = time.monotonic() + 3600 * args.hours
    while (cell := next((one for one in cells(runs, args) if one.name not in runs), None)) and time.monotonic() < ends:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            if ARMS[cell.arm].trl:
                own = [cell.arm, str(cell.rate), str(cell.seed), str(folder / "run.json")]
                given = ["--threads", args.threads, "--minutes", args.minutes, "--model", args.model]
                given += ["--task", args.task, "--autocast", args.autocast]
                subprocess.run([sys.executable, __file__, *map(str, given), "--child", *own], check=True)
                runs[cell.name] = json.loads((folder / "run.json").read_text())
            else:
                runs[cell.name] = train_ours(cell, args, folder)
        print(f"{cell.name}: {runs[cell.name]['curve'][-1]}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(document(args, "trl") | {"runs": runs}, indent=1) + "\n")
    if cell is not None:
        print(f"not run yet, and what follows from it: {cell.name}")
    checks = told(runs, args)
    for check in checks:
        print(check)
    return int(not all(check.holds for check in checks))


if __name__ == "__main__":
    raise SystemExit(main())
