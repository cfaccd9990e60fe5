"""Searches that grow a tree of replies: how places are shared out (DORA), and which leaves are worth them (ETS)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import made
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import composed
from small import VOCABULARY, make_engine, small_model
from test_search import ARITHMETIC, TOKENIZER, exam, problems, refusal, search
from tiny_hf import make_tokenizer
from words import rollout_of

from grpo_cli.collect.episodes import play
from grpo_cli.collect.requests import requests_for
from grpo_cli.collect.resuming import begun
from grpo_cli.collect.search import Searching
from grpo_cli.evaluate import search_with
from grpo_cli.interfaces import Bench
from grpo_cli.methods import ets
from grpo_cli.methods.dora import Leaf, cosines, grown, rebase, shared_out, voted
from grpo_cli.methods.ets import chosen, clusters
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Rollout

COPIES = np.array([[1, 1, 1, 0.2], [1, 1, 1, 0.2], [1, 1, 1, 0.2], [0.2, 0.2, 0.2, 1]])
TWO_BRANCHES = [(0,), (0,), (1,), (1,)]


def bench_of(model: Any, task: Any = ARITHMETIC, tokenizer: Any = TOKENIZER) -> Bench:
    return Bench(torch.device("cpu"), model, tokenizer, 0, task, make_engine(model))


def flat(rollouts: Sequence[Rollout]) -> np.ndarray:
    return np.ones((len(rollouts), 3))


# How places are shared out


@pytest.mark.parametrize(
    ("scores", "temperature", "counts"),
    [
        ((0.9, 0.8, 0.5, 0.1), 0.2, [5, 3, 0, 0]),  # 8 times .568 .344 .077 .010
        ((0.9, 0.8, 0.5, 0.1), 1.0, [3, 3, 2, 0]),  # 8 times .331 .299 .222 .149
        ((0.1, 0.5, 0.8, 0.9), 0.2, [0, 0, 3, 5]),
        ((0.5,), 0.2, [8]),
    ],
)
def test_places_go_from_the_best_down_while_there_are_any(
    scores: Sequence[float], temperature: float, counts: list[int]
) -> None:
    assert rebase(scores, 8, temperature) == counts


def test_replies_in_one_direction_share_what_one_in_another_has_alone() -> None:
    """Diagonals are 1/3, 1/3, 1/3 and 1, of which shares are 1/6, 1/6, 1/6 and 1/2: of 8 places 1.33 three times, and
    4."""
    assert shared_out([0.7] * 4, COPIES, 8, 0.1) == [1, 1, 1, 4]
    assert shared_out([0.7] * 4, np.eye(4), 8, 0.1) == [2, 2, 2, 2]
    # The last is so bad that REBASE leaves it nothing, and its direction no longer counts.
    assert shared_out([0.9, 0.9, 0.9, 0.1], COPIES, 8, 0.1) == [3, 3, 2, 0]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=9), st.integers(0, 9), st.floats(0.01, 2), st.integers(0, 99))
def test_no_more_places_are_given_out_than_there_are_and_some_are(
    scores: list[float], more: int, temperature: float, seed: int
) -> None:
    states, places = np.random.default_rng(seed).normal(size=(len(scores), 2)), len(scores) + more
    counts = shared_out(scores, cosines(states), places, temperature)
    assert 1 <= sum(counts) <= places and min(counts) >= 0 and sum(rebase(scores, places, temperature)) == places


# Which leaves are worth them


def test_a_tree_keeps_what_is_worth_its_nodes() -> None:
    """Seven nodes: the problem, two branches, four leaves. Leaves 1 and 2 need four of them: .7 - 4/7; all: 1 - 1, and
    1.4 for both clusters; 1, 2 and 4: .8 - 6/7 + 1.4."""
    worth, labels = (0.4, 0.3, 0.2, 0.1), (0, 0, 0, 1)
    assert chosen(worth, TWO_BRANCHES, labels, 1.0, 0.0) == ([0, 1], pytest.approx(0.7 - 4 / 7))
    assert chosen(worth, TWO_BRANCHES, labels, 1.0, 1.4) == ([0, 1, 2, 3], pytest.approx(1.4))
    # A little dearer, and the third leaf is not worth its node: .8 - 1.5 * 6/7 + 1.4, of all 1 - 1.5 + 1.4.
    assert chosen(worth, TWO_BRANCHES, labels, 1.5, 1.4) == ([0, 1, 3], pytest.approx(0.8 - 9 / 7 + 1.4))


def every_choice(
    worth: Sequence[float], paths: Sequence[ets.Path], labels: Sequence[int], cost: float, diversity: float
) -> float:
    """The most that any leaves are worth, all of them being tried."""

    def nodes(some: Sequence[int]) -> int:
        return len(some) + len({paths[i][:end] for i in some for end in range(len(paths[i]) + 1)})

    everything = range(len(worth))
    return max(
        sum(worth[i] for i in some) - cost * nodes(some) / nodes(everything)
        + diversity * len({labels[i] for i in some}) / len(set(labels))
        for size in range(1, len(worth) + 1)
        for some in combinations(everything, size)
    )  # fmt: skip


@given(st.data(), st.integers(1, 7), st.floats(0, 3), st.floats(0, 3))
def test_the_choice_is_the_best_of_all(data: st.DataObject, count: int, cost: float, diversity: float) -> None:
    some = st.lists(st.floats(0, 1), min_size=count, max_size=count)
    worth = [one / count for one in data.draw(some)]
    paths = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=count, max_size=count))
    labels = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    kept, value = chosen(worth, paths, labels, cost, diversity)
    assert kept and value == pytest.approx(every_choice(worth, paths, labels, cost, diversity))


def test_clusters_are_joined_by_the_mean_distance_of_their_members() -> None:
    """On a circle, in degrees: cosines of 10 and 20 degrees are .985 and .940, so that 0 and 10 are joined, while 25 is
    too far from them on average (.906 and .966: .936), though near to 10."""

    def at(*degrees: float) -> list[int]:
        turned = np.radians(degrees)
        return clusters(cosines(np.stack([np.cos(turned), np.sin(turned)], axis=1)))

    assert at(0, 10, 25) == [0, 0, 1] and at(0, 10, 20) == [0, 0, 0] and at(0, 90, 1) == [0, 1, 0] and at(7) == [0]
    assert clusters(cosines(np.zeros((2, 3)))) == [0, 1]


# The tree that grows


@pytest.mark.parametrize("choice", ["dora", "ets"])
def test_one_reply_is_plain_sampling_to_the_bit(choice: str) -> None:
    model, prompts = small_model(), problems(3)
    engine = make_engine(model)
    asked = requests_for(prompts, 1, Sampling.plain(12), 0, "eval", held_out=True)  # as pass@k asks
    plain = {one.request.prompt.id: one for one in play(engine, ARITHMETIC, [begun(request) for request in asked])}
    desk = Searching(engine, ARITHMETIC, prompts, Sampling.plain(12), 0)
    assert search(choice, width=1, every=3)(desk) == [plain[prompt.id] for prompt in prompts]


def test_what_goes_on_is_copied_and_its_path_names_what_it_has_grown_from() -> None:
    engine = make_engine(small_model(), eos_token_ids=(VOCABULARY,))  # which is never drawn
    desk = Searching(engine, ARITHMETIC, problems(2), Sampling.plain(8), 0, read_states=flat)
    seen: list[list[Leaf]] = []

    def third_alone(leaves: Sequence[Leaf], states: np.ndarray, places: int) -> list[int]:
        assert places == 3 and states.shape == (3, 3)
        seen.append([*leaves])
        return [0, 0, 3] if len(seen) <= 2 else [1, 2, 0]

    found = grown(desk, 3, 3, third_alone)
    first, _, second, _ = seen
    assert [leaf.path for leaf in first] == [()] * 3 and [leaf.path for leaf in second] == [(2,)] * 3
    assert {leaf.reply.token_ids[:3] for leaf in second} == {first[2].reply.token_ids}
    assert len({leaf.reply.token_ids for leaf in second}) == 3, "each copy draws on its own"
    begins = [one.token_ids[:6] for one in found[0]]
    assert begins == [second[0].reply.token_ids, second[1].reply.token_ids, second[1].reply.token_ids]
    assert [len(one) for one in found[0]] == [8, 8, 8] and {one.finish for one in found[0]} == {Finish.LENGTH}
    assert desk.tokens == 2 * 3 * 8 and set(desk.sequential.values()) == {8}


def test_places_that_rounding_left_are_there_again_at_the_next_step() -> None:
    engine = make_engine(small_model(), eos_token_ids=(VOCABULARY,))
    desk = Searching(engine, ARITHMETIC, problems(1), Sampling.plain(6), 0, read_states=flat)
    sizes: list[tuple[int, int]] = []

    def two_then_all(leaves: Sequence[Leaf], states: np.ndarray, places: int) -> list[int]:
        sizes.append((len(leaves), places))
        return [1, 1, 0, 0] if len(leaves) == 4 else [2, 2]

    (row,) = grown(desk, 4, 2, two_then_all)
    assert sizes == [(4, 4), (2, 4)] and len(row) == 4


@pytest.mark.parametrize("choice", ["dora", "ets"])
def test_the_model_is_read_and_an_answer_found_for_each_problem(choice: str) -> None:
    found = search_with(bench_of(small_model()), search(choice, width=4, every=3), exam(), Sampling.plain(12), 0)
    assert 0 <= found.metrics["search/accuracy"] <= 1 and 12 < found.metrics["search/tokens"] <= 48
    again = search_with(bench_of(small_model()), search(choice, width=4, every=3), exam(), Sampling.plain(12), 0)
    assert again == found


def test_directions_are_the_mean_of_the_last_layer_over_the_reply() -> None:
    model, seen = small_model(), list[Any]()

    def look(desk: Searching) -> None:
        rollouts = [rollout_of(desk.prompts[0], text, TOKENIZER) for text in ("1+2=3", "7")]
        seen.append((rollouts, desk.states(rollouts)))

    search_with(bench_of(model), look, exam(), Sampling.plain(12), 0)
    ((rollouts, states),) = seen
    for one, state in zip(rollouts, states, strict=True):
        ids = torch.tensor([[*one.request.prompt.token_ids, *one.token_ids]])
        own: list[torch.Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(
            lambda module, inputs, output, own=own: own.append(output[0] if isinstance(output, tuple) else output)
        )
        model(input_ids=ids)
        hook.remove()
        expected = own[0][0, -len(one) :].detach().mean(dim=0)
        np.testing.assert_allclose(state, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_the_answer_has_the_largest_sum_of_scores() -> None:
    """Two replies of a probability of .5 a token say 7, one of .9 says 8: 1.0 against .9; with .4 the other way."""
    prompt = problems(1)[0]
    desk = Searching(make_engine(small_model()), ARITHMETIC, [prompt], Sampling.plain(8), 0)

    def said(text: str, chance: float, sample: int) -> Rollout:
        one = rollout_of(prompt, text, TOKENIZER, sample)
        return Rollout(one.request, one.token_ids, (float(np.log(chance)),) * len(one), one.finish, 0)

    for chance, place in ((0.5, 1), (0.4, 0)):
        replies = [said("8", 0.9, 0), said("7", chance, 1), said("3+4=7", chance, 2)]
        assert voted(desk, replies).request.sample == place
    unread = made.task("guess", make_tokenizer())
    silent = Searching(make_engine(small_model()), unread, [prompt], Sampling.plain(8), 0)
    assert voted(silent, [said("8", 0.3, 0), said("7", 0.6, 1)]).request.sample == 1
    assert voted(desk, [said("x", 0.3, 0), said("y", 0.6, 1)]).request.sample == 1, "what cannot be read has no vote"


# What is refused


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["search=dora", "search.width=0"], "search.width=0 must be from 1 to 65536"),
        (
            ["search=dora", "search.temperature=0"],
            "search.temperature=0.0 must be more than 0: scores are",
        ),
        (["search=ets", "search.width=21"], "search.width=21 must be from 1 to 20: the best of all choices"),
        (["search=ets", "search.every=0"], "search.every=0 must be at least 1"),
        (["search=ets", "search.cost=-1"], "search.cost=-1.0 must be at least 0"),
        (["search=ets", "sparsity=snapkv"], "use sparsity=dense, or search=best"),
        (["search=dora", "task=guess"], "search=dora copies replies of one turn, and task=guess has several"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_searched_is_refused_before_a_model_is_loaded(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_without_a_model_to_read_it_is_said() -> None:
    engine = make_engine(small_model(), eos_token_ids=(VOCABULARY,))
    desk = Searching(engine, ARITHMETIC, problems(1), Sampling.plain(8), 0)
    with pytest.raises(UserError, match="none can be read here; use search=majority or best"):
        search("dora", every=2)(desk)
    assert composed("search=ets", command="eval").parts["search"]["diversity"] == 1.4
