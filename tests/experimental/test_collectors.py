"""Collectors: worked numbers, exact budgets, and whole steps of rounds with an engine and a judge that are made up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import made
import numpy as np
import pytest
from bank import InOrder, Scripted, collection_of
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.rehearsal import rehearsed
from grpo_cli.config.instantiate import function
from grpo_cli.experimental import xrpo as ci
from grpo_cli.experimental.apportion import hand_out, in_proportion
from grpo_cli.experimental.dars import missing
from grpo_cli.experimental.trace import mixed_gains
from grpo_cli.history import History, Visit
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, Request

Solves = Callable[[Request], bool]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def collector(choice: str, **changed: Any) -> Any:
    return function("collector", made.part("collector", choice, **changed))


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"p{place}", (0,), "") for place in range(count)]


def one_step(
    rule: Any, solves: Solves, *, n: int, prompts: int, history: History | None = None, seed: int = 0
) -> tuple[dict[str, int], Scripted, dict[str, float]]:
    """How many rollouts each problem got, in the order of the groups."""
    bank, curriculum = Scripted(solves), InOrder(problems(8 * prompts))
    collection = collection_of(bank, curriculum, n=n, prompts=prompts, history=history, seed=seed)
    groups = collection.run(rule, bank)
    return {group.prompt.id: len(group.rollouts) for group in groups}, bank, collection.metrics()


def seen(rates: Sequence[float], tried: int = 20) -> History:
    """One visit of each problem, in which that share of rollouts solved it."""
    return History({f"p{place}": [Visit(0, round(rate * tried), tried)] for place, rate in enumerate(rates)})


# ---- sharing out


@settings(max_examples=100)
@given(data=st.data(), most=st.integers(3, 7), count=st.integers(1, 4))
def test_no_division_of_the_rollouts_expects_more_mixed_groups_than_the_one_that_is_made(data, most, count):
    """Against all of them; 0 or at least 2 of each. An odd budget often leaves one where two would be wanted."""
    chances = st.floats(0.05, 9.0)
    solved = np.array(data.draw(st.lists(chances, min_size=count, max_size=count)))
    failed = np.array(data.draw(st.lists(chances, min_size=count, max_size=count)))
    budget = data.draw(st.integers(2, most * count))
    gains = mixed_gains(solved, failed, most)
    worth = gains.cumsum(axis=1)

    def expected(counts: Sequence[int]) -> float:
        return float(sum(worth[place, number] for place, number in enumerate(counts)))

    found = hand_out(gains.tolist(), [0] * count, budget, rng(data.draw(st.integers(0, 5))))
    assert sum(found) == budget and all(number == 0 or 2 <= number <= most for number in found)
    sizes = [0, *range(2, most + 1)]
    best = max(expected(some) for some in itertools.product(sizes, repeat=count) if sum(some) == budget)
    assert expected(found) == pytest.approx(best, abs=1e-12)


@settings(max_examples=100)
@given(
    have=st.lists(st.integers(2, 5), min_size=1, max_size=6),
    extra=st.integers(0, 12),
    seed=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_what_is_handed_out_goes_with_the_problems_whatever_their_order(have, extra, seed, order):
    gains = [[1 / (k + 1) + place / 1000 for k in range(20)] for place in range(len(have))]
    budget = min(extra, sum(19 - number for number in have))
    plain = hand_out(gains, have, budget, rng(seed))
    places = list(range(len(have)))
    order.shuffle(places)
    moved = hand_out([gains[p] for p in places], [have[p] for p in places], budget, rng(seed + 1))
    assert moved == [plain[p] for p in places]
    assert sum(plain) == sum(have) + budget and all(new >= old for new, old in zip(plain, have, strict=True))


@settings(max_examples=150)
@given(
    shares=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=12), least=st.integers(0, 4), spare=st.integers(0, 60)
)
def test_proportional_counts_have_their_sum_and_their_least_and_follow_the_shares(shares, least, spare):
    total = least * len(shares) + spare
    counts = in_proportion(np.array(shares), total, least, rng())
    assert sum(counts) == total and min(counts) >= least
    for (a, one), (b, other) in itertools.product(zip(shares, counts, strict=True), repeat=2):
        assert not (a > b + 1e-6 and one < other), "a larger share has fewer"
    # The smallest shares are raised to the least, as few as will do; the others differ from the proportion by less
    # than one.
    order = sorted(range(len(shares)), key=lambda place: shares[place])
    for raised in range(len(shares) + 1):
        others = order[raised:]
        exact = {p: shares[p] * (total - least * raised) / sum(shares[o] for o in others) for p in others}
        if all(share >= least - 1e-9 for share in exact.values()):
            break
    assert all(abs(counts[place] - share) < 1 + 1e-6 for place, share in exact.items())


def test_equal_remainders_are_drawn_among():
    drawn = Counter(tuple(in_proportion(np.ones(3), 7, 2, rng(seed))) for seed in range(300))
    assert set(drawn) == {(3, 2, 2), (2, 3, 2), (2, 2, 3)} and min(drawn.values()) > 60


# ---- dars


@pytest.mark.parametrize(
    ("n", "most", "weighting", "divided", "expected"),
    [
        (8, 32, "equal", False, [24, 11, 3, 1, 0, 0, 0, 0, 0]),
        (8, 64, "hard", False, [56, 24, 8, 3, 0, 0, 0, 0, 0]),
        (8, 32, "equal", True, [9, 5, 2, 1, 0, 0, 0, 0, 0]),
        (8, 64, "hard", True, [23, 14, 6, 3, 0, 0, 0, 0, 0]),
        (16, 64, "equal", False, [48, 48, 21, 11, 6, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_dars_asks_for_what_the_paper_does(n, most, weighting, divided, expected):
    assert [missing(solved, n, most, weighting, divided) for solved in range(n + 1)] == expected


@settings(max_examples=100)
@given(size=st.integers(2, 60), data=st.data(), weighting=st.sampled_from(["equal", "hard"]), divided=st.booleans())
def test_dars_asks_for_the_fewest_that_reach_its_aim(size, data, weighting, divided):
    """In squares, which are whole: (total * S)^2 >= (emphasis * peak)^2."""
    solved = data.draw(st.integers(0, size))
    p = max(Fraction(solved, size), Fraction(1, 2 * size))
    more = missing(solved, size, 10**9, weighting, divided)
    if p >= Fraction(1, 2):
        assert more == 0
        return
    emphasis = 2 * (1 - p) if weighting == "hard" else 1
    squared = 4 * p * (1 - p) if divided else (2 * p * (1 - p)) ** 2
    aim = (emphasis * (Fraction(size) if divided else Fraction(size, 2))) ** 2
    total = size + more
    assert total**2 * squared >= aim > (total - 1) ** 2 * squared


def first_solved(counts: Mapping[str, int]) -> Solves:
    """The first so many samples of each problem are right."""
    return lambda request: request.sample < counts[request.prompt.id]


def test_dars_makes_a_second_round_of_what_was_hard_in_groups_of_their_first_order():
    solved = {"p0": 4, "p1": 1, "p2": 8, "p3": 2}
    rule = collector("dars", most=32)
    sizes, bank, metrics = one_step(rule, first_solved(solved), n=8, prompts=4)
    assert list(sizes.items()) == [("p0", 8), ("p1", 8 + 11), ("p2", 8), ("p3", 8 + 3)]
    first, second = bank.rounds
    assert [(r.prompt.id, r.sample) for r in first] == [(f"p{p}", s) for p in range(4) for s in range(8)]
    more = [("p1", sample) for sample in range(8, 19)] + [("p3", sample) for sample in range(8, 11)]
    assert [(r.prompt.id, r.sample) for r in second] == more
    judged = Counter((request.prompt.id, request.sample) for request in bank.judged)
    assert set(judged.values()) == {1} and len(judged) == 32 + 14
    assert len({request.seed for request in bank.judged}) == 46
    assert metrics["collect/second_round"] == pytest.approx(14 / 46)
    assert (metrics["collect/rounds"], metrics["collect/rollouts_max"]) == (2.0, 19.0)


def test_dars_has_one_round_where_nothing_is_hard():
    sizes, bank, metrics = one_step(collector("dars"), lambda request: True, n=8, prompts=3)
    assert set(sizes.values()) == {8} and len(bank.rounds) == 1 and metrics["collect/second_round"] == 0.0


@settings(max_examples=60)
@given(solved=st.lists(st.integers(0, 4), min_size=3, max_size=3), room=st.integers(0, 90), seed=st.integers(0, 3))
def test_a_cap_leaves_of_the_second_round_exactly_what_fits(solved, room, seed):
    counts = {f"p{place}": number for place, number in enumerate(solved)}
    rule = collector("dars", cap_rollouts=24 + room)
    sizes, *_ = one_step(rule, first_solved(counts), n=8, prompts=3, seed=seed)
    free, *_ = one_step(collector("dars"), first_solved(counts), n=8, prompts=3)
    assert sum(sizes.values()) == min(24 + room, sum(free.values()))
    assert all(8 <= size <= free[name] for name, size in sizes.items())


# ---- mixed


def chance_of_mixed(solved: float, failed: float, most: int) -> list[float]:
    """Of groups of 2, 3, ... rollouts."""
    return mixed_gains(np.array([solved]), np.array([failed]), most)[0].cumsum()[2:].tolist()


def test_the_chance_of_a_mixed_group_is_that_of_the_beta_distribution():
    uniform = [0.3333, 0.5, 0.6, 0.6667, 0.7143, 0.75, 0.7778]
    assert chance_of_mixed(1.0, 1.0, 8) == pytest.approx(uniform, abs=5e-5)
    assert chance_of_mixed(2.0, 8.0, 5) == pytest.approx([0.2909, 0.4364, 0.5315, 0.6014], abs=5e-5)
    known = chance_of_mixed(0.3e12, 0.7e12, 9)  # hardly a distribution any more
    assert known == pytest.approx([1 - 0.3**m - 0.7**m for m in range(2, 10)], abs=1e-9)


def known_gains(rates: Sequence[float], most: int) -> np.ndarray:
    rate = np.array(rates)
    return mixed_gains(rate * 1e12, (1 - rate) * 1e12, most)


def test_rollouts_go_where_the_next_one_mixes_most():
    gains = known_gains([0.05, 0.25, 0.5, 0.9], 8)
    assert hand_out(gains.tolist(), [2] * 4, 8, rng()) == [2, 5, 4, 5]
    worth = gains.cumsum(axis=1)
    assert sum(worth[place, count] for place, count in enumerate([2, 5, 4, 5])) == pytest.approx(2.1412, abs=5e-5)
    assert worth[:, 4].sum() == pytest.approx(2.0840, abs=5e-5)
    gains = known_gains([0.5, 0.9, 0.05], 8)
    assert hand_out(gains.tolist(), [0] * 3, 8, rng()) == [4, 4, 0]
    assert gains[0, :5].sum() + gains[1, :5].sum() == pytest.approx(1.2188, abs=5e-5)


def test_mixed_looks_at_a_pool_and_leaves_out_what_is_known_to_be_easy_or_hard():
    history = seen([0.0, 1.0, 0.5, 0.0, 1.0, 0.55, 0.0, 0.0, 1.0], tried=40)
    rule = collector("mixed", most=None)
    sizes, bank, metrics = one_step(rule, lambda request: True, n=8, prompts=3, history=history)
    certain = [size for name, size in sizes.items() if name not in ("p2", "p5")]
    assert sizes["p2"] >= 5 and sizes["p5"] >= 5 and max(certain) <= 3 and len(certain) < 7
    assert {int(name[1:]) for name in sizes} <= set(range(9)) and len(bank.rounds) == 1
    beta = {name: history.beta(name, 0.7, 1.0) for name in sizes}
    expected = sum(chance_of_mixed(*beta[name], count)[-1] for name, count in sizes.items())
    assert metrics["collect/expected_mixed"] == pytest.approx(expected)


def test_a_problem_that_was_never_seen_is_worth_more_than_one_that_always_failed():
    sizes, *_ = one_step(
        collector("mixed", pool=2), lambda request: True, n=2, prompts=2, history=seen([0.0, 0.0, 0.0], tried=20)
    )
    assert sizes == {"p3": 4}, "2n of the only one that is new"


def test_earlier_visits_fade():
    """Long ago it was solved always, then never; the other way round it is as uncertain with decay 1, not with 0."""
    history = History({"p0": [Visit(0, 8, 8), Visit(1, 0, 8)], "p1": [Visit(0, 4, 8), Visit(1, 4, 8)]})
    both, *_ = one_step(collector("mixed", pool=2, decay=1.0), lambda r: True, n=8, prompts=1, history=history)
    assert both == {"p0": 4, "p1": 4}
    last, *_ = one_step(collector("mixed", pool=2, decay=0.0), lambda r: True, n=8, prompts=1, history=history)
    assert last["p1"] > last.get("p0", 0)


def mixed_groups(choice: str, seed: int, steps: int = 60, count: int = 300, **changed: Any) -> int:
    """In so many steps of 8 x 16 rollouts on problems of difficulty N(0, 4), while the solver gets better by what is
    mixed. Whether a rollout is right hangs on its seed, as which rollouts a model makes does."""
    difficulty = rng(seed).normal(0, 4, count)
    ability, total, history = 0.0, 0, History()
    rule, curriculum = collector(choice, **changed), Epochs(problems(count), 16, seed)
    bank = Scripted(
        lambda request: request.seed / 2**64 < 1 / (1 + np.exp(difficulty[int(request.prompt.id[1:])] - ability))
    )
    for step in range(steps):
        collection = collection_of(bank, curriculum, n=8, prompts=16, history=history, step=step, seed=seed)
        groups = collection.run(rule, bank)
        assert sum(len(group.rollouts) for group in groups) == 128
        mixed = sum(0 < group.solved < len(group.rollouts) for group in groups)
        total, ability = total + mixed, ability + 0.02 * mixed / 16
        history.observe(step, groups)
    return total


@pytest.mark.matrix
def test_on_a_bank_of_problems_a_pool_mixes_half_as_many_groups_again():
    """In part since the groups are smaller and more: what was seen of problems has its own tenth in it."""
    for seed in range(2):
        plain, pooled = mixed_groups("equal", seed), mixed_groups("mixed", seed, pool=3)
        blind = mixed_groups("mixed", seed, pool=3, prior=1e9)  # beside which nothing that was seen counts
        assert pooled >= 1.5 * plain and pooled >= 1.1 * blind, (seed, plain, pooled, blind)


# ---- sqrt


def test_sqrt_is_in_proportion_to_the_deviation():
    rates = [0.05 + 0.1 * place for place in range(10)]
    sizes, *_ = one_step(collector("sqrt"), lambda request: True, n=4, prompts=10, history=seen(rates))
    assert list(sizes.values()) == [2, 4, 4, 5, 5, 5, 5, 4, 4, 2]
    deviations = np.sqrt([rate * (1 - rate) for rate in rates])
    exact = [2.199, 3.602, 4.368, 4.812, 5.019]
    assert (4 * deviations / deviations.mean()).tolist() == pytest.approx(exact + exact[::-1], abs=5e-4)


def test_sqrt_takes_a_new_problem_for_the_most_uncertain_and_floors_the_certain():
    """Deviations .1 (floored), .1, .5 and .5 (unseen) of n=6: 2, 2, 10, 10."""
    history = seen([0.0, 1.0, 0.5])
    sizes, *_ = one_step(collector("sqrt", floor=0.1), lambda request: True, n=6, prompts=4, history=history)
    assert list(sizes.values()) == [2, 2, 10, 10]
    sizes, *_ = one_step(collector("sqrt", floor=0.5), lambda request: True, n=6, prompts=4, history=history)
    assert list(sizes.values()) == [6] * 4


# ---- ci


def test_intervals_narrow_by_so_much():
    assert 0.5 * ci._half_width(4) == pytest.approx(0.7956, abs=5e-5)
    assert 0.5 * ci.narrowing(4) == pytest.approx(0.1748, abs=5e-5)
    assert 0.5 * ci.narrowing(8) == pytest.approx(0.0337, abs=5e-5)


def test_ci_goes_on_with_what_is_uncertain_in_as_many_rounds():
    """24 rollouts of 3 problems in 3 rounds of 8. One problem is always right, one never, one every other time."""
    rule = collector("ci", explore=0.0)
    sizes, bank, metrics = one_step(
        rule, lambda r: {"p0": True, "p1": False, "p2": r.sample % 2 == 0}[r.prompt.id], n=8, prompts=3
    )
    assert [len(requests) for requests in bank.rounds] == [8, 8, 8] and metrics["collect/rounds"] == 3.0
    assert sizes["p2"] > sizes["p0"] and sizes["p2"] > sizes["p1"] and min(sizes.values()) >= 3
    assert sorted(Counter(request.prompt.id for request in bank.rounds[0]).values()) == [2, 3, 3]


@settings(max_examples=200)
@given(n=st.integers(2, 9), prompts=st.integers(1, 6), rounds=st.integers(1, 9), seed=st.integers(0, 50))
def test_ci_leaves_nothing_of_its_budget_in_any_number_of_rounds(n, prompts, rounds, seed):
    sizes, bank, _ = one_step(
        collector("ci", rounds=rounds), lambda r: r.seed % 2 == 0, n=n, prompts=prompts, seed=seed
    )
    assert sum(sizes.values()) == n * prompts and len(bank.rounds) <= rounds
    later = [len(requests) for requests in bank.rounds[1:]]
    assert max(later, default=0) - min(later, default=0) <= 1, "what does not divide is shared out"


# ---- all


@settings(max_examples=40)
@given(
    choice=st.sampled_from(["mixed", "sqrt", "ci"]),
    n=st.integers(2, 9),
    prompts=st.integers(1, 6),
    rates=st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.5, 1.0]), max_size=6),
    seed=st.integers(0, 50),
)
def test_a_step_has_exactly_its_rollouts_and_no_group_of_one(choice, n, prompts, rates, seed):
    rule = collector(choice)
    sizes, bank, metrics = one_step(
        rule, lambda r: r.seed % 2 == 0, n=n, prompts=prompts, history=seen(rates), seed=seed
    )
    assert sum(sizes.values()) == n * prompts and min(sizes.values()) >= 2
    assert metrics["collect/rollouts_min"] >= 2.0 and (choice == "mixed" or len(sizes) == prompts)
    judged = Counter((request.prompt.id, request.sample) for request in bank.judged)
    assert set(judged.values()) == {1} and len(judged) == n * prompts
    for name, size in sizes.items():
        assert {sample for problem, sample in judged if problem == name} == set(range(size))
    most = n * prompts if choice == "sqrt" else 2 * n
    assert max(sizes.values()) <= most
    again, *_ = one_step(
        collector(choice), lambda r: r.seed % 2 == 0, n=n, prompts=prompts, history=seen(rates), seed=seed
    )
    assert again == sizes, "a function of the step's seed"


@pytest.mark.parametrize("choice", ["dars", "mixed", "sqrt", "ci"])
@pytest.mark.parametrize(("n", "prompts"), [(2, 1), (16, 16), pytest.param(4100, 3, marks=pytest.mark.matrix)])
def test_a_rehearsal_knows_how_much_is_asked_for(choice, n, prompts):
    rule = collector(choice, **({"most": 2 * n} if choice == "dars" else {}))
    size = rehearsed(rule, n, prompts)
    assert size.picked == (3 * prompts if choice == "mixed" else prompts)
    assert size.rollouts == n * prompts if choice != "dars" else 1.4 < size.rollouts / (n * prompts) < 2.01
    assert size.at_once <= size.rollouts and size.problems <= size.picked


@pytest.mark.parametrize(
    ("choice", "changed", "message"),
    [
        ("dars", {"most": 7}, "collector.most=7 is less than n=8, with which every problem begins"),
        ("dars", {"cap_rollouts": 31}, r"collector.cap_rollouts=31 is less than the 32 rollouts of the first round"),
        ("mixed", {"most": 3, "pool": 2}, "collector.most=3 with collector.pool=2 has room for 6 of n=8 rollouts"),
        ("sqrt", {"least": 9}, "collector.least=9 is more than n=8"),
        ("ci", {"most": 7}, "collector.most=7 is less than n=8"),
    ],
)
def test_settings_that_cannot_be_had_are_refused_in_a_sentence(choice, changed, message):
    with pytest.raises(UserError, match=message):
        rehearsed(collector(choice, **changed), 8, 4)
