"""Your own reward function: what it may ask for and return, and how each mistake is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tiny_hf import make_tokenizer
from words import rollout_of, task_of

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.types import Finish, Reward

TOKENIZER = make_tokenizer()
MODULE = """
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

def match(reply, answer):
    return reply == answer

def parts(reply, answer, row, question, finished, length):
    return {"correct": float(reply.startswith(answer)), "easy": row["level"] == "easy", "short": 1 / length}

def many(replies, answers, rows):
    return [{"correct": float(r == a)} for r, a in zip(replies, answers)]

def array(replies):
    return np.array([len(r) for r in replies], dtype=np.float32)

def short(replies):
    return [1.0] * (len(replies) - 1)

def raises(reply, answer):
    return 1 / (len(reply) - 3)

def no_number(reply):
    return float("nan") if reply == "nan" else None if reply == "none" else "1" if reply == "text" else {}

def named(reply):
    return {reply: 1.0}

def wants(reply, temperature):
    return 1.0

def anything(**words):
    return float(len(words))

def ended(finished, row, question):
    return {"finished": finished, "is_last": row["question"] == "q5" == question}

def ends(reply):
    raise GeneratorExit

def huge(reply):
    return 10 ** (400 if reply == "400" else 5000)

def far(reply):
    return 2.0**53 * (1 if reply == "at" else -1 if reply == "below" else 1.5)

def scalar(reply):
    return eval(reply)

def empties(row):
    row["tags"].clear()
    return float(row.pop("level") == "easy")

number = 5
"""
BROKEN = {"ends": "raise GeneratorExit"}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "rewards_of_mine.py").write_text(MODULE)
    for name, text in BROKEN.items():
        (tmp_path / f"{name}_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("rewards_of_mine", None)


def make(tmp_path: Path, function: str, **settings: Any) -> Jsonl:
    path = tmp_path / "p.jsonl"
    rows = [f'{{"question": "q{i}", "answer": "word {i}", "level": "{"easy" if i % 2 else "hard"}"}}' for i in range(6)]
    path.write_text("\n".join(rows) + "\n")
    return task_of("jsonl", TOKENIZER, path=str(path), reward=f"rewards_of_mine:{function}", **settings)


def judged(task: Jsonl, replies: Sequence[str]) -> list[Reward]:
    prompts = task.prompts("train")
    pairs = [(prompts[i], rollout_of(prompts[i], reply, TOKENIZER, sample=i)) for i, reply in enumerate(replies)]
    return task.rewards(pairs)


def message_of(tmp_path: Path, function: str, replies: Sequence[str] = ("a",), **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        judged(make(tmp_path, function, **settings), replies)
    return str(caught.value)


def test_one_number_is_the_reward_and_a_part_of_the_functions_name(tmp_path: Path) -> None:
    task = make(tmp_path, "match")
    answer = task.prompts("train")[0].answer
    assert answer.startswith("word ")  # as it is in the file: only one's own function knows what it means
    weights = {"match": 1.0}
    right, wrong = Reward(1.0, {"match": 1.0}, weights=weights), Reward(0.0, {"match": 0.0}, weights=weights)
    assert judged(task, [answer, "x"]) == [right, wrong]


HALF = ["torch.tensor(0.5)", "torch.tensor([0.5])", "torch.tensor(0.5, requires_grad=True)", "np.float16(0.5)"]
HALF += ["torch.tensor(0.5, dtype=torch.bfloat16)", "np.float32(0.5)", "np.array([[0.5]])", "Fraction(1, 2)"]
REAL = {"torch.tensor(True)": 1.0, "torch.tensor(3)": 3.0, "np.bool_(True)": 1.0, "True": 1.0, "-3": -3.0}
NO_REAL = [
    "Decimal('sNaN')",
    "Decimal('1e400')",
    "Fraction(10**400)",
    "1j",
    "np.complex64(1)",
    "torch.tensor([1., 2.])",
]
NO_REAL += ["torch.tensor([])", "np.array(['1'])", "np.str_('1')", "b'1'", "[0.5]", "np.datetime64('2020')", "None"]
NO_REAL += ["torch.tensor(float('inf'))"]


def test_a_reward_may_be_any_real_scalar_and_nothing_else(tmp_path: Path) -> None:
    task = make(tmp_path, "scalar")
    for value, worth in {**dict.fromkeys([*HALF, "Decimal('0.5')"], 0.5), **REAL}.items():
        assert [reward.total for reward in judged(task, [value])] == [worth], value
    for value in NO_REAL:
        with pytest.raises(UserError, match="as scalar for sample 0"):
            judged(task, [value])


def test_rows_are_copies_with_the_same_types_from_every_format(tmp_path: Path) -> None:
    files = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"question": f"q{i}", "answer": "a", "level": "easy", "w": 0.5, "tags": [{"p": 0.25}]} for i in range(6)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = pyarrow.Table.from_pylist([{**row, "w": Decimal("0.5")} for row in rows])
    files.write_table(typed, tmp_path / "p.parquet")
    for name in ("p.jsonl", "p.parquet"):
        task = task_of("jsonl", TOKENIZER, path=str(tmp_path / name), reward="rewards_of_mine:empties")
        assert (
            [reward.total for reward in judged(task, ["a"])]
            == [reward.total for reward in judged(task, ["a"])]
            == [1.0]
        )
        row = dict(task.row_of(task.prompts("train")[0]))
        assert {**row, "question": "q"} == {**rows[0], "question": "q"} and type(row["w"]) is float
        assert type(row["tags"][0]["p"]) is float


def test_named_parts_are_added_with_their_weights(tmp_path: Path) -> None:
    task = make(tmp_path, "parts", weights={"correct": 2.0, "short": 10.0, "tag_count": 1.0})
    prompt = task.prompts("train")[1]
    reward = task.reward(prompt, rollout_of(prompt, f"{prompt.answer}<think>", TOKENIZER))
    easy, length = float(int(prompt.answer[-1]) % 2), len("word 0<think>") + 1
    assert dict(reward.parts) == {"correct": 1.0, "easy": easy, "short": 1 / length, "tag_count": 0.25}
    assert reward.total == pytest.approx(2.0 + easy + 10 / length + 0.25)


def test_a_reply_is_finished_unless_it_was_cut_off(tmp_path: Path) -> None:
    task = make(tmp_path, "ended")
    prompt = task.prompts("train")[0]
    said = [replace(rollout_of(prompt, "a", TOKENIZER), finish=finish) for finish in Finish]
    found = {rollout.finish: task.reward(prompt, rollout).parts["finished"] for rollout in said}
    assert found == {Finish.EOS: 1.0, Finish.STOP: 1.0, Finish.LENGTH: 0.0, Finish.PARTIAL: 0.0}


def test_a_function_of_many_sees_all_rollouts_of_a_step(tmp_path: Path) -> None:
    task = make(tmp_path, "many")
    answers = [prompt.answer for prompt in task.prompts("train")]
    assert [reward.total for reward in judged(task, [answers[0], "x", answers[2]])] == [1.0, 0.0, 1.0]
    assert task.rewards([]) == []
    assert judged(make(tmp_path, "array"), ["a", "bcd"]) == [
        Reward(size, {"array": size}, weights={"array": 1.0}) for size in (1.0, 3.0)
    ]
    assert judged(make(tmp_path, "anything"), ["a"])[0].total == 7.0


@pytest.mark.parametrize(
    ("function", "replies", "expected"),
    [
        ("raises", ["ok", "abc"], "raised ZeroDivisionError.*rewards_of_mine.py, line 24.* for sample 1 .*'abc'"),
        ("ends", ["abc"], "raised GeneratorExit "),
        ("no_number", ["text"], "returned '1' as no_number"),
        ("no_number", ["else"], "returned no part for sample 0"),
        ("short", ["a", "b", "c"], "returned 2 rewards for the 3 rollouts from sample 0 of prompt train-"),
        ("named", ["a/b"], "called a part 'a/b' for sample 0"),
        ("named", ["mean"], "reward/mean"),
        ("wants", ["a"], "takes temperature, but by name it can get reply, turns, answer, question"),
        ("huge", ["5000"], "returned a number of 16610 bits as huge for sample 0"),
        ("far", ["above"], "returned 1.3510798882111488e.16 as far.*from -2.53 to 2.53"),
        ("nothing", ["a"], "rewards_of_mine has no function nothing"),
    ],
)
def test_a_mistake_names_the_function_and_the_rollout(
    tmp_path: Path, function: str, replies: list[str], expected: str
) -> None:
    message = message_of(tmp_path, function, replies)
    assert f"rewards_of_mine:{function}" in message or "the reward function" in message
    assert re.search(expected, message), message


def test_the_largest_rewards_are_those_that_are_exact(tmp_path: Path) -> None:
    assert [reward.total for reward in judged(make(tmp_path, "far"), ["at", "below"])] == [2.0**53, -(2.0**53)]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("maths", "written as module:name"),
        ("no_such_module:f", "the module no_such_module raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("ends_of_mine:f", "raised GeneratorExit ("),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_at_the_start(reward: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        task_of("jsonl", TOKENIZER, path="p.jsonl", reward=reward)
    assert f"task.reward={reward}" in str(caught.value) and expected in str(caught.value)


def test_weights_must_go_with_the_parts(tmp_path: Path) -> None:
    assert "task.weights.brief weighs nothing" in message_of(tmp_path, "match", weights={"brief": 1.0})
    assert "reward/format is a metric already" in message_of(tmp_path, "named", ["format"], weights={"format": 1.0})
    assert "task.formats_on=wrong" in message_of(tmp_path, "match", formats_on="wrong")
    assert "task.grading=strict is for task.reward=numbers" in message_of(tmp_path, "match", grading="strict")
