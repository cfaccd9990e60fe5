"""Rollouts that are stopped and resumed: the engine that stops them, the rounds that go on with them, and
collector=partial, which loses nothing on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bank import collection_of
from made import full, infinite, mean_length, micro, prefix_head
from small import FakeEngine, make_engine, small_model, some_requests
from test_resume import cut_off_and_resumed, records, trained
from test_stop import cut
from test_stop import engine as reading_engine

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.equal import equal
from grpo_cli.collect.resuming import GOLDEN, joined, remaining_request, unstarted
from grpo_cli.collect.stored import from_plain, to_plain
from grpo_cli.engine.sampling import uniforms
from grpo_cli.engine.scheduling import Fifo, Lpt, Sjf
from grpo_cli.engine.torch_engine import TorchEngine
from grpo_cli.interfaces import StepRollouts
from grpo_cli.methods.april import Partial
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import (
    ENVIRONMENT,
    EngineStats,
    Finish,
    Group,
    Prompt,
    Request,
    Reward,
    Rollout,
    ScoredGroup,
    Span,
)

MODEL = small_model()


def after(count: int) -> Callable[[Rollout], bool]:
    """Says yes when it is asked for the so-many-th time, and must not be asked again."""
    asked = list[Rollout]()

    def enough(rollout: Rollout) -> bool:
        assert len(asked) < count, "an engine that was told yes asks no more"
        assert rollout.finish is not Finish.PARTIAL, "only what has ended is asked about"
        asked.append(rollout)
        return len(asked) == count

    return enough


def first_seed(request: Request) -> int:
    """Return the seed that a rollout started with, from the request for its rest."""
    return (request.seed - request.resumed_tokens * GOLDEN) % 2**64


def key(rollout: Rollout) -> tuple[str, int]:
    return rollout.request.prompt.id, rollout.request.sample


def by_key(rollouts: Sequence[Rollout]) -> dict[tuple[str, int], Rollout]:
    found = {key(rollout): rollout for rollout in rollouts}
    assert len(found) == len(rollouts), "a request came back twice"
    return found


# The engine stops


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


def engine_of(sampler: str, plan: str) -> TorchEngine:
    return make_engine(MODEL, sampler=SAMPLERS[sampler](), **{name: make() for name, make in PLANS[plan].items()})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stopped_rollout_goes_on_as_if_it_had_not_been_stopped(sampler: str, plan: str) -> None:
    engine, requests = engine_of(sampler, plan), some_requests(n=6)
    whole = by_key(list(make_engine(MODEL).generate(requests)))
    begun_before = {key(unstarted(r)): unstarted(r) for r in requests}
    rounds = 0
    while left := [rollout for rollout in begun_before.values() if rollout.finish is Finish.PARTIAL]:
        rounds += 1
        asked = [remaining_request(rollout) for rollout in left]
        of = {(r.prompt.id, r.sample): rollout for r, rollout in zip(asked, left, strict=True)}
        made = list(engine.generate(asked, after(min(3, len(asked)))))
        assert {key(rollout) for rollout in made} == of.keys() and len(made) == len(of)
        assert sum(rollout.finish is not Finish.PARTIAL for rollout in made) >= min(3, len(asked))
        assert engine.stats().generated_tokens == sum(map(len, made)), "each token counts once, where it was drawn"
        for rollout in made:
            one = joined(of[key(rollout)], rollout, rounds)
            begun_before[key(one)] = one
    assert rounds > 2
    for name, rollout in begun_before.items():
        assert (rollout.token_ids, rollout.finish) == (whole[name].token_ids, whole[name].finish)
        assert rollout.request == whole[name].request
        np.testing.assert_allclose(rollout.sampler_logprobs, whole[name].sampler_logprobs, atol=2e-5)
        versions = [span.version for span in rollout.spans]
        assert versions == sorted(set(versions)) and sum(span.count for span in rollout.spans) == len(rollout)


@pytest.mark.bits
@pytest.mark.parametrize("stop", [("fgf", "cc", "e"), tuple("a" + letter for letter in "bcdefghij")])
@pytest.mark.parametrize("before", [1, 5])
def test_a_stop_string_that_began_before_the_border_is_found(stop: tuple[str, ...], before: int) -> None:
    """Rollouts that were stopped so many tokens before the one that completes a string."""
    requests = [replace(one, sampling=replace(one.sampling, stop=stop)) for one in some_requests(n=12)]
    plain = by_key(list(reading_engine().generate(some_requests(n=12))))
    whole, parts = dict[tuple[str, int], Rollout](), list[Rollout]()
    for request in requests:
        rollout = plain[request.prompt.id, request.sample]
        length, finish = cut(rollout, stop)
        made = max(0, length - before)
        whole[key(rollout)] = replace(rollout, token_ids=rollout.token_ids[:length], finish=Finish(finish))
        parts.append(Rollout(request, rollout.token_ids[:made], rollout.sampler_logprobs[:made], Finish.PARTIAL))
    asked = [remaining_request(part) for part in parts]
    of = {(rest.prompt.id, rest.sample): part for rest, part in zip(asked, parts, strict=True)}
    assert sum(rollout.finish is Finish.STOP for rollout in whole.values()) > 1
    for rest in reading_engine().generate(asked):
        found = joined(of[key(rest)], rest, 0)
        assert (found.token_ids, found.finish) == (whole[key(found)].token_ids, whole[key(found)].finish)


# The request for a rest


def test_the_rest_is_asked_for_as_a_longer_prompt_with_its_stream_moved_on() -> None:
    request = Request(Prompt("p", (3, 4), "x"), 2, 2**64 - 1, Sampling.plain(10))
    partial = Rollout(request, (7, 8, 9), (-1.0, -2.0, -3.0), Finish.PARTIAL, (Span(4, 3),))
    rest = remaining_request(partial)
    assert rest.prompt.token_ids == (3, 4, 7, 8, 9) and rest.prompt.answer == "x"
    assert (rest.sample, rest.sampling.max_new_tokens, rest.resumed_tokens) == (2, 7, 3)
    assert (uniforms([request.seed], 9)[0, 3:] == uniforms([rest.seed], 6)[0]).all()
    assert first_seed(rest) == request.seed
    other = remaining_request(replace(partial, token_ids=(7, 89), sampler_logprobs=(-1.0, -1.0)))
    assert rest.prompt.id.startswith("p+") and other.prompt.id != rest.prompt.id
    other = remaining_request(replace(partial, request=replace(request, sample=3)))
    assert other.prompt == rest.prompt, "one text is read once"
    assert remaining_request(unstarted(request)) is request


def test_a_group_comes_back_from_plain_values_as_it_was() -> None:
    sampling = replace(Sampling.plain(9), stop=("a", "b"))
    request = Request(Prompt("p", (3, 4), "x"), 2, 2**64 - 1, sampling)
    turns = (Span(4, 1), Span(ENVIRONMENT, 2), Span(5, 1))
    partial = Rollout(request, (7, 8, 9, 7), (-0.1, 0.0, 0.0, -0.3), Finish.PARTIAL, turns)
    group = Group(request.prompt, (partial, unstarted(replace(request, sample=5))))
    assert from_plain(to_plain(group)) == group and not group.whole


# Rounds that stop and go on, with a scripted engine


class Slotted(FakeEngine):
    """So many rows at a time. A token is a function of all tokens before it and of the request's stream; 0 ends."""

    def __init__(self, slots: int = 6) -> None:
        self.slots, self.calls, self.drawn, self.judged = slots, list[list[Request]](), 0, list[Rollout]()

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        self.calls.append(list(requests))
        self.drawn, stop = 0, False
        waiting, running = list(requests), list[tuple[Request, list[int], np.ndarray]]()
        while (waiting or running) and not stop:
            while waiting and len(running) < self.slots:
                request = waiting.pop(0)
                running.append((request, [], uniforms([request.seed], request.sampling.max_new_tokens)[0]))
            for row in list(running):
                request, tokens, stream = row
                context = sum((i + 1) * token for i, token in enumerate((*request.prompt.token_ids, *tokens))) % 97
                uniform = stream[len(tokens)]
                tokens.append(0 if uniform < 0.08 else 1 + (int(uniform * 1000) + context) % 50)
                self.drawn += 1
                finish = Finish.EOS if not tokens[-1] else Finish.LENGTH if len(tokens) == len(stream) else None
                if finish:
                    running.remove(row)
                    rollout = rollout_of(request, tokens, finish)
                    yield rollout
                    stop = stop or (enough is not None and enough(rollout))
        yield from (rollout_of(request, tokens, Finish.PARTIAL) for request, tokens, _ in running)
        yield from (rollout_of(request, [], Finish.PARTIAL) for request in waiting)

    def prompts(self, split: str) -> Sequence[Prompt]:
        return PROBLEMS

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        assert rollout.finish is not Finish.PARTIAL, "a reward never sees half an answer"
        self.judged.append(rollout)
        return Reward(float(len(rollout) % 2))

    def text(self, token_ids: Sequence[int]) -> str:
        return ""

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, generated_tokens=self.drawn, slots=1, slot_utilisation=1.0)


def rollout_of(request: Request, tokens: Sequence[int], finish: Finish) -> Rollout:
    return Rollout(request, tuple(tokens), (-1.0,) * len(tokens), finish)


PROBLEMS = [Prompt(f"q{i}", (i % 7 + 1, 3), "") for i in range(40)]


def step_of(
    engine: Slotted, step: int, *, n: int = 3, prompts: int = 4, updates: int = 1, tokens: int = 40, **parts: Any
) -> StepCollection:
    curriculum = parts.get("curriculum") or Epochs(PROBLEMS, prompts, 0)
    words: dict[str, Any] = dict(sampling=Sampling.plain(tokens), seed=7, step=step, version=step * updates)
    return collection_of(engine, curriculum, n=n, prompts=prompts, **words)


def held_of(rule: Partial) -> list[Group]:
    return [from_plain(group) for group in rule.state_dict()["held"]]


@pytest.mark.parametrize(("surplus", "max_lag", "slots"), [(0.0, 4, 6), (1.0, 1, 6), (1.0, 4, 100)])
def test_in_fifty_steps_every_rollout_ends_once_and_as_it_would_have_by_itself(
    surplus: float, max_lag: int, slots: int
) -> None:
    engine, rule, curriculum = Slotted(slots), Partial(surplus=surplus, max_lag=max_lag), Epochs(PROBLEMS, 4, 0)
    seen: dict[int, Rollout] = {}
    begun_ones, drawn = set[int](), 0
    for step in range(50):
        engine.calls.clear()
        collection = step_of(engine, step, curriculum=curriculum)
        groups = collection.run(rule)
        begun_ones |= {first_seed(request) for call in engine.calls for request in call}
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
        assert not held & {group.prompt.id for group in groups}
        assert len(held) <= surplus * 4
    held_rollouts = [rollout for group in held_of(rule) for rollout in group.rollouts]
    assert begun_ones == seen.keys() | {rollout.request.seed for rollout in held_rollouts}, "nothing is lost"
    assert not seen.keys() & {rollout.request.seed for rollout in held_rollouts}, "nothing comes twice"
    assert drawn == sum(map(len, (*seen.values(), *held_rollouts))), "each token is drawn once"
    for rollout in seen.values():
        (alone,) = Slotted().generate([rollout.request])
        assert (rollout.token_ids, rollout.finish) == (alone.token_ids, alone.finish)
    assert sorted(key(r) for r in engine.judged) == sorted(key(r) for r in seen.values())
    if surplus:
        assert any(len(rollout.spans) > 1 for rollout in seen.values())
        assert any(rollout.spans[0].version < rollout.spans[-1].version for rollout in seen.values())


# What a collector may do with partial rollouts


def ended(rollout: Rollout) -> bool:
    return rollout.finish is not Finish.PARTIAL


def test_a_group_is_scored_as_it_is_now_and_returned_whole() -> None:
    def stale(step: StepRollouts) -> list[ScoredGroup]:
        groups = step.generate(((prompt, 3) for prompt in step.pick(4)), enough=2)
        step.generate(group for group in groups if not group.whole)
        return step.score(groups)

    engine, plain = Slotted(), Slotted()
    assert step_of(engine, 0).run(stale) == step_of(plain, 0).run(equal)

    def half(step: StepRollouts) -> list[ScoredGroup]:
        return [one for one in step.score(step.generate(((p, 3) for p in step.pick(4)), enough=2)) if one.rollouts]

    with pytest.raises(UserError, match="returned problem 'q.*' with unfinished rollouts: generate them first"):
        step_of(engine, 0).run(half)


def test_what_is_held_is_not_mixed_up_and_goes_on_with_the_sampling_that_it_was_begun_with() -> None:
    engine, rule = Slotted(6), Partial(surplus=1.0, max_lag=4)
    step_of(engine, 0).run(rule)
    held = held_of(rule)

    def forgets(step: StepRollouts) -> Any:
        return step.generate([(held[0].prompt, 3), held[0]])

    with pytest.raises(UserError, match="of which this step has another group: pass its id to step.pick"):
        step_of(engine, 1).run(forgets)
    said = "begun with sampling.max_new_tokens=40, and this run has sampling.max_new_tokens=2: resume with the former"
    with pytest.raises(UserError, match=said):
        step_of(engine, 1, tokens=2).run(rule)


# Whole runs


TRAINED = ("record.rollouts=-1", "optim.lr=1e-3")


def test_a_run_goes_on_with_its_partial_rollouts_from_a_checkpoint(tmp_path: Path) -> None:
    words = (*TRAINED, "collector=partial", "train.steps=4", "eval.every=2", "eval.problems=4")
    cut_off_and_resumed(tmp_path, *words, step=4)
    metrics, rollouts = records(tmp_path / "alone")
    held = load_state(tmp_path / "alone" / "checkpoints" / "step_000002")["rules"]["collector"]["held"]
    assert held and metrics[2]["collect/carried_tokens"]
    lengths = sum(json.loads(line)["length"] for line in rollouts.splitlines())
    assert lengths + metrics[-1]["collect/carried_tokens"] == metrics[-1]["tokens/generated"]  # type: ignore[operator]
    assert "partial" not in {json.loads(line)["finish"] for line in rollouts.splitlines()}
    with pytest.raises(UserError, match="the checkpoint holds what collector=partial has learnt, and this run's"):
        trained(tmp_path / "cut", *words, f"resume={tmp_path / 'cut'}", "collector=equal", "train.steps=5")
