"""Your own reward function: what it may ask for and return, and how each mistake is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import made
import pytest
from made import rollout_of
from tiny_hf import make_tokenizer

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.types import Reward

TOKENIZER = make_tokenizer()
MODULE = """
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

def match(reply, answer):
    return reply == answer

def parts(reply, answer, row, question, finished, length, turns):
    turns.clear()
    return {"correct": float(reply.startswith(answer)), "easy": row["level"] == "easy", "short": 1 / length}

def many(replies, answers, rows):
    return [{"correct": float(r == a)} for r, a in zip(replies, answers)]

def short(replies):
    return [1.0] * (len(replies) - 1)

def raises(reply, answer):
    return 1 / (len(reply) - 3)

def named(reply):
    return {reply: 1.0}

def wants(reply, temperature):
    return 1.0

def anything(**words):
    return float(len(words))

def scalar(reply):
    return eval(reply)

def empties(row):
    row["tags"].clear()
    return float(row.pop("level") == "easy")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text(MODULE)
    (tmp_path / "ends_of_mine.py").write_text("raise GeneratorExit")
    monkeypatch.syspath_prepend(str(tmp_path))


def make(tmp_path: Path, function: str, **settings: Any) -> Jsonl:
    path = tmp_path / "p.jsonl"
    rows = [f'{{"question": "q{i}", "answer": "word {i}", "level": "{"easy" if i % 2 else "hard"}"}}' for i in range(6)]
    path.write_text("\n".join(rows) + "\n")
    return made.task("jsonl", TOKENIZER, path=str(path), reward=f"rewards_of_mine:{function}", **settings)


def judged(task: Jsonl, replies: Sequence[str]) -> list[Reward]:
    prompts = task.prompts("train")
    pairs = [(prompts[i], rollout_of(prompts[i], reply, TOKENIZER, sample=i)) for i, reply in enumerate(replies)]
    return task.rewards(pairs)


HALF = ["torch.tensor(0.5)", "torch.tensor([0.5])", "torch.tensor(0.5, requires_grad=True)", "np.float16(0.5)"]
HALF += ["torch.tensor(0.5, dtype=torch.bfloat16)", "np.array([[0.5]])", "Fraction(1, 2)", "Decimal('0.5')"]
REAL = {"torch.tensor(True)": 1.0, "torch.tensor(3)": 3.0, "np.bool_(True)": 1.0, "True": 1.0, "-2.**53": -(2.0**53)}
NO_REAL = "Decimal('sNaN')|Fraction(10**400)|1j|np.complex64(1)|torch.tensor([1., 2.])|torch.tensor([])|2.**54|10**5000"
NO_REAL += "|np.array(['1'])|np.str_('1')|'1'|b'1'|[0.5]|np.datetime64('2020')|None|float('nan')|torch.tensor(1e39)"


def test_a_reward_may_be_any_real_scalar_and_nothing_else(tmp_path: Path) -> None:
    task = make(tmp_path, "scalar")
    for value, worth in {**dict.fromkeys(HALF, 0.5), **REAL}.items():
        assert [reward.total for reward in judged(task, [value])] == [worth], value
    for value in NO_REAL.split("|"):
        with pytest.raises(UserError, match="for sample 0"):
            judged(task, [value])


def test_rows_are_copies_with_the_same_types_from_every_format(tmp_path: Path) -> None:
    files = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"question": f"q{i}", "answer": "a", "level": "easy", "w": 0.5, "tags": [{"p": 0.25}]} for i in range(6)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = pyarrow.Table.from_pylist([{**row, "w": Decimal("0.5")} for row in rows])
    files.write_table(typed, tmp_path / "p.parquet")
    for name in ("p.jsonl", "p.parquet"):
        task = made.task("jsonl", TOKENIZER, path=str(tmp_path / name), reward="rewards_of_mine:empties")
        assert [reward.total for _ in range(2) for reward in judged(task, ["a"])] == [1.0, 1.0]
        row = dict(task.row_of(task.prompts("train")[0]))
        assert {**row, "question": "q"} == {**rows[0], "question": "q"} and type(row["w"]) is float
        assert type(row["tags"][0]["p"]) is float


def test_parts_are_added_with_their_weights_and_a_number_is_a_part_of_the_functions_name(tmp_path: Path) -> None:
    task = make(tmp_path, "parts", weights={"correct": 2.0, "short": 10.0, "tag_count": 1.0})
    prompt = task.prompts("train")[1]
    reward = task.reward(prompt, rollout_of(prompt, f"{prompt.answer}<think>", TOKENIZER))
    easy, length = float(int(prompt.answer[-1]) % 2), len("word 0<think>") + 1
    assert dict(reward.parts) == {"correct": 1.0, "easy": easy, "short": 1 / length, "tag_count": 0.25}
    assert reward.total == pytest.approx(2.0 + easy + 10 / length + 0.25)
    right, wrong = judged(make(tmp_path, "match"), [task.prompts("train")[0].answer, "x"])
    assert (right, wrong.total) == (Reward(1.0, {"match": 1.0}, "match", {"match": 1.0}), 0.0)
    (formed,) = judged(make(tmp_path, "match", weights={"tag_count": 9.0}), ["<think>x</think>"])
    assert formed.total > 1 and not formed.solved, "the number alone says what is right"


def test_a_function_of_many_sees_all_rollouts_of_a_step(tmp_path: Path) -> None:
    task = make(tmp_path, "many")
    answers = [prompt.answer for prompt in task.prompts("train")]
    assert [reward.total for reward in judged(task, [answers[0], "x", answers[2]])] == [1.0, 0.0, 1.0]
    assert task.rewards([]) == []
    assert judged(make(tmp_path, "anything"), ["a"])[0].total == 7.0


@pytest.mark.parametrize(
    ("function", "replies", "words", "expected"),
    [
        ("raises", ["ok", "abc"], {}, r"raised ZeroDivisionError.*rewards_of_mine.py, line \d+.* for sample 1 .*'abc'"),
        ("scalar", ["{}"], {}, "returned no part for sample 0"),
        ("short", ["a", "b", "c"], {}, "returned 2 rewards for the 3 rollouts from sample 0 of prompt train-"),
        ("named", ["a/b"], {}, "called a part 'a/b' for sample 0"),
        ("named", ["mean"], {}, "reward/mean"),
        ("wants", ["a"], {}, "temperature.*by name it can get reply, turns, answer, question"),
        ("nothing", ["a"], {}, "rewards_of_mine has no function nothing"),
        ("match", ["a"], {"weights": {"brief": 1.0}}, "task.weights.brief weighs nothing"),
        ("match", ["a"], {"weights": {"correct": 0.5}}, "task.weights.correct weighs nothing"),
        ("named", ["format"], {"weights": {"format": 1.0}}, "reward/format is a metric already"),
        ("match", ["a"], {"grading": "strict"}, "task.grading=strict is for task.reward=numbers"),
    ],
)
def test_a_mistake_names_the_function_or_the_setting_and_the_rollout(
    tmp_path: Path, function: str, replies: list[str], words: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        judged(make(tmp_path, function, **words), replies)
    assert re.search(expected, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("maths", "written as module:name"),
        ("no_such_module:f", "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("ends_of_mine:f", "raised GeneratorExit ("),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_at_the_start(reward: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        made.task("jsonl", TOKENIZER, path="p.jsonl", reward=reward)
    assert f"task.reward={reward}" in str(caught.value) and expected in str(caught.value)
