"""What all generated tasks keep to: problems of seed and index, splits that share nothing, sizes in turn."""

from __future__ import annotations

from typing import Any

import made
import pytest
from tiny_hf import make_tokenizer

from grpo_cli.model.load import load_tokenizer
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.generated import GeneratedTask, is_held_out

TINY, WORDS = load_tokenizer(made.model()), make_tokenizer()
TASKS = ("arithmetic", "word_problems")
# Settings under which there are few problems; and settings beyond their range, or that do not go with another one.
FEW: dict[str, dict[str, int]] = {
    "arithmetic": {"max_terms": 2, "max_operand": 2, "max_value": 10},
    "word_problems": {"max_start": 3, "max_change": 2},
}
BAD: dict[str, tuple[dict[str, int], dict[str, int], str]] = {
    "arithmetic": ({"min_terms": 1, "max_value": 10_000}, {"max_value": 3}, "task.max_operand="),
    "word_problems": ({"min_steps": 0, "max_change": 10_000}, {"min_steps": 3}, "task.max_steps="),
}


def task(name: str, seed: int = 0, **changes: Any) -> GeneratedTask[Any]:
    return made.task(name, WORDS if name == "word_problems" else TINY, seed, **changes)


@pytest.mark.parametrize("name", TASKS)
def test_train_is_a_function_of_seed_and_index_and_eval_of_neither(name: str) -> None:
    first, again, other = (task(name, seed).prompts("train") for seed in (3, 3, 4))
    assert [first[i] for i in (7, 2, 5)] == [again[i] for i in (7, 2, 5)]
    assert first[0:20] != other[0:20] and first[-1] == first[len(first) - 1]
    assert task(name, 3).prompts("eval") == task(name, 4).prompts("eval")
    assert len(list(task(name, train_problems=5).prompts("train"))) == 5
    for call in (lambda: first[len(first)], lambda: first[-len(first) - 1]):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize("name", TASKS)
def test_no_problem_of_one_split_is_in_the_other_and_none_is_twice_in_eval(name: str) -> None:
    asked = task(name, 1)
    assert len({prompt.token_ids for prompt in asked.prompts("eval")}) == len(asked.prompts("eval")) > 200
    for split, count in (("eval", 200), ("train", 1000)):
        problems = [asked._problem(prompt)[0] for prompt in asked.prompts(split)[:count]]
        assert {is_held_out(str(problem)) for problem in problems} == {split == "eval"}


@pytest.mark.parametrize("name", TASKS)
def test_what_cannot_be_is_refused_with_all_its_keys(name: str) -> None:
    with pytest.raises(UserError, match="task.eval_problems=700: only .*; lower it"):
        task(name, eval_problems=700, **FEW[name])
    beyond, together, other_key = BAD[name]
    with pytest.raises(UserError) as caught:
        task(name, eval_problems=0, **beyond)
    assert all(f"task.{key}=" in str(caught.value) for key in ("eval_problems", *beyond))
    with pytest.raises(UserError, match=f"task.{min(together)}=.*{other_key}"):
        task(name, **together)
    with pytest.raises(UserError, match="test"):
        task(name).prompts("test")
