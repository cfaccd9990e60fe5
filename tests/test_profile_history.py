"""A profile of the problems to train on: how it is made and read, and what groups it suggests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import Bank, BankRun, problems
from test_curricula import curriculum, ids
from typer.testing import CliRunner

from grpo_cli.cli.main import app
from grpo_cli.collect.profile import MOST_PROFILED, read_history
from grpo_cli.collect.rehearsal import CollectionSize, rehearsed
from grpo_cli.config.check import check
from grpo_cli.config.instantiate import rules_of
from grpo_cli.evaluate import EvalResult, evaluate_with, write_samples
from grpo_cli.history import PROFILED, History, Visit
from grpo_cli.interfaces import Bench
from grpo_cli.methods.sgpo import bad_sizes, size_for
from grpo_cli.settings import SampleSettings, SplitExamSettings
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Reward, Rollout

WRITE_IT = "grpo eval eval.split=train eval.problems=-1 eval.k=8"
DRAWN = SampleSettings(top_p=1.0, top_k=0, max_new_tokens=1, stop=(), max_turn_tokens=None)


class TwoSplits(Bank):
    """Whose held-out problems are others, and which rewards more than the answer."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(rollout.token_ids[0] + 0.5, {"correct": float(rollout.token_ids[0])})

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self.problems if split == "train" else [replace(prompt, id=f"e-{prompt.id}") for prompt in self.problems]


def evaluated(bank: Bank, k: int = 8, count: int = -1, split: str = "train") -> EvalResult:
    bench = Bench(torch.device("cpu"), None, None, 0, bank, bank)
    exam = SplitExamSettings(problems=count, k=k, temperature=1.0, split=split)
    return evaluate_with(bench, exam, DRAWN, 0, exam.split)


def file_of(folder: Path, result: EvalResult) -> str:
    write_samples(folder, result.examples)
    return str(folder / "samples.jsonl")


# Written and read


def test_an_evaluation_of_the_problems_to_train_on_is_read_as_a_visit_before_training(tmp_path: Path) -> None:
    bank = TwoSplits(40)
    result = evaluated(bank)
    history = read_history(file_of(tmp_path, result), bank.problems)
    assert len(history.profile) == 40 and len(history) == 0
    for prompt in bank.problems:
        rows = [row for row in result.examples if row.prompt_id == prompt.id and row.reason == "sampled"]
        assert history.visits(prompt.id) == (Visit(PROFILED, sum(row.parts["correct"] == 1.0 for row in rows), 8),)
        assert all(row.solved == (row.reward == 1.5) for row in rows)
    assert len({visit.solved for visit in history.profile.values()}) > 4


def test_a_split_is_the_one_that_was_asked_for_and_held_out_ones_the_rule() -> None:
    bank = TwoSplits(5)
    assert {row.prompt_id for row in evaluated(bank, count=3).examples} == {"q0", "q1", "q2"}
    assert {row.prompt_id for row in evaluated(bank, split="eval").examples} == {f"e-q{i}" for i in range(5)}


class Lazy(Sequence[Prompt]):
    """A million problems, and how many of them were made; a check of types looks at one or two."""

    made = 0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        self.made += 1
        return Prompt(f"q{index}", (0,), "")


def test_lazy_problems_are_made_only_as_far_as_the_file_goes(tmp_path: Path) -> None:
    lazy, bank = Lazy(), TwoSplits(30)
    assert len(read_history(None, lazy).profile) == 0 and lazy.made < 5
    assert len(read_history(file_of(tmp_path, evaluated(bank)), lazy).profile) == 30 and lazy.made < 40


def test_all_problems_of_a_task_without_end_are_not_evaluated() -> None:
    bank = TwoSplits(3)
    bank.problems = Lazy()  # type: ignore[assignment]
    with pytest.raises(UserError, match="asks for all 1000000 problems to train on, more than 100000: set task.train_"):
        evaluated(bank)
    assert bank.problems.made < 5  # type: ignore[attr-defined]
    bank.difficulty = np.zeros(1)
    assert len(evaluated(bank, count=2, k=1).examples) == 4


def rows_of(bank: Bank) -> list[dict[str, Any]]:
    return [asdict(row) for row in evaluated(bank, k=2).examples]


Change = Callable[[list[dict[str, Any]]], Any]
BAD: Mapping[str, tuple[Change, str]] = {  # rows to what the file holds, and what the message says of it
    "empty": (lambda rows: [], "train.history=FILE is empty"),
    "no JSON": (lambda rows: [rows[0], "{"], "line 2 of train.history=FILE is no JSON"),
    "of an older version": (
        lambda rows: [{key: value for key, value in row.items() if key != "solved"} for row in rows],
        "line 1 of train.history=FILE does not say solved",
    ),
    "other rows": (lambda rows: [rows[0], [1, 2]], "line 2 of train.history=FILE does not say prompt_id, sample"),
    "words for values": (
        lambda rows: [row | {"solved": "no", "sample": 0.0} for row in rows],
        "line 1 of train.history=FILE does not say sample, solved",
    ),
    "no sampled answers": (
        lambda rows: [row for row in rows if row["reason"] == "greedy"],
        "train.history=FILE holds no sampled answers",
    ),
    "twice": (lambda rows: [*rows, rows[-1]], "line 13 of train.history=FILE holds sample 1 of problem 'q3' a second"),
    "of another task": (
        lambda rows: [row | {"prompt_id": "gsm8k-" + row["prompt_id"]} for row in rows],
        "train.history=FILE knows 0 of the 4 problems of this task",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_does_not_do_is_refused(name: str, tmp_path: Path) -> None:
    change, said = BAD[name]
    bank, file = TwoSplits(4), tmp_path / "samples.jsonl"
    rows = change(rows_of(bank))
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    with pytest.raises(UserError) as told:
        read_history(str(file), bank.problems)
    assert str(told.value).startswith(said.replace("FILE", str(file))) and WRITE_IT in str(told.value)


def test_a_file_that_is_not_there_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    for place, found in ((tmp_path / "x", "not there"), (tmp_path, "a folder: name the samples.jsonl in it")):
        said = f"train.history={place} is {found}; {WRITE_IT} writes one"
        with pytest.raises(UserError) as told:
            read_history(str(place), problems(2))
        assert str(told.value).startswith(said)
        with pytest.raises(UserError) as told:
            check(made.settings(train=made.train(history=str(place))))
        assert str(told.value).startswith(said)


# Which sizes it suggests


def with_counts(counts: Sequence[int | None], tried: int = 8) -> History:
    """Of problems q0, q1, ...; None: not in the profile."""
    return History({f"q{i}": [Visit(PROFILED, c, tried)] for i, c in enumerate(counts) if c is not None})


def test_a_size_is_the_least_in_which_one_right_rollout_is_expected() -> None:
    found = [size_for(Visit(PROFILED, solved, 8), (2, 4, 8)) for solved in range(9)]
    assert found == [None, 8, 4, 4, 2, 2, 2, 2, 2]
    assert size_for(Visit(PROFILED, 1, 64), (2, 4, 8)) == 8, "none is large enough"


def phases_of(rule: Any, steps: int) -> list[tuple[float, set[str]]]:
    """Of each step, the size of its phase and its problems."""
    found = []
    for step in range(steps):
        picked = rule.pick(step, 2, frozenset())
        assert len(set(picked)) == 2
        found.append((rule.observe(step, [])["curriculum/phase"], set(ids(picked))))
    return found


def rule_of(counts: Sequence[int | None], steps: int = 12, **changed: Any) -> Any:
    words = {"unsolved": 0.0, "per_step": 2, "steps": steps} | changed
    return curriculum("profile", problems(len(counts)), history=with_counts(counts), **words)


def test_eight_probes_give_the_sizes_of_the_paper() -> None:
    """Two of each count: those of 7 and 8 are trivial, those of 0 are left out."""
    counts = [solved for solved in range(9) for _ in range(2)]
    seen = phases_of(rule_of(counts, steps=60), 60)
    of: dict[float, set[int]] = {}
    for size, names in seen:
        of.setdefault(size, set()).update(counts[int(name[1:])] for name in names)
    assert of == {2.0: {4, 5, 6}, 4.0: {2, 3}, 8.0: {1}}
    assert [size for size, _ in seen] == sorted(size for size, _ in seen), "the smallest first"


def test_unsolved_problems_lengthen_no_phase() -> None:
    counts = [*[0] * 6, *[4] * 8, 1, 1]
    assert [size for size, _ in phases_of(rule_of(counts, steps=10, unsolved=1.0), 10)] == [2] * 8 + [8] * 2


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (None, [2] * 6 + [4] * 4 + [8] * 2),
        ([1, 1, 2], [2] * 3 + [4] * 3 + [8] * 6),
        ([0, 0.5, 0.5], [4] * 6 + [8] * 6),
        ([1, 0, 0], [2] * 12),
    ],
    ids=str,
)
def test_each_phase_has_its_share_of_the_steps(shares: Any, expected: list[int]) -> None:
    counts = [4] * 6 + [2] * 4 + [1] * 2
    assert [size for size, _ in phases_of(rule_of(counts, shares=shares), 12)] == expected
    assert phases_of(rule_of(counts, shares=shares), 14)[-1][0] == expected[-1], "the last has no end"


def test_a_phase_without_problems_is_skipped_and_a_small_one_filled_up() -> None:
    seen = phases_of(rule_of([4] * 4 + [1]), 12)
    assert {size for size, _ in seen} == {2.0, 8.0}
    assert all("q4" in names for size, names in seen if size == 8.0), "and one of those before"
    seen = phases_of(rule_of([4, 2, 2, 2, 1], shares=[1, 1, 1]), 12)
    assert all("q0" in names and names & {"q1", "q2", "q3"} for size, names in seen if size == 2.0), "those after first"


def test_a_phase_goes_through_its_problems_in_epochs() -> None:
    seen = [names for _, names in phases_of(rule_of([4] * 6, steps=30), 30)]
    for start in range(0, 30, 3):
        assert set.union(*seen[start : start + 3]) == {f"q{i}" for i in range(6)}
    assert len({frozenset(names) for names in seen[::3]}) > 3


def test_unsolved_problems_are_kept_by_chance_and_come_in_every_phase() -> None:
    counts = [0] * 4000 + [4, 4, 1, 1]
    kept = curriculum("profile", problems(len(counts)), history=with_counts(counts), steps=10).state_dict()["sizes"]
    unsolved = {name for name, size in kept.items() if size == 0}
    assert abs(len(unsolved) - 400) < 4 * np.sqrt(4000 * 0.1 * 0.9)
    assert kept["q4000"] == 2 and kept["q4002"] == 8
    other = curriculum("profile", problems(len(counts)), history=with_counts(counts), seed=1).state_dict()["sizes"]
    assert {name for name, size in other.items() if size == 0} != unsolved
    seen = phases_of(rule_of([0, 0, 4, 4, 1, 1], steps=40, unsolved=1.0), 40)
    for phase in (2.0, 8.0):
        assert {"q0", "q1"} <= set.union(*(names for size, names in seen if size == phase))


# What is made of each


def bank_run(counts: Sequence[int | None], choice: str, *, n: int = 5, unsolved: float = 1.0) -> BankRun:
    """Problems in the numbers of `counts`, three in a step, collected by their profile."""
    bank, history = Bank(len(counts)), with_counts(counts)
    words = {"unsolved": unsolved} if choice == "profile" else {}
    rule = curriculum(choice, bank.problems, per_step=3, steps=20, n=n, history=history, **words)
    rules = rules_of(made.settings().parts | {"collector": made.part("collector", "profile")})
    return BankRun(bank, rule, history, prompts=3, n=n, collector=rules.collector)


def test_each_problem_is_asked_as_often_as_its_profile_suggests_and_unknown_ones_n_times() -> None:
    run = bank_run([4, 2, 1, 8, 7, None], "epochs").steps(range(20))
    assert {name: of[name] for of in run.sizes for name in of} == dict(q0=2, q1=4, q2=8, q3=2, q4=2, q5=5)
    assert [len({of[name] for of in run.sizes if name in of}) for name in ("q0", "q2", "q5")] == [1, 1, 1], (
        "whatever came of it since: the ninth visit is after the profile has left the last eight"
    )


def test_unsolved_problems_are_asked_as_often_as_those_of_their_phase() -> None:
    counts = [0, 0, *[4] * 6, *[2] * 6]
    run = bank_run(counts, "profile").steps(range(20))
    for metrics, sizes in zip(run.metrics, run.sizes, strict=True):
        assert set(sizes.values()) == {int(metrics["curriculum/phase"])}
    assert {size for of in run.sizes for name, size in of.items() if name == "q0"} == {2, 4}
    assert bank_run([4, 0, 2], "epochs").steps(range(1)).sizes[0] == dict(q0=2, q1=4, q2=4)
    assert set(bank_run([0] * 3, "epochs").steps(range(1)).sizes[0].values()) == {8}, "alone as often as can be"


def test_the_rule_is_rehearsed_without_a_profile() -> None:
    parts = made.settings().parts | {"collector": made.part("collector", "profile")}
    assert rehearsed(rules_of(parts).collector, 6, 4) == replace(CollectionSize.equal(6, 4), unequal=True)
    for sizes in ([4, 2], [1, 2], [], [2, 2], [2, True]):
        parts["collector"] = made.part("collector", "profile", sizes=sizes)
        with pytest.raises(UserError, match="collector.sizes=.* must be whole numbers of 2 or more, from the smallest"):
            rehearsed(rules_of(parts).collector, 6, 4)
    assert [*bad_sizes("collector.sizes", [2, 4.5])] and not [*bad_sizes("collector.sizes", [2])]


# What is kept


def test_a_run_that_goes_on_does_not_depend_on_the_file() -> None:
    counts = [0, 0, None, *[4] * 6, *[2] * 6, 8]
    whole, first = bank_run(counts, "profile").steps(range(20)), bank_run(counts, "profile").steps(range(5))
    state, seen = first.curriculum.state_dict(), first.history.state_dict()  # type: ignore[attr-defined]
    for other in ([4] * len(counts), [None] * (len(counts) - 1)):
        rest = bank_run(counts, "profile")
        rest.history = with_counts(other)
        rest.bank.ability = first.bank.ability
        rest.curriculum = curriculum(
            "profile", problems(len(counts)), per_step=3, steps=20, n=5, history=rest.history, unsolved=1.0
        )
        rest.history.load_state_dict(seen)
        rest.curriculum.load_state_dict(state)
        rest.steps(range(5, 20))
        assert rest.picked == whole.picked[5:] and rest.sizes == whole.sizes[5:]


def test_a_checkpoint_of_other_sizes_is_refused() -> None:
    state = rule_of([4, 4]).state_dict()
    with pytest.raises(UserError, match=r"made with curriculum.sizes=\[2, 4, 8\], but this run has \[2, 8\]; resume"):
        rule_of([4, 4], sizes=[2, 8]).load_state_dict(state)
    with pytest.raises(UserError, match="holds nothing for curriculum=profile"):
        rule_of([4, 4]).load_state_dict(None)


# What is refused


WRONG = [dict(trivial=1.5), dict(unsolved=-0.5), dict(sizes=[4, 2]), dict(sizes=[1, 2])]
WRONG += [dict(shares=[1, 1]), dict(shares=[0, 0, 0]), dict(shares=[1, -1, 1])]


@pytest.mark.parametrize("changed", WRONG, ids=str)
def test_a_setting_out_of_range_is_refused_before_a_model_is_loaded(changed: Mapping[str, Any]) -> None:
    ((name, value),) = changed.items()
    with pytest.raises(UserError, match=re.escape(f"curriculum.{name}={value} must be ")):
        rule_of([4, 4], **changed)
    parts = made.settings().parts | {"curriculum": made.part("curriculum", "profile", **changed)}
    with pytest.raises(UserError, match=re.escape(f"curriculum.{name}={value} must be ")):
        check(made.settings(parts=parts))


def test_a_profile_has_to_be_given_and_to_fit(tmp_path: Path) -> None:
    parts = made.settings().parts | {"curriculum": made.part("curriculum", "profile")}
    needed = f"curriculum=profile needs train.history=<samples.jsonl>; write it with {WRITE_IT}"
    with pytest.raises(UserError) as told:
        check(made.settings(parts=parts))
    assert str(told.value) == needed
    check(made.settings(parts=parts, resume="auto"))
    with pytest.raises(UserError) as told:
        rule_of([None, None]).pick(0, 1, frozenset())
    assert str(told.value) == needed
    (tmp_path / "f").touch()
    parts |= {"collector": made.part("collector", "profile", sizes=[2, 4])}
    with pytest.raises(UserError) as told:
        check(made.settings(parts=parts, train=made.train(history=str(tmp_path / "f"))))
    assert str(told.value) == "curriculum.sizes=[2, 4, 8] and collector.sizes=[2, 4] must be the same"


def test_a_profile_that_leaves_too_few_problems_is_refused() -> None:
    with pytest.raises(UserError, match="leaves 1 of 4 problems, and train.prompts=2 are trained on in a step: raise"):
        rule_of([8, 8, 7, 4])
    with pytest.raises(UserError, match="step 1 asks for 5 different problems, but curriculum=profile leaves 3: lower"):
        rule_of([8, 8, 4, 4, 4]).pick(0, 5, frozenset())


def test_of_very_many_problems_those_of_the_profile_are_trained_on() -> None:
    lazy = Lazy()
    assert len(lazy) > MOST_PROFILED
    rule = curriculum("profile", lazy, history=with_counts([4, 4, 4]))
    assert {prompt.id for prompt in rule.pick(0, 3, frozenset())} == {"q0", "q1", "q2"}
    assert lazy.made < 50, "the others are not made to be looked at"


# By the program


def test_a_profile_is_written_read_and_resumed_by_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grpo(*words: str) -> Any:
        return CliRunner().invoke(app, words)

    monkeypatch.chdir(tmp_path)
    task = ["task.train_problems=12", "logger=jsonl", "device=cpu", "sampling.max_new_tokens=32"]
    bad = grpo("eval", *task, "eval.split=tran", "hydra.run.dir=none")
    assert bad.exit_code == 2 and "eval.split=tran must be one of eval, train; did you mean train?" in bad.output
    done = grpo("eval", *task, "eval.split=train", "eval.problems=-1", "eval.k=8", "hydra.run.dir=profile")
    assert done.exit_code == 0, done.output
    assert "every answer (train split):" in done.output
    summary = json.loads((tmp_path / "profile" / "summary.json").read_text())
    assert (summary["split"], summary["problems"], summary["k"]) == ("train", 12, 8)
    words = [*task, "train.history=profile/samples.jsonl", "n=4", "train.prompts=2", "eval.every=0"]
    by_profile = ["curriculum=profile", "collector=profile", "curriculum.trivial=1.0"]
    whole = grpo("train", *words, *by_profile, "train.steps=4", "hydra.run.dir=whole")
    assert whole.exit_code == 0, whole.output
    part = grpo("train", *words, *by_profile, "train.steps=4", "train.max_generated=1", "hydra.run.dir=part")
    assert part.exit_code == 0, part.output
    (tmp_path / "profile" / "samples.jsonl").unlink()
    gone = grpo("train", "resume=part", "train.max_generated=null")
    assert gone.exit_code == 2 and "train.history=profile/samples.jsonl is not there" in gone.output
    rest = grpo("train", "resume=part", "train.max_generated=null", "train.history=null")
    assert rest.exit_code == 0, rest.output
    assert [*sizes_in(tmp_path / "part")] == [*sizes_in(tmp_path / "whole")]
    assert {row["curriculum/phase"] for row in rows_in(tmp_path / "whole")} <= {2.0, 4.0, 8.0}


def rows_in(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]


def sizes_in(run: Path) -> Iterator[tuple[float, ...]]:
    names = ("curriculum/phase", "collect/rollouts_min", "reward/mean", "prompts/distinct", "response/length_mean")
    for row in rows_in(run):
        yield tuple(row[name] for name in names)
