"""Mismatch correction: weights, rejections and metrics by hand, and the identities they obey."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import made
import pytest
import torch
from small import completions, plain_batch, small_model
from test_advantage import close as near
from test_learner import make_learner
from test_passes import make_batch
from test_seams import Spy, close, quiet, said_by
from test_train import Recorder, make_trainer
from typed import lasting

from grpo_cli.collect.collection import StepCollection
from grpo_cli.config.choices import choices
from grpo_cli.interfaces import Correction
from grpo_cli.learner.batch import collate, corrected, rows_of, verdict_on
from grpo_cli.learner.learner import Update
from grpo_cli.learner.old_policy import SamplerPolicy, is_needed_first
from grpo_cli.learner.schedule import effective_share, rate_factor
from grpo_cli.metrics import reuse_metrics
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.runs.find import find_checkpoint
from grpo_cli.settings import Sampling
from grpo_cli.step import Step
from grpo_cli.support.errors import UserError
from grpo_cli.types import GIVEN, Batch, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Span, Totals

PRESETS = {name: made.correction(name) for name in choices("correction")}
WEIGHTLESS = ("none",)  # which measures xi and does nothing about it


def asked(part: Correction, sampler: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor) -> Any:
    """Its verdict, with weights and mask as tables; no rollout is better than others."""
    batch, own = plain_batch(mask, sampler_logprobs=sampler), completions(mask)
    verdict = part(batch, policy[own])
    weights, kept = torch.zeros(mask.shape), torch.zeros(mask.shape, dtype=torch.bool)
    weights[own], kept[own] = verdict.weights, verdict.mask
    return SimpleNamespace(weights=weights, mask=kept, reasons=verdict.reasons, metrics=verdict.metrics)


def apply(part: Correction, xi: list[list[float]], mask: list[list[int]] | None = None):
    """Weights, mask and metrics for given ratios; where the mask is 0 the log-probabilities are garbage."""
    ratios = torch.tensor(xi, dtype=torch.float64)
    valid = torch.ones_like(ratios) if mask is None else torch.tensor(mask)
    sampler = torch.full_like(ratios, -2.0).float()
    policy = (sampler + ratios.log()).float()
    garbage = valid == 0
    verdict = asked(part, sampler.masked_fill(garbage, math.nan), policy.masked_fill(garbage, -math.inf), ~garbage)
    return verdict.weights.tolist(), verdict.mask.int().tolist(), verdict.metrics


def test_nothing_is_corrected_by_default_and_everything_is_measured():
    weights, kept, metrics = apply(made.correction(), [[0.5, 2.0, 1e-6], [1.0, 1.0, 9.0]], [[1, 1, 1], [1, 1, 0]])
    assert weights == [[1, 1, 1], [1, 1, 0]] and kept == [[1, 1, 1], [1, 1, 0]]
    xi = [0.5, 2.0, 1e-6, 1.0, 1.0]
    assert metrics["mismatch/ratio_mean"] == near(sum(xi) / 5)
    assert metrics["mismatch/ratio_min"] == near(1e-6)
    assert metrics["mismatch/kl"] == near(sum(x - 1 - math.log(x) for x in xi) / 5)
    assert metrics["mismatch/rejected"] == 0 and metrics["mismatch/masked_tokens"] == 0
    assert metrics["mismatch/weight_mean"] == 1
    assert not made.correction().needs_old_logprobs


def test_sequence_weights_are_the_product_of_the_ratios():
    part = made.correction(importance="sequence", is_threshold=3.0)
    weights, _, _ = apply(part, [[0.5, 3.0, 7.0], [2.0, 2.0, 1.0]], [[1, 1, 0], [1, 1, 1]])
    assert weights[0] == near([1.5, 1.5, 0]) and weights[1] == near([3, 3, 3])
    masked = apply(replace(part, is_mode="mask"), [[0.5, 3.0], [2.0, 2.0]])
    assert masked[0][0] == near([1.5, 1.5]) and masked[0][1] == [0, 0]
    assert masked[2]["mismatch/rejected"] == 0.5


def test_low_weights_are_raised_to_their_bound_and_the_ends_of_the_band_lie_in_it():
    part = made.correction(importance="token", is_threshold=2.0, is_threshold_low=0.5)
    assert apply(part, [[0.1, 1.0, 9.0]])[0] == [near([0.5, 1.0, 2.0])]
    assert apply(made.correction(mask_low=1.0, mask_high=1.0), [[1.0, 2.0, 0.5]])[1] == [[1, 0, 0]]


def test_one_impossible_token_vetoes_its_sequence_and_no_other():
    part = made.correction(rejection="veto", veto=1e-4)
    xi = [[1.0, 0.9e-4, 1.0], [1.0, 1.1e-4, 1.0], [1.0, 1.0, 1e-9]]
    weights, kept, metrics = apply(part, xi, [[1, 1, 1], [1, 1, 1], [1, 1, 0]])  # the third's lies in the padding
    assert kept == [[0, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert weights == [[0, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert metrics["mismatch/rejected"] == near(1 / 3) and metrics["mismatch/masked_tokens"] == near(3 / 8)
    # A bound on xi for the sake of its weight, of exp(-20), must not hide a token of xi = e**-30.
    xi = [[math.exp(-30.0)], [math.exp(-25.0)]]
    assert apply(replace(part, veto=1e-12), xi)[1] == [[0], [1]]
    assert apply(made.correction(), [[0.0], *xi])[:2] == ([[1]] * 3, [[1]] * 3)  # without a veto no token is impossible


def test_the_release_normalises_before_it_rejects():
    """Truncated weights 1.0 1.5 1e-6, 0.4 1.2 1.4 have mean 5.5 / 6, vetoed and masked ones included."""
    weights, kept, metrics = apply(PRESETS["sparse_rl_release"], [[1.0, 3.0, 1e-6], [0.4, 1.2, 1.4]])
    assert kept == [[0, 0, 0], [0, 1, 1]]
    mean = (1.0 + 1.5 + 1e-6 + 0.4 + 1.2 + 1.4) / 6
    assert weights[0] == [0, 0, 0] and weights[1] == near([0, 1.2 / mean, 1.4 / mean])
    assert metrics["mismatch/rejected"] == 0.5 and metrics["mismatch/weight_mean"] == near(1.3 / mean)


def test_batch_normalised_weights_of_sequences_have_mean_one():
    part = made.correction(importance="sequence", is_threshold=2.0, batch_normalise=True)
    weights = apply(part, [[0.5, 1.0, 1.0], [1.5, 1.0, 9.0]], [[1, 1, 1], [1, 1, 0]])[0]
    assert weights[0] == near([0.5] * 3) and weights[1] == near([1.5, 1.5, 0])  # mean of sequences, not of tokens


@pytest.mark.parametrize("name", PRESETS)
def test_without_a_mismatch_no_preset_changes_anything(name):
    weights, kept, _ = apply(PRESETS[name], [[1.0] * 3] * 2, [[1, 1, 1], [1, 0, 0]])
    assert weights == kept == [[1, 1, 1], [1, 0, 0]]
    assert PRESETS[name].needs_old_logprobs == (name not in WEIGHTLESS)


def test_quantiles_are_over_response_tokens():
    """1001 tokens, log xi = 0, -1, ... -1000 percent: the 0.1 % quantile is the second smallest, 1 % the eleventh."""
    log_ratio = -torch.arange(1001, dtype=torch.float32)[None] / 100
    padded = torch.cat([log_ratio, torch.full((1, 50), -99.0)], dim=1)
    mask = torch.arange(1051)[None] < 1001
    metrics = asked(made.correction(), torch.zeros(1, 1051), padded, mask).metrics
    assert metrics["mismatch/log_ratio_q001"] == near(-9.99)
    assert metrics["mismatch/log_ratio_q01"] == near(-9.90)


@pytest.mark.parametrize("name", PRESETS)
def test_log_probabilities_that_are_no_numbers_are_not_masked_away(name):
    """Of the sampler they are refused; a policy's would hide a broken model from the guard against bad steps."""
    with pytest.raises(UserError, match="no finite log-probability for 1 of 3"):
        sampler = torch.tensor([[-1.0, math.nan, -1.0]])
        asked(PRESETS[name], sampler, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    policy, mask = torch.tensor([[-1.0, math.nan]]), torch.ones(1, 2, dtype=torch.bool)
    verdict = asked(PRESETS[name], torch.full((1, 2), -1.0), policy, mask)
    assert verdict.mask.all() and (name in WEIGHTLESS or verdict.weights.isnan().any()) and verdict.reasons == ("",)


def test_each_row_has_the_reason_for_its_rejection():
    log_ratio = torch.tensor([[1.0, 1.0], [1.0, 1e-6], [0.1, 9.0], [1.0, 1.0], [0.6, 0.6]]).log()
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0], [1, 1]]).bool()
    weighted = made.correction(importance="sequence", is_threshold=2.0, is_threshold_low=0.5, is_mode="mask")
    part = replace(weighted, rejection="veto", mask_low=0.5, mask_high=1.5)
    verdict = asked(part, torch.zeros(5, 2), log_ratio, mask)
    assert [why.partition(":")[0] for why in verdict.reasons] == ["", "veto", "mask", "empty", "importance"]
    assert [bool(row.any()) for row in verdict.weights] == [reason == "" for reason in verdict.reasons]
    assert verdict.metrics["mismatch/rejected"] == near(3 / 4)


# Old tokens, and given ones


PROMPT = Prompt("p", (1,), "")


def rollout(sample: int, *spans: tuple[int, int], logprob: float = -1.0) -> Rollout:
    """Of spans of (version, count); given tokens have no log-probability."""
    logprobs = tuple(math.nan if version == GIVEN else logprob for version, count in spans for _ in range(count))
    request, tokens = Request(PROMPT, sample, sample, Sampling.plain(8)), (2,) * len(logprobs)
    return Rollout(request, tokens, logprobs, Finish.EOS, tuple(Span(*span) for span in spans))


def batch_of(*rollouts: Rollout, version: int = 5) -> Batch:
    return collate([ScoredGroup(PROMPT, rollouts, tuple(Reward(0.0) for _ in rollouts))], version)


def test_a_correction_is_shown_the_drawn_tokens_alone_and_given_ones_share_the_fate_of_their_row():
    """Rows: two drawn after one given; a vetoed one; one that was given whole; an empty one."""
    batch = batch_of(rollout(0, (GIVEN, 1), (4, 2)), rollout(1, (GIVEN, 1), (4, 1)), rollout(2, (GIVEN, 3)), rollout(3))
    policy = torch.full(batch.weights.shape, -1.0) + math.log(1.5)
    policy[4] = -40.0
    policy[0] = -90.0  # of a given token: nobody drew it, and nobody asks
    rules = made.correction(importance="token", is_threshold=2.0, rejection="veto")
    verdict = verdict_on(rules, batch, policy)
    assert verdict.mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert verdict.weights.tolist() == pytest.approx([1.0, 1.5, 1.5, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert [why.partition(":")[0] for why in verdict.reasons] == ["", "veto", "", "empty"]
    assert verdict.metrics["mismatch/ratio_mean"] == pytest.approx((1.5 + 1.5 + math.exp(-20)) / 3)
    weighted = corrected(replace(batch, weights=batch.weights * 3.0), verdict)
    assert weighted.weights[:3].tolist() == pytest.approx([3.0, 4.5, 4.5]), "the row's weight is multiplied"


class Table:
    """Two tokens of three, the second's distribution depending on the first: every string can be counted."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()

    def logprobs(self) -> torch.Tensor:
        """Of all nine strings: zero for the prompt, then of both tokens."""
        table = self.logits.log_softmax(dim=1)
        rows = [torch.stack([table.new_zeros(()), table[0, a], table[1 + a, b]]) for a in range(3) for b in range(3)]
        return torch.stack(rows)


REWARDS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5, 0.7, 0.1, -2.0])


def mean_gradient(policy: Table, sampler: torch.Tensor, rule: Any) -> torch.Tensor:
    """Of the loss, on average over what `sampler` draws (log-probabilities of each string's tokens): string by string,
    through verdict and loss as a step goes through them."""
    ids = torch.tensor([[0, a, b] for a in range(3) for b in range(3)])
    mask = torch.ones(9, 3, dtype=torch.bool)
    mask[:, 0] = False
    ages = torch.full((9, 3), 2)
    batch = plain_batch(mask, input_ids=ids, sampler_logprobs=sampler.float(), advantages=REWARDS, token_ages=ages)
    batch = corrected(batch, verdict_on(rule, batch, policy.logprobs().detach().float()[:, 1:].flatten()))
    chances = sampler.sum(dim=1).exp()
    gradient = torch.zeros_like(policy.logits)
    for string, chance in enumerate(chances.tolist()):
        # One sequence, of at most one token: the sum over what it has.
        part = rows_of(batch, torch.tensor([string]))
        output = made.loss(aggregation="constant")(policy.logprobs()[string, 1:], part, Totals(1, 2, 1))
        gradient += chance * torch.autograd.grad(output.loss, policy.logits)[0]
    return gradient


def lagged(*versions: int) -> torch.Tensor:
    """The first token drawn by the table of one version, the second by that of another."""
    with torch.no_grad():
        first, second = (Table(version).logprobs() for version in versions)
    return torch.stack([first[:, 0], first[:, 1], second[:, 2]], dim=1)


@pytest.mark.parametrize("versions", [(0, 0), (2, 2), (3, 1)])
def test_importance_weights_of_sequences_have_no_bias_at_any_lag(versions):
    """Version 0 is the policy; a partial rollout has two. Exact: all strings are counted, none is sampled."""
    policy = Table(0)
    objective = (policy.logprobs().sum(dim=1).exp() * REWARDS).sum()
    (exact,) = torch.autograd.grad(-objective, policy.logits)
    found = mean_gradient(policy, lagged(*versions), made.correction(importance="sequence"))
    assert torch.allclose(found, exact, atol=1e-6)
    if versions != (0, 0):
        uncorrected = mean_gradient(policy, lagged(*versions), made.correction())
        assert not torch.allclose(uncorrected, exact, atol=1e-2)


def test_how_much_is_old_or_given_is_told_of_the_tokens_that_are_trained_on():
    batch = batch_of(rollout(0, (GIVEN, 1), (3, 2), (5, 1)), rollout(1, (4, 2)), rollout(2, (1, 4)))
    weights = batch.weights * batch.per_token(torch.tensor([1.0, 1.0, 0.0]))  # the oldest counts nothing
    expected = {"off/token_share": 4 / 6, "off/lag_mean": (2 + 2 + 0 + 1 + 1) / 5}
    assert reuse_metrics(replace(batch, weights=weights)) == {**expected, "off/given_share": 1 / 6}
    assert reuse_metrics(batch_of(rollout(0, (5, 3)))) == {}
    assert set(reuse_metrics(replace(batch, weights=0 * weights)).values()) == {0.0}


def logged(*log_weights: float) -> tuple[Batch, torch.Tensor]:
    """A batch of rows of two tokens each, of which the learner's and the sampler's probabilities differ by so much."""
    batch = batch_of(*(rollout(i, (5, 2)) for i in range(len(log_weights))))
    return batch, batch.sampler_logprobs + batch.per_token(torch.tensor(log_weights)) / 2


def test_an_update_is_worth_its_effective_sample_size():
    """Of weights 1, 2, 3, 4: 10^2 / (4 * 30), also where all are off by e^2000."""
    for further in (0.0, 2000.0):
        found = effective_share(*logged(*(further + math.log(w) for w in (1.0, 2.0, 3.0, 4.0))))
        assert found == pytest.approx(5 / 6, abs=1e-4)
    assert rate_factor("sqrt", found, 1.0) == pytest.approx(math.sqrt(5 / 6), abs=1e-4)
    assert rate_factor("linear", found, 1.0) == found
    assert rate_factor("linear", found, found) == rate_factor("sqrt", found, 0.1) == 1.0


def test_given_tokens_and_rows_that_count_nothing_have_no_part_in_the_sample_size():
    batch = batch_of(rollout(0, (GIVEN, 1), (5, 1)), rollout(1, (4, 2)), rollout(2, (5, 2)), rollout(3, (GIVEN, 2)))
    third = batch.per_token(torch.tensor([False, False, True, False]))
    logprobs = batch.sampler_logprobs + 9.0 * third
    logprobs[0] = -50.0  # of a given token
    assert effective_share(replace(batch, weights=batch.weights * ~third), logprobs) == 1.0
    assert effective_share(batch, logprobs) == pytest.approx(1 / 3, rel=1e-3)
    assert effective_share(replace(batch, weights=0 * batch.weights), logprobs) == 1.0


def uneven() -> Batch:
    """Rows of 4, 2, 3 and 1 tokens, whose sampler was off by up to e^2."""
    batch = make_batch([(1, [4, 2]), (1, [3]), (2, [1])])
    exact = make_learner(small_model()).logprobs(small_model(), batch)
    shifts, ages = batch.per_token(torch.tensor([0.5, -0.25, 0.0, 1.0])), torch.zeros(10, dtype=torch.long)
    return replace(batch, sampler_logprobs=exact + shifts, token_ages=ages)


@pytest.mark.parametrize("tokens", [10_000, 1])
def test_the_sample_size_is_that_of_the_whole_update_however_it_is_cut(tokens):
    w = torch.tensor([-2.0, 0.5, 0.0, -1.0]).exp()
    share = float(w.sum() ** 2 / (4 * (w * w).sum()))
    update = make_learner(small_model(), tokens=tokens, ess="linear").update(uneven(), 0)
    assert update.metrics["off/ess"] == pytest.approx(share, rel=1e-4)
    assert update.metrics["optim/lr"] == 0.25 * update.metrics["off/ess"]


def test_without_optim_ess_it_is_measured_where_anything_is_old_and_changes_nothing():
    """With it a share that is no number is a fault, not a full share."""
    batch = uneven()
    old = make_learner(small_model()).update(batch, 0).metrics
    new = make_learner(small_model()).update(replace(batch, token_ages=None), 0).metrics
    assert old["optim/lr"] == new["optim/lr"] == 0.25 and 0 < old["off/ess"] < 1 and "off/ess" not in new
    broken = replace(batch, sampler_logprobs=batch.sampler_logprobs.index_fill(0, torch.tensor([9]), math.nan))
    update = make_learner(small_model(), ess="sqrt").update(broken, 0)
    assert update.fault == "off/ess is nan" and not update.stepped


# The old policy


MANY = {"steps": 2, "minibatches": 2}
UNCLIPPED = made.loss(clip_low=1.0, clip_high=1e6)


def test_each_update_after_the_first_of_a_step_needs_what_was_there_before_it():
    for epochs, minibatches, needed in ((1, 1, False), (2, 1, True), (1, 2, True)):
        train = made.train(epochs=epochs, minibatches=minibatches)
        assert is_needed_first(made.correction(), train, has_dropout=False) == needed


def test_half_masked_and_an_eighth_of_all_clipped_leave_three_eighths_active():
    step: Any = SimpleNamespace(old_policy=SimpleNamespace(end_step=lambda active: {"off/active": active}))
    update = Update({"loss/clip_fraction": 0.125}, torch.zeros(1), None, stepped=True)
    found = Step._end_old_policy(step, [update], {"mismatch/masked_tokens": 0.5}, 0.5)
    assert found == {"off/active": 0.5 * (1 - 0.125 / 0.5)}, "of tokens in the loss, half of which have a weight"


def test_drawn_measures_from_where_each_token_was_drawn_and_makes_no_pass(tmp_path, monkeypatch):
    """All is of two updates ago, and the sampler was e^0.3 off: xi would be e^-0.3, and is 1."""

    def older(one: Rollout, version: int) -> Rollout:
        logprobs = tuple(logprob + 0.3 for logprob in one.sampler_logprobs)
        return replace(one, sampler_logprobs=logprobs, spans=(Span(version - 2, len(one)),))

    def aged(self: StepCollection, collector: Any) -> list[ScoredGroup]:
        groups = run(self, collector)
        return [replace(g, rollouts=tuple(older(one, self.version) for one in g.rollouts)) for g in groups]

    run = StepCollection.run
    monkeypatch.setattr(StepCollection, "run", aged)
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


def test_the_average_is_what_the_clip_measures_from(tmp_path):
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
def test_a_run_that_goes_on_has_the_average_that_it_would_have_had_to_the_bit(tmp_path, high):
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


def test_a_run_does_not_go_on_from_another_old_policy(tmp_path):
    settings = quiet(tmp_path, steps=1)
    make_trainer(settings, correction=made.correction(prox="ewma")).fit()
    checkpoint = find_checkpoint(tmp_path).path
    with pytest.raises(UserError, match="prox=ewma"):
        make_trainer(settings, correction=made.correction(prox="sampler"), checkpoint=checkpoint)
    with pytest.raises(UserError, match="given"):
        SamplerPolicy(model := small_model(), make_learner(model)).logprobs(batch_of(rollout(0, (GIVEN, 1), (5, 1))))
