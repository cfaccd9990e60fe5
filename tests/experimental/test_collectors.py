"""Collectors: worked numbers, exact budgets, and whole steps of rounds with an engine and a judge that are made up."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import InOrder, Scripted, collection_of, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from small import advantages_of, make_engine, scored, small_model, some_requests
from test_partial import held_of
from test_resume import cut_off_and_resumed, rows

from grpo_cli.collect.epochs import Epochs
from grpo_cli.config.instantiate import make, ready
from grpo_cli.experimental import arrol as arrol_module
from grpo_cli.experimental import latr, poise
from grpo_cli.experimental.adhint import num_given
from grpo_cli.experimental.dars import missing
from grpo_cli.experimental.reading import POOLED, PolicyReading, ProbeRows, Probing, read
from grpo_cli.experimental.roll_packer import Tail
from grpo_cli.experimental.sorted_rl import Sorted
from grpo_cli.experimental.trace import hand_out, mixed_gains
from grpo_cli.interfaces import Runtime
from grpo_cli.rules.advantage import advantages
from grpo_cli.rules.downsample import choose
from grpo_cli.settings import Sampling
from grpo_cli.types import ENVIRONMENT, GIVEN, EngineStats, Finish, Prompt, Request, Reward, Rollout, Span


@settings(max_examples=100)
@given(data=st.data(), most=st.integers(3, 7), count=st.integers(1, 4))
def test_no_division_of_the_rollouts_expects_more_mixed_groups_than_the_one_that_is_made(data, most, count):
    """Against all of them; 0 or at least 2 of each. One may be left where two would be wanted."""
    chances = st.floats(0.05, 9.0)
    solved = np.array(data.draw(st.lists(chances, min_size=count, max_size=count)))
    failed = np.array(data.draw(st.lists(chances, min_size=count, max_size=count)))
    budget = data.draw(st.integers(2, most * count))
    gains = mixed_gains(solved, failed, most)
    worth = gains.cumsum(axis=1)

    def expected(counts: Sequence[int]) -> float:
        return float(sum(worth[place, number] for place, number in enumerate(counts)))

    found = hand_out(gains.tolist(), budget, np.random.default_rng(data.draw(st.integers(0, 5))))
    assert sum(found) in (budget, budget - 1) and all(number == 0 or 2 <= number <= most for number in found)
    sizes, large = [0, *range(2, most + 1)], gains[:, 2].max() / 2
    of_size = [some for some in itertools.product(sizes, repeat=count) if sum(some) in (budget, sum(found))]
    assert max(map(expected, of_size)) - large <= expected(found) <= max(map(expected, of_size)) + 1e-12


@pytest.mark.parametrize(
    ("n", "most", "weighting", "divided", "expected"),
    [(8, 32, "equal", False, [24, 11, 3, 1, 0, 0, 0, 0, 0]), (8, 64, "hard", True, [23, 14, 6, 3, 0, 0, 0, 0, 0])],
)
def test_dars_asks_for_what_the_paper_does(n, most, weighting, divided, expected):
    assert [missing(solved, n, most, weighting, divided) for solved in range(n + 1)] == expected


BENCH = Runtime(torch.device("cpu"), None, None, Scripted(), Scripted(), (9,))
HALF = math.sqrt(0.5)  # the advantage of the better of two, but for eps
TWO = scored(1.0, 0.0, replies=[(1, 2, 3), (4, 5)], logprobs=[(-0.1, -0.2, -3.0), (-0.5, -0.5)])


def test_only_tokens_of_the_newest_weights_and_given_ones_are_trained_on():
    spans = (Span(GIVEN, 1), Span(3, 1), Span(4, 1)), (Span(3, 2),)
    rollouts = tuple(replace(one, spans=of) for one, of in zip(TWO.rollouts, spans, strict=True))
    found = advantages(made.advantage("fresh"), replace(TWO, rollouts=rollouts), [0, 1])
    assert found.numpy() == pytest.approx(np.array([[HALF, 0, HALF], [0, 0, 0]]), abs=5e-4)


def test_stored_groups_take_the_place_of_new_ones_and_cost_nothing():
    """Half of four problems are new. Of p0 to p3, p3 is solved by none and not stored; then p4 and p5 beside two of
    p0, p1 and p2."""
    engine, order = Scripted(lambda r: r.sample == 0 and r.prompt.id != "q3"), OnceInOrder(problems(20))
    rule = make("collector", made.part("collector", "fifo", capacity=4))
    collection_of(engine, order, n=2, prompts=4).run(rule)
    collection = collection_of(engine, order, n=2, prompts=4, step=1, version=1)
    groups = collection.run(rule)
    names = [group.prompt.id for group in groups]
    assert names[:2] == ["q4", "q5"] and len(set(names)) == 4 and set(names[2:]) < {"q0", "q1", "q2"}
    assert [len(requests) for requests in engine.rounds] == [8, 4] and len(engine.judged) == 12
    assert [group.prompt.id for group in collection.finished_groups] == ["q4", "q5"]
    assert [one["prompt"][0] for one in rule.state_dict()["stored"]] == ["q1", "q2", "q4", "q5"], "the newest four"


class OnceInOrder(InOrder):
    """No problem comes twice."""

    def pick(self, step: int, count: int, without: Any) -> Any:
        found = [prompt for prompt in self._prompts if prompt.id not in without][:count]
        self._prompts = [prompt for prompt in self._prompts if prompt not in found]
        return found


class Known(Scripted):
    """Two problems, whose tokens read as their numbers."""

    def prompts(self, split: str) -> list[Prompt]:
        return problems(2)

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def solution(self, prompt: Prompt) -> Sequence[int]:
        return range(1, 11)


def test_groups_of_another_run_are_trained_on_with_its_log_probabilities(tmp_path):
    base = {"step": 1, "prompt_id": "q0", "prompt": "0", "reply": "5 9", "finish": "eos", "parts": {}}
    base |= {"token_ids": [5, 9], "logprobs": [None, -0.5]}
    rows = [json.dumps({**base, "sample": place, "reward": float(place)}) for place in (0, 1)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(rows) + "\n")
    rule = make("collector", made.part("collector", "folder", path=str(tmp_path)))
    rule.setup(replace(BENCH, task=Known()))
    engine = Scripted()
    collection = collection_of(engine, InOrder(problems(9)), n=2, prompts=2, sampling=Sampling.plain(8))
    new, read = collection.run(rule)
    assert (new.prompt.id, read.prompt.id, read.totals.tolist()) == ("q1", "q0", [0.0, 1.0])
    assert read.rollouts[1].token_ids == (5, 9) and read.rollouts[1].spans == (Span(GIVEN, 1), Span(0, 1))
    assert math.isnan(read.rollouts[0].sampler_logprobs[0]) and read.rollouts[0].sampler_logprobs[1] == -0.5
    assert [group.prompt.id for group in collection.finished_groups] == ["q1"]


def test_the_harder_a_problem_is_the_more_of_its_solution_is_given():
    """Of two plain replies each, one to p0 is right and none to p1: 0.4 and 0.8 of 10 tokens for the other two."""
    rule = make("collector", made.part("collector", "hint", noise=0.0))
    rule.setup(replace(BENCH, task=Known()))
    engine = Scripted(lambda r: r.prompt.id == "q0" and r.sample == 0)
    engine.reply = (7, 7, 9)
    groups = collection_of(engine, InOrder(problems(2)), n=4, prompts=2, sampling=Sampling.plain(30)).run(rule)
    assert [[num_given(one) for one in group.rollouts] for group in groups] == [[0, 0, 4, 4], [0, 0, 8, 8]]
    assert groups[0].rollouts[2].token_ids == (1, 2, 3, 4, 7, 7, 9)
    assert len({one.request.seed for group in groups for one in group.rollouts}) == 8
    # rewards of p0: 1 0 plain, 0 0 with a hint; then one of those with a hint is right
    arms = made.advantage("arms")
    assert advantages(arms, groups[0], [0, 2]).tolist() == [[0.5] * 3 + [0] * 4, [0.0] * 7]
    right = replace(groups[0], rewards=(groups[0].rewards[1],) * 2 + groups[0].rewards[:2])
    assert advantages(arms, right, [2, 3]).tolist() == [[0.5] * 7, [0] * 4 + [-0.5] * 3]


class ByLength(Scripted):
    """A table gives the tokens of each problem's rollouts; a rollout of more than one token is right."""

    def __init__(self, length: Callable[[Request], int]) -> None:
        super().__init__()
        self.length = length

    def generate(self, requests: Sequence[Request], enough: Any = None) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        stopped_at = None
        for request in sorted(requests, key=self.length):
            length = self.length(request)
            if stopped_at is None or length == stopped_at:
                rollout = Rollout(request, (3,) * length, (-1.0,) * length, Finish.EOS)
                yield rollout
                if stopped_at is None and enough is not None and enough(rollout):
                    stopped_at = length
            else:
                yield Rollout(request, (3,) * stopped_at, (-1.0,) * stopped_at, Finish.PARTIAL)

    def reward(self, prompt: Any, rollout: Rollout) -> Reward:
        return Reward(float(len(rollout) > 1))


def test_long_problems_are_set_aside_and_come_together_worked_by_hand():
    """Two problems a step and one more under way; the lengths of one rollout each. In step 0 p0 and p2 end after 4
    tokens, of which p1 has as many; so step 1 with p3, p4 and p5; then two are aside, and step 2 is theirs."""
    lengths = {"q0": 2, "q1": 9, "q2": 4, "q3": 3, "q4": 3, "q5": 8, "q6": 1, "q7": 2, "q8": 5}
    engine, rule, curriculum = ByLength(lambda r: lengths[r.prompt.id]), Tail(surplus=0.5), OnceInOrder(problems(9))
    told = []
    for step in range(4):
        collection = collection_of(engine, curriculum, n=1, prompts=2, step=step, version=step)
        groups = collection.run(rule)
        aside = [group["prompt"][0] for group in rule.state_dict()["aside"]]
        told.append(([g.prompt.id for g in groups], aside, collection.metrics()["collect/tokens_dropped"]))
        assert collection.metrics()["collect/long_step"] == (step == 2)
    assert told == [
        (["q0", "q2"], ["q1"], 4.0),
        (["q3", "q4"], ["q1", "q5"], 3.0),
        (["q1", "q5"], [], 0.0),
        (["q6", "q7"], ["q8"], 2.0),
    ]


def test_a_load_is_trained_on_from_its_shortest_to_its_longest_before_the_next_begins():
    """Three steps of two problems: p0 and p3, p4 and p1, p2 and p5. Then the next load."""
    lengths = {"q0": 1, "q1": 7, "q2": 9, "q3": 2, "q4": 5, "q5": 12} | {f"q{place}": place for place in range(6, 12)}
    engine = ByLength(lambda r: lengths[r.prompt.id.partition("+")[0]] - r.resumed_tokens)  # of whole rollouts
    rule, curriculum = Sorted(loads=3), OnceInOrder(problems(12))
    trained = []
    for step in range(4):
        groups = collection_of(engine, curriculum, n=1, prompts=2, step=step, version=step).run(rule)
        trained.append({group.prompt.id for group in groups})
    assert trained == [{"q0", "q3"}, {"q4", "q1"}, {"q2", "q5"}, {"q6", "q7"}]
    assert [len(group.rollouts[0]) for group in held_of(rule)] == [7] * 4, "as far as the longest that ended"


def test_the_shortest_are_kept_and_of_equally_long_ones_the_likeliest():
    replies = [(-1.0,) * 5, (-2.0,) * 3, (-0.5,) * 3, (-9.0,), (-1.0,) * 3]
    kept = choose(made.downsample("shortest"), scored(*[0.0] * 5, logprobs=replies), 3, np.random.default_rng(0))
    assert kept == [2, 3, 4]


def test_all_is_as_one_reads_it_in_the_whole_models_answer():
    """Row by row, from logits and hidden states as transformers gives them; an environment's tokens are passed over."""
    model = small_model("qwen3", num_hidden_layers=3)
    rollouts = list(make_engine(small_model()).generate(some_requests(prompts=2, n=2, tokens=14, temperature=0.7)))
    spans = (Span(0, 2), Span(ENVIRONMENT, 2), Span(0, 3))
    rollouts.append(replace(rollouts[0], token_ids=(5, 6, 7, 8, 9, 3, 4), sampler_logprobs=(0.0,) * 7, spans=spans))
    rollouts.append(replace(rollouts[0], token_ids=(), sampler_logprobs=(), spans=()))
    found = read(replace(BENCH, model=model), rollouts, tokens=True)
    for row, one in enumerate(rollouts):
        prompt = one.request.prompt.token_ids
        with torch.no_grad():
            said = model(input_ids=torch.tensor([[*prompt, *one.token_ids]]), output_hidden_states=True)
        own = [len(prompt) + place for place in range(len(one)) if not one.spans[1:] or place not in (2, 3)]
        probs = (said.logits[0][[place - 1 for place in own]] / 0.7).double().softmax(-1)
        assert found.entropies[row] == pytest.approx((-(probs * probs.log()).sum(-1)).numpy(), abs=1e-5)
        top, ids = probs.topk(2, dim=-1)
        assert found.top_ids[row].tolist() == ids.tolist()
        assert found.top_probs[row] == pytest.approx(top.numpy(), abs=1e-5)
        states = said.hidden_states[2][0]  # two thirds of three layers
        ends = [states[list(range(len(prompt)))[-POOLED:]], states[own[-POOLED:]]]
        wanted = torch.cat([end.mean(0) if len(end) else torch.zeros(end.shape[1]) for end in ends])
        assert found.features[row] == pytest.approx(wanted.numpy(), abs=1e-5)


def test_the_ridge_is_the_closed_form_on_a_window_of_steps():
    rng = np.random.default_rng(1)
    features, targets = rng.standard_normal((30, 4)) * [1, 10, 0.1, 1] + 3, rng.random(30)
    probe = Probing(window=2, min_rollouts=30, ridge=0.05, layer=None, n=15, prompts=1)
    probe.add([ProbeRows(rng.random((29, 4)), rng.random(29), np.ones(29))])
    for step in (slice(0, 20), slice(20, 30)):
        probe.add([ProbeRows(features[step], targets[step], np.full(len(targets[step]), np.nan))])
    centred = (features - features.mean(0)) / features.std(0)
    weights = np.linalg.solve(centred.T @ centred + 0.05 * 30 * np.eye(4), centred.T @ (targets - targets.mean()))
    assert probe.predict(features) == pytest.approx(centred @ weights + targets.mean(), abs=1e-12)


def test_the_others_features_predict_a_rollouts_baseline(monkeypatch):
    """After a step in which the reward is 0.2 + 0.5 x of the first feature, and the other is noise: of 1, 0 and 0.5 the
    others predict 0.325, 0.575 and 0.45. Until enough is known the baseline is the mean of the others' rewards."""
    known: list[Any] = []
    flat = (np.zeros(4),) * 40  # entropies: a constant feature is ignored
    monkeypatch.setattr(poise, "read", lambda *given, **named: PolicyReading(known[-1], flat[: len(known[-1])]))

    def advantages(rule: Any, rewards: Any, features: Any) -> list[float]:
        known.append(np.array(features, dtype=float))
        return advantages_of(rule, rewards)

    rule, fresh = made.advantage("probe", min_rollouts=4, ridge=1e-9), made.advantage("probe", min_rollouts=99)
    rule.setup(BENCH)
    fresh.setup(BENCH)
    features, rows = np.random.default_rng(0).random((40, 2)), [[1.0, 0.3], [0.0, 0.1], [0.5, 0.9]]
    advantages(rule, (0.2 + 0.5 * features[:, 0]).tolist(), features)
    rule.observe(0, [])
    assert advantages(rule, [1.0, 0.0, 0.0], rows) == pytest.approx([1 - 0.325, -0.575, -0.45], abs=1e-5)
    assert advantages(fresh, [1.0, 0.25, 0.0], rows) == pytest.approx([0.875, -0.25, -0.625])


PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(40)]


class Growing(Scripted):
    """Sample s of a problem has s + 1 tokens: the numbers 10, 11, ... Those of 12 and more are right."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.sample >= 11)

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        for request in requests:
            size, most = request.sample + 1 - request.resumed_tokens, request.sampling.max_new_tokens
            tokens = tuple(10 + request.resumed_tokens + place for place in range(min(size, most)))
            finish = Finish.EOS if size <= most else Finish.LENGTH
            yield Rollout(request, tokens, (-1.0,) * len(tokens), finish)

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, slots=1, slot_utilisation=1.0)


def test_wrong_ones_are_given_up_once_they_are_told_from_right_ones(monkeypatch):
    """The features say how long a rollout will be. What is given up is not judged, and at least two stay."""
    looked: list[list[int]] = []

    def of_samples(runtime: Any, rollouts: Sequence[Rollout], **words: Any) -> PolicyReading:
        assert all(one.finish is Finish.PARTIAL and len(one) == 5 for one in rollouts)
        looked.append([one.request.sample for one in rollouts])
        return PolicyReading(np.array([[float(one.request.sample), 1.0] for one in rollouts]))

    monkeypatch.setattr(arrol_module, "read", of_samples)
    rule = ready("collector", "arrol", made.OFFERED, warmup=0, min_rollouts=4, keep=0.4)
    rule.setup(BENCH)
    for step in range(3):
        engine = Growing()
        order, sampling = Epochs(PROBLEMS, 3, 7), Sampling.plain(20)
        collection = collection_of(engine, order, n=16, prompts=3, step=step, sampling=sampling)
        groups = collection.run(rule)
        metrics = rule.observe(step, groups)
        dropped = 3 * 16 - sum(len(group.rollouts) for group in groups)
        assert len(engine.judged) == 48 - dropped
        assert looked[-1] == [*range(5, 16)] * 3 and (dropped > 0) == (step > 0)
        assert all(len(one) == one.request.sample + 1 for group in groups for one in group.rollouts)
    assert metrics["prune/kept"] == pytest.approx(1 - dropped / 33)
    solved = [reward.total for g in groups for one, reward in zip(g.rollouts, g.rewards, strict=True) if len(one) > 5]
    assert np.mean(solved) > 5 / 11, "a larger share than without"


LONGEST = 24


class Spelled(Growing):
    """The tokens of sample s: 100 times s + their place. All have LONGEST of them."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for request in requests:
            places = range(request.resumed_tokens, request.resumed_tokens + request.sampling.max_new_tokens)
            tokens = tuple(place + 100 * request.sample for place in places)
            yield Rollout(request, tokens, (-1.0,) * len(tokens), Finish.LENGTH)


def test_siblings_share_exactly_their_prefix(monkeypatch):
    """The root hesitates at tokens 2 and 5. At the first look, after four tokens, a branch begins at 2, at the second
    one at 5, and nothing at 5 in the branch, which has had its own token there in the chunk that it was born in."""

    def hesitates(runtime: Any, rollouts: Sequence[Rollout], **words: Any) -> PolicyReading:
        ids = tuple(np.array([[token, 7] for token in one.token_ids]) for one in rollouts)
        sure = [[(0.45, 0.4) if place in (2, 5) else (1.0, 0.0) for place in range(len(one))] for one in rollouts]
        return PolicyReading(np.zeros((len(rollouts), 0)), (), ids, tuple(map(np.array, sure)))

    monkeypatch.setattr(latr, "read", hesitates)
    rule = make("collector", made.part("collector", "lookahead", chunk=4, prune_after=[3], hand_over=12))
    rule.setup(BENCH)
    sampling = Sampling.plain(LONGEST)
    collection = collection_of(Spelled(), Epochs(PROBLEMS, 1, 7), n=4, prompts=1, sampling=sampling)
    (group,) = collection.run(rule)
    (root, at_2, at_5, plain), metrics = group.rollouts, collection.metrics()
    assert root.token_ids[:6] == (0, 1, 2, 3, 4, 5) and num_given(root) == num_given(plain) == 0
    assert at_2.token_ids[:5] == (0, 1, 7, 103, 104) and num_given(at_2) == 3
    assert at_5.token_ids[:8] == (0, 1, 2, 3, 4, 7, 206, 207) and num_given(at_5) == 6
    assert np.isnan(at_5.sampler_logprobs).tolist() == [True] * 6 + [False] * 18
    assert (metrics["collect/branches"], metrics["collect/pruned"]) == (2.0, 0.0)


PROBED = "collector=arrol collector.at=3 collector.warmup=0 collector.min_rollouts=4 collector.window=2 advantage=probe"
PROBED += " advantage.min_rollouts=4 train.prompts=4 sampling.max_new_tokens=32"
TAIL = "collector=tail collector.surplus=1.0 train.prompts=3 optim.lr=1e-3 sampling.max_new_tokens=40"


@pytest.mark.parametrize(("words", "steps"), [(TAIL, 5), (PROBED, 3)])
def test_what_a_checkpoint_holds_goes_on_to_the_bit(words, steps, tmp_path):
    words = (*words.split(), "record.rollouts=-1", f"train.steps={steps}")
    cut_off_and_resumed(tmp_path, *words, step=steps)
    _, first, *_, last = rows(tmp_path / "alone")
    assert first.get("collect/set_aside") or (last["prune/kept"] < 1 and last["probe/rows"] > 0)
