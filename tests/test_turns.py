"""Episodes of several turns: the same tokens whichever way they are made, and none of the environment's trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from made import correction, fptas, infinite, loss, micro, prefix_head
from small import EOS, FakeEngine, make_engine, small_model, some_and_the_rest, some_requests
from talk import Talk
from test_kv_budget import Ledger
from test_resume import cut_off_and_resumed, rows
from typed import json_lines

from grpo_cli.collect import episodes
from grpo_cli.collect.episodes import play
from grpo_cli.collect.resuming import unstarted
from grpo_cli.config.instantiate import ready
from grpo_cli.evaluate import evaluate
from grpo_cli.learner.batch import collate, corrected, totals, verdict_on
from grpo_cli.learner.forward import Padded
from grpo_cli.settings import Sampling
from grpo_cli.types import ENVIRONMENT, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Span

REQUESTS = dict(prompts=3, n=4, tokens=60, max_turn_tokens=9)


class InRounds(FakeEngine):
    """The same engine, which says that it cannot answer in place."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(self, requests: Any, *enough: Any) -> Iterator[Rollout]:
        return self._engine.generate(requests, *enough)

    def stats(self) -> Any:
        return self._engine.stats()


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def played(engine: Any, talk: Any = None, requests: Any = None, **words: Any) -> dict[Any, Rollout]:
    found = play(engine, talk or Talk(), [unstarted(one) for one in requests or some_requests(**REQUESTS)], **words)
    return {(one.request.prompt.id, one.request.sample): one for one in found}


def said(rollouts: dict[Any, Rollout]) -> dict[Any, Any]:
    return {name: (one.token_ids, one.finish, one.spans) for name, one in rollouts.items()}


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[Any, Any]:
    return said(played(InRounds(make_engine(model))))


WAYS: dict[str, Any] = {
    "full": {},
    "paused": {"sampler": infinite(slots=3), "scheduler": fptas(), "predictor": prefix_head(prefix_tokens=6)},
    "micro": {"sampler": micro(slots=3)},
    "infinite": {"sampler": infinite(slots=3)},
    "one slot": {"sampler": infinite(slots=1)},
}


@pytest.mark.parametrize("looks", [0, 40])
@pytest.mark.parametrize("way", some_and_the_rest([*WAYS], ["infinite"]))
def test_answers_in_place_give_the_tokens_of_rounds(model, expected, monkeypatch, way, looks):
    monkeypatch.setattr(episodes, "GRACE", 0)
    monkeypatch.setattr(episodes, "POLL", 0)
    engine = make_engine(model, **WAYS[way])
    assert said(played(engine, Talk(looks=looks))) == expected
    spans = [span for _, _, spans in expected.values() for span in spans if span.version != ENVIRONMENT]
    assert engine.stats().generated_tokens == sum(span.count for span in spans)


@pytest.mark.parametrize(("rule", "bound", "looks"), [("dense", 32, 0), ("dense", 32, 7), ("rkv", 40, 7)])
def test_a_row_that_begins_anew_for_room_says_the_same(model, looks, rule, bound):
    """With room for about two of twelve rows. One whose environment is slow keeps no keys either, and begins anew."""
    own = {} if rule == "dense" else {"budget": 16, "buffer": 4, "window": 4}
    unbounded, talk, kept = Talk(), Talk(looks=looks), ready("sparsity", rule, **own)
    expected = said(played(make_engine(model, sparsity=kept), unbounded))
    ledger, words = Ledger(), {"sparsity": kept, "warn": lambda text: None}
    with ledger.open():
        engine = make_engine(model, sampler=infinite(slots=6, kv_budget=f"{bound}KB"), **words)
        assert said(played(engine, talk)) == expected
    assert ledger.peak <= bound * 1000
    assert engine.stats().slots < 6 if rule == "rkv" else engine.stats().details["engine/preemptions"] > 0
    assert talk.asked == unbounded.asked, "what has been answered is known"


def test_an_evaluation_counts_the_tokens_of_all_rounds(model):
    requests = some_requests(**REQUESTS)
    prompts, sampling = [one.prompt for one in requests[::4]], requests[0].sampling
    found = [
        evaluate(engine, Talk(), prompts, sampling, k=2, seed=0).stats.generated_tokens
        for engine in (make_engine(model), InRounds(make_engine(model)))
    ]
    assert found[0] == found[1] > 0


@pytest.mark.parametrize(("rule", "looks"), [("streaming", 0), ("rkv", 5)])
def test_eviction_sees_what_the_environment_says_as_part_of_the_response(model, rule, looks):
    """With room for all it is the dense episode; with less each way of batching makes the same one."""

    def made_with(budget: int, **sampler: Any) -> dict[Any, Any]:
        own = {"window": 4} if rule == "rkv" else {"window": 2, "sinks": 2}
        kept = ready("sparsity", rule, budget=budget, buffer=4, **own)
        engine = make_engine(model, sparsity=kept, **sampler)
        return said(played(engine, Talk(looks=looks)))

    assert made_with(200) == said(played(InRounds(make_engine(model))))
    assert made_with(16) == made_with(16, sampler=infinite(slots=3)) != made_with(200)


@pytest.mark.parametrize(("in_place", "looks"), [(True, 5), (False, 0)])
def test_an_episode_that_is_cut_off_goes_on_as_if_it_had_not_been(model, expected, monkeypatch, in_place, looks):
    """Wherever the cut falls: in a turn, at its end, or in what the environment says; and before it has answered."""
    monkeypatch.setattr(episodes, "GRACE", 0)
    whole, cut_in = {}, set()
    for first in range(1, 11, 3):
        engine = make_engine(model, sampler=infinite(slots=5))
        engine = engine if in_place else InRounds(engine)
        left = [unstarted(one) for one in some_requests(**REQUESTS)]
        whole = {}
        while left:
            ends = iter(range(1, 99))
            found = list(play(engine, Talk(looks=looks), left, enough=lambda _, ends=ends, at=first: next(ends) >= at))
            left = [one for one in found if one.finish is Finish.PARTIAL]
            cut_in |= {one.parts[-1][0] for one in left if one.parts}
            whole |= {(r.request.prompt.id, r.request.sample): r for r in found if r.finish is not Finish.PARTIAL}
        assert said(whole) == expected
    assert cut_in == {True, False}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("room, taken", [(0, False), (1, True)])
def test_an_answer_is_read_only_where_the_model_can_reply_to_it(model, in_place, room, taken):
    """Answers that leave room for a number of tokens."""

    class Fills(Talk):
        def between(self, turns: Any, said: Any) -> Any:
            return [7] * (30 - room - len(turns[0]))

    engine = make_engine(model) if in_place else InRounds(make_engine(model))
    found = played(engine, Fills(turns=2), some_requests(prompts=3, n=4, tokens=30, max_turn_tokens=9)).values()
    long = [one for one in found if any(theirs for theirs, _ in one.parts)]
    assert bool(long) == taken and all(len(one) == 30 for one in long)
    assert sum(one.finish is Finish.LENGTH and len(one) < 30 for one in found) >= 4 * (not taken)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_episode_has_no_more_turns_than_the_task_and_its_last_is_not_answered(model, in_place, turns):
    answered: list[int] = []

    class Counts(Talk):
        def respond(self, prompt: Any, turns: Any) -> Any:
            answered.append(len(turns))
            return super().respond(prompt, turns)

    found = played(make_engine(model) if in_place else InRounds(make_engine(model)), Counts(turns=turns)).values()
    assert max(len(one.turns) for one in found) == turns
    assert sorted(set(answered)) == list(range(1, turns))


def two_turns(logprob: float) -> ScoredGroup:
    """Behind a prompt of 2 tokens: 3 drawn, 2 of the environment's, 1 drawn; and a rollout of one turn, 2 tokens."""
    prompt = Prompt("p", (5, 6), "")
    spans = (Span(0, 3), Span(ENVIRONMENT, 2), Span(0, 1))
    request = Request(prompt, 0, 0, Sampling.plain(9))
    one = Rollout(request, (7, 8, EOS, 9, 10, EOS), (-1.0,) * 3 + (logprob,) * 2 + (-1.0,), Finish.EOS, spans)
    other = Rollout(replace(request, sample=1), (7, EOS), (-1.0,) * 2, Finish.EOS, (Span(0, 2),))
    return ScoredGroup(prompt, (one, other), (Reward(1.0), Reward(0.0)))


def test_no_number_at_a_place_of_the_environment_moves_the_loss_or_the_gradient(model):
    def gradient(logprob: float) -> list[torch.Tensor]:
        batch = collate([two_turns(logprob)])
        batch = replace(batch, advantages=batch.per_token(torch.tensor([1.0, -1.0])))
        batch = corrected(batch, verdict_on(correction("tis"), batch, torch.zeros(len(batch.token_ids))))
        model.zero_grad()
        found = loss("grpo")(Padded(99, 512, 1.0).logprobs(model, batch), batch, totals(batch, 9)).loss
        found.backward()
        return [found.detach(), *(weight.grad.clone() for weight in model.parameters())]

    first, *others = map(gradient, (float("nan"), 0.0, -7.0, 1e30))
    assert all(all(map(torch.equal, first, other)) for other in others)


GUESS = ["task=guess", "sampling.max_turn_tokens=4", "sampling.max_new_tokens=40", "record.rollouts=-1"]


def test_a_run_that_is_cut_off_in_the_middle_of_episodes_goes_on_as_one_left_alone(tmp_path):
    words = [*GUESS, "collector=partial", "collector.surplus=2.0", "correction=tis", "record.tokens=true"]
    cut_off_and_resumed(tmp_path, *words, "train.steps=4", step=4)
    found = rows(tmp_path / "alone")
    assert any(row.get("collect/carried_tokens", 0) for row in found), "episodes were carried over"
    assert all(row["turns/mean"] > 1 and row["tokens/environment"] > 0 for row in found[1:]), "but for step 0"
    recorded = json_lines(tmp_path / "alone" / "rollouts.jsonl")
    for row in recorded:
        lengths = [end - start for start, end in row.get("environment", [])]
        assert sum(lengths) + sum(value is not None for value in row["logprobs"]) == row["length"]
        assert len(row.get("turns", [])) in (0, 2 * len(lengths) + 1)


def test_a_sequence_that_pauses_when_its_cache_is_due_for_an_eviction_comes_back():
    """64 keys of rkv's 48 + 16 are held; one answer comes, of three tokens, when nothing else runs."""

    class Late:
        asked = ended = 0

        def ask(self, rollout: Rollout) -> int:
            self.asked += 1
            return self.asked

        def answers(self, wait: bool) -> list[tuple[int, tuple[int, ...]]]:
            first, self.ended = self.ended + 1, self.asked if wait else self.ended
            return [(number, (5, 6, 7)) for number in range(first, self.ended + 1)]

    requests = [*some_requests(1, 1, tokens=120, max_turn_tokens=65), *some_requests(2, 1, tokens=120)[1:]]
    parts = dict(sampler=infinite(slots=2), eos_token_ids=(), sparsity=ready("sparsity", "rkv"))
    assert [len(one) for one in make_engine(small_model(), **parts).generate(requests, None, Late())] == [120, 120]
