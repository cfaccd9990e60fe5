"""Rollouts that are stopped and resumed: the engine that stops them, the rounds that go on with them, and
collector=partial, which loses nothing on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bank import Scripted, collection_of
from made import full, infinite, mean_length, micro, prefix_head
from small import VOCABULARY, contents, finished_in_rounds, make_engine, scored, small_model, some_requests

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.resuming import GOLDEN, unstarted
from grpo_cli.collect.stored import from_plain, to_plain
from grpo_cli.engine.scheduling import Fifo, Lpt, Sjf
from grpo_cli.interfaces import StepRollouts
from grpo_cli.methods.april import Partial, lag
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import ENVIRONMENT, EngineStats, Finish, Group, Prompt, Request, Reward, Rollout, ScoredGroup, Span

MODEL = small_model()
SAMPLERS = {
    "full": lambda: full(),
    "micro": lambda: micro(slots=5),
    "infinite": lambda: infinite(slots=4),
    "budget": lambda: infinite(kv_budget=40 * 1024),
}
PLANS: dict[str, dict[str, Callable[[], Any]]] = {
    "fifo": {"scheduler": Fifo},
    "sjf": {"scheduler": Sjf, "predictor": lambda: mean_length()},
    "parked": {"scheduler": Lpt, "predictor": lambda: prefix_head(prefix_tokens=3, min_rollouts=2)},
}
PAIRS = tuple(first + second for first in "bd" for second in "bcdefghij")  # of tokens, as stop strings


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stopped_rollout_goes_on_as_if_it_had_not_been_stopped(sampler: str, plan: str) -> None:
    plain, words = some_requests(n=6), {name: make() for name, make in PLANS[plan].items()}
    words["decode"] = lambda ids: "".join(chr(95 + one) for one in ids)
    requests = [replace(one, sampling=replace(one.sampling, stop=PAIRS)) for one in plain]
    found = finished_in_rounds(make_engine(MODEL, sampler=SAMPLERS[sampler](), **words), requests)
    whole = contents(make_engine(MODEL, decode=words["decode"]).generate(requests))
    assert "stop" in {finish for *_, finish in whole.values()}, "also where a string begins before a round's end"
    assert {id(rollout.request) for rollout in found} == {id(request) for request in requests}
    assert max(len(rollout.spans) for rollout in found) > 2
    for rollout in found:
        tokens, logprobs, finish = whole[rollout.request.prompt.id, rollout.request.sample]
        assert (rollout.token_ids, rollout.finish.value) == (tokens, finish)
        np.testing.assert_allclose(rollout.sampler_logprobs, logprobs, atol=2e-5)
        versions = [span.version for span in rollout.spans]
        assert versions == sorted(set(versions)) and sum(span.count for span in rollout.spans) == len(rollout)


def test_a_group_comes_back_from_plain_values_as_it_was() -> None:
    request = Request(Prompt("p", (3, 4), "x"), 2, 2**64 - 1, replace(Sampling.plain(9), stop=("a", "b")))
    turns = (Span(4, 1), Span(ENVIRONMENT, 2), Span(5, 1))
    partial = Rollout(request, (7, 8, 9, 7), (-0.1, 0.0, 0.0, -0.3), Finish.PARTIAL, turns)
    group = Group(request.prompt, (partial, unstarted(replace(request, sample=5))))
    assert from_plain(to_plain(group)) == group and not group.whole
    assert lag(group, 6) == 2, "of tokens that were sampled"
    unjudged = scored(1.0, Reward(0.0, judged=False))
    assert from_plain(to_plain(unjudged)) == unjudged and not step_of(Drawn(), 0).differs(unjudged)


# Rounds that stop and go on


class Drawn(Scripted):
    """Rollouts of a real engine."""

    def __init__(self, slots: int = 6) -> None:
        super().__init__()
        self.engine = make_engine(MODEL, sampler=infinite(slots=slots))

    def generate(self, requests: Any, *enough: Any) -> Any:
        self.rounds.append(list(requests))
        return self.engine.generate(requests, *enough)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        assert rollout.finish is not Finish.PARTIAL, "a reward never sees half an answer"
        return super().reward(prompt, rollout)

    def stats(self) -> EngineStats:
        return self.engine.stats()


PROBLEMS = [Prompt(f"q{i}", (i % 7 + 2, i % VOCABULARY, 3), "") for i in range(40)]


def step_of(engine: Drawn, step: int, curriculum: Any = None, tokens: int = 20) -> StepCollection:
    words: dict[str, Any] = dict(n=3, prompts=4, sampling=Sampling.plain(tokens), seed=7, step=step, version=step)
    return collection_of(engine, curriculum or Epochs(PROBLEMS, 4, 0), **words)


def held_of(rule: Partial) -> list[Group]:
    return [from_plain(group) for group in rule.state_dict()["held"]]


@pytest.mark.parametrize(("surplus", "max_lag", "slots"), [(0.0, 4, 6), (1.0, 1, 6), (1.0, 4, 12)])
def test_in_twelve_steps_every_rollout_ends_once_and_as_it_would_have_by_itself(
    surplus: float, max_lag: int, slots: int
) -> None:
    engine, rule, curriculum = Drawn(slots), Partial(surplus=surplus, max_lag=max_lag), Epochs(PROBLEMS, 4, 0)
    seen: dict[int, Rollout] = {}
    drawn = 0
    for step in range(12):
        collection = step_of(engine, step, curriculum)
        groups = collection.run(rule)
        drawn += collection.stats.generated_tokens
        assert len(groups) >= 4
        for group in groups:
            assert [rollout.request.sample for rollout in group.rollouts] == [0, 1, 2]
            for rollout in group.rollouts:
                assert rollout.finish is not Finish.PARTIAL and rollout.request.seed not in seen
                seen[rollout.request.seed] = rollout
                versions = [span.version for span in rollout.spans]
                assert versions == sorted(set(versions)) and sum(s.count for s in rollout.spans) == len(rollout)
                assert step - versions[0] <= max_lag
        left = [one for group in held_of(rule) for one in group.rollouts if one.finish is Finish.PARTIAL]
        metrics = collection.metrics()
        carried = (metrics["collect/carried_rollouts"], metrics["collect/carried_tokens"])
        assert carried == (len(left), sum(map(len, left)))
        held = {group.prompt.id for group in held_of(rule)}
        assert not held & {group.prompt.id for group in groups} and len(held) <= surplus * 4
    held_rollouts = [rollout for group in held_of(rule) for rollout in group.rollouts]
    begun = {(one.seed - one.resumed_tokens * GOLDEN) % 2**64 for requests in engine.rounds for one in requests}
    assert begun == seen.keys() | {rollout.request.seed for rollout in held_rollouts}, "nothing is lost"
    assert not seen.keys() & {rollout.request.seed for rollout in held_rollouts}, "nothing comes twice"
    assert drawn == sum(map(len, (*seen.values(), *held_rollouts))), "each token is drawn once"
    alone = {one.request.seed: one for one in make_engine(MODEL).generate([one.request for one in seen.values()])}
    assert {seed: (one.token_ids, one.finish) for seed, one in seen.items()} == {
        seed: (one.token_ids, one.finish) for seed, one in alone.items()
    }
    assert len(engine.judged) == len(seen), "each is judged once"
    assert any(len(rollout.spans) > 1 for rollout in seen.values()) == (surplus > 0)


def test_half_a_group_and_one_begun_with_other_sampling_are_refused() -> None:
    def half(step: StepRollouts) -> list[ScoredGroup]:
        return [one for one in step.score(step.generate(((p, 3) for p in step.pick(4)), enough=2)) if one.rollouts]

    engine, rule = Drawn(), Partial(surplus=1.0, max_lag=4)
    with pytest.raises(UserError, match="returned prompt 'q.*' with unfinished rollouts: generate them first"):
        step_of(engine, 0).run(half)
    step_of(engine, 0).run(rule)
    held = held_of(rule)
    with pytest.raises(UserError, match="of which this step has another group: pass its id to step.pick"):
        step_of(engine, 1).run(lambda step: step.generate([(held[0].prompt, 3), held[0]]))
    with pytest.raises(UserError, match="began with sampling.max_new_tokens=20, not .*=2: resume with"):
        step_of(engine, 1, tokens=2).run(rule)
