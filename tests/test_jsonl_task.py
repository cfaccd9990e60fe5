"""Questions from a file or the hub: what is read, how it is split, put and judged, and how each mistake is refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest
from made import rollout_of
from tiny_hf import make_tokenizer

from grpo_cli.support.errors import UserError
from grpo_cli.tasks.formats import FORMATS
from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.tasks.problems import read_problems
from grpo_cli.types import Prompt, Reward

TOKENIZER = make_tokenizer()
CHAT = make_tokenizer(chat_template=True)


def write(path: Path, *rows: Any) -> str:
    lines = (row if isinstance(row, bytes | str) else json.dumps(row) for row in rows)
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return str(path)


def problems(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(count)]


def make(path: str, tokenizer: Any = TOKENIZER, **settings: Any) -> Jsonl:
    return made.task("jsonl", tokenizer, path=path, **settings)


def all_of(task: Jsonl) -> list[Prompt]:
    return [*task.prompts("train"), *task.prompts("eval")]


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def test_every_row_is_in_one_split_known_by_its_line_and_with_its_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "", *problems(100))  # the blank first line counts as a line
    task = make(path, eval_fraction=0.1)
    assert (len(task.prompts("train")), len(task.prompts("eval"))) == (90, 10)
    assert sorted(int(prompt.id.split("-")[1]) for prompt in all_of(task)) == list(range(2, 102))
    for prompt in all_of(task):
        split, line = prompt.id.split("-")
        number = int(line) - 2
        assert task.text(prompt.token_ids) == f"Question: What is {number} + {number}?\nAnswer:"
        assert prompt.answer == str(2 * number) and task.prompts(split).by_id(prompt.id) == prompt
    assert task.prompts("train").by_id("test-000002") is None


def test_the_split_follows_from_the_questions_alone_and_is_the_same_in_every_version(tmp_path: Path) -> None:
    """Else a checkpoint would be evaluated on what it was trained on. Copies of a question stay on one side."""
    for seed, rows in ((0, problems(40)), (7, problems(40)[::-1]), (0, [*problems(40), *problems(40)])):
        task = made.task("jsonl", TOKENIZER, seed, path=write(tmp_path / "p.jsonl", *rows), eval_fraction=0.1)
        held_out, train = ([int(it.answer) // 2 + 1 for it in task.prompts(split)] for split in ("eval", "train"))
        assert {*held_out} == {4, 14, 16, 39} and len(held_out) == len(rows) // 10 and not {*held_out} & {*train}


def test_an_eval_file_is_the_eval_split_and_shares_no_question(tmp_path: Path) -> None:
    rows = problems(5)
    path = write(tmp_path / "t.jsonl", *rows[:3])
    task = make(path, eval_path=write(tmp_path / "e.jsonl", *rows[3:]))
    assert [p.id for p in task.prompts("train")] == ["train-000001", "train-000002", "train-000003"]
    assert [(p.id, p.answer) for p in task.prompts("eval")] == [("eval-000001", "6"), ("eval-000002", "8")]
    other = write(tmp_path / "o.jsonl", *rows[1:4])
    said: list[str] = []
    task = make(path, eval_path=other, warn=said.append)
    assert [p.id for p in task.prompts("train")] == ["train-000001"] and len(task.prompts("eval")) == 3
    assert len(said) == 1 and f"2 of the 3 problems of {path}" in said[0] and other in said[0]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("p.jsonl", b'{"question": "a", "answer": 0.10000000000000000000001}', [(1, "a", "0.10000000000000000000001")]),
        (
            "p.json",
            BOM + b'\n[{"question": "a", "answer": 1},\n{"question": "b", "answer": "2"}]',
            [(1, "a", "1"), (2, "b", "2")],
        ),
        (
            "p.CSV",
            BOM + b'answer,question,more\r\n1,"a, ""b""\nc",\r\n\r\n2,d,x\r\n',
            [(3, 'a, "b"\nc', "1"), (5, "d", "2")],
        ),
        (  # from Windows
            "p.jsonl",
            BOM + b'{"question": "a\xe2\x80\xa8b", "answer": "1"}\r\n\r\n{"question": "c", "answer": "2"}',
            [(1, "a\u2028b", "1"), (3, "c", "2")],
        ),
    ],
)
def test_rows_are_read_as_they_were_written(tmp_path: Path, name: str, content: bytes, rows: list[Any]) -> None:
    (tmp_path / name).write_bytes(content)
    found = read_problems(str(tmp_path / name), "task.path", "question", "answer")
    assert [(row.line, row.question, row.answer) for row in found] == rows


def test_without_a_chat_template_the_plain_template_is_filled(tmp_path: Path) -> None:
    question = "If {x} is {question}, what is {0}?"  # other braces mean nothing, in the data and in the template
    path = write(tmp_path / "p.jsonl", *[{"question": question + str(i), "answer": "1"} for i in range(3)])
    task = make(path, template="{Q}: {question} A:", system_prompt="Think.")
    prompt = task.prompts("train")[0]
    assert task.text(prompt.token_ids) == f"Think.\n\n{{Q}}: {question}{int(prompt.id[-1]) - 1} A:"


@pytest.mark.parametrize(("grading", "total"), [("lenient", 0), ("strict", 1)])
def test_both_gradings_are_reported_and_one_is_the_total(tmp_path: Path, grading: str, total: int) -> None:
    task = make(write(tmp_path / "p.jsonl", *problems(5)), grading=grading)
    prompt = replace(task.prompts("train")[0], answer="8")
    replies = {"\\boxed{8.0}": (1, 1), "It is 8.": (1, 0), "#### 9": (0, 0), "8 #### 9": (0, 0), "": (0, 0)}
    for reply, graded in replies.items():
        reward = task.reward(prompt, rollout_of(prompt, reply, TOKENIZER))
        assert (*reward.parts.values(), reward.total) == (*graded, graded[total]), reply


def test_prompts_that_do_not_fit_are_left_out_with_a_warning(tmp_path: Path) -> None:
    rows = problems(20)
    rows[7]["question"] = rows[9]["question"] = "word " * 30
    path, said = write(tmp_path / "p.jsonl", *rows), []
    needed = len(TOKENIZER(f"Question: {rows[7]['question']}\nAnswer:")["input_ids"])
    make(path, max_prompt_tokens=needed)
    left = all_of(make(path, max_prompt_tokens=needed - 1, warn=said.append))
    assert len(left) == 18 and not {p.id[-2:] for p in left} & {"08", "10"}
    assert len(said) == 1 and "2 of the " in said[0]
    assert f"line 8: the prompt has {needed} tokens, but at most {needed - 1} fit" in said[0]
    assert "no prompt to train on is left" in message_of(lambda: make(path, max_prompt_tokens=3, warn=said.append))


# Mistakes


@pytest.mark.parametrize("key", ["path", "eval_path"])
def test_a_file_that_cannot_be_read_is_named_and_a_pipe_is_not_waited_for(key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *problems(30))
    os.mkfifo(tmp_path / "pipe")
    reasons = {tmp_path / "pipe": "a pipe or a device", "/dev/zero": "a pipe or a device"}
    reasons |= {tmp_path: "Is a directory", tmp_path / "none.jsonl": "No such file"}
    for place, reason in reasons.items():
        message = message_of(lambda place=place: make(**{"path": path, key: str(place)}).prompts("eval"))
        assert f"task.{key}={place} cannot be read: " in message and reason in message


def test_fields_that_are_null_are_no_part_of_a_chat(tmp_path):
    """Arrow gives each message the fields of all, which chat templates look for."""
    chat = [{"role": "user", "content": "a", "tool_calls": None}]
    path = write(tmp_path / "p.jsonl", {"question": chat, "answer": "1"})
    (found,) = read_problems(path, "task.path", "question", "answer")
    assert found.question == "a" and found.messages == ({"role": "user", "content": "a"},)


GOOD = '{"question": "a", "answer": "1"}'
FIVE = '{"question": "b", "answer": "five"}'
BAD_FILES = [
    ([GOOD, '{"question": "b", "answer": '], "{path}, line 2 cannot be read as JSON"),
    ([GOOD, "", "[1, 2]"], "{path}, line 3 must be a JSON object with question, but is a list"),
    (['{"prompt": "b", "c": 1}'], "line 1 has no field 'question' (task.question_field); the fields are: prompt, c"),
    (['{"question": ["b"], "answer": "2"}'], "{path}, line 1: field 'question' must hold messages"),
    (["[" * 100_000], "{path}, line 1 cannot be read as JSON: "),
    (['{"question": "a", "answer": 1e9999999999999999999}'], "{path}, line 1 cannot be read as JSON: "),
    (['{"question": "\\ud800", "answer": "1"}'], "{path}, line 1: field 'question' has half of a surrogate pair"),
    ([GOOD, FIVE], "{path}, line 2: no answer was understood in the field 'answer': 'five'; end it with '#### 42'"),
    ([GOOD, GOOD], "task.path={path} holds 1 question"),
    ([GOOD.encode() + b'\n{"question": "caf\xe9"}\n'], "{path}, line 2 is not UTF-8: save"),
]
BAD_TABLES = [
    (["question,answer", "a, b,1"], "{path}, line 2 has not one cell for each field: quote commas"),
    (["question,answer", '"a'], "{path}, line 2 cannot be read as CSV: unexpected end of data"),
    (["question;answer", "a;1"], "the fields are: question;answer; cells are separated by commas"),
    (["question,answer"], "task.path={path} is empty"),
]


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("name", "lines", "expected"),
    [*(("p.jsonl", *case) for case in BAD_FILES), *(("p.csv", *case) for case in BAD_TABLES)],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, name: str, lines: list[Any], expected: str) -> None:
    path = write(tmp_path / name, *lines)
    assert expected.replace("{path}", path) in message_of(lambda: make(path))


def test_a_few_answers_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, str]] = problems(200)
    rows[3]["answer"] = rows[8]["answer"] = "many"
    path, said = write(tmp_path / "p.jsonl", *rows), []
    assert "(and 1 more of 199 rows)" in message_of(lambda: make(write(tmp_path / "q.jsonl", *rows[:199])))
    assert len(all_of(make(path, warn=said.append))) == 198
    assert len(said) == 1 and "line 4 (and 1 more of 200 rows): no answer was understood" in said[0]


# The hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the hub, which has three numbers for each split."""
    asked: list[Any] = []

    def load_dataset(*names: str, split: str) -> list[dict[str, str]]:
        asked.append((*names, split))
        answers = ["one" if split == "bad" else rf"\boxed{{{i}}}" for i in range(3)]
        return [{"question": f"{split} {i}", "answer": answer} for i, answer in enumerate(answers)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_hub_data_set_is_read_like_a_file(tmp_path: Path, hub: list[Any]) -> None:
    task = make("hub:someone/sums:train", eval_path=write(tmp_path / "e.jsonl", {"question": "x", "answer": "2"}))
    assert [p.id for p in task.prompts("train")] == [f"train-{i:06d}" for i in range(1, 4)]
    message = message_of(lambda: make("hub:someone/sums:train", eval_path="hub:someone/sums:hard:bad"))
    assert "hub:someone/sums:hard:bad, row 1" in message
    assert hub == [("someone/sums", "train")] * 2 + [("someone/sums", "hard", "bad")]


def test_without_a_path_both_splits_come_from_the_hub_and_training_s_once_asked(tmp_path: Path, hub: list[Any]) -> None:
    task = made.task("gsm8k", TOKENIZER)
    assert hub == [("openai/gsm8k", "main", "test")]
    for split in ("train", "eval"):
        assert [(p.id, p.answer) for p in task.prompts(split)] == [(f"{split}-{i + 1:06d}", str(i)) for i in range(3)]
    assert hub[1:] == [("openai/gsm8k", "main", "train")]
    own = write(tmp_path / "own.jsonl", {"question": "mine", "answer": "#### 1000"})
    assert [prompt.answer for prompt in made.task("gsm8k", TOKENIZER, eval_path=own).prompts("eval")] == ["1000"]


# Examples


def test_examples_come_before_the_question_and_are_in_no_split(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *problems(12))
    task = make(path, few_shot=2, system_prompt="Think.", eval_fraction=0.2)
    shown = [f"Question: What is {i} + {i}?\nAnswer: It is {2 * i}.\n#### {2 * i}" for i in (0, 1)]
    first = "\n\n".join(["Think.", *shown])
    prompts = all_of(task)
    assert len(prompts) == 10 and all(task.text(p.token_ids).startswith(f"{first}\n\nQuestion: ") for p in prompts)
    assert not any(p.id.endswith(("000001", "000002")) for p in prompts)
    chat = make(path, CHAT, few_shot=1).prompts("train")[0]
    turns = "user\nWhat is 0 + 0?<|im_end|>\n<|im_start|>assistant\nIt is 0.\n#### 0<|im_end|>\n<|im_start|>user\n"
    assert CHAT.decode(list(chat.token_ids)).startswith(f"<|im_start|>{turns}")


# Format

WHOLE = "<think>\n2 + 2\n</think>\n<answer>\n4\n</answer>"
# text, format, format_soft, tag_count, tag_lines
CASES = [
    (WHOLE, 1.0, 1.0, 1.0, 1.0),
    ("<think>2 + 2</think><answer>4</answer>", 0.0, 1.0, 1.0, 0.0),
    (f"Well: {WHOLE}", 0.0, 0.94, 1.0, 1.0),  # six characters outside
    (f"{WHOLE}{'.' * 150}", 0.0, 0.0, 1.0, 1.0),
    (f"{WHOLE}\nbye", 1.0, 0.96, 1.0, 1.0),  # open-r1 looks no further than the line of the last tag
    (WHOLE.replace("\n4\n", "\n"), 0.0, 1.0, 1.0, 1.0),  # one line break cannot end both lines
    (WHOLE.replace("4", "4</answer> or </answer>\n5"), 1.0, 0.75, 0.75, 1.0),
    (WHOLE.replace("2 + 2", "2\n</think>\n3"), 1.0, 1.0, 0.75, 0.75),
    (WHOLE.replace("</think>", ""), 0.0, 0.0, 0.75, 0.75),
    (f"{WHOLE}\n<answer>\n5\n</answer>", 1.0, 0.79, 0.5, 0.5),  # 21 characters outside; a tag twice is no tag
    ("<answer>4</answer><think>x</think>", 0.0, 0.0, 1.0, 0.0),
    ("<think>\n" + "\n</think>\n<answer>\n" * 20_000, 0.0, 0.0, 0.25, 0.25),
    ("<think>" * 20_000 + "</think><answer>" * 20_000, 0.0, 0.0, 0.0, 0.0),  # quick, however hostile
]


@pytest.mark.parametrize(("text", "whole", "soft", "count", "lines"), CASES)
def test_each_part_sees_the_tags_in_its_way(text: str, whole: float, soft: float, count: float, lines: float) -> None:
    found = {name: pytest.approx(form(text)) for name, form in FORMATS.items()}
    assert found == {"format": whole, "format_soft": soft, "tag_count": count, "tag_lines": lines}


def reward_of(tmp_path: Path, reply: str, **settings: Any) -> Reward:
    task = make(write(tmp_path / "p.jsonl", *({"question": word, "answer": "4"} for word in "ab")), **settings)
    prompt = task.prompts("train")[0]
    return task.reward(prompt, rollout_of(prompt, reply, TOKENIZER))


@pytest.mark.parametrize(
    ("reply", "weights", "formats_on", "total"),
    [
        # PODS, the commit of the GSM8K results: 0.1 for form and 0.025 for each tag, in wrong replies only
        (WHOLE, {"correct": 1.0, "format_soft": 0.1, "tag_count": 0.1}, "wrong", 1.0),
        (WHOLE.replace("4", "5"), {"correct": 1.0, "format_soft": 0.1, "tag_count": 0.1}, "wrong", 0.2),
        # the later commits: in all replies
        (WHOLE, {"correct": 1.0, "format_soft": 0.01, "tag_count": 0.01}, "all", 1.02),
        # open-r1: accuracy, format and tag count, 0 to 3
        (WHOLE, {"correct": 1.0, "format": 1.0, "tag_lines": 1.0}, "all", 3.0),
        (f"4{WHOLE}"[:-9], {"correct": 1.0, "format": 1.0, "tag_lines": 1.0}, "all", 1.75),
    ],
)
def test_the_total_is_the_weighted_sum_as_in_the_published_runs(
    tmp_path: Path, reply: str, weights: dict[str, float], formats_on: str, total: float
) -> None:
    reward = reward_of(tmp_path, reply, weights=weights, formats_on=formats_on)
    assert reward.total == pytest.approx(total)
    assert sum(weight * reward.parts[part] for part, weight in reward.weights.items()) == pytest.approx(total)
    assert "correct_strict" in reward.parts and "correct_strict" not in reward.weights, "it is only logged"
    assert reward.parts.keys() == {"correct", "correct_strict", *weights}, "others are not looked at"


def test_with_strict_grading_the_weight_is_that_of_the_marked_answer(tmp_path: Path) -> None:
    weights = {"correct": 0.5, "tag_count": 0.1}
    unmarked = reward_of(tmp_path, "It is 4.", weights=weights, grading="strict", formats_on="wrong")
    marked = reward_of(tmp_path, "<answer>4</answer>", weights=weights, grading="strict", formats_on="wrong")
    assert (unmarked.total, marked.total) == (0.0, 0.5)
    assert unmarked.weights == {"correct_strict": 0.5, "tag_count": 0.1}
    assert marked.weights == {"correct_strict": 0.5}, "form counts in wrong answers alone"
