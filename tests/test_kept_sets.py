"""Training on truncated sampling (`sampling.kept_set`): what truncation keeps is recorded for each token, and the
learner's log-probabilities are over the same ids."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import full, infinite, micro
from small import make_engine, plain_batch, small_model, some_requests
from test_config import refusal
from test_generate import generating
from test_profile_shapes import fullest_step, work_of
from test_resume import cut_off_and_resumed, rows
from test_train import CountTask

from grpo_cli.collect import resuming, stored
from grpo_cli.engine.kv.eviction import Dense
from grpo_cli.engine.step import sample
from grpo_cli.engine.step.sample import SamplingTable, ids_of, in_bits
from grpo_cli.engine.torch.generation import BEHIND
from grpo_cli.learner.batch import collate, minibatches
from grpo_cli.learner.forward import make_forward
from grpo_cli.learner.learner import Learner
from grpo_cli.learner.logprobs import KeptTokens, token_logprobs
from grpo_cli.profile.estimate import total
from grpo_cli.profile.shapes import EngineShape, ShapeModel
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import NullMeter
from grpo_cli.tracking.examples import examples
from grpo_cli.types import Finish, Group, Reward, Rollout, ScoredGroup

CUT = {"top_p": 0.8, "kept_set": True}


def sets_of(rollout: Rollout) -> list[list[int]]:
    assert rollout.kept is not None
    ids, counts = rollout.kept.arrays
    return [part.tolist() for part in np.split(ids, counts.cumsum()[:-1])]


def group_of(rollouts: Any) -> ScoredGroup:
    made_of = tuple(rollouts)
    return ScoredGroup(made_of[0].request.prompt, made_of, tuple(Reward(0.0) for _ in made_of))


def learner_of(model: Any, **words: Any) -> Learner:
    parts = made.model(""), Sampling.plain(30), made.train(**words), made.optim(), NullMeter(), pytest.fail
    return Learner(model, made.loss(), *parts)


@given(st.integers(1, 99), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=50)
def test_sets_come_back_from_their_bits(vocabulary: int, rows_: int, seed: int) -> None:
    kept = torch.rand(rows_, vocabulary, generator=torch.Generator().manual_seed(seed)) < 0.3
    found = ids_of(in_bits(kept).numpy())
    assert [one.tolist() for one in found] == [row.nonzero()[:, 0].tolist() for row in kept]
    assert all(one.dtype == np.int32 for one in found)


def test_what_truncation_keeps_is_said_with_the_token() -> None:
    """Of 0.4, 0.3, 0.2 and 0.1 the first two reach 0.6; the first alone is top-1."""
    table = SamplingTable(2, torch.device("cpu"))
    table.put([0, 1], [replace(Sampling.plain(9), kept_set=True, **cut) for cut in ({"top_p": 0.6}, {"top_k": 1})])
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log().expand(2, 4)
    _, logprobs, bits = table.draw(logits, torch.tensor([0.99, 0.99], dtype=torch.float64), slice(0, 2))
    assert [one.tolist() for one in ids_of(bits.numpy())] == [[1, 3], [1]]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([3 / 7, 1.0]))


def test_log_probabilities_over_a_set_by_hand() -> None:
    """Logits log 1, 2, 3, 4 at temperature 1: of the ids 1 and 3 the last has 4/6; over all it has 0.4."""

    model = small_model(vocab_size=4, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head.bias = torch.nn.Parameter(torch.arange(1.0, 5.0).log())
    kept = KeptTokens(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([[0, 2], [0, 0]]))
    ids, mask = torch.tensor([[0, 3, 3]]), torch.tensor([[False, True, True]])
    found = token_logprobs(model, ids, mask, 1.0, 8, kept=lambda rows, columns: kept)
    torch.testing.assert_close(found, torch.tensor([[0.0, math.log(4 / 6), math.log(0.4)]]))
    found.sum().backward()
    # Of the set: 1 - 2/3 for the token and -1/3 for the other; of all: the token less the probabilities.
    wanted = torch.tensor([0.0, -1 / 3, 0.0, 1 / 3]) + torch.tensor([-0.1, -0.2, -0.3, 0.6])
    torch.testing.assert_close(model.lm_head.bias.grad, wanted)


@pytest.mark.parametrize("way", ["", "padding_free", "shared_prefix"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_values_and_gradients_equal_those_of_masked_logits(chunk: int, way: str) -> None:
    model = small_model(tie_word_embeddings=False)
    rollouts = list(make_engine(model).generate(some_requests(2, 3, tokens=12, **CUT)))
    rollouts[0] = replace(rollouts[0], kept=None)  # as one that was given
    batch = collate([group_of(rollouts)], 0)
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))

    def masked() -> torch.Tensor:
        logits = model(batch.input_ids).logits[:, :-1]
        outside = torch.zeros(logits.shape, dtype=torch.bool)
        for row, rollout in enumerate(rollouts):
            start = len(rollout.request.prompt.token_ids) - 1
            for place, ids in enumerate(sets_of(rollout) if rollout.kept else []):
                outside[row, start + place] = True
                outside[row, start + place, ids] = False
        chosen = logits.masked_fill(outside, -torch.inf).log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])
        zeros = torch.zeros(len(batch), 1)
        return torch.cat([zeros, chosen[..., 0]], dim=1).masked_fill(~batch.response_mask, 0.0)

    forward = make_forward(made.train(logprob_chunk=chunk, **({way: True} if way else {})), 1.0, way == "shared_prefix")
    forward.prepare(model)
    found = []
    for compute in (lambda: forward.logprobs(model, batch), masked):
        model.zero_grad()
        values = compute()
        (values * weights).sum().backward()
        found.append((values.detach(), [weight.grad.clone() for weight in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=5e-5, rtol=1e-3)


def test_the_ratio_to_the_sampler_is_1_and_is_not_where_sets_are_forgotten() -> None:
    """In float32 at top_p=0.8: within 1e-6 in the mean."""
    model = small_model()
    rollouts = list(make_engine(model).generate(some_requests(4, 8, **CUT)))
    batch = collate([group_of(rollouts)], 0)
    learner = learner_of(model)

    def ratio(batch: Any) -> float:
        own = learner.logprobs(model, batch)
        return float((own - batch.sampler_logprobs).double().exp()[batch.response_mask].mean())

    assert abs(ratio(batch) - 1) <= 1e-6
    assert ratio(replace(batch, kept_ids=None, kept_bounds=None)) < 0.95
    parts = minibatches(batch, 3, np.random.default_rng(0))
    assert sum(map(len, parts)) == len(batch) and all(abs(ratio(part) - 1) <= 1e-6 for part in parts)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("sampler", [full(), micro(slots=5), infinite(slots=3), infinite(kv_budget=40 * 1024)])
def test_recording_changes_no_token_and_does_not_depend_on_neighbours(
    sampler: Any, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BEHIND, "cpu", behind)
    model, requests = small_model(), some_requests(3, 4, **CUT)
    by_name = lambda some: {(r.request.prompt.id, r.request.sample): r for r in some}  # noqa: E731
    found = by_name(make_engine(model, sampler=sampler).generate(requests))
    unrecorded = some_requests(3, 4, **CUT | {"kept_set": False})
    for name, other in by_name(make_engine(model).generate(unrecorded)).items():
        assert other.kept is None and (found[name].token_ids, found[name].finish) == (other.token_ids, other.finish)
    for name, alone in by_name(make_engine(model).generate(requests)).items():
        assert found[name].kept == alone.kept
        assert all(token in ids for token, ids in zip(alone.token_ids, sets_of(alone), strict=True))


def test_engines_record_the_same_sets() -> None:
    model, requests = small_model(), some_requests(2, 3, **CUT)
    ours, theirs = (
        {(r.request.prompt.id, r.request.sample): r.kept for r in engine.generate(requests)}
        for engine in (make_engine(model), generating(model))
    )
    assert ours == theirs


def test_sets_come_back_from_stores_and_go_on_with_partial_rollouts() -> None:
    model = small_model()
    group = group_of(make_engine(model, eos_token_ids=(-1,)).generate(some_requests(1, 3, tokens=8, **CUT)))
    assert stored.from_plain(stored.to_plain(group)) == group
    plain = Group(group.prompt, group.rollouts)
    assert stored.from_plain(stored.to_plain(plain)) == plain
    whole = group.rollouts[0]
    (ended,) = make_engine(model, eos_token_ids=(whole.token_ids[3],)).generate([whole.request])
    begun = replace(ended, finish=Finish.PARTIAL)
    rest = next(iter(make_engine(model, eos_token_ids=(-1,)).generate([resuming.rest_of(begun)])))
    assert resuming.joined(begun, rest, 0).kept == whole.kept
    answered = resuming.answered(begun, (5, 6, 7))
    assert sets_of(answered) == [*sets_of(begun), [], [], []]
    assert resuming.joined_sets((None, 2), (None, 1)) is None


def test_a_record_does_not_say_what_is_over_a_set_alone() -> None:
    group = group_of(make_engine(small_model()).generate(some_requests(1, 1, tokens=5, **CUT)))
    (said,) = examples(CountTask(), [group], [], -1, tokens=True)
    assert said.token_ids == group.rollouts[0].token_ids and set(said.logprobs or ()) == {None}


def test_the_gradient_is_that_of_the_policy_over_the_set() -> None:
    """A table policy of five tokens, and a sampler whose set is {0, 1, 3}. Over all that it can draw, the mean of
    ratio * reward * grad log pi, each over the set, is the exact gradient of the mean reward of pi over the set, where
    pi has moved since; over the whole vocabulary it is not."""
    old, rewards, kept = torch.tensor([0.5, 1.0, -1.0, 0.2, -2.0]), torch.tensor([1.0, 0.0, 3.0, 2.0, 1.0]), [0, 1, 3]
    sampler = torch.full((5,), -torch.inf)
    sampler[kept] = old[kept].log_softmax(0)
    logits = (old + torch.tensor([0.3, -0.2, 0.1, 0.4, 0.2])).requires_grad_()
    (exact,) = torch.autograd.grad((logits[kept].softmax(0) * rewards[kept]).sum(), logits)

    def mean_gradient(over: list[int]) -> torch.Tensor:
        model = small_model(vocab_size=5, tie_word_embeddings=False)
        with torch.no_grad():
            model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(logits.detach().clone())
        rows_ = [[4, token] for token in kept]  # a prompt of one token, and each token that can be drawn
        bounds = torch.zeros(3, 2, 2, dtype=torch.long)
        bounds[:, 1, 1] = len(over)
        batch = plain_batch([[0, 1]] * 3, input_ids=torch.tensor(rows_), advantages=rewards[kept], kept_bounds=bounds)
        batch = replace(batch, kept_ids=torch.tensor(over, dtype=torch.int32))
        values = make_forward(made.train(), 1.0, False).logprobs(model, batch)[:, 1]
        ratios = (values - sampler[kept]).exp()
        (sampler[kept].exp() * ratios * rewards[kept]).sum().backward()
        return model.lm_head.bias.grad

    torch.testing.assert_close(mean_gradient(kept), exact)
    assert (mean_gradient([0, 1, 2, 3, 4]) - exact).abs().max() > 0.05


def test_a_run_trains_on_what_truncation_kept_and_goes_on_as_one_left_alone(tmp_path: Path) -> None:
    cut = "sampling.top_p=0.8", "sampling.kept_set=true", "sampling.temperature=2", "train.minibatches=2"
    cut_off_and_resumed(tmp_path, *cut, "collector=partial", "train.steps=4", step=4)
    steps = [row for row in rows(tmp_path / "alone") if "mismatch/ratio_mean" in row]
    assert steps and abs(float(steps[0]["mismatch/ratio_mean"]) - 1) <= 1e-6  # later ones go on with older tokens
    assert all(float(row["rollouts/kept_ids"]) > 1 for row in steps)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}, CUT])
def test_what_drawing_holds_is_predicted(cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With so many words a decode step is fullest where it draws, where it sorts all of them."""
    monkeypatch.setattr(sample, "FIRST", 2000)
    model, requests = small_model(vocab_size=2000), some_requests(prompts=1, n=4, tokens=6, **cut)
    held, in_c = (total(fullest_step(model, requests, full(), native)) for native in (False, True))
    assert in_c <= held
    shape = EngineShape(full(), Dense(), 0, sampling=requests[0].sampling)
    _, decode = ShapeModel(lambda: small_model(vocab_size=2000), "none").rollouts(work_of(requests, 4, 6), shape)
    assert sum(decode.values()) == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize(
    ("words", "key", "way_out"),
    [
        ("sampling.top_p=0.8", "sampling.top_p=0.8", "sampling.kept_set=true"),
        ("sampling.kept_set=true", "sampling.kept_set=true", "sampling.top_p"),
        ("sampling.kept_set=true sampling.top_p=0.8 engine=vllm", "engine=vllm", "since 0.28"),
        ("sampling.kept_set=true sampling.top_p=0.8 engine=ray engine.inner=vllm", "engine=ray", "engine=torch"),
        ("sampling.kept_set=true sampling.top_p=0.8 replay=folder replay.path=.", "replay=folder", "replay=fifo"),
    ],
)
def test_what_cannot_work_with_sets_is_refused_with_a_way_out(words: str, key: str, way_out: str) -> None:
    said = refusal(*words.split())
    assert key in said and way_out in said
