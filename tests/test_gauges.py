"""`record.gauges`: the noise scale, and how many weights change."""

from __future__ import annotations

from typing import Any

import made
import numpy as np
import pytest
import torch
from made import composed
from small import small_model
from test_entropy import some_batch

from grpo_cli.config.check import check
from grpo_cli.learner.batch import rows_of
from grpo_cli.learner.gauges import Gauges, changed_share, halves, in_bfloat16, noise_of
from grpo_cli.learner.learner import Learner
from grpo_cli.settings import RecordSettings, Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import Batch


def gauges(*names: str, every: int = 10) -> Gauges:
    return Gauges(RecordSettings(rollouts=0, tokens=False, gauges=names, gauge_every=every))


def test_the_noise_scale_by_hand() -> None:
    """S = (5 - 2) / (1/4 - 1/16) = 16, Q = (16 * 2 - 4 * 5) / 12 = 1."""
    assert noise_of(5.0, 4, 2.0, 16) == (pytest.approx(16.0), pytest.approx(1.0))
    gauge = gauges("noise")
    assert gauge.noise(5.0, 4, 2.0, 16)["gauge/noise_scale"] == pytest.approx(16.0)
    # Then S = 0, Q = 3: averages are (.95 * .05 * 16) / .0975 and (.95 * .05 + .05 * 3) / .0975.
    later = gauge.noise(3.0, 4, 3.0, 16)
    assert later["gauge/noise_trace"] == pytest.approx(7.79487, rel=1e-5)
    assert later["gauge/noise_scale"] == pytest.approx(0.76 / 0.1975)
    assert "gauge/noise_scale" not in gauges("noise").noise(5.0, 4, 1.0, 16), "of a signal below 0 there is none"


def test_of_independent_rows_the_trace_and_the_signal_are_found() -> None:
    """Gradients of rows are drawn about (1, 2), variances .5 and 1.5: S is 2 and Q is 5, on average."""
    draws = np.random.default_rng(0).normal((1.0, 2.0), np.sqrt((0.5, 1.5)), size=(4000, 16, 2))
    squares = [(draws[:, :rows].mean(axis=1) ** 2).sum(axis=1) for rows in (8, 16)]
    found = np.array([noise_of(float(half), 8, float(whole), 16) for half, whole in zip(*squares, strict=True)])
    assert found.mean(axis=0) == pytest.approx((2.0, 5.0), rel=0.1)


def test_changed_weights_are_counted_by_their_bfloat16_bits() -> None:
    """Steps of bfloat16 at 1 are 1/128: a quarter of one is rounded away, and -0 is not 0 by its bits."""
    weights = [torch.tensor([1.0, 1.0, 0.0, 5.0]), torch.tensor([[2.0]])]
    before = in_bfloat16(weights)
    assert changed_share(before, weights) == 0.0
    weights[0][:3] = torch.tensor([1.0 + 1 / 128, 1.0 + 1 / 512, -0.0])
    assert changed_share(before, weights) == 2 / 5


def learner(gauge: Gauges | None, tokens: int = 10_000) -> tuple[Learner, Any]:
    model = small_model()
    train, words = made.train(micro_batch_tokens=tokens), made.optim(lr=0.01, warmup_steps=0)
    parts = (made.model(""), Sampling.plain(16), train, words, NullMeter())
    return Learner(model, made.loss(), *parts, gauges=gauge), model


def norm_of(batch: Batch) -> float:
    return learner(None)[0].update(batch, 0).metrics["optim/grad_norm"]


def test_an_update_measures_the_half_and_the_whole_and_is_the_same_update() -> None:
    batch = some_batch()
    first, others = halves(5, 20)
    assert sorted([*first.tolist(), *others.tolist()]) == [0, 1, 2, 3, 4] and (len(first), len(others)) == (2, 3)
    plain, expected = learner(None)
    reference = plain.update(batch, 20)
    with_gauges, model = learner(gauges("noise", "changed"), tokens=16)
    before = in_bfloat16([*model.parameters()])
    update = with_gauges.update(batch, 20)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # of steps of 0.01
    torch.testing.assert_close(update.logprobs, reference.logprobs, rtol=1e-4, atol=1e-5)
    # The loss is a mean over rows, so that the half alone has its own gradient.
    half, whole = norm_of(rows_of(batch, first)) ** 2, norm_of(batch) ** 2
    trace, signal = noise_of(half, 2, whole, 5)
    found = update.metrics
    assert (found["gauge/noise_trace"], found["gauge/noise_signal"]) == pytest.approx((trace, signal), rel=1e-3)
    assert found["gauge/changed"] == changed_share(before, [*model.parameters()]) > 0.5


def test_between_its_steps_nothing_is_measured_and_no_bit_is_another() -> None:
    batch = some_batch()
    (plain, one), (with_gauges, other) = learner(None), learner(gauges("noise", "changed"))
    expected, found = plain.update(batch, 19), with_gauges.update(batch, 19)
    assert found.metrics == expected.metrics
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert gauges("noise", every=3).due(6) == {"noise"} and not gauges("noise", every=3).due(7)


@pytest.mark.parametrize(
    ("words", "said"),
    [("record.gauges=[noise,speed]", "record.gauges.*speed"), ("record.gauge_every=0", "record.gauge_every=0 must be")],
)
def test_what_is_no_gauge_is_refused(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(composed(words, "logger=jsonl"))
