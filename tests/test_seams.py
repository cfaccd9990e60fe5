"""What passes between trainer, learner, engine, correction and checkpoint: each gets what is meant for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import small_model
from test_train import GRPO, SPARSE_RL, Recorder, make_trainer, settings_for

from grpo_cli import downsample, loss
from grpo_cli.correction import Correct
from grpo_cli.settings import EvalSettings, RunSettings
from grpo_cli.types import Batch, LossOutput, Totals

TIS = Correct(importance="token", is_threshold=2.0)


def quiet(settings: RunSettings, **changes: Any) -> RunSettings:
    """Without evaluations."""
    return replace(settings, eval=EvalSettings(0, 1, 1, 1.0), **changes)


class Spy:
    """A loss that keeps what it is given: batches, and the learner's log-probabilities of them."""

    def __init__(self, inner: Any = GRPO, change: Callable[[int, LossOutput], LossOutput] = lambda i, output: output):
        self.batches: list[Batch] = []
        self.logprobs: list[torch.Tensor] = []
        self._inner, self._change = inner, change

    def __call__(self, logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        self.batches.append(batch)
        self.logprobs.append(logprobs.detach())
        return self._change(len(self.batches) - 1, self._inner(logprobs, batch, totals))


def said_by(model: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """Log-probabilities of a batch's responses, from the model's logits as they are."""
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits / temperature
    said = torch.zeros(batch.input_ids.shape)
    said[:, 1:] = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return said * batch.response_mask


def close(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    assert found is not None
    return torch.allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("correction", [Correct(), TIS, SPARSE_RL], ids=["none", "tis", "sparse_rl"])
def test_the_old_policy_is_the_learner_until_it_moves_and_then_what_it_was(
    tmp_path: Path, correction: Correct, m: int
) -> None:
    spy, model = Spy(), small_model()
    before = copy.deepcopy(model)
    settings = quiet(settings_for(tmp_path, steps=1, epochs=2, minibatches=2), m=m)
    rule = downsample.maxvar if m == 2 else downsample.all_rollouts
    make_trainer(settings, model=model, loss=spy, correction=correction, downsample=rule).fit()
    assert [batch.policy_logprobs is None for batch in spy.batches] == [True, False, False, False]
    for batch, learner in zip(spy.batches[1:], spy.logprobs[1:], strict=True):
        assert close(batch.policy_logprobs, said_by(before, batch, 1.0))
        assert not close(batch.policy_logprobs, learner), "and it has moved"


def test_an_update_that_was_skipped_has_not_moved_the_learner(tmp_path: Path) -> None:
    def overflow(call: int, output: LossOutput) -> LossOutput:
        return replace(output, loss=output.loss * float("inf")) if call == 0 else output

    spy = Spy(change=overflow)
    make_trainer(quiet(settings_for(tmp_path, steps=1, minibatches=3)), loss=spy).fit()
    assert [batch.policy_logprobs is None for batch in spy.batches] == [True, True, False]


@pytest.mark.parametrize("correction", [Correct(), TIS], ids=["none", "tis"])
def test_rounding_between_two_passes_clips_nothing(tmp_path: Path, correction: Correct) -> None:
    """GSPO's clip is narrower than bfloat16's rounding, by which the correction's pass and the learner's differ."""
    gspo = partial(loss.gspo, clip_low=3e-4, clip_high=4e-4, kl_coef=0.0, aggregation="sequence")
    recorder = Recorder()
    trainer = make_trainer(
        quiet(settings_for(tmp_path, steps=3)), loss=gspo, correction=correction, trackers=(recorder,)
    )
    exact = trainer._learner.logprobs
    trainer._learner.logprobs = lambda *words: exact(*words).bfloat16().float()  # type: ignore[method-assign]
    trainer.fit()
    for record in recorder.records[1:]:
        assert (record.metrics["loss/clip_fraction"], record.metrics["loss/policy_ratio_mean"]) == (0.0, 1.0)
