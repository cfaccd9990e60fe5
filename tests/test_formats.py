"""Parts of a reward that look at form alone, worked out by hand, and how they are weighed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_hf import make_tokenizer
from words import rollout_of, task_of

from grpo_cli.tasks.formats import FORMATS
from grpo_cli.types import Reward

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


TOKENIZER = make_tokenizer()


def reward_of(tmp_path: Path, reply: str, **settings: Any) -> Reward:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": "4"}\n{"question": "b", "answer": "4"}\n')
    task = task_of("jsonl", TOKENIZER, path=str(path), **settings)
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
