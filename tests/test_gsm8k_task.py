"""GSM8K: its own solutions earn 1 and spoilt ones 0, on the real files where they are, else the hub's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_hf import make_tokenizer
from words import GSM8K, rollout_of, task_of

from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.types import Prompt, Rollout

TRAIN, TEST = GSM8K / "train.jsonl", GSM8K / "test.jsonl"
TOKENIZER = make_tokenizer()


def rollout(prompt: Prompt, reply: str) -> Rollout:
    return rollout_of(prompt, reply, TOKENIZER)


def real_task(**settings: Any) -> Jsonl:
    if not GSM8K.is_dir():
        pytest.skip("the GSM8K files are not here")
    return task_of("gsm8k", TOKENIZER, path=str(TRAIN), **settings)


def solutions(path: Path) -> list[str]:
    return [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]


def test_real_solutions_earn_one_and_spoilt_ones_nothing() -> None:
    task = real_task(eval_path=str(TEST), max_prompt_tokens=2048)
    assert (len(task.prompts("train")), len(task.prompts("eval"))) == (7473, 1319)
    for split, path, step in (("train", TRAIN, 40), ("eval", TEST, 10)):
        prompts, replies = task.prompts(split), solutions(path)
        for i in range(0, len(replies), step):
            reward = task.reward(prompts[i], rollout(prompts[i], replies[i]))
            assert (reward.total, reward.parts) == (1.0, {"correct": 1.0, "correct_strict": 1.0})
            spoilt = task.reward(prompts[i], rollout(prompts[i], f"{replies[i]}0.5"))
            assert (spoilt.total, spoilt.parts) == (0.0, {"correct": 0.0, "correct_strict": 0.0})
            unmarked = task.reward(prompts[i], rollout(prompts[i], replies[i].replace("####", "The answer is")))
            assert (unmarked.total, unmarked.parts) == (1.0, {"correct": 1.0, "correct_strict": 0.0})


def test_a_share_of_the_real_train_file_is_held_out() -> None:
    task = real_task(eval_fraction=0.05)
    assert (len(task.prompts("train")), len(task.prompts("eval"))) == (7473 - 374, 374)  # 373.65, rounded
    train_ids = {task.prompts("train")[i].id.split("-")[1] for i in range(0, 7099, 7)}
    assert not train_ids & {prompt.id.split("-")[1] for prompt in task.prompts("eval")}


def test_without_a_path_both_splits_come_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def load_dataset(name: str, config: str, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"question": f"{split} {i}", "answer": f"{i}\n#### {i}"} for i in range(3)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = task_of("gsm8k", TOKENIZER)
    assert asked == [("openai/gsm8k", "main", "test")]  # what is trained on is read when it is asked for
    assert [p.answer for p in task.prompts("train")] == ["0", "1", "2"]
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]
    assert [(p.id, p.answer) for p in task.prompts("eval")] == [(f"eval-{i + 1:06d}", str(i)) for i in range(3)]
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "mine", "answer": "#### 1,000"}\n')
    task = task_of("gsm8k", TOKENIZER, eval_path=str(own))
    assert [prompt.answer for prompt in task.prompts("eval")] == ["1000"]
    assert task.text(task.prompts("eval")[0].token_ids) == "Question: mine\nAnswer:"
