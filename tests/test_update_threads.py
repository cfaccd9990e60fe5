"""How many threads updates get: all or one, tried at the first update, kept by a resumed run; a user's number wins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from test_adapters import moved
from test_dropout import DROPPING
from test_learner import make_batch, steep
from typer.testing import CliRunner

from grpo_cli.cli.main import app
from grpo_cli.learner import learner as learning
from grpo_cli.learner import threads as module
from grpo_cli.learner.learner import Learner
from grpo_cli.model.load import load_model
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import NullMeter
from grpo_cli.support.threads import computing_with
from grpo_cli.types import Batch, LossOutput, Totals

CPU = torch.device("cpu")
ROWS = torch.arange(16)


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    with computing_with(4):
        yield


class FakeClock:
    """Work that takes so many seconds for each row, by the number of threads, and some on top."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, row: dict[int, float], call: dict[int, float]) -> None:
        self.now, self.done = 0.0, list[tuple[int, int]]()
        self._of_a_row, self._of_a_call = row, call
        monkeypatch.setattr(module, "seconds_of", self._seconds_of)

    def work(self, rows: torch.Tensor) -> None:
        threads = torch.get_num_threads()
        self.done.append((threads, len(rows)))
        self.now += self._of_a_call[threads] + len(rows) * self._of_a_row[threads]

    def _seconds_of(self, work: Callable[[], object]) -> float:
        start = self.now
        work()
        return self.now - start


@pytest.mark.parametrize(
    ("row", "call", "expected"),
    [
        ({1: 0.01, 4: 0.01}, {1: 0.0, 4: 0.03}, 1),  # half is 8 rows: 0.11 / 0.08 = 1.375
        ({1: 0.01, 4: 0.01}, {1: 0.0, 4: 0.01}, 4),  # 0.09 / 0.08 = 1.125: not worth other bits
        ({1: 0.01, 4: 0.004}, {1: 0.0, 4: 0.01}, 4),
    ],
)
def test_one_is_chosen_where_all_take_a_quarter_longer(
    row: dict[int, float], call: dict[int, float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch, row, call)
    assert module.threads_for_updates(clock.work, ROWS) == expected
    assert [one for one in clock.done if one[1] == 8] == [(1, 8), (4, 8)] * 2
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("row", "most"), [(0.3, 1), (0.2, 2)])  # of 16 rows an eighth is 2
def test_of_long_work_no_more_is_tried_than_shows_it(row: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch, {1: row, 4: row}, {1: 0.0, 4: 9.0})
    assert module.threads_for_updates(clock.work, ROWS) == 4
    assert max(rows for _, rows in clock.done) == most and {threads for threads, _ in clock.done} == {1}


def test_what_is_slow_on_first_use_is_not_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch, {1: 0.01, 4: 0.01}, {1: 0.0, 4: 0.03})
    work = clock.work

    def slow_at_first(rows: torch.Tensor) -> None:
        clock.now += 0.0 if clock.done else 2.0
        work(rows)

    assert module.threads_for_updates(slow_at_first, ROWS) == 1


def test_nothing_is_tried_with_one_thread() -> None:
    with computing_with(1):
        assert module.threads_for_updates(lambda rows: pytest.fail("it was tried"), ROWS) == 1


def dropping_learner(threads: int | str, loss: Any = steep) -> tuple[Learner, Any]:
    """A learner of adapters with dropout, whose passes draw random numbers."""
    torch.manual_seed(0)
    settings = replace(made.model(), lora=DROPPING)
    model = moved(load_model(settings, CPU))
    words = settings, Sampling.plain(4), made.train(threads=threads), made.optim(lr=0.01, warmup_steps=0)
    return Learner(model, loss, *words, NullMeter()), model


def test_an_update_after_a_trial_is_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial leaves no gradient, and draws no random number."""
    monkeypatch.setattr(module, "_WORTH", 0.0)  # one thread wins
    found = []
    for threads in (1, "auto"):
        learner, model = dropping_learner(threads)
        torch.manual_seed(1)
        told = [learner.update(make_batch(), step).metrics for step in range(2)]
        assert learner.threads == 1 and torch.get_num_threads() == 4
        found.append((told, {name: weight.detach().clone() for name, weight in model.named_parameters()}))
    (told, weights), (told_too, weights_too) = found
    assert told == told_too and all(torch.equal(weights[name], weights_too[name]) for name in weights)


def test_a_number_is_obeyed_and_auto_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, tuple[float, ...]]] = []

    def watched(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        seen.append((torch.get_num_threads(), tuple(batch.advantages.tolist())))
        return steep(logprobs, batch, totals)

    flat = replace(make_batch(), advantages=torch.zeros(2))
    learner, _ = dropping_learner(3, watched)
    learner.update(flat, 0)
    assert seen == [(3, (0.0, 0.0))]
    monkeypatch.setattr(learning, "threads_for_updates", lambda work, rows: work(rows) or 2)
    learner, _ = dropping_learner("auto", watched)
    seen.clear()
    learner.update(flat, 0)
    learner.update(flat, 1)
    assert seen == [(4, (1.0, -0.5)), (2, (0.0, 0.0)), (2, (0.0, 0.0))]  # advantages of 0 would leave half to do undone


def test_a_kept_number_is_not_tried_anew_unless_there_are_no_longer_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "threads_for_updates", lambda work, rows: 2)
    for kept, expected in ((1, 1), (4, 4), (5, 2), (None, 2)):
        learner, _ = dropping_learner("auto")
        learner.keep_threads(kept)
        learner.update(make_batch(), 0)
        assert learner.threads == expected
    learner, _ = dropping_learner(3)
    learner.keep_threads(1)
    assert learner.threads == 3


def test_a_run_says_its_numbers_and_a_resumed_one_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["logger=jsonl", "eval.every=0", "train.prompts=2", "n=4", "engine.threads=2"]

    def trained(*more: str) -> tuple[str, Any]:
        result = CliRunner().invoke(app, ["train", *words, *more])
        assert result.exit_code == 0, result.output
        return result.output, json.loads(Path("run/summary.json").read_text())

    monkeypatch.setattr(learning, "threads_for_updates", lambda work, rows: 3)
    said, summary = trained("train.steps=1", "hydra.run.dir=run")
    assert said.count("threads: 2 for decode steps and 3 for updates, of 4") == 1
    assert summary["update_threads"] == 3
    assert load_state(Path("run/checkpoints/step_000001"))["threads"] == 3
    monkeypatch.setattr(learning, "threads_for_updates", lambda work, rows: pytest.fail("it was tried"))
    said, summary = trained("train.steps=2", "resume=run")
    assert "3 for updates, of 4" in said and summary["update_threads"] == 3
    said, summary = trained("train.steps=3", "resume=run", "train.threads=1")
    assert "for updates, of" not in said and summary["update_threads"] == 1
