"""Steps of training, of ours and of TRL's `GRPOTrainer`, which `real.py` measures side by side: same model,
problems, n, length limit and threads.

Both train with AdamW at a rate too small to change how long the replies are, without a KL term, with one update per
round of rollouts; the first step is warm-up. TRL (the extra `bench`) runs as documented for generation with
`transformers`; its micro-batch is the whole batch, which is its fastest setting here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from arms import Case
from common import Figures, clock_of, clocked, settings_of
from transformers import TrainerCallback

from grpo_cli.config.instantiate import make
from grpo_cli.config.prepare import prepare
from grpo_cli.experiment import parts_of, set_up
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import RunSettings
from grpo_cli.step import Step
from grpo_cli.support.memory import peak_bytes
from grpo_cli.support.meter import Meter
from grpo_cli.support.processor import flush_denormals
from grpo_cli.tracking.progress import Progress
from grpo_cli.types import Finish, Prompt, Request, Rollout

RATE = 1e-9
PHASES = ("rollout", "forward", "backward")


def uneven(reply: str) -> float:
    """A reward that differs within nearly every group."""
    return float(zlib.crc32(reply.encode()) % 2)


def training(case: Case) -> tuple[str, ...]:
    """The words of `grpo train` for the rounds that are measured."""
    rate = (f"optim.lr={RATE}", "optim.warmup_steps=0", "optim.schedule=constant", "optim.weight_decay=0.0")
    return (*case.run, *rate, f"n={case.n}", f"train.prompts={case.prompts}", f"device={case.device}", "eval.every=0")


def run_ours(case: Case) -> list[Figures]:
    """Rounds of `grpo train`, nothing saved or logged; phases in processor seconds where there is one thread."""
    settings = settings_of(*training(case))
    meter = Meter(clock=clock_of(case.threads))
    run = prepare(settings)
    runtime = set_up(run, settings.model, span=meter.span)
    step = Step(settings, parts_of(run, runtime, meter, print, print))
    progress, found = Progress(), list[Figures]()
    for number in range(case.repeats + 1):
        _, figures = clocked(lambda number=number: step.run(number, progress))
        times = meter.take()
        figures |= {phase: times.get(f"time/{phase}", 0.0) for phase in PHASES}
        found.append(figures | {"tokens": float(runtime.engine.stats().generated_tokens)})
    return found


class StopWatch(TrainerCallback):
    """Notes the seconds of each of a trainer's steps."""

    def __init__(self) -> None:
        self.steps: list[Figures] = []
        self._start = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, processor = self._start
        self.steps.append({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - processor})


def problems_of(settings: RunSettings, tokenizer: Any, count: int) -> tuple[Any, list[Prompt], list[dict[str, Any]]]:
    """Return the task, `count` of its problems, and their rows for TRL: texts of which it makes the same tokens."""
    task = make("task", settings.parts["task"], {"tokenizer": tokenizer, "seed": settings.seed, "warn": print})
    prompts = [task.prompts("train")[i] for i in range(count)]
    texts = [tokenizer.decode(p.token_ids) for p in prompts]
    assert [tuple(tokenizer(text)["input_ids"]) for text in texts] == [p.token_ids for p in prompts], "same prompts"
    return task, prompts, [{"prompt": text, "problem": number} for number, text in enumerate(texts)]


def reward_of(
    settings: RunSettings, task: Any, prompts: Sequence[Prompt], tokens: list[float]
) -> Callable[..., list[float]]:
    """The task's reward as TRL calls it, which notes how many `tokens` each round has."""

    def reward(completion_ids: list[list[int]], problem: list[int], **_: Any) -> list[float]:
        tokens.append(float(sum(map(len, completion_ids))))
        asked = [Request(prompts[number], 0, 0, settings.sampling) for number in problem]
        made = zip(asked, completion_ids, strict=True)
        rollouts = [Rollout(one, tuple(ids), (0.0,) * len(ids), Finish.EOS) for one, ids in made]
        return [task.reward(rollout.request.prompt, rollout).total for rollout in rollouts]

    return reward


def run_trl(case: Case) -> list[Figures]:
    """As many steps of TRL's trainer, in autocast where the case is."""
    import trl
    from datasets import Dataset

    settings = settings_of(*training(case))
    model, tokenizer = case.loaded(), load_tokenizer(settings.model)
    task, prompts, rows = problems_of(settings, tokenizer, (case.repeats + 1) * case.prompts)
    tokens: list[float] = []
    words: dict[str, Any] = dict(use_cpu=True, bf16=settings.model.autocast == "bfloat16", dataloader_pin_memory=False)
    words |= dict(report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=case.seed)
    words |= dict(per_device_train_batch_size=case.n * case.prompts, num_generations=case.n, temperature=1.0)
    words |= dict(max_completion_length=case.max_new_tokens, max_steps=case.repeats + 1, loss_type="grpo", beta=0.0)
    words |= dict(learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=1.0, gradient_checkpointing=False)
    watch = StopWatch()
    trained = dict(train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[watch])
    with tempfile.TemporaryDirectory() as folder:
        settled = trl.GRPOConfig(**words, output_dir=folder)
        reward = reward_of(settings, task, prompts, tokens)
        trl.GRPOTrainer(model=model, reward_funcs=reward, args=settled, **trained).train()
    return [step | {"tokens": count} for step, count in zip(watch.steps, tokens, strict=True)]


WAYS: Mapping[str, Callable[[Case], list[Figures]]] = {"trl": run_trl, "grpo-cli": run_ours}


def measured(way: str, case: Case) -> Figures:
    """Medians over the steps after the first, and the peak of this process."""
    torch.set_num_threads(case.threads)
    flush_denormals()
    steps = WAYS[way](case)[1:]
    return {name: statistics.median(s[name] for s in steps) for name in steps[0]} | {"peak_bytes": peak_bytes("cpu")}
