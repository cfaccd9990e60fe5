"""What the record says of training is what the loss was given; and steps that teach nothing change nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from small import small_model
from test_seams import Spy, quiet
from test_train import (
    SEQUENCE_MASK,
    SPARSE_RL,
    CountTask,
    Recorder,
    make_trainer,
    same,
    with_sampler_off_by,
)

from grpo_cli.methods import pods
from grpo_cli.settings import RecordSettings, RunSettings
from grpo_cli.types import Prompt, Record, Reward, Rollout

WITHOUT = made.correction("none")
MASKED = made.correction("mis", importance="sequence")  # one token has a xi of exp(-20)


class SecondIsWorst(CountTask):
    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(0.0 if rollout.request.sample == 1 else 1.0 + rollout.request.sample)


def ran(folder: Path, m: int = 4, train: Mapping[str, Any] | None = None, **parts: Any) -> tuple[Record, Spy]:
    """One step of three problems with four rollouts each; of samples 1 the sampler is off by 20 in a token."""
    recorder, spy, model = Recorder(), Spy(), small_model()
    engine = with_sampler_off_by(model, lambda rollout: 20.0 if rollout.request.sample == 1 else 0.0)
    settings = replace(quiet(folder, **(train or {})), record=RecordSettings(rollouts=-1, tokens=False), m=m)
    parts = dict(engine=engine, task=SecondIsWorst(), trackers=(recorder,), loss=spy) | parts
    trainer = make_trainer(settings, model=model, **parts)
    trainer._learner.updates = 10
    trainer.fit()
    return recorder.records[1], spy


def counted(record: Record, spy: Spy, epochs: int = 1) -> tuple[float, float]:
    """Rollouts and tokens as the record has them: those that were given to the loss with a weight, once each."""
    cells = [(batch, batch.trained_mask) for batch in spy.batches]
    rows, tokens = sum(int(b.any(c).sum()) for b, c in cells), sum(int(c.sum()) for _, c in cells)
    found = record.metrics["rollouts/trained"], record.metrics["tokens/trained"]
    assert found == (rows / epochs, tokens / epochs)
    return found


@pytest.mark.parametrize("train", [{}, {"epochs": 2, "minibatches": 2}], ids=["once", "twice"])
def test_a_rollout_without_a_weight_is_not_kept_and_counts_nowhere(tmp_path: Path, train: dict[str, int]) -> None:
    record, spy = ran(tmp_path, train=train, correction=MASKED)
    lengths = [row.length for row in record.examples if row.sample != 1]
    assert counted(record, spy, train.get("epochs", 1)) == (9, sum(lengths))
    for row in record.examples:
        assert (row.sample == 1) == (not row.kept) == row.reason.startswith("importance: ")
    assert record.metrics["reward/kept_mean"] == pytest.approx((1 + 3 + 4) / 3), "nor in the mean reward"


@pytest.mark.parametrize("m", [4, 2])
def test_a_vetoed_rollout_counts_nowhere(tmp_path, m):
    """With m = n it is in the batch, for the divisors."""
    record, spy = ran(tmp_path, m=m, correction=SPARSE_RL, downsample=pods.maxvar)
    trained = [row for row in record.examples if row.kept]
    assert counted(record, spy) == (3 * min(m, 3), sum(row.length for row in trained))
    assert len(spy.batches[0]) == 3 * m and not any(row.sample == 1 for row in trained)


def test_a_rollout_whose_advantage_is_0_is_trained_on(tmp_path):
    record, _ = ran(tmp_path, correction=WITHOUT, advantage=lambda group, kept: torch.zeros(len(kept)))
    assert all(row.kept and row.advantage == 0.0 for row in record.examples)
    assert record.metrics["tokens/trained"] == sum(row.length for row in record.examples)


class Equal(CountTask):
    """Every rollout of the first `steps` steps earns the same."""

    def __init__(self, steps: int, rollouts_per_step: int = 12) -> None:
        self._left = steps * rollouts_per_step

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        self._left -= 1
        return Reward(0.3) if self._left >= 0 else super().reward(prompt, rollout)


def decaying(folder: Path, **train: Any) -> RunSettings:
    settings = quiet(folder, **train)
    return replace(settings, optim=replace(settings.optim, weight_decay=0.1))


def test_a_step_of_equal_rewards_is_as_if_it_had_not_been(tmp_path):
    """Decay, and averages of the step before, would move the weights without a gradient."""
    model, recorder = small_model(), Recorder()
    kept: list[dict[str, torch.Tensor]] = [copy.deepcopy(dict(model.state_dict()))]
    recorder._on_log = lambda record: kept.append(copy.deepcopy(dict(model.state_dict())))
    settings, updated = decaying(tmp_path, steps=3, epochs=2, minibatches=2), list[int]()
    parts: dict[str, Any] = dict(task=Equal(2), trackers=(recorder,))
    trainer = make_trainer(settings, model=model, **parts)
    trainer._parts.runtime.engine.update_weights = lambda: updated.append(trainer._progress.step)
    summary = trainer.fit()
    assert updated == [2], "an engine gets weights that have moved, and no others"
    assert [same(kept[0], later) for later in kept[1:]] == [True, True, True, False]
    assert (summary["updates"], summary["empty_steps"], summary["skipped_updates"]) == (4, 2, 0)
    first, last = recorder.records[1].metrics, recorder.records[3].metrics
    assert (first["optim/empty_steps"], first["optim/grad_norm"], first["loss/policy"]) == (1, 0.0, 0.0)
    assert (first["rollouts/trained"], last["rollouts/trained"]) == (12, 36), "they were gone over all the same"


@pytest.mark.parametrize("correction", [SPARSE_RL, SEQUENCE_MASK], ids=["veto", "is"])
def test_a_step_in_which_all_are_rejected_moves_nothing(tmp_path, correction):
    """Weights of 0 leave the tokens in the mask, a veto takes them out of it; weight decay would move the weights."""
    model, warnings = small_model(), list[str]()
    before = copy.deepcopy(dict(model.state_dict()))
    engine = with_sampler_off_by(model, lambda rollout: 20.0)
    parts: dict[str, Any] = dict(engine=engine, correction=correction, warn=warnings.append)
    summary = make_trainer(decaying(tmp_path, steps=1), model=model, **parts).fit()
    assert (summary["updates"], summary["empty_steps"], summary["skipped_updates"]) == (0, 1, 0)
    assert (summary["trained_rollouts"], summary["trained_tokens"]) == (0, 0)
    assert same(before, model.state_dict()) and any("every rollout was rejected" in text for text in warnings)


def test_a_minibatch_of_equal_rewards_is_passed_over_and_the_next_one_is_still_on_policy(tmp_path):
    """One prompt, two minibatches of two: the pairs are equal within the first alone when the advantages are given."""
    spy = Spy()

    def halves(group: Any, kept: Any) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 0.0, 0.0])

    settings = quiet(tmp_path, prompts=1, minibatches=4)
    summary = make_trainer(settings, loss=spy, advantage=halves).fit()
    assert (summary["updates"], summary["empty_steps"], len(spy.batches)) == (1, 0, 4)
    moved = [float(batch.advantages[0]) for batch in spy.batches].index(1.0)
    old = [batch.old_logprobs is None for batch in spy.batches]
    assert old == [place <= moved for place in range(4)]
