"""Collectors: worked numbers, exact budgets, and whole steps of rounds with an engine and a judge that are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import made
import numpy as np
import pytest
from bank import InOrder, Scripted, collection_of
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.config.instantiate import make
from grpo_cli.experimental.dars import missing
from grpo_cli.experimental.trace import hand_out, mixed_gains
from grpo_cli.types import Prompt, Request

Solves = Callable[[Request], bool]


def collector(choice: str, **changed: Any) -> Any:
    return make("collector", made.part("collector", choice, **changed))


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"p{place}", (0,), "") for place in range(count)]


def one_step(rule: Any, solves: Solves, *, n: int, prompts: int) -> tuple[dict[str, int], Scripted, dict[str, float]]:
    """How many rollouts each problem got, in the order of the groups."""
    bank, curriculum = Scripted(solves), InOrder(problems(8 * prompts))
    collection = collection_of(bank, curriculum, n=n, prompts=prompts)
    groups = collection.run(rule)
    return {group.prompt.id: len(group.rollouts) for group in groups}, bank, collection.metrics()


# ---- sharing out


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
    best = max(expected(some) for some in itertools.product(sizes, repeat=count) if sum(some) == budget)
    assert best - large <= expected(found) <= best + 1e-12


# ---- dars


@pytest.mark.parametrize(
    ("n", "most", "weighting", "divided", "expected"),
    [
        (8, 32, "equal", False, [24, 11, 3, 1, 0, 0, 0, 0, 0]),
        (8, 64, "hard", True, [23, 14, 6, 3, 0, 0, 0, 0, 0]),
    ],
)
def test_dars_asks_for_what_the_paper_does(n, most, weighting, divided, expected):
    assert [missing(solved, n, most, weighting, divided) for solved in range(n + 1)] == expected


def test_dars_makes_a_second_round_of_what_was_hard_in_groups_of_their_first_order():
    solved = {"p0": 4, "p1": 1, "p2": 8, "p3": 2}
    rule = collector("dars", most=32)
    sizes, bank, metrics = one_step(rule, lambda request: request.sample < solved[request.prompt.id], n=8, prompts=4)
    assert list(sizes.items()) == [("p0", 8), ("p1", 8 + 11), ("p2", 8), ("p3", 8 + 3)]
    assert [len(one) for one in bank.rounds] == [32, 14]
    assert len(bank.judged) == len({request.seed for request in bank.judged}) == 46, "each is judged once"
    assert metrics["collect/second_round"] == pytest.approx(14 / 46)
