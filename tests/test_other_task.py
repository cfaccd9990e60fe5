"""A run that goes on with another task, or with others of its problems, uses nothing that the first ones have left."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bank import problems
from test_resume import WORDS, rows, trained

from grpo_cli.collect.learnt import put_back, remembering
from grpo_cli.collect.same import OtherProblems, Places
from grpo_cli.config.compose import settings_of
from grpo_cli.experiment import build
from grpo_cli.history import digest_of
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.runs.find import find_checkpoint
from grpo_cli.tasks.prompting import MadePrompts
from grpo_cli.types import Prompt

# All that holds something of single problems, in two runs. A step's replies are of several lengths, so that groups are
# held, and of several rewards, so that they are stored.
RULES = {
    "held": (
        "n=6",
        "sampling.max_new_tokens=20",
        "replay=fifo",
        "replay.fresh=0.9",
        "curriculum=dps",
        "collector=partial",
        "credit=gdro",
    ),
    "visits": ("curriculum=target", "collector=sqrt"),
}
OTHERS = (("task=guess",), ("task.max_terms=3", "task.eval_problems=64"))
KEPT = ("record.rollouts=-1", "optim.lr=1e-3", "train.prompts=3", "train.steps=3", "task.train_problems=8")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of three steps."""
    folders = {name: tmp_path_factory.mktemp(name) for name in RULES}
    for name, folder in folders.items():
        trained(folder, *KEPT, *RULES[name])
    return folders


def state_of(folder: Path) -> dict[str, Any]:
    path = find_checkpoint(folder).path
    assert path is not None
    return load_state(path)["rules"]


def problems_held(state: dict[str, Any]) -> list[tuple[str, list[int], str]]:
    """Those of stored and of held groups, as they are kept."""
    groups = [*state.get("replay", {}).get("stored", ()), *state.get("collector", {}).get("held", ())]
    return [tuple(group["prompt"]) for group in groups]


@pytest.mark.parametrize("other", OTHERS, ids=lambda words: words[0])
@pytest.mark.parametrize("name", RULES)
def test_what_is_of_another_task_is_dropped_counted_and_named(
    begun: dict[str, Path], tmp_path: Path, name: str, other: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(begun[name], tmp_path / "run"))
    words = (*WORDS, *KEPT, *RULES[name], f"run_dir={folder}", f"resume={folder}", "train.steps=5", *other)
    before = state_of(folder)
    assert name != "held" or (before["replay"]["stored"] and before["collector"]["held"])
    trainer = build(settings_of(*words))
    here = {prompt.id: prompt for prompt in trainer._parts.bench.task.prompts("train")}
    # With fewer terms some of the problems are, as it happens, the same.
    digests = before["history"]["digests"]
    same = {problem for problem, digest in digests.items() if problem in here and digest_of(here[problem]) == digest}
    assert len(same) < len(digests)
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count("resume with the task as it was") == 1
    assert f" {len(digests) - len(same)} of the problems in the checkpoint" in said or name == "held"
    assert trainer._parts.history.digests.keys() == same == trainer._parts.history.state_dict()["visits"].keys()
    learnt = {part: rule.state_dict() for part, rule in remembering(trainer._parts)}
    assert {problem for _, problem in learnt["curriculum"].get("problems", ())} <= same
    assert learnt.get("credit", {"bin_of": {}})["bin_of"].keys() <= same
    trainer.fit()
    after = state_of(folder)
    for problem, tokens, answer in problems_held(after):
        assert Prompt(problem, tuple(tokens), answer) == here[problem]
    assert all(here[problem].token_ids for problem in after["history"]["visits"])
    assert "resume with the task as it was" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", RULES)
def test_with_the_same_task_a_run_goes_on_to_the_bit(
    begun: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(begun[name], tmp_path / "run"))
    trained(folder, *KEPT, *RULES[name], f"resume={folder}", "train.steps=5")
    trained(tmp_path / "alone", *KEPT, *RULES[name], "train.steps=5", "train.checkpoint_every=3")
    assert "task as it was" not in "".join(capsys.readouterr())
    assert rows(folder) == rows(tmp_path / "alone")
    ours, theirs = (state_of(run)["history"] for run in (folder, tmp_path / "alone"))
    assert ours == theirs and len(ours["digests"]) == len(ours["visits"]) > 3


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_that_does_not_say_what_its_problems_were_goes_on_as_it_is(
    begun: dict[str, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(begun[name], tmp_path / "run"))
    trainer = build(settings_of(*WORDS, *KEPT, *RULES[name], f"run_dir={folder}", f"resume={folder}"))
    state = state_of(folder)
    del state["history"]["digests"]
    put_back(trainer._parts, state)
    assert trainer._parts.history.state_dict()["visits"] == state["history"]["visits"]
    assert "task as it was" not in "".join(capsys.readouterr())


def test_of_problems_that_are_numbered_only_those_that_are_asked_about_are_made() -> None:
    made: list[int] = []

    def make(place: int) -> Prompt:
        made.append(place)
        return Prompt(f"train-{place}", (place,), "")

    many = MadePrompts(make, 100_000_000)
    digests = {f"train-{place}": digest_of(Prompt("", (place + place % 2,), "")) for place in range(6)}
    is_other = OtherProblems(many, digests | {"guess-7": 0, "word": 0})
    assert [place for place in range(6) if is_other(f"train-{place}")] == [1, 3, 5]
    assert is_other("guess-7") and is_other("word") and not is_other("train-99")
    assert is_other.found == {"train-1", "train-3", "train-5", "guess-7", "word"} and len(made) < 20


def test_a_problem_that_cannot_be_found_among_very_many_is_taken_for_the_same() -> None:
    many = MadePrompts(lambda place: Prompt(f"{place * 7919 % 1000003:x}z", (place,), ""), 200_000)
    assert not Places(many).certain and not OtherProblems(many, {"1234z": 5})("1234z")
    few = problems(9)
    assert [Places(few).of(f"q{i}") for i in (0, 8, 9)] == [0, 8, None]
    assert OtherProblems(few, {"q9": 5})("q9")
