"""Problems of reasoning-gym: the same in every process, held out, and scored by what executes nothing."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import made
import pytest
from made import rollout_of, unexpected
from tiny_hf import make_tokenizer

from grpo_cli.support.errors import UserError
from grpo_cli.tasks import reasoning_gym as gym
from grpo_cli.tasks.workers import Workers

pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None,
    reason="the extra gym is not installed: pip install -e '.[gym]' needs a C compiler (pycosat has no wheels)",
)
CHAT = make_tokenizer(chat_template=True)
# Some that read JSON, raise, depend on the hash seed, have no oracle, or are like most.
FEW = ("boxnet", "chain_sum", "course_schedule", "ransom_note")
NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
JUNK = (None, "", "zzz", "9" * 5000, "nan", "[]", '{"a": 1}', "[" * 2000, "1/0", "\x00", "None", "(1, 2)")


def task(name: str | None = "chain_sum", seed: int = 0, warn: Any = unexpected, most: Any = None, **words: Any) -> Any:
    words = {"judge_workers": 1, "eval_problems": 12, "name": name, **words}
    return made.task("reasoning_gym", CHAT, seed, warn=warn, max_prompt_tokens=most, **words)


def texts(task: Any, split: str, count: int = 12) -> list[str]:
    return [task.text(task.prompts(split)[i].token_ids) for i in range(count)]


@pytest.fixture(scope="module", autouse=True)
def _one_process_for_all_tasks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym, "Workers", functools.cache(Workers))
        yield


@pytest.fixture(scope="module")
def two_processes() -> Any:
    """Two of the library's processes, started by programs with other hash seeds."""
    with pytest.MonkeyPatch.context() as patch:
        made = []
        for seed in ("1", "2"):
            patch.setenv("PYTHONHASHSEED", seed)
            workers = Workers("gym", 1, 120.0)
            workers.ask([{"check": "", "config": {}}])  # so that it starts with this seed
            made.append(workers)
    return made


def problem(name: str, index: int, **more: Any) -> dict[str, Any]:
    return {"task": name, "config": {}, "seed": "train/7", "index": index, **more}


def holds(name: str, two_processes: list[Workers], canary: Path) -> None:
    """All that is promised of a task."""
    one, other = two_processes
    items = one.ask([problem(name, i) for i in (0, 1, 501)])
    assert items == other.ask([problem(name, i) for i in (501, 1, 0)])[::-1]
    assert all(item["question"] for item in items) and items[0] != items[2]
    assert {bool(item["answer"]) for item in items} == {name not in NO_ORACLE}
    for i, item in enumerate(items[:2]):
        if item["answer"]:
            assert one.ask([problem(name, i, reply=item["answer"])]) == [{"score": 1.0}]
    writes = [f"open({str(canary)!r}, 'w')", f"[open({str(canary)!r}, 'w')]", f"(open({str(canary)!r}, 'w'),)"]
    replies = [*JUNK, *writes]
    for reply, said in zip(replies, one.ask([problem(name, 0, reply=r) for r in replies]), strict=True):
        assert said.get("score", 0.0) < 1 and (said.keys() <= {"score", "incomparable", "limit"}), (reply, said)
    assert not canary.exists()


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_problems_are_the_same_everywhere_and_only_answers_are_right(two_processes, tmp_path, all_of_them):
    """And that of a task that is refused is executed."""
    canary, library = tmp_path / "canary", two_processes[0].ask([{"check": "", "config": {}}])[0]["names"]
    names = sorted({*library} - gym.REFUSED.keys()) if all_of_them else FEW
    assert len(names) >= (91 if all_of_them else 4)
    for name in names:
        holds(name, two_processes, canary)
    two_processes[0].ask([problem("string_insertion", 0, reply=f"[str(open({str(canary)!r}, 'w'))]")])
    assert canary.exists()


def test_no_question_is_in_both_splits_and_eval_is_the_same_for_every_seed():
    words = {"config": {"max_terms": 2, "max_digits": 1}, "eval_problems": 30}
    tasks = [task(seed=seed, **words) for seed in (0, 1)]
    assert list(tasks[0].prompts("eval")) == list(tasks[1].prompts("eval"))
    seen = [{*texts(task, "train", 200)} for task in tasks]
    held_out = texts(tasks[0], "eval", 30)
    assert len({*held_out}) == 30 and not {*held_out} & (seen[0] | seen[1])
    assert seen[0] != seen[1], "other seeds have other problems"


def test_a_prompts_id_says_all_that_its_problem_is_made_of():
    first, again = task(), task()
    prompt = first.prompts("train")[3]
    assert prompt.id.startswith("train-") and again.prompts("train")[3] == prompt
    assert again.prompts("train").by_id(prompt.id) == prompt and again.prompts("train").by_id("eval-3") is None
    row = again.row_of(prompt)
    assert row["question"] in first.text(prompt.token_ids) and row["answer"] == prompt.answer
    assert task(seed=1).row_of(prompt) != row


def test_a_reward_has_the_library_s_score_and_what_went_wrong():
    lenient, strict = task(), task(grading="strict", weights={"correct": 1.0, "score": 0.5, "format": 0.25})
    prompt = lenient.prompts("eval")[0]
    right = prompt.answer
    for reply, parts, total in (
        (right, (1, 1, 0), 0.0),
        (f"so <answer>0</answer> no <answer> {right}\n</answer>.", (1, 1, 1), 1.75),
        (f"<answer>{right}{right}</answer>", (0, 0.5, 1), 0.5),
        ("<answer></answer>", (0, 0, 1), 0.25),
        ("", (0, 0, 0), 0.0),
    ):
        rollout = rollout_of(prompt, reply, CHAT)
        found = lenient.reward(prompt, rollout)
        assert tuple(found.parts[part] for part in ("correct", "score", "format")) == parts
        assert found.total == parts[0] and strict.reward(prompt, rollout).total == total

    class Failing:
        def ask(self, questions: Any) -> Any:
            says = {"a": {"limit": "time"}, "b": {"died": "signal 9"}, "c": {"incomparable": "x"}, "d": {"score": 1e9}}
            return [says.get(one["reply"], {"score": float("nan")}) for one in questions]

    lenient._workers = Failing()
    said = lenient.rewards([(prompt, rollout_of(prompt, reply, CHAT)) for reply in "abcdea"])
    assert [reward.total for reward in said] == [0, 0, 0, 1, 0, 0]
    assert [reward.parts["over_limit"] for reward in said] == [1, 0, 0, 0, 0, 1]
    assert [reward.parts["incomparable"] for reward in said] == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        *(({"name": name}, f"task.name={name}") for name in gym.REFUSED),
        ({"name": "chain_sums"}, "did you mean chain_sum"),
        ({"config": {"min_term": 2}}, "task.config: .*min_term'"),
        ({"weights": {"correct": 1.0, "score": 0.0, "formt": 1.0}}, "task.weights.form"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_can(words, named):
    with pytest.raises(UserError, match=named):
        task(**words)


def test_problems_that_do_not_fit_are_left_out():
    heard: list[str] = []
    words: Any = {"name": "shortest_path", "warn": heard.append, "eval_problems": 2}
    lengths = sorted(len(prompt.token_ids) for prompt in map(task(**words).prompts("train").__getitem__, range(20)))
    short = task(most=lengths[10], **words)
    assert max(len(short.prompts("train")[i].token_ids) for i in range(20)) <= lengths[10]
    assert len(heard) == 1 and "left out" in heard[0]
    with pytest.raises(UserError, match="no problem"):
        task(most=10, **words)
