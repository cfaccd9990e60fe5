"""How many problems of each task of reasoning-gym a model gets right before any training: pass@1 and pass@k.

    python scripts/bench/gym.py --model models/smollm2 --json gym.json          # goes on where it was stopped

Each task has its library's own config, and `--shown` solved problems before each question, without which a small model
does not answer in the form that the scorers read. A prompt with more than `--longest` tokens is left out.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import replace
from typing import Any

from common import document, parsed, parser, settings_of, write

from grpo_cli.config.instantiate import make
from grpo_cli.evaluate import evaluate_with
from grpo_cli.experiment import set_up
from grpo_cli.settings import ExamSettings
from grpo_cli.support.errors import UserError
from grpo_cli.tasks import reasoning_gym


def measured(bench: Any, settings: Any, args: Any, name: str) -> dict[str, Any]:
    """The figures of one task; none but the reason where there is no problem of it that fits."""
    offered = {"tokenizer": bench.tokenizer, "seed": 0, "max_prompt_tokens": args.longest, "warn": lambda text: None}
    words = settings.parts["task"] | {"name": name, "few_shot": args.shown, "eval_problems": args.problems}
    start = time.perf_counter()
    try:
        task = make("task", words | {"train_problems": 1}, offered)
    except UserError as error:
        return {"left_out": str(error)}
    exam = ExamSettings(problems=args.problems, k=args.k, temperature=1.0)
    found = evaluate_with(replace(bench, task=task), exam, settings.sampling, seed=0)
    drawn = [example for example in found.examples if example.reason == "sampled"]
    parts = {part: sum(e.parts[part] for e in drawn) / len(drawn) for part in ("score", "format", "incomparable")}
    prompts = task.prompts("eval")
    return {
        **{metric.removeprefix("eval/"): value for metric, value in found.metrics.items()},
        **parts,
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts) / len(prompts),
        "seconds": time.perf_counter() - start,
    }


def main(words: list[str] | None = None) -> int:
    made = parser(__doc__, threads=1)
    made.add_argument("--model", default="models/smollm2")
    made.add_argument("--names", nargs="*", help="only these tasks")
    for word, default in (("problems", 8), ("k", 8), ("tokens", 32), ("shown", 2), ("longest", 1024)):
        made.add_argument(f"--{word}", type=int, default=default)
    args = parsed(made, words, names=["chain_sum"], problems=2, k=2, tokens=4)
    settings = settings_of(
        *(["model=smollm2_135m", f"model.path={args.model}"] if args.model != "tiny" else []),
        *("task=reasoning_gym", "task.name=chain_sum", "task.eval_problems=1", "task.judge_workers=1"),
        *("sampler=infinite", "sampler.slots=32", f"sampling.max_new_tokens={args.tokens}"),
    )
    reasoning_gym.Workers = functools.cache(reasoning_gym.Workers)  # the library is imported once for all tasks
    bench = set_up(settings, settings.model)
    names, args.names = args.names or sorted(set(reasoning_gym.library_names()) - reasoning_gym.REFUSED.keys()), None
    asked = document(args, "reasoning-gym")
    old = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"settings": {}}
    same = {**old["settings"], "load_before": 0.0} == {**asked["settings"], "load_before": 0.0}
    tasks = old["tasks"] if same else {}
    for name in names:
        if name not in tasks:
            tasks[name] = measured(bench, settings, args, name)
            print(name, json.dumps(tasks[name]), flush=True)
            if args.json:
                write(args.json, {**asked, "tasks": tasks})
    return 0


if __name__ == "__main__":
    sys.exit(main())
