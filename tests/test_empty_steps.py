"""Steps that teach nothing: one rule for equal rewards, for rejected rollouts and for a loss that does not care."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from small import small_model
from test_seams import Spy, quiet
from test_train import (
    GRPO,
    SEQUENCE_MASK,
    SPARSE_RL,
    CountTask,
    Recorder,
    make_trainer,
    same,
    settings_for,
    with_sampler_off_by,
)

from grpo_cli.settings import RunSettings
from grpo_cli.types import Batch, LossOutput, Prompt, Reward, Rollout, Totals


class Equal(CountTask):
    """Every rollout of the first `steps` steps earns the same."""

    def __init__(self, steps: int, rollouts_per_step: int = 12) -> None:
        self._left = steps * rollouts_per_step

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        self._left -= 1
        return Reward(0.3) if self._left >= 0 else super().reward(prompt, rollout)


def decaying(folder: Path, **train: Any) -> RunSettings:
    settings = quiet(settings_for(folder, **train))
    return replace(settings, optim=replace(settings.optim, weight_decay=0.1))


def test_a_step_of_equal_rewards_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Decay, and averages of the step before, would move the weights without a gradient."""
    model, recorder, warnings = small_model(), Recorder(), list[str]()
    kept: list[dict[str, torch.Tensor]] = [copy.deepcopy(dict(model.state_dict()))]
    recorder._on_log = lambda record: kept.append(copy.deepcopy(dict(model.state_dict())))
    settings, updated = decaying(tmp_path, steps=3, epochs=2, minibatches=2), list[int]()
    parts: dict[str, Any] = dict(task=Equal(2), trackers=(recorder,), warn=warnings.append)
    trainer = make_trainer(settings, model=model, **parts)
    trainer._parts.bench.engine.update_weights = lambda: updated.append(trainer._progress.step)
    summary = trainer.fit()
    assert updated == [2], "an engine gets weights that have moved, and no others"
    assert [same(kept[0], later) for later in kept[1:]] == [True, True, True, False]
    assert (summary["updates"], summary["empty_steps"], summary["skipped_updates"]) == (4, 2, 0)
    first, last = recorder.records[1].metrics, recorder.records[3].metrics
    assert (first["optim/empty_steps"], first["optim/grad_norm"], first["loss/policy"]) == (1, 0.0, 0.0)
    assert (first["rollouts/trained"], last["rollouts/trained"]) == (12, 36), "they were gone over all the same"
    assert first["mismatch/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert not [text for text in warnings if "rejected" in text]


def test_equal_rewards_do_step_towards_the_reference(tmp_path: Path) -> None:
    """The divergence is asked of every token after fixed ones: that of a step's own rollouts differs with them."""
    model, far = small_model(), small_model(seed=1)
    ids = torch.randint(2, 24, (8, 16), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def divergence() -> float:
        policy, reference = (some(ids).logits.log_softmax(-1) for some in (model, far))
        return float((policy.exp() * (policy - reference)).sum(-1).mean())

    near = made.loss(kl_coef=1.0)
    before, settings = divergence(), decaying(tmp_path, steps=6)
    summary = make_trainer(settings, model=model, task=Equal(6), loss=near, reference=far).fit()
    assert (summary["updates"], summary["empty_steps"]) == (6, 0)
    assert divergence() < 0.9 * before


@pytest.mark.parametrize("own_term", [False, True], ids=["plain", "own term"])
@pytest.mark.parametrize("correction", [SPARSE_RL, SEQUENCE_MASK], ids=["veto", "is"])
def test_a_step_in_which_all_are_rejected_moves_nothing_but_for_a_term_of_the_loss_s_own(
    tmp_path: Path, correction: Any, own_term: bool
) -> None:
    """Weights of 0 leave the tokens in the mask, a veto takes them out of it; weight decay would move the weights."""

    def with_own_term(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        output = GRPO(logprobs, batch, totals)
        return replace(output, loss=output.loss + logprobs[batch.loss_mask].sum() / totals.tokens)

    model, warnings, moved = small_model(), list[str](), own_term and correction is SEQUENCE_MASK
    before = copy.deepcopy(dict(model.state_dict()))
    engine = with_sampler_off_by(model, lambda rollout: 20.0)
    parts: dict[str, Any] = dict(engine=engine, correction=correction, loss=with_own_term if own_term else GRPO)
    summary = make_trainer(decaying(tmp_path, steps=1), model=model, warn=warnings.append, **parts).fit()
    assert (summary["updates"], summary["empty_steps"], summary["skipped_updates"]) == (moved, 1 - moved, 0)
    assert (summary["trained_rollouts"], summary["trained_tokens"]) == (0, 0)
    assert same(before, model.state_dict()) != moved
    (warning,) = [text for text in warnings if "every rollout was rejected" in text]
    assert "sparsity.budget" in warning


def test_a_minibatch_of_equal_rewards_is_passed_over_and_the_next_one_is_still_on_policy(tmp_path: Path) -> None:
    """One prompt, two minibatches of two: the pairs are equal within the first alone when the advantages are given."""
    spy = Spy()

    def halves(group: Any, kept: Any) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 0.0, 0.0])

    settings = quiet(settings_for(tmp_path, steps=1, prompts=1, minibatches=4))
    summary = make_trainer(settings, loss=spy, advantage=halves).fit()
    assert (summary["updates"], summary["empty_steps"], len(spy.batches)) == (1, 0, 4)
    moved = [float(batch.advantages[0]) for batch in spy.batches].index(1.0)
    old = [batch.policy_logprobs is None for batch in spy.batches]
    assert old == [place <= moved for place in range(4)]
