"""What passes between trainer, learner, engine, correction and checkpoint: each gets what is meant for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from small import FakeEngine, make_engine, small_model
from test_train import CountTask, Recorder, make_trainer, same, settings_for, with_sampler_off_by

from grpo_cli.learner.forward import padded
from grpo_cli.methods import pods
from grpo_cli.rules import downsample
from grpo_cli.settings import EvalSettings, RecordSettings, RunSettings, Sampling
from grpo_cli.types import Batch, LossOutput, Record, Request, Reward, ScoredGroup, Totals

NONE, TIS = made.correction(), made.correction(importance="token", is_threshold=2.0)
SPARSE_RL = made.correction(importance="token", is_threshold=1.5, rejection="veto", veto=1e-4)
SEQUENCE_MASK = made.correction(importance="sequence", is_mode="mask", is_threshold_low=0.5, is_threshold=5.0)
KL = made.loss(kl_coef=0.1)


def quiet(folder: Path, steps: int = 1, **train: Any) -> RunSettings:
    """Without evaluations."""
    plain = EvalSettings(every=0, problems=1, k=1, temperature=1.0)
    return replace(settings_for(folder, steps=steps, **train), eval=plain)


class Spy:
    """A loss that keeps what it is given: batches, divisors, and the learner's log-probabilities."""

    def __init__(self, inner: Any = None, change: Callable[[int, LossOutput], LossOutput] = lambda i, output: output):
        self.batches, self.logprobs, self.totals = list[Batch](), list[torch.Tensor](), list[Totals]()
        self._inner, self._change = inner or made.loss(), change

    def __call__(self, logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        self.batches.append(batch)
        self.logprobs.append(logprobs.detach())
        self.totals.append(totals)
        return self._change(len(self.batches) - 1, self._inner(logprobs, batch, totals))


def infinite_at(calls: Callable[[int], bool]) -> Callable[[int, LossOutput], LossOutput]:
    return lambda call, output: replace(output, loss=output.loss * float("inf")) if calls(call) else output


def said_by(model: Any, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a batch's responses, from the model's logits as they are."""
    with torch.no_grad():
        logs = (model(input_ids=padded(batch)).logits / temperature).log_softmax(-1)
    return logs[batch.per_token(torch.arange(len(batch))), batch.positions - 1, batch.token_ids] * batch.response_mask


def close(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    assert found is not None
    return torch.allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("m", "correction"), [(4, NONE), (2, TIS), (2, SPARSE_RL)], ids=["none", "tis", "sparse_rl"])
def test_the_old_policy_is_the_learner_until_it_moves_and_then_what_it_was(tmp_path, correction, m):
    """At the sampling temperature, as the learner's pass and the reference's are."""
    spy, model, reference = Spy(KL), small_model(), small_model(seed=1).requires_grad_(False)
    before = copy.deepcopy(model)
    sampling = Sampling.plain(8, temperature=0.6)
    settings = replace(quiet(tmp_path, epochs=2, minibatches=2), m=m, sampling=sampling)
    rule = pods.maxvar if m == 2 else downsample.all_rollouts
    parts: dict[str, Any] = dict(correction=correction, downsample=rule, reference=reference)
    make_trainer(settings, model=model, loss=spy, **parts).fit()
    assert [batch.old_logprobs is None for batch in spy.batches] == [True, False, False, False]
    assert close(spy.logprobs[0], said_by(before, spy.batches[0], 0.6))
    for batch, learner in zip(spy.batches[1:], spy.logprobs[1:], strict=True):
        assert close(batch.old_logprobs, said_by(before, batch, 0.6))
        assert close(batch.ref_logprobs, said_by(reference, batch, 0.6))
        assert not close(batch.old_logprobs, learner), "and it has moved"


def test_an_update_that_was_skipped_has_not_moved_the_learner_and_is_in_no_mean(tmp_path):
    spy = Spy(change=infinite_at(lambda call: call == 0))
    make_trainer(quiet(tmp_path / "first", minibatches=3), loss=spy).fit()
    assert [batch.old_logprobs is None for batch in spy.batches] == [True, True, False]
    recorder, spy = Recorder(), Spy(change=infinite_at(lambda call: call % 2 == 1))  # two in a row would stop the run
    summary = make_trainer(quiet(tmp_path / "then", steps=4), loss=spy, trackers=(recorder,)).fit()
    assert (summary["status"], summary["skipped_updates"], summary["updates"]) == ("completed", 2, 2)
    assert ["loss/total" in record.metrics for record in recorder.records[1:]] == [True, False] * 2


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 20])
def test_a_loss_is_given_the_whole_update_s_divisors_whatever_its_part(tmp_path, micro_batch_tokens):
    spy = Spy()
    summary = make_trainer(quiet(tmp_path, micro_batch_tokens=micro_batch_tokens), loss=spy).fit()
    tokens = sum(int(batch.loss_mask.sum()) for batch in spy.batches)
    assert {*spy.totals} == {Totals(sequences=12, tokens=tokens, max_new_tokens=8)}
    assert tokens == summary["trained_tokens"] == summary["generated_tokens"]
    assert (len(spy.totals) == 1) == (micro_batch_tokens == 10_000)


def test_weights_mask_and_rejections_of_a_correction_reach_the_loss(tmp_path):
    """The sampler is off by e^0.5 at the first token, so that xi is e^-0.5 there; for the third sample it is e^2."""
    spy, model = Spy(), small_model()
    engine = with_sampler_off_by(model, lambda rollout: -2.0 if rollout.request.sample == 2 else 0.5)
    parts: dict[str, Any] = dict(correction=made.correction(importance="token", is_threshold=1.5, mask_high=3.0))
    parts |= dict(engine=engine, loss=spy, advantage=lambda group, kept: torch.arange(1.0, 1 + len(kept)))
    make_trainer(quiet(tmp_path), model=model, **parts).fit()
    (batch,) = spy.batches
    first = batch.running(batch.response_mask) == 1
    outside = (batch.advantages == 3.0)[first]
    expected = torch.where(outside, 0.0, float(np.exp(-0.5)))
    torch.testing.assert_close(batch.weights[first], expected, atol=1e-3, rtol=0)
    assert torch.equal(batch.loss_mask[first], ~outside) and len(outside) == 12
    rest = batch.weights[batch.response_mask & ~first]
    torch.testing.assert_close(rest, torch.ones_like(rest), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("correction", "m", "passes", "lowest"),
    [(NONE, 4, [], -1.0), (NONE, 2, [], -0.5), (TIS, 4, [12], -1.0), (TIS, 2, [6], -0.5), (SPARSE_RL, 2, [12], -1.0)],
    ids=["none", "none, m=2", "tis", "tis, m=2", "sparse_rl, m=2"],
)
def test_the_mismatch_is_of_the_rollouts_that_a_pass_is_made_over(tmp_path, correction, m, passes, lowest):
    """xi is e^-1 at the first token of sample 0 and e^-0.5 at that of sample 1, and 1 elsewhere. No pass is made over
    rollouts that are not trained on, unless the correction may reject, and none at all to measure."""
    model, recorder = small_model(), Recorder()
    engine = with_sampler_off_by(model, lambda rollout: {0: 1.0, 1: 0.5}.get(rollout.request.sample, 0.0))
    parts: dict[str, Any] = dict(engine=engine, correction=correction, trackers=(recorder,))
    trainer = make_trainer(replace(quiet(tmp_path), m=m), model=model, downsample=lambda *_: [1, 3], **parts)
    made, exact = list[int](), trainer._learner.logprobs
    trainer._learner.logprobs = lambda *given: made.append(len(given[1])) or exact(*given)  # type: ignore[func-returns-value, method-assign]
    trainer.fit()
    metrics = recorder.records[1].metrics
    assert made == passes
    assert metrics["mismatch/ratio_min"] == pytest.approx(np.exp(lowest), abs=1e-3)


@pytest.mark.parametrize(("count_by", "rows"), [("rollout", (1.0, 1.0, 1.0)), ("prompt", (2.0, 1.0, 2 / 3))])
def test_each_problem_has_the_same_share_of_the_loss_whatever_its_number_of_rollouts(tmp_path, count_by, rows):
    """Groups of 2, 4 and 6, 4 in the mean: rows of 4/2, 4/4 and 4/6, which make 4 for each problem and 12 in all."""
    spy = Spy()
    collector = lambda step: step.score(step.generate(zip(step.pick(3), (2, 4, 6), strict=True)))  # noqa: E731
    make_trainer(quiet(tmp_path, count_by=count_by), loss=spy, collector=collector).fit()
    (seen,) = spy.batches
    of_rows = seen.sums(seen.weights) / seen.sums(seen.response_mask)
    torch.testing.assert_close(seen.weights, seen.per_token(of_rows) * seen.response_mask)
    found = [of_rows[seen.group == group].tolist() for group in range(3)]
    for weights, row, size in zip(sorted(found, key=len), rows, (2, 4, 6), strict=True):
        assert weights == pytest.approx([row] * size)


class Asked(FakeEngine):
    """An engine that notes its requests, and in which precision they come."""

    def __init__(self, model: Any) -> None:
        self._inner = make_engine(model)
        self.calls, self.halved = list[list[Request]](), list[bool]()

    def generate(self, requests: Any) -> Any:
        self.calls.append(list(requests))
        self.halved.append(torch.is_autocast_enabled("cpu"))
        return self._inner.generate(requests)

    def stats(self) -> Any:
        return self._inner.stats()


def test_a_request_s_seed_is_of_its_step_or_of_its_evaluation_alone(tmp_path):
    """All twelve prompts come in each step, and are held out too: nothing but the step tells the requests apart."""
    model, task = small_model(), CountTask()
    task.prompts = lambda split: CountTask().prompts("train")
    engine, exam = Asked(model), EvalSettings(every=3, problems=12, k=4, temperature=0.5)
    settings = replace(settings_for(tmp_path, steps=3, prompts=12), eval=exam)
    make_trainer(settings, model=model, engine=engine, task=task).fit()
    before, *steps, after = engine.calls
    assert [len(call) for call in engine.calls] == [60, 48, 48, 48, 60]
    assert [request.seed for request in before] == [request.seed for request in after]
    seeds = [request.seed for call in (before, *steps) for request in call]
    assert len(set(seeds)) == len(seeds)
    assert sorted({(r.sampling.temperature, r.sample) for r in before}) == [(0.0, 0), *((0.5, i) for i in range(4))]
    assert {request.sampling for call in steps for request in call} == {settings.sampling}


@pytest.mark.parametrize(("autocast", "dtype"), [("none", torch.float32), ("bfloat16", torch.bfloat16)])
def test_rollouts_evaluations_and_all_passes_are_in_one_precision(tmp_path, autocast, dtype):
    model, seen = small_model(), list[torch.dtype]()
    engine = Asked(model)
    model.model.layers[0].mlp.register_forward_hook(lambda *words: seen.append(words[2].dtype))
    exam, settings = EvalSettings(every=1, problems=2, k=1, temperature=1.0), settings_for(tmp_path, steps=1)
    settings = replace(settings, model=replace(settings.model, autocast=autocast), eval=exam)
    make_trainer(settings, model=model, engine=engine, correction=TIS).fit()
    assert engine.halved == [autocast == "bfloat16"] * 3 and {*seen} == {dtype}


def test_metrics_of_the_loss_are_means_over_updates(tmp_path):
    recorder = Recorder()
    spy = Spy(change=lambda call, output: replace(output, metrics={"loss/policy": torch.tensor(call + 1.0)}))
    make_trainer(quiet(tmp_path, steps=2, epochs=2, minibatches=2), loss=spy, trackers=(recorder,)).fit()
    assert [record.metrics["loss/policy"] for record in recorder.records[1:]] == [2.5, 6.5]


# What is trained on, and steps that teach nothing


MASKED = made.correction("mis", importance="sequence")  # one token has a xi of exp(-20)


def ran(folder: Path, m: int = 4, train: Mapping[str, Any] | None = None, **parts: Any) -> tuple[Record, Spy]:
    """One step of three problems with four rollouts each; of samples 1 the sampler is off by 20 in a token."""
    recorder, spy, model, task = Recorder(), Spy(), small_model(), CountTask()
    task.reward = lambda prompt, rollout: Reward((1.0, 0.0, 3.0, 4.0)[rollout.request.sample])
    engine = with_sampler_off_by(model, lambda rollout: 20.0 if rollout.request.sample == 1 else 0.0)
    settings = replace(quiet(folder, **(train or {})), record=RecordSettings(rollouts=-1, tokens=False), m=m)
    parts = dict(engine=engine, task=task, trackers=(recorder,), loss=spy) | parts
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
def test_a_rollout_without_a_weight_is_not_kept_and_counts_nowhere(tmp_path, train):
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


def test_each_problem_s_rollouts_are_chosen_by_chances_of_its_own(tmp_path):
    rows = ran(tmp_path, m=2, downsample=pods.random)[0].examples
    kept = [[row.sample for row in rows[start : start + 4] if row.kept] for start in (0, 4, 8)]
    assert [*map(len, kept)] == [2, 2, 2] and len({*map(tuple, kept)}) > 1


@pytest.mark.parametrize("number", [0.0, 2.0])
def test_a_rollout_whose_advantage_is_0_is_trained_on(tmp_path, number):
    """One per token, whose mean its record has."""

    def equal(group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
        rows = [torch.full((len(group.rollouts[index]),), number) for index in kept]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    record, _ = ran(tmp_path, correction=NONE, advantage=equal)
    assert all(row.kept and row.advantage == number for row in record.examples)
    assert record.metrics["tokens/trained"] == sum(row.length for row in record.examples)


def decaying(folder: Path, **train: Any) -> RunSettings:
    settings = quiet(folder, **train)
    return replace(settings, optim=replace(settings.optim, weight_decay=0.1))


def test_a_step_of_equal_rewards_is_as_if_it_had_not_been(tmp_path):
    """Decay, and averages of the step before, would move the weights without a gradient."""
    model, recorder = small_model(), Recorder()
    kept: list[dict[str, torch.Tensor]] = [copy.deepcopy(dict(model.state_dict()))]
    recorder._on_log = lambda record: kept.append(copy.deepcopy(dict(model.state_dict())))
    settings, updated = decaying(tmp_path, steps=3, epochs=2, minibatches=2), list[int]()
    task, equal = CountTask(), iter([Reward(0.3)] * 24)  # of the first two steps
    task.reward = lambda *of: next(equal, None) or CountTask.reward(task, *of)
    trainer = make_trainer(settings, model=model, task=task, trackers=(recorder,))
    trainer._parts.runtime.engine.update_weights = lambda: updated.append(trainer._progress.step)
    summary = trainer.fit()
    assert updated == [2], "an engine gets weights that have moved, and no others"
    assert [same(kept[0], later) for later in kept[1:]] == [True, True, True, False]
    assert (summary["updates"], summary["empty_steps"], summary["skipped_updates"]) == (4, 2, 0)
    first, last = recorder.records[1].metrics, recorder.records[3].metrics
    assert (first["optim/empty_steps"], first["optim/grad_norm"], first["loss/policy"]) == (1, 0.0, 0.0)
    assert (first["rollouts/trained"], last["rollouts/trained"]) == (12, 36), "they were gone over all the same"


@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize("correction", [SPARSE_RL, SEQUENCE_MASK], ids=["veto", "is"])
def test_a_step_in_which_all_are_rejected_moves_nothing(tmp_path, correction, m):
    """Weights of 0 leave the tokens in the mask, a veto takes them out of it; weight decay would move the weights."""
    model, warnings = small_model(), list[str]()
    before = copy.deepcopy(dict(model.state_dict()))
    engine = with_sampler_off_by(model, lambda rollout: 20.0)
    parts: dict[str, Any] = dict(engine=engine, correction=correction, downsample=pods.maxvar, warn=warnings.append)
    summary = make_trainer(replace(decaying(tmp_path, steps=1), m=m), model=model, **parts).fit()
    assert (summary["updates"], summary["empty_steps"], summary["skipped_updates"]) == (0, 1, 0)
    assert (summary["trained_rollouts"], summary["trained_tokens"]) == (0, 0)
    assert same(before, model.state_dict()) and any("every rollout was rejected" in text for text in warnings)
