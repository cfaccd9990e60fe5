"""Curricula that learn: their golden numbers, what they make of a bank of problems, and what they refuse."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import made
import numpy as np
import pytest
import torch
from bank import group_of, problems
from hypothesis import given, settings

from grpo_cli.collect.epochs import CandidateOrder, Epochs
from grpo_cli.config.instantiate import make
from grpo_cli.history import History, Visit
from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt

RULES = ("epochs", "dps", "target")


def curriculum(
    choice: str,
    prompts: Sequence[Prompt],
    *,
    per_step: int = 1,
    steps: int = 1000,
    n: int = 8,
    seed: int = 0,
    history: History | None = None,
    **changed: Any,
) -> Any:
    """As a run makes it of `conf/`."""
    offered = {"prompts": prompts, "per_step": per_step, "steps": steps, "n": n, "seed": seed}
    offered["history"] = History() if history is None else history
    return make("curriculum", made.part("curriculum", choice, **changed), offered)


def ids(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


# dps by hand


def predictions(solved: Sequence[int | None], **changed: Any) -> list[float]:
    """The chance to be mixed of a problem after each of its looks: how many of 8 rollouts solved it, None where none
    was made of it."""
    prompts = problems(2)
    rule = curriculum("dps", prompts, per_step=2, pool=1, **changed)
    found = []
    for step, count in enumerate(solved):
        rule.pick(step, 2, frozenset())
        rule.observe(step, [group_of(prompts[1], 0), *([] if count is None else [group_of(prompts[0], count)])])
        # a copy is asked, whose own visit changes nothing here
        copy = curriculum("dps", prompts, per_step=2, pool=1, **changed)
        copy.load_state_dict(rule.state_dict())
        copy.pick(step + 1, 2, frozenset())
        found.append(copy.observe(step + 1, [group_of(prompts[0], 4)])["curriculum/predicted_mixed"])
    return found


@pytest.mark.parametrize(
    ("solved", "changed", "expected"),
    [
        ((4, 1, 7), {}, (0.4, 0.52, 0.5636)),
        ((4, None, None, None, None), {}, (0.4, 0.3684, 0.3514, 0.3425, 0.3379)),
        ((8, 8), {}, (0.3, 0.24)),
        ((0, 0, 3), {}, (0.3, 0.24, 0.3243)),
        ((4, 4, 4), {"decay": 0.0}, (0.4, 0.5, 0.5)),  # the last way alone counts
    ],
)
def test_a_problem_s_chance_to_be_mixed_is_that_of_its_chain(
    solved: Sequence[int | None], changed: Mapping[str, Any], expected: Sequence[float]
) -> None:
    assert predictions(solved, **changed) == pytest.approx(expected, abs=5e-5)


# target by hand


def with_rates(rates: Sequence[float]) -> History:
    return History({f"q{i}": [Visit(0, round(100 * rate), 100)] for i, rate in enumerate(rates)})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"temperature": 0.1}, [0.0141, 0.1044, 0.7718, 0.1044, 0.0052]),
        ({}, [0, 0, 1, 0, 0]),  # at a low temperature the nearest is taken
        ({"target": 1.0}, [0, 0, 0, 0, 1]),
        ({"target": 0.0}, [1, 0, 0, 0, 0]),
    ],
)
def test_problems_are_drawn_by_how_near_their_rates_are(changed: Any, expected: Sequence[float]) -> None:
    draws = 1000
    rule = curriculum("target", problems(5), history=with_rates((0.1, 0.3, 0.5, 0.7, 1.0)), pool=100, **changed)
    counts = Counter(rule.pick(step, 1, frozenset())[0].id for step in range(draws))
    for place, chance in enumerate(expected):
        assert abs(counts[f"q{place}"] / draws - chance) <= 4 * np.sqrt(chance * (1 - chance) / draws)


def test_an_unseen_problem_has_half_a_chance_and_a_visit_weighs_by_its_age() -> None:
    history = History({"q0": [Visit(0, 8, 8), Visit(1, 0, 8)], "q1": [Visit(0, 2, 8)]})
    rule = curriculum("target", problems(3), history=history, pool=3, decay=0.5)
    rule.pick(0, 3, frozenset())
    groups = [group_of(prompt, 0) for prompt in problems(3)]
    found = rule.observe(0, groups)["curriculum/predicted_rate"]
    assert found == pytest.approx((1 / 3 + 0.25 + 0.5) / 3)
    rule.pick(1, 3, frozenset())
    assert rule.observe(1, groups[2:]) == {"curriculum/predicted_rate": 0.5}, "what was not asked says nothing"


# On a bank


# What is kept


COURSES = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=6, max_size=6)), max_size=8)


@pytest.mark.parametrize("choice", RULES)
@given(course=COURSES, pool=st.integers(1, 5), count=st.integers(1, 6), seed=st.integers(0, 3))
@settings(max_examples=40)
def test_what_is_put_back_picks_the_same(choice: str, course: Any, pool: int, count: int, seed: int) -> None:
    prompts, history = problems(12), History()
    words = {} if choice == "epochs" else {"pool": pool}
    first = curriculum(choice, prompts, seed=seed, history=history, **words)
    for step, (wanted, solved) in enumerate(course):
        picked = first.pick(step, wanted, frozenset())
        assert len(set(picked)) == wanted
        groups = [group_of(prompt, solved[i], 5) for i, prompt in enumerate(picked[:-1] if solved[0] else picked)]
        history.observe(step, groups)
        first.observe(step, groups)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    again = curriculum(choice, prompts, seed=seed, history=history, **words)
    again.load_state_dict(state)
    step = len(course)
    picked = first.pick(step, count, frozenset())
    first.observe(step, [group_of(prompt, 2, 5) for prompt in picked])
    assert ids(again.pick(step, count, frozenset())) == ids(picked), "also once the first has gone on"
    again.observe(step, [group_of(prompt, 0, 5) for prompt in picked])
    then = curriculum(choice, prompts, seed=seed, history=history, **words)
    then.load_state_dict(state)
    assert ids(then.pick(step, count, frozenset())) == ids(picked), "what was kept has not moved on"


# Several picks in a step, and steps that are made again


# Candidates, and the order of epochs


def test_candidates_are_the_next_of_the_order_and_all_where_there_are_fewer() -> None:
    prompts = problems(10)
    order = Epochs(prompts, 2, 0)
    some = CandidateOrder(prompts, 2, 0, pool=3)
    for step in range(4):
        assert some.places(step, 2, frozenset()) == order.places(step, 6, frozenset())
    assert some.places(4, 4, frozenset()) == [*range(10)]
    assert some.places(5, 3, frozenset({"q4"})) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert set(some.places(6, 2, frozenset({"q4", "q7"}))).isdisjoint({4, 7})
    with pytest.raises(UserError, match="step 7 picks 11 different problems, but the task has 10"):
        some.places(6, 9, frozenset({"q4", "q7"}))


def test_an_order_leaves_out_what_a_step_has_and_takes_any_number() -> None:
    prompts = problems(7)
    order = Epochs(prompts, 2, 0)
    without = frozenset({"q1", "q5"})
    for step in range(50):
        found = ids(order.pick(step, 1 + step % 5, without))
        assert len(set(found)) == 1 + step % 5 and without.isdisjoint(found)
    with pytest.raises(UserError, match="picks 8 different problems, but the task has 7"):
        order.pick(50, 6, without)
    plain = Epochs(prompts, 1, 0)
    taken = [place for count in (1, 2, 3, 1) for place in plain.places(0, count, frozenset())]
    assert sorted(taken) == [*range(7)], "an epoch whose steps differ in size still takes each once"


# What is refused


@pytest.mark.parametrize("choice", ["dps", "target"])
def test_a_task_that_is_never_revisited_is_refused(choice: str) -> None:
    curriculum(choice, problems(100), per_step=4, steps=25)
    with pytest.raises(UserError, match=f"curriculum={choice} .*train_problems=24"):
        curriculum(choice, problems(100), per_step=4, steps=24)
