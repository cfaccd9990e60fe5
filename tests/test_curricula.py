"""Curricula: the order of epochs, golden numbers of those that learn, and what they take up again from a checkpoint."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
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

NOBODY = frozenset[str]()


def curriculum(choice: str, prompts: Sequence[Prompt], history: History, per_step: int = 1, **changed: Any) -> Any:
    """As a run makes it of `conf/`."""
    offered = {"prompts": prompts, "per_step": per_step, "steps": 25, "n": 8, "seed": 0, "history": history}
    return make("curriculum", made.part("curriculum", choice, **changed), offered)


def ids(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_an_epoch_takes_no_prompt_twice_and_the_next_takes_them_in_another_order() -> None:
    def order(steps: range, seed: int = 0) -> list[str]:
        """The prompts of some steps, as one text a step."""
        epochs = Epochs([Prompt(letter, (5,), "") for letter in "abcdefg"], 2, seed)
        return ["".join(ids(epochs.pick(step, 2, NOBODY))) for step in steps]

    epochs = [order(range(3 * epoch, 3 * epoch + 3)) for epoch in range(20)]
    assert all(len(set("".join(steps))) == 6 for steps in epochs)
    assert len({tuple(steps) for steps in epochs}) > 10  # of 5040 orders
    assert set("".join(sum(epochs, []))) == set("abcdefg")  # one is left over each time, and not the same
    assert order(range(60)) == sum(epochs, []), "whatever was asked for before"
    assert order(range(60), seed=1) != sum(epochs, [])


def test_an_order_leaves_out_what_a_step_has_and_takes_any_number() -> None:
    order, without = Epochs(problems(7), 2, 0), frozenset({"q1", "q5"})
    for step in range(50):
        found = ids(order.pick(step, 1 + step % 5, without))
        assert len(set(found)) == 1 + step % 5 and without.isdisjoint(found)
    with pytest.raises(UserError, match="picks 8 different prompts, but the task has 7"):
        order.pick(50, 6, without)
    plain = Epochs(problems(7), 1, 0)
    taken = [place for count in (1, 2, 3, 1) for place in plain.places(0, count, NOBODY)]
    assert sorted(taken) == [*range(7)], "an epoch whose steps differ in size still takes each once"


def test_candidates_are_the_next_of_the_order_and_all_where_there_are_fewer() -> None:
    prompts = problems(10)
    order, some = Epochs(prompts, 2, 0), CandidateOrder(prompts, 2, 0, pool=3)
    for step in range(4):
        assert some.places(step, 2, NOBODY) == order.places(step, 6, NOBODY)
    assert some.places(4, 4, NOBODY) == [*range(10)]
    assert some.places(5, 3, frozenset({"q4"})) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("solved", "decay", "expected"),
    [
        ((4, 1, 7), 0.5, (0.4, 0.52, 0.5636)),
        ((4, None, None), 0.5, (0.4, 0.3684, 0.3514)),
        ((0, 0, 3), 0.5, (0.3, 0.24, 0.3243)),
        ((4, 4, 4), 0.0, (0.4, 0.5, 0.5)),  # the last way alone counts
    ],
)
def test_dps_predicts_the_chance_to_be_mixed_of_a_chain(solved: Any, decay: float, expected: Sequence[float]) -> None:
    """Check the prediction after each step: how many of 8 rollouts solved the problem, or None without rollouts."""
    prompts, found = problems(2), []
    rule, copy = (curriculum("dps", prompts, History(), 2, pool=1, decay=decay) for _ in range(2))
    for step, count in enumerate(solved):
        rule.pick(step, 2, NOBODY)
        rule.observe(step, [group_of(prompts[1], 0), *([] if count is None else [group_of(prompts[0], count)])])
        rule.observe(step, [])  # a step that has picked nothing has seen nothing
        copy.load_state_dict(rule.state_dict())
        copy.pick(step + 1, 2, NOBODY)
        found.append(copy.observe(step + 1, [group_of(prompts[0], 4)])["curriculum/predicted_mixed"])
    assert found == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"temperature": 0.1}, [0.0141, 0.1044, 0.7718, 0.1044, 0.0052]),
        ({"target": 1.0}, [0, 0, 0, 0, 1]),  # at a low temperature the nearest is taken
    ],
)
def test_problems_are_drawn_by_how_near_their_rates_are(changed: Any, expected: Sequence[float]) -> None:
    rates, draws = (0.1, 0.3, 0.5, 0.7, 1.0), 1000
    history = History({f"q{i}": [Visit(0, round(100 * rate), 100)] for i, rate in enumerate(rates)})
    rule = curriculum("target", problems(5), history, pool=100, **changed)
    counts = Counter(rule.pick(step, 1, NOBODY)[0].id for step in range(draws))
    for place, chance in enumerate(expected):
        assert abs(counts[f"q{place}"] / draws - chance) <= 4 * np.sqrt(chance * (1 - chance) / draws)


def test_an_unseen_problem_has_half_a_chance_and_a_visit_weighs_by_its_age() -> None:
    history = History({"q0": [Visit(0, 8, 8), Visit(1, 0, 8)], "q1": [Visit(0, 2, 8)]})
    rule = curriculum("target", problems(3), history, pool=3, decay=0.5)
    rule.pick(0, 3, NOBODY)
    found = rule.observe(0, [group_of(prompt, 0) for prompt in problems(3)])["curriculum/predicted_rate"]
    assert found == pytest.approx((1 / 3 + 0.25 + 0.5) / 3)


COURSES = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=6, max_size=6)), max_size=8)


@pytest.mark.parametrize("choice", ["epochs", "dps", "target"])
@given(course=COURSES, pool=st.integers(1, 5), count=st.integers(1, 6))
@settings(max_examples=40)
def test_what_is_put_back_picks_the_same(choice: str, course: Any, pool: int, count: int) -> None:
    prompts, history = problems(12), History()
    words = {} if choice == "epochs" else {"pool": pool}
    first, again, then = (curriculum(choice, prompts, history, **words) for _ in range(3))
    for step, (wanted, solved) in enumerate(course):
        picked = first.pick(step, wanted, NOBODY)
        assert len(set(picked)) == wanted
        groups = [group_of(prompt, solved[i], 5) for i, prompt in enumerate(picked[:-1] if solved[0] else picked)]
        history.observe(step, groups)
        first.observe(step, groups)
    saved, step = io.BytesIO(), len(course)
    torch.save(first.state_dict(), saved)
    state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    again.load_state_dict(state)
    picked = first.pick(step, count, NOBODY)
    first.observe(step, [group_of(prompt, 2, 5) for prompt in picked])
    assert ids(again.pick(step, count, NOBODY)) == ids(picked), "also once the first has gone on"
    again.observe(step, [group_of(prompt, 0, 5) for prompt in picked])
    then.load_state_dict(state)
    assert ids(then.pick(step, count, NOBODY)) == ids(picked), "what was kept has not moved on"


@pytest.mark.parametrize("choice", ["dps", "target"])
def test_a_task_that_is_never_revisited_is_refused(choice: str) -> None:
    curriculum(choice, problems(100), History(), 4)
    with pytest.raises(UserError, match=f"curriculum={choice} .*raise train.steps"):
        curriculum(choice, problems(101), History(), 4)
