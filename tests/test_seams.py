"""What passes between trainer, learner, engine, correction and checkpoint: each gets what is meant for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import group_of
from small import FakeEngine, make_engine, small_model
from test_train import GRPO, SPARSE_RL, CountTask, Recorder, make_trainer, settings_for, with_sampler_off_by

from grpo_cli.interfaces import StepRollouts
from grpo_cli.learner.forward import padded
from grpo_cli.methods import pods
from grpo_cli.rules import downsample
from grpo_cli.rules.correction import Correct
from grpo_cli.runs.find import find_checkpoint
from grpo_cli.select import Selection, row_weights
from grpo_cli.settings import EvalSettings, RunSettings, Sampling
from grpo_cli.types import (
    Batch,
    LossOutput,
    Prompt,
    Request,
    Reward,
    Rollout,
    ScoredGroup,
    Totals,
    Verdict,
)

TIS = made.correction(importance="token", is_threshold=2.0)


def quiet(settings: RunSettings, **changes: Any) -> RunSettings:
    """Without evaluations."""
    return replace(settings, eval=EvalSettings(every=0, problems=1, k=1, temperature=1.0), **changes)


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
    ids = padded(batch)
    with torch.no_grad():
        logs = (model(input_ids=ids).logits / temperature).log_softmax(-1)
    said = logs[batch.spread(torch.arange(len(batch))), batch.positions - 1, batch.token_ids]
    return said * batch.response_mask


def close(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    assert found is not None
    return torch.allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("correction", [made.correction(), TIS, SPARSE_RL], ids=["none", "tis", "sparse_rl"])
def test_the_old_policy_is_the_learner_until_it_moves_and_then_what_it_was(
    tmp_path: Path, correction: Correct, m: int
) -> None:
    spy, model = Spy(), small_model()
    before = copy.deepcopy(model)
    settings = quiet(settings_for(tmp_path, steps=1, epochs=2, minibatches=2), m=m)
    rule = pods.maxvar if m == 2 else downsample.all_rollouts
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


@pytest.mark.parametrize("correction", [made.correction(), TIS], ids=["none", "tis"])
def test_rounding_between_two_passes_clips_nothing(tmp_path: Path, correction: Correct) -> None:
    """GSPO's clip is narrower than bfloat16's rounding, by which the correction's pass and the learner's differ."""
    recorder = Recorder()
    trainer = make_trainer(
        quiet(settings_for(tmp_path, steps=3)), loss=made.loss("gspo"), correction=correction, trackers=(recorder,)
    )
    exact = trainer._learner.logprobs
    trainer._learner.logprobs = lambda *words: exact(*words).bfloat16().float()  # type: ignore[method-assign]
    trainer.fit()
    assert len(recorder.records) == 4
    for record in recorder.records[1:]:
        assert (record.metrics["loss/clip_fraction"], record.metrics["loss/policy_ratio_mean"]) == (0.0, 1.0)


def reference() -> Any:
    return small_model(seed=1).requires_grad_(False)


KL = made.loss(kl_coef=0.1)


def test_every_pass_is_at_the_sampling_temperature(tmp_path: Path) -> None:
    """The learner's, the old policy's and the reference's, each under its own model."""
    spy, model = Spy(KL), small_model()
    before = copy.deepcopy(model)
    settings = quiet(settings_for(tmp_path, steps=1, minibatches=2), sampling=Sampling.plain(8, temperature=0.6))
    make_trainer(settings, model=model, loss=spy, reference=reference()).fit()
    first, second = spy.batches
    assert close(spy.logprobs[0], said_by(before, first, 0.6))
    assert not close(spy.logprobs[0], said_by(before, first, 1.0))
    assert close(second.policy_logprobs, said_by(before, second, 0.6))
    for batch in spy.batches:
        assert close(batch.ref_logprobs, said_by(reference(), batch, 0.6))


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 20])
def test_a_loss_is_told_of_the_whole_update_whatever_its_part(tmp_path: Path, micro_batch_tokens: int) -> None:
    told: list[tuple[int, Totals]] = []

    def watched(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        told.append((int(batch.loss_mask.sum()), totals))
        return GRPO(logprobs, batch, totals)

    settings = quiet(settings_for(tmp_path, steps=1, micro_batch_tokens=micro_batch_tokens))
    summary = make_trainer(settings, loss=watched).fit()
    tokens = sum(part for part, _ in told)
    assert {totals for _, totals in told} == {Totals(sequences=12, tokens=tokens, max_new_tokens=8)}
    assert tokens == summary["trained_tokens"] == summary["generated_tokens"]
    assert (len(told) == 1) == (micro_batch_tokens == 10_000)


def sample_numbers(group: ScoredGroup, kept: Sequence[int]) -> torch.Tensor:
    """Advantages that tell the rows of a batch: 1, 2, 3, ... within each group."""
    return torch.arange(1.0, 1 + len(kept))


def test_the_weights_and_the_mask_of_a_correction_reach_the_loss(tmp_path: Path) -> None:
    """The sampler is off by e^0.5 at the first token, so that xi is e^-0.5 there; for the third sample it is e^2."""
    spy, model = Spy(), small_model()
    engine = with_sampler_off_by(model, lambda rollout: -2.0 if rollout.request.sample == 2 else 0.5)
    parts: dict[str, Any] = dict(correction=made.correction(importance="token", is_threshold=1.5, mask_high=3.0))
    parts |= dict(engine=engine, loss=spy, advantage=sample_numbers)
    make_trainer(quiet(settings_for(tmp_path, steps=1)), model=model, **parts).fit()
    (batch,) = spy.batches
    first = batch.running(batch.response_mask) == 1
    outside = (batch.advantages == 3.0)[first]
    expected = torch.where(outside, 0.0, float(np.exp(-0.5)))
    torch.testing.assert_close(batch.weights[first], expected, atol=1e-3, rtol=0)
    assert torch.equal(batch.loss_mask[first], ~outside) and len(outside) == 12
    rest = batch.weights[batch.response_mask & ~first]
    torch.testing.assert_close(rest, torch.ones_like(rest), atol=1e-3, rtol=0)


class Counted:
    """A correction that notes how many rollouts it is asked about."""

    def __init__(self, inner: Correct) -> None:
        self._inner = inner
        self.needs_policy_logprobs, self.rejects = inner.needs_policy_logprobs, inner.rejects
        self.count_rejected = inner.count_rejected
        self.prox, self.prox_window = inner.prox, inner.prox_window
        self.asked: list[int] = []

    def __call__(self, batch: Batch, policy_logprobs: torch.Tensor) -> Verdict:
        self.asked.append(len(batch))
        return self._inner(batch, policy_logprobs)


@pytest.mark.parametrize(
    ("inner", "m", "asked", "passes", "name", "lowest"),
    [
        (made.correction(), 4, 12, [], "mismatch", -1.0),
        (made.correction(), 2, 6, [], "mismatch_trained", -0.5),
        (TIS, 4, 12, [12], "mismatch", -1.0),
        (TIS, 2, 6, [6], "mismatch_trained", -0.5),
        (SPARSE_RL, 4, 12, [12], "mismatch", -1.0),
        (SPARSE_RL, 2, 12, [12], "mismatch", -1.0),
    ],
    ids=["none", "none, m=2", "tis", "tis, m=2", "sparse_rl", "sparse_rl, m=2"],
)
def test_a_correction_is_asked_once_and_the_mismatch_named_by_the_rollouts_that_it_is_of(
    tmp_path: Path, inner: Correct, m: int, asked: int, passes: list[int], name: str, lowest: float
) -> None:
    """xi is e^-1 at the first token of sample 0 and e^-0.5 at that of sample 1, and 1 elsewhere. No pass is made over
    rollouts that are not trained on, unless the correction may reject, and none at all to measure."""
    model, recorder, spy, correction = small_model(), Recorder(), Spy(), Counted(inner)
    engine = with_sampler_off_by(model, lambda rollout: {0: 1.0, 1: 0.5}.get(rollout.request.sample, 0.0))
    parts: dict[str, Any] = dict(engine=engine, correction=correction, loss=spy, trackers=(recorder,))
    parts["downsample"] = lambda group, keep, rng: [1, 3]
    trainer = make_trainer(quiet(settings_for(tmp_path, steps=1), m=m), model=copy.deepcopy(model), **parts)
    made, exact = list[int](), trainer._learner.logprobs
    trainer._learner.logprobs = lambda *given: made.append(len(given[1])) or exact(*given)  # type: ignore[func-returns-value, method-assign]
    trainer.fit()
    metrics, (batch,) = recorder.records[1].metrics, spy.batches
    assert (correction.asked, made) == ([asked], passes)
    assert {metric.partition("/")[0] for metric in metrics if metric.startswith("mismatch")} == {name}
    assert metrics[f"{name}/ratio_min"] == pytest.approx(np.exp(lowest), abs=1e-3)
    off = (batch.sampler_logprobs - said_by(model, batch, 1.0))[batch.running(batch.response_mask) == 1]
    shifts = [1.0, 0.5, 0.0, 0.0] if m == 4 else [0.5, 0.0]
    assert sorted(off.tolist()) == pytest.approx(sorted(shifts * 3), abs=1e-4)


class Asked(FakeEngine):
    """An engine that notes what it is asked for, and in which precision."""

    def __init__(self, model: Any, state: Any = None) -> None:
        self._inner = make_engine(model)
        self.calls: list[list[Request]] = []
        self.halved: list[bool] = []
        self.told = 0
        self.remembered = state

    def generate(self, requests: Any) -> Any:
        self.calls.append(list(requests))
        self.halved.append(torch.is_autocast_enabled("cpu"))
        return self._inner.generate(requests)

    def stats(self) -> Any:
        return self._inner.stats()

    def update_weights(self) -> None:
        self.told += 1

    def state_dict(self) -> Any:
        return {"remembered": self.remembered}

    def load_state_dict(self, state: Any) -> None:
        self.remembered = state["remembered"]


class OneNamed(CountTask):
    """A task whose held-out problems have the names of those that are trained on."""

    def prompts(self, split: str) -> Any:
        return [Prompt(f"p{i}", (2 + i % 5, 3 + i % 7, 9), "7") for i in range(12)]


def test_a_request_s_seed_is_of_its_step_or_of_its_evaluation_alone(tmp_path: Path) -> None:
    """All twelve prompts come in each step, and are held out too: nothing but the step tells the requests apart."""
    model = small_model()
    engine = Asked(model)
    exam = EvalSettings(every=3, problems=12, k=4, temperature=0.5)
    settings = replace(settings_for(tmp_path, steps=3, prompts=12), eval=exam)
    make_trainer(settings, model=model, engine=engine, task=OneNamed()).fit()
    before, *steps, after = engine.calls
    assert [len(call) for call in engine.calls] == [60, 48, 48, 48, 60]
    assert [request.seed for request in before] == [request.seed for request in after]
    seeds = [request.seed for call in (before, *steps) for request in call]
    assert len(set(seeds)) == len(seeds)
    assert sorted({(r.sampling.temperature, r.sample) for r in before}) == [(0.0, 0), *((0.5, i) for i in range(4))]
    assert {request.sampling for call in steps for request in call} == {settings.sampling}


def test_rollouts_and_evaluations_are_in_the_precision_of_the_updates(tmp_path: Path) -> None:
    for autocast, halved in (("none", False), ("bfloat16", True)):
        model, seen = small_model(), list[torch.dtype]()
        engine = Asked(model)
        model.model.layers[0].mlp.register_forward_hook(lambda *words, seen=seen: seen.append(words[2].dtype))
        settings = settings_for(tmp_path / autocast, steps=1)
        settings = replace(
            settings,
            model=replace(settings.model, autocast=autocast),
            eval=EvalSettings(every=1, problems=2, k=1, temperature=1.0),
        )
        make_trainer(settings, model=model, engine=engine, correction=TIS).fit()
        assert engine.halved == [halved] * 3
        assert set(seen) == {torch.bfloat16 if halved else torch.float32}, (
            "the correction's and the update's passes too"
        )


def test_every_epoch_of_every_step_has_an_order_of_its_own(tmp_path: Path) -> None:
    taken: list[list[float]] = []

    def watched(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        taken.append(batch.advantages.tolist())
        return GRPO(logprobs, batch, totals)

    settings = quiet(settings_for(tmp_path, steps=2, prompts=1, epochs=2, minibatches=2), n=12, m=12)
    make_trainer(settings, loss=watched, advantage=sample_numbers).fit()
    firsts = {tuple(sorted(rows)) for rows in taken[::2]}
    assert len(firsts) == 4


def test_a_down_sample_rule_s_stream_is_of_seed_step_and_prompt(tmp_path: Path) -> None:
    def drawn(seed: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}

        def rule(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
            found.setdefault(group.prompt.id, []).append(float(rng.random()))
            return list(range(keep))

        settings = quiet(settings_for(tmp_path / str(seed), steps=2, prompts=12), m=2, seed=seed)
        make_trainer(settings, downsample=rule).fit()
        return found

    first, again = drawn(0), drawn(1)
    numbers = [number for found in (first, again) for draws in found.values() for number in draws]
    assert len(first) == 12 and len(numbers) == len(set(numbers)) == 48


def test_a_resumed_run_has_the_random_states_and_the_engine_s_that_were_saved(tmp_path: Path) -> None:
    def draws() -> tuple[float, float]:
        return float(torch.rand(())), float(np.random.random())

    model, settings = small_model(), quiet(settings_for(tmp_path, steps=2))
    make_trainer(settings, model=model, engine=Asked(model, state=[1.5, 2.5])).fit()
    expected = draws()
    checkpoint = find_checkpoint(tmp_path).path
    torch.manual_seed(99)
    np.random.seed(99)
    longer, fresh = replace(settings, train=replace(settings.train, steps=3)), Asked(model)
    make_trainer(longer, checkpoint=checkpoint, engine=fresh)
    assert draws() == expected
    assert fresh.remembered == [1.5, 2.5]


def test_what_a_run_counts_goes_on_and_adds_up(tmp_path: Path) -> None:
    recorder, settings = Recorder(), quiet(settings_for(tmp_path, steps=2, epochs=2, minibatches=3), m=2)
    make_trainer(settings, downsample=pods.maxvar, trackers=(recorder,)).fit()
    longer = replace(settings, train=replace(settings.train, steps=3))
    checkpoint = find_checkpoint(tmp_path).path
    summary = make_trainer(longer, checkpoint=checkpoint, downsample=pods.maxvar, trackers=(recorder,)).fit()
    assert (summary["updates"], summary["generated_rollouts"], summary["trained_rollouts"]) == (3 * 6, 3 * 12, 3 * 6)
    rows = [record.metrics for record in recorder.records[1:]]
    made = [row["tokens/generated"] for row in rows]
    steps = [12 * row["response/length_mean"] for row in rows]
    assert made == pytest.approx(list(np.cumsum(steps)))
    assert summary["generated_tokens"] == made[-1] > summary["trained_tokens"] == rows[-1]["tokens/trained"] > 0


def test_metrics_of_the_loss_are_means_over_the_step_s_updates(tmp_path: Path) -> None:
    recorder, calls = Recorder(), list[int]()

    def numbered(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        calls.append(1)
        return LossOutput(GRPO(logprobs, batch, totals).loss, {"loss/policy": torch.tensor(float(len(calls)))})

    settings = quiet(settings_for(tmp_path, steps=2, epochs=2, minibatches=2))
    make_trainer(settings, loss=numbered, trackers=(recorder,)).fit()
    assert [record.metrics["loss/policy"] for record in recorder.records[1:]] == [2.5, 6.5]


def test_the_rate_follows_the_step(tmp_path: Path) -> None:
    settings, recorder = quiet(settings_for(tmp_path, steps=4, minibatches=2)), Recorder()
    settings = replace(settings, optim=replace(settings.optim, schedule="linear"))
    make_trainer(settings, trackers=(recorder,)).fit()
    rates = [record.metrics["optim/lr"] for record in recorder.records[1:]]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_updates_that_fail_now_and_then_do_not_stop_a_run(tmp_path: Path) -> None:
    """Two in a row would. What was not finite is in no mean."""

    def every_other(call: int, output: LossOutput) -> LossOutput:
        return replace(output, loss=output.loss * float("inf")) if call % 2 else output

    recorder, spy = Recorder(), Spy(change=every_other)
    summary = make_trainer(quiet(settings_for(tmp_path, steps=6)), loss=spy, trackers=(recorder,)).fit()
    assert (summary["status"], summary["skipped_updates"], summary["updates"]) == ("completed", 3, 3)
    assert ["loss/total" in record.metrics for record in recorder.records[1:]] == [True, False] * 3


@pytest.mark.parametrize("count_rejected", [True, False])
def test_whether_the_rejected_count_is_the_correction_s_word(tmp_path: Path, count_rejected: bool) -> None:
    spy, model = Spy(), small_model()
    engine = with_sampler_off_by(model, lambda rollout: 20.0 if rollout.request.sample == 1 else 0.0)
    correction = replace(SPARSE_RL, count_rejected=count_rejected)
    make_trainer(
        quiet(settings_for(tmp_path, steps=1)), model=model, engine=engine, loss=spy, correction=correction
    ).fit()
    assert len(spy.batches[0]) == (12 if count_rejected else 9)


class Forgets(CountTask):
    """Held-out problems are solved once each, in the first evaluation; those that are trained on never."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        held_out, new = prompt.id.startswith("eval"), prompt.id not in self._seen
        if rollout.request.sampling.temperature == 0.0:
            self._seen.add(prompt.id)
        return Reward(1.0 if held_out and new else rollout.token_ids[0] / 1000)


def test_the_best_accuracy_need_not_be_the_last_one(tmp_path: Path) -> None:
    recorder, settings = (
        Recorder(),
        replace(settings_for(tmp_path, steps=1), eval=EvalSettings(every=1, problems=3, k=2, temperature=1.0)),
    )
    summary = make_trainer(settings, task=Forgets(), trackers=(recorder,)).fit()
    assert (summary["best_accuracy"], summary["final_accuracy"]) == (1.0, 0.0)
    assert [len(record.examples) for record in recorder.records] == [0, 5], "record.rollouts of 12"


def per_problem(spy: Spy) -> list[list[float]]:
    """What the rows of each problem weighed in the loss. All tokens of a reply weigh the same, and no others do."""
    (seen,) = spy.batches
    rows = seen.sums(seen.weights) / seen.sums(seen.response_mask)
    torch.testing.assert_close(seen.weights, seen.spread(rows) * seen.response_mask)
    of: dict[int, list[float]] = {}
    for group, row in zip(seen.group.tolist(), rows.tolist(), strict=True):
        of.setdefault(group, []).append(row)
    return list(of.values())


def two_four_and_six(step: StepRollouts) -> list[ScoredGroup]:
    return step.score(step.generate(zip(step.pick(3), (2, 4, 6), strict=True)))


@pytest.mark.parametrize(("count_by", "rows"), [("rollout", (1.0, 1.0, 1.0)), ("prompt", (2.0, 1.0, 2 / 3))])
def test_each_problem_has_the_same_share_of_the_loss_whatever_its_number_of_rollouts(tmp_path: Path, count_by, rows):
    """Groups of 2, 4 and 6, 4 in the mean: rows of 4/2, 4/4 and 4/6, which make 4 for each problem and 12 in all."""
    spy = Spy()
    settings = replace(
        settings_for(tmp_path, steps=1, count_by=count_by), eval=EvalSettings(every=0, problems=1, k=1, temperature=1.0)
    )
    make_trainer(settings, loss=spy, collector=two_four_and_six).fit()
    found = sorted(per_problem(spy), key=len)
    for weights, row, size in zip(found, rows, (2, 4, 6), strict=True):
        assert weights == pytest.approx([row] * size)
    assert [sum(weights) for weights in found] == pytest.approx([4.0] * 3 if count_by == "prompt" else [2.0, 4.0, 6.0])


def test_a_problem_without_a_chosen_rollout_has_no_part_in_the_mean():
    none, two, six = (
        Selection(group_of(Prompt(name, (0,), ""), 0, 6), tuple(range(count)), torch.zeros(count), ("",) * 6)
        for name, count in (("a", 0), ("b", 2), ("c", 6))
    )
    assert row_weights([none, two, six]).tolist() == pytest.approx([2.0] * 2 + [4 / 6] * 6)
