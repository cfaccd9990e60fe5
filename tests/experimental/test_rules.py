"""The median and parts of a reward: worked numbers, and the definition in plain Python."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import InOrder, Scripted, collection_of
from made import composed, rollout_of
from small import FakeEngine, advantages_of, kept_by, make_engine, plain_batch, scored, small_model
from test_predict import request, rollout

from grpo_cli.collect.episodes import play
from grpo_cli.collect.requests import requests_for
from grpo_cli.collect.resuming import unstarted
from grpo_cli.config.instantiate import make
from grpo_cli.evaluate import search_with
from grpo_cli.experimental import lightning_rl, mc_grpo
from grpo_cli.experimental.dora import cosines, rebase, shared_out
from grpo_cli.experimental.ets import chosen, clusters
from grpo_cli.experimental.oracle import Oracle
from grpo_cli.interfaces import Runtime
from grpo_cli.model.load import load_tokenizer
from grpo_cli.select import select
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Request, Reward, Rollout, Totals


def test_the_release_divides_by_the_median_distance_and_leaves_the_middle_rollout_out():
    """Median .2, distances .2 .1 0 .3 .8, of which .2 is in the middle: each over .201."""
    group = scored(*[Reward(total) for total in (0.0, 1.0, 0.2, 0.5, 0.1)])
    release = made.advantage("median", scale="mad")
    found = select(group, [""] * 5, 4, mc_grpo.all_but_the_middle, release, np.random.default_rng(0), True)
    assert found.indices == (0, 1, 3, 4)
    assert found.advantages.tolist() == pytest.approx([-0.995025, 3.980100, 1.492537, -0.497512], abs=1e-5)
    # by the deviation, of which the variance is (.36^2 + .26^2 + .16^2 + .14^2 + .64^2) / 4 = .163
    by_deviation = advantages_of(made.advantage("median"), [0.0, 0.1, 0.2, 0.5, 1.0])
    assert by_deviation[4] == pytest.approx(0.8 / (0.163**0.5 + 0.001))


def test_a_part_counts_by_its_weight_and_not_by_its_scale():
    """Two parts of scale 1 and 100, of which each rollout has one or both: whitened both are +-.866."""
    rewards = [
        replace(reward, weights={"right": 1.0, "short": 1.0})
        for reward in (
            Reward(101.0, {"right": 1.0, "short": 100.0}),
            Reward(1.0, {"right": 1.0, "short": 0.0}),
            Reward(100.0, {"right": 0.0, "short": 100.0}),
            Reward(0.0, {"right": 0.0}),  # what it does not have is 0
        )
    ]
    per_part = partial(lightning_rl.per_part, stats_over="kept", eps=0.0)
    high = 3**0.5 / 2
    for short, times in ((1.0, [2, 0, 0, -2]), (0.5, [1.5, 0.5, -0.5, -1.5]), (0.0, [1, 1, -1, -1])):
        found = advantages_of(per_part, rewards, weights={"short": short})
        assert found == pytest.approx([high * time for time in times], abs=1e-6)


def test_an_advantage_is_solved_or_not_less_the_value_whatever_the_reward_says(tmp_path):
    """Half of the sampled answers were right: at beta 0.5 the value is 0.5 log((1 + e^2) / 2)."""
    answers = [("sampled", True), ("sampled", False), ("greedy", True)]
    rows = [{"prompt_id": "p", "prompt": "1=", "reason": reason, "solved": solved} for reason, solved in answers]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = [Reward(0.3, {"correct": 1.0}), Reward(0.9, {"correct": 0.0})]
    rule, wanted = made.advantage("a2po", answers=str(tmp_path / "samples.jsonl")), 0.5 * math.log((1 + math.e**2) / 2)
    assert advantages_of(rule, rewards) == pytest.approx([1 - wanted, -wanted])


def test_a_rollout_is_regressed_on_its_advantage():
    """Of two rollouts: log(pi / pi_ref) 1.5 and 1 in sum and advantages 0.5 and -0.5, so with beta 0.4 residuals of 0.1
    and 0.9; the second counts half."""
    weights = torch.tensor([[1.0, 1.0], [0.5, 0.5]])
    batch = plain_batch([[1, 1]] * 2, advantages=torch.tensor([0.5, -0.5]), ref_logprobs=torch.full((2, 2), -2.0))
    batch = replace(batch, weights=weights.flatten())
    policy = torch.tensor([-1.0, -1.5, -1.5, -1.5])
    loss = made.loss("a2po", beta=0.4)(policy, batch, Totals(2, 4, 2)).loss
    assert loss.item() == pytest.approx((0.1**2 + 0.5 * 0.9**2) / 2)


def test_a_reply_whose_end_is_certain_has_a_narrower_clip():
    """Of the last two tokens: probabilities 1 and 1 give 0.05 + 0.15 sigmoid(0) = 0.125, and 0.5 and 0 give
    0.05 + 0.15 sigmoid(4 * 0.75)."""
    old = torch.tensor([[-3.0, 0.0, 0.0], [-3.0, math.log(0.5), -100.0]])
    batch = plain_batch([[1, 1, 1]] * 2, old_logprobs=old)
    moved = old + torch.tensor([[0.5, 0.0, 0.0]] * 2)
    output = made.loss("echo", tail=2)(moved.flatten(), batch, Totals(2, 6, 3))
    clips = [0.05 + 0.15 / (1 + math.exp(-x)) for x in (0.0, 3.0)]
    assert output.metrics["loss/clip_mean"].item() == pytest.approx(sum(clips) / 2)
    # exp(0.5) = 1.65 is clipped; the other two ratios of each reply are 1
    assert output.loss.item() == pytest.approx(-sum(2 + 1 + clip for clip in clips) / 6)


def test_rollouts_are_made_two_at_a_time_until_the_first_success_or_the_bound():
    """Of n = 4, at most 9: p0 is solved at once, p1 by its 6th, p2 by its 9th and last, p3 never."""
    solves = {"p0": 0, "p1": 5, "p2": 8, "p3": 99}
    bank = Scripted(lambda r: r.sample == solves[r.prompt.id])
    collection = collection_of(bank, InOrder([Prompt(name, (0,), "") for name in solves]), n=4, prompts=4)
    groups = collection.run(rule := make("collector", made.part("collector", "aero", most=9)))
    assert (rule.at_once(4, 4), replace(rule, more=9).at_once(4, 4)) == (16, 20)
    metrics = collection.metrics()
    assert [len(group.rollouts) for group in groups] == [4, 6, 9, 9]
    asked = [Counter(request.prompt.id for request in requests) for requests in bank.rounds]
    assert asked[1:] == [{"p1": 2, "p2": 2, "p3": 2}, {"p2": 2, "p3": 2}, {"p2": 1, "p3": 1}]
    assert len(bank.judged) == 28 and len({request.seed for request in bank.judged}) == 28, "each is judged once"
    assert metrics["collect/later_rounds"] == pytest.approx(12 / 28) and metrics["collect/unsolved"] == 1.0


@pytest.mark.parametrize(
    ("right", "wrong", "k", "expected"),
    [
        (1, 31, 1.0, (1, 1)),
        (2, 30, 1.5, (2, 3)),
        (0, 32, 1.0, (0, 1)),  # as of one right answer
        (12, 20, 1.0, (4, 4)),  # 24 are more than 8: half and half
        (30, 2, 1.0, (6, 2)),
        (32, 0, 1.0, (8, 0)),
    ],
)
def test_all_right_answers_and_some_wrong_ones_are_kept_of_32_at_most_8(right, wrong, k, expected):
    rule = make("downsample", made.part("downsample", "aero", k=k))
    group = kept_by(rule, scored(*[1.0] * right, *[0.0] * wrong), 8, np.random.default_rng(0))
    assert (group.solved, len(group.rollouts) - group.solved) == expected


def test_the_baseline_is_the_posterior_mean():
    """2 of 8 right, Beta(1, 1): 3/10. Of the 3 kept, 1 right: 2/5. Beta(1/2, 3/2) and 8: 2.5/10."""
    rewards, kept = [1.0, 1.0, *[0.0] * 6], [0, 6, 7]
    assert advantages_of(made.advantage("beta"), rewards, kept) == pytest.approx([0.7, -0.3, -0.3])
    assert advantages_of(made.advantage("beta", stats_over="kept"), rewards, kept) == pytest.approx([0.6, -0.4, -0.4])
    prior = made.advantage("beta", prior_right=0.5, prior_wrong=1.5)
    assert advantages_of(prior, rewards, kept) == pytest.approx([0.75, -0.25, -0.25])


def test_a_prompt_gets_the_lengths_of_its_recorded_steps_in_turn_also_after_a_resume(tmp_path):
    rows = [(4, "a", 0, 40), (1, "a", 1, 12), (1, "a", 0, 10), (4, "a", 1, 42), (1, "b", 0, 11)]
    names, path = ("step", "prompt_id", "sample", "length"), tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    predictor, both = Oracle(path), [request("a"), request("a", 1)]
    assert predictor.predict([*both, request("b")], None) == [10.0, 12.0, 11.0]
    predictor.learn([rollout(one, 10) for one in both], None)
    resumed = Oracle(path)
    resumed.load_state_dict(json.loads(json.dumps(predictor.state_dict())))
    for one in (predictor, resumed):
        assert one.predict(both, None) == [40.0, 42.0]
        with pytest.raises(UserError, match="sample 2 of prompt a .*record.rollouts=-1"):
            one.predict([request("a"), request("a", 2)], None)
        assert one.predict([request("not recorded")], None) is None
        assert one.predict([replace(request("a"), held_out=True)], None) is None


# Searches of `grpo eval`: which of several replies is the answer, and what they cost.


TOKENIZER = load_tokenizer(made.model())
ARITHMETIC = made.task("arithmetic", TOKENIZER)


def search(choice: str, **changed: Any) -> Any:
    return make("search", made.part("search", choice, **changed))


def problems(count: int) -> list[Prompt]:
    return [ARITHMETIC.prompts("eval")[place] for place in range(count)]


def runtime(engine: Any, model: Any = None, task: Any = ARITHMETIC) -> Runtime:
    return Runtime(torch.device("cpu"), model, TOKENIZER, task, engine)


def answers(choice: Any, engine: Any, prompts: Sequence[Prompt], tokens: int = 12) -> list[Rollout]:
    return list(choice(runtime(engine), prompts, Sampling.plain(tokens), 0)[0])


class Says(FakeEngine):
    """Each sample of a problem has a reply and a log-probability of each of its tokens."""

    def __init__(self, replies: Sequence[tuple[str, float]]) -> None:
        self._replies = replies
        self.read: list[tuple[int, ...]] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for one in reversed(requests):
            self.read.append(one.prompt.token_ids)
            text, logprob = self._replies[one.sample]
            made = rollout_of(one.prompt, text, TOKENIZER, one.sample)
            yield replace(made, request=one, sampler_logprobs=(logprob,) * len(made))


@pytest.mark.parametrize(("found", "words"), [([], "not enough values"), (([], {}), "one whole rollout")])
def test_a_search_of_one_s_own_fails_by_its_name(found: Any, words: str) -> None:
    exam = replace(composed(command="eval").eval, problems=2)
    with pytest.raises(UserError, match=f"search.*{words}"):
        search_with(runtime(Says(())), lambda *given: found, exam, Sampling.plain(5), 0)


def test_best_is_the_likeliest_per_token_and_not_the_shortest_or_right_one():
    """Sums are -0.9 * 2, -0.5 * 6 and -0.6 * 2: the second has the best mean, and the third the best sum."""
    replies = [("7", -0.9), ("3+4=8", -0.5), ("7", -0.6)]
    (found,) = answers(search("best", k=3), Says(replies), problems(1))
    assert found.request.sample == 1


def test_drafts_are_read_before_the_problem_and_the_answer_is_the_problems():
    """The likelier of two drafts, its last four tokens, an empty line, the problem."""
    (prompt,), engine = problems(1), Says([("3+4=8", -0.9), ("1+7=9", -0.5), ("12", -1.0)])
    reads_drafts = search("pdr", drafts=2, keep=1, rounds=1, workspace=4)
    found = reads_drafts(runtime(engine, small_model()), [prompt], Sampling.plain(12), 0)
    draft = TOKENIZER("1+7=9")["input_ids"][-4:]
    assert engine.read[2:] == [(*draft, *TOKENIZER("\n\n")["input_ids"], *prompt.token_ids)]
    assert found[0][0].request.prompt == prompt and found[0][0].request.sample == 2


def test_places_are_shared_among_likely_replies_and_directions():
    """REBASE at T = 1 of scores log 4, log 2, log 1, log 1 and 8 places: 4, 2, 1, 1. Two alike have about half each."""
    scores = [math.log(x) for x in (4, 2, 1, 1)]
    assert rebase(scores, 8, 1.0) == [4, 2, 1, 1] and rebase(scores, 3, 1.0) == [2, 1, 0, 0]
    # 8 x .173 = 1.38 are two, 6 x .156 / .827 = 1.13 of those left are two, and less than one each of the other four
    assert rebase([0.9 - 0.01 * i for i in range(8)], 8, 0.1) == [2, 2, 1, 1, 1, 1, 0, 0]
    alike = cosines(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
    # weights 1/2, 1/2, 1 of equal scores: shares .25, .25, .5 of 3 places are .75, .75 and 1.5, the largest first
    assert shared_out([0.5] * 3, alike, 3, 1.0) == [1, 0, 2]


def test_the_part_of_a_tree_that_goes_on_is_the_best_of_all_choices():
    """Against every subset of leaves: worth less nodes kept and more clusters."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        count = int(rng.integers(1, 7))
        worth, labels = rng.dirichlet(np.ones(count)).tolist(), rng.integers(0, 3, count).tolist()
        paths = [tuple(rng.integers(0, 2, 2).tolist()) for _ in range(count)]
        cost, diversity = rng.random(2) * 2
        nodes = [{("leaf", i), *(path[:end] for end in range(3))} for i, path in enumerate(paths)]
        everything, every = len(set().union(*nodes)), len(set(labels))

        def value(some: Sequence[int], worth=worth, nodes=nodes, labels=labels, c=cost, d=diversity) -> float:
            kept, found = len(set().union(*(nodes[i] for i in some))), len({labels[i] for i in some})
            return sum(worth[i] for i in some) - c * kept / everything + d * found / every  # noqa: B023

        best = max(value(some) for size in range(1, count + 1) for some in combinations(range(count), size))
        found = chosen(worth, paths, labels, cost, diversity)
        assert value(found) == pytest.approx(best)
    assert clusters(cosines(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))) == [0, 0, 1]


def test_one_particle_is_plain_sampling_to_the_bit():
    engine, prompts = make_engine(small_model()), problems(3)
    asked = requests_for(prompts, 1, Sampling.plain(12), 0, "eval", held_out=True)  # as pass@k asks
    plain = {one.request.prompt.id: one for one in play(engine, ARITHMETIC, [unstarted(request) for request in asked])}
    found = answers(search("particle", particles=1, every=3), engine, prompts)
    assert found == [plain[prompt.id] for prompt in prompts]


def test_accuracy_is_of_the_searched_answer_and_tokens_are_those_of_all_replies():
    right = [prompt.answer for prompt in problems(2)]
    assert right[0] != right[1]
    replies = [("x", -1.0), (right[0], -1.0), ("1" + right[0], -1.0), (right[0], -1.0)]
    exam = replace(composed(command="eval").eval, problems=2, temperature=1.0)
    found = search_with(runtime(Says(replies)), search("majority", k=4), exam, Sampling.plain(64), 0)
    lengths = [len(TOKENIZER(text)["input_ids"]) + 1 for text, _ in replies]
    names = ("accuracy", "tokens", "sequential")
    assert [found.metrics[f"search/{name}"] for name in names] == [0.5, sum(lengths), max(lengths)]
    assert [(one.sample, one.reason, one.reply) for one in found.examples] == [(1, "searched", right[0])] * 2
