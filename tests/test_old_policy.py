"""From which policy the clip measures: the learner of the step's start, the sampler, or an average of weights."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from small import small_model
from test_off_policy import aged, given_then_old
from test_seams import Spy, close, quiet, said_by
from test_train import Recorder, lasting, make_trainer

from grpo_cli.runs.checkpoint import load_state
from grpo_cli.runs.find import find_checkpoint
from grpo_cli.support.errors import UserError
from grpo_cli.types import Span

# In whole steps.

MANY = {"steps": 2, "minibatches": 2}
UNCLIPPED = made.loss(clip_low=1.0, clip_high=1e6)


def test_drawn_measures_from_where_each_token_was_drawn_and_makes_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is of two updates ago, and the sampler was e^0.3 off: xi would be e^-0.3, and is 1."""

    def older(one: Any, version: int) -> Any:
        logprobs = tuple(logprob + 0.3 for logprob in one.sampler_logprobs)
        return replace(one, sampler_logprobs=logprobs, spans=(Span(version - 2, len(one)),))

    aged(monkeypatch, older)
    spy, recorder = Spy(), Recorder()
    settings = quiet(tmp_path, **MANY)
    trainer = make_trainer(settings, loss=spy, correction=made.correction("mis", prox="sampler"), trackers=(recorder,))
    trainer._learner.updates = 10
    trainer._learner.logprobs = pytest.fail
    trainer.fit()
    assert len(spy.batches) == 4
    for batch in spy.batches:
        assert batch.old_logprobs is not None and torch.equal(batch.old_logprobs, batch.sampler_logprobs)
        assert torch.equal(batch.weights, batch.response_mask.float())
    first = recorder.records[1].metrics
    assert first["mismatch/ratio_mean"] == 1.0
    assert first["loss/policy_ratio_mean"] == pytest.approx(math.exp(-0.3), rel=0.05)
    assert first["off/active"] == 1.0 - first["loss/clip_fraction"] and "off/prox_resets" not in first


def test_drawn_is_refused_where_tokens_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(monkeypatch, given_then_old)
    trainer = make_trainer(quiet(tmp_path), correction=made.correction(prox="sampler"))
    trainer._learner.updates = 10
    with pytest.raises(UserError, match="prox=sampler .* 12 tokens"):
        trainer.fit()


def test_the_average_is_what_the_clip_measures_from(tmp_path: Path) -> None:
    """Three updates in steps of one; before the third the average of the first two is (beta * a + b) / (beta + 1)."""
    spy, model, weights = Spy(UNCLIPPED), small_model(), list[Any]()
    recorder = Recorder(lambda record: weights.append(copy.deepcopy(model)))
    correction = made.correction("tis", prox="ewma", prox_window=2)
    make_trainer(quiet(tmp_path, steps=3), model=model, loss=spy, correction=correction, trackers=(recorder,)).fit()
    assert [batch.old_logprobs is None for batch in spy.batches] == [True, False, False]
    _, once, twice, _ = weights
    average = copy.deepcopy(twice)
    for mean, a, b in zip(average.parameters(), once.parameters(), twice.parameters(), strict=True):
        mean.data = (0.5 * a.data + b.data) / 1.5
    second, third = spy.batches[1:]
    assert close(second.old_logprobs, said_by(once, second, 1.0))
    assert close(third.old_logprobs, said_by(average, third, 1.0))
    assert not close(third.old_logprobs, said_by(twice, third, 1.0))


@pytest.mark.parametrize("high", [None, 1.0])
def test_a_run_that_goes_on_has_the_average_that_it_would_have_had_to_the_bit(
    tmp_path: Path, high: float | None
) -> None:
    """With `mask_high` 1 nearly half of the tokens are masked, and the average begins anew in every step."""
    settings = {name: quiet(tmp_path / name, steps=4, minibatches=2) for name in ("alone", "cut")}
    short = replace(settings["cut"], train=replace(settings["cut"].train, steps=2))
    parts: dict[str, Any] = {"correction": made.correction(prox="ewma", prox_window=4, mask_high=high)}
    records = {name: Recorder() for name in ("alone", "cut")}
    make_trainer(settings["alone"], loss=UNCLIPPED, **parts, trackers=(records["alone"],)).fit()
    make_trainer(short, loss=UNCLIPPED, **parts).fit()
    parts |= {"trackers": (records["cut"],), "checkpoint": find_checkpoint(tmp_path / "cut").path}
    make_trainer(settings["cut"], loss=UNCLIPPED, **parts).fit()
    ends = [find_checkpoint(tmp_path / name).path for name in ("alone", "cut")]
    alone, cut = (load_state(end)["old_policy"] for end in ends if end)
    assert (alone["count"], alone["resets"]) == (cut["count"], cut["resets"])
    assert (alone["resets"] > 0) == (high is not None) and (alone["count"] > 0) == (high is None)
    assert all(torch.equal(one, other) for one, other in zip(alone["average"], cut["average"], strict=True))
    last, again = (lasting(records[name].records[-1].metrics) for name in ("alone", "cut"))
    assert last == again and "off/active" in last


def test_a_run_does_not_go_on_from_another_old_policy(tmp_path: Path) -> None:
    settings = quiet(tmp_path, steps=1)
    make_trainer(settings, correction=made.correction(prox="ewma")).fit()
    checkpoint = find_checkpoint(tmp_path).path
    with pytest.raises(UserError, match="prox=ewma"):
        make_trainer(settings, correction=made.correction(prox="sampler"), checkpoint=checkpoint)
