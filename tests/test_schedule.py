"""Plans and orders: that they lose nobody, keep their guarantees against exact solvers, and change with names only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import fptas
from simulation import Simulation, simulate

from grpo_cli.engine.makespan import (
    assign,
    lower_bound,
    lpt,
    makespan,
    trimmed_programme,
)
from grpo_cli.engine.scheduling import Fifo, Lpt, Running, Sjf, Waiting, planned_steps
from grpo_cli.support.errors import UserError

SCHEDULERS = [Fifo, Sjf, Lpt, fptas, lambda: fptas(refill="lpt")]
small_instances = st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.integers(1, 4))
instances = settings(max_examples=60)


def optimum(lengths: Sequence[int], slots: int) -> int:
    """The least makespan, by branch and bound: each job to each slot of a different load, the longest job first."""
    best = sum(lengths)
    ordered = sorted(lengths, reverse=True)
    floor = lower_bound(lengths, slots)

    def place(job: int, loads: tuple[int, ...]) -> None:
        nonlocal best
        if max(loads) >= best or best == floor:
            return
        if job == len(ordered):
            best = max(loads)
            return
        for slot in range(slots):
            if loads[slot] not in loads[:slot]:
                place(job + 1, (*loads[:slot], loads[slot] + ordered[job], *loads[slot + 1 :]))

    place(0, (0,) * slots)
    return best


def least_sum_of_round_maxima(lengths: Sequence[int], slots: int) -> int:
    """Over every way to cut every order into rounds of at most `slots`, full ones first or not."""
    if not lengths:
        return 0
    first, rest = lengths[0], list(lengths[1:])
    best = sum(lengths)
    for size in range(min(slots - 1, len(rest)) + 1):
        for mates in itertools.combinations(range(len(rest)), size):
            longest = max([first, *(rest[i] for i in mates)])
            others = [rest[i] for i in range(len(rest)) if i not in mates]
            best = min(best, longest + least_sum_of_round_maxima(others, slots))
    return best


def waiting(predicted: Sequence[float | None], limit: int = 10_000) -> list[Waiting]:
    return [Waiting(index, "p", limit, length) for index, length in enumerate(predicted)]


def run_with_true_lengths(steps: Sequence[int], scheduler, slots: int, rounds: bool = False) -> Simulation:
    """`steps` are decode steps: a request of one token more."""
    lengths = [count + 1 for count in steps]
    return simulate(lengths, [float(length) for length in lengths], scheduler, slots, rounds)


def test_lpt_falls_into_its_known_traps_and_the_plan_gets_out_of_them():
    # 5 | 5 | 4, then 4 3 3 3 to the least load: 5+3+3 | 5+3 | 4+4. The optimum is 5+4 | 5+4 | 3+3+3.
    assert makespan(lpt([5, 5, 4, 4, 3, 3, 3], 3), [5, 5, 4, 4, 3, 3, 3]) == 11
    assert makespan(lpt([5, 4, 3, 3, 3], 2), [5, 4, 3, 3, 3]) == 10
    assert assign([5, 4, 3, 3, 3], 2, epsilon=0.1, max_states=1000).makespan == 9
    scheduler = fptas()
    run_with_true_lengths([5, 5, 4, 4, 3, 3, 3], scheduler, 3)
    figures = [scheduler.details[f"engine/plan_{name}"] for name in ("makespan", "lower_bound", "guarantee")]
    assert figures == [9.0, 9.0, 1.0]


@instances
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(2, 4), st.sampled_from([1e-9, 0.02, 0.1, 0.5]))
def test_the_trimmed_programme_is_within_epsilon_of_the_optimum(lengths, slots, epsilon):
    lists, complete = trimmed_programme(lengths, slots, epsilon, below=sum(lengths) + 1, max_states=10**6)
    assert lists is not None and complete
    assert sorted(job for jobs in lists for job in jobs) == list(range(len(lengths)))
    assert makespan(lists, lengths) <= (1 + epsilon) * optimum(lengths, slots)


@instances
@given(small_instances, st.sampled_from([0.05, 0.3]))
def test_an_assignment_keeps_its_word(instance, epsilon):
    lengths, slots = instance
    plan = assign(lengths, slots, epsilon, max_states=20_000)
    best = optimum(lengths, slots)
    assert sorted(job for jobs in plan.lists for job in jobs) == list(range(len(lengths)))
    assert plan.makespan == makespan(plan.lists, lengths)
    assert plan.makespan <= makespan(lpt(lengths, slots), lengths)
    assert plan.makespan <= plan.guarantee * best + 1e-9
    assert slots > 3 or plan.makespan <= (1 + epsilon) * best
    assert lower_bound(lengths, slots) <= best
    for jobs in plan.lists:
        assert [lengths[job] for job in jobs] == sorted((lengths[job] for job in jobs), reverse=True)


@instances
@given(st.lists(st.integers(1, 60), min_size=1, max_size=10), st.integers(1, 4), st.randoms(use_true_random=False))
def test_reordering_jobs_reorders_the_plan_only(lengths, slots, shuffler):
    order = list(range(len(lengths)))
    shuffler.shuffle(order)
    plan = assign(lengths, slots, 0.1, 20_000)
    shuffled = assign([lengths[job] for job in order], slots, 0.1, 20_000)
    assert (shuffled.makespan, shuffled.guarantee) == (plan.makespan, plan.guarantee)
    assert _loads(shuffled.lists, [lengths[job] for job in order]) == _loads(plan.lists, lengths)
    if len(set(lengths)) == len(lengths):
        assert sorted(tuple(order[job] for job in jobs) for jobs in shuffled.lists) == sorted(plan.lists)


def _loads(lists: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    return sorted([lengths[job] for job in jobs] for jobs in lists)


@pytest.mark.parametrize("make", SCHEDULERS)
@instances
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=16),
    slots=st.integers(1, 6),
    rounds=st.booleans(),
    data=st.data(),
)
def test_every_request_is_admitted_once_and_no_slot_holds_two(make, lengths, slots, rounds, data):
    guess = st.none() | st.floats(0, 50)
    predicted = data.draw(st.lists(guess, min_size=len(lengths), max_size=len(lengths)))
    ran = simulate(lengths, predicted, make(), slots, rounds)
    assert sorted(index for index, _, _ in ran.admitted) == list(range(len(lengths)))
    for slot in range(slots):
        held = sorted((first, first + lengths[index] - 1) for index, at, first in ran.admitted if at == slot)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(held))
    if not rounds:
        steps = [length - 1 for length in lengths]
        floor = lower_bound(steps, ran.slots)
        assert floor <= ran.decode_steps <= (2 - 1 / ran.slots) * max(floor, 1)


@instances
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_order_is_within_graham_s_bound_of_the_optimum(steps, slots, shuffler):
    shuffler.shuffle(steps)
    assert run_with_true_lengths(steps, Fifo(), slots).decode_steps <= (2 - 1 / slots) * optimum(steps, slots)
    longest_first = run_with_true_lengths(steps, Lpt(), slots).decode_steps
    assert longest_first <= (4 / 3 - 1 / (3 * slots)) * optimum(steps, slots)


@instances
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 4))
def test_longest_first_makes_the_best_rounds(steps, slots):
    least = least_sum_of_round_maxima(steps, slots)
    assert run_with_true_lengths(steps, Lpt(), slots, rounds=True).decode_steps == least
    if len(steps) % min(slots, len(steps)) == 0:
        assert run_with_true_lengths(steps, Sjf(), slots, rounds=True).decode_steps == least


@pytest.mark.parametrize("refill", ["sjf", "lpt"])
@instances
@given(st.lists(st.integers(1, 60), min_size=1, max_size=14), st.integers(1, 5))
def test_with_true_lengths_the_plan_is_kept(refill, steps, slots):
    scheduler = fptas(refill=refill)
    ran = run_with_true_lengths(steps, scheduler, slots)
    assert scheduler.assignment is not None
    assert ran.decode_steps <= scheduler.assignment.makespan
    assert scheduler.assignment.makespan <= run_with_true_lengths(steps, Lpt(), slots).decode_steps


def test_fptas_is_lpt_from_the_second_round_on():
    # Its lists are 36 7 5 and 18 16 13: followed to the end, their rounds would be 36 18 | 7 16 | 5 13, of 65 steps.
    ran = run_with_true_lengths([36, 18, 16, 13, 7, 5], fptas(), 2, rounds=True)
    assert [index for index, _, _ in ran.admitted] == [0, 1, 2, 3, 4, 5]
    assert ran.decode_steps == 36 + 16 + 7


@pytest.mark.parametrize(("refill", "place"), [("sjf", -1), ("lpt", 1)])
def test_an_empty_list_takes_from_another_by_the_refill_rule(refill, place):
    # Steps 9 9 3 2 4 1: one slot gets 9 4 1 and the other 9 3 2. The second 9 takes far longer than predicted.
    left = waiting([10.0, 10.0, 4.0, 3.0, 5.0, 2.0])
    scheduler = fptas(refill=refill)
    scheduler.start(left, slots=2)
    assert scheduler.assignment is not None
    first, second = sorted(scheduler.assignment.lists)
    assert scheduler.plan(left, [], 2) == [first[0], second[0]]
    expected = [first[1], first[2], second[place]]
    for index in expected:
        left = [view for view in left if view.index not in (first[0], second[0], *expected[: expected.index(index)])]
        assert scheduler.plan(left, [Running(second[0], 1, 10.0)], 1) == [index]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_plan_that_was_not_followed_is_made_anew(make):
    scheduler = make()
    views = waiting([5.0, 4.0, 3.0, 2.0])
    scheduler.start(views, slots=2)
    scheduler.plan(views, [], 2)
    again = scheduler.plan(views, [], 2)
    assert len({*again}) == 2


@pytest.mark.parametrize(
    ("make", "order"),
    [(Fifo, [0, 1, 2, 3, 4]), (Sjf, [1, 3, 0, 2, 4]), (Lpt, [4, 0, 2, 1, 3]), (fptas, [4, 0, 2, 1, 3])],
)
def test_ties_go_by_request_index_whatever_the_order_they_are_shown_in(make, order):
    views = waiting([5.0, 3.0, 5.0, 3.0, 8.0])
    for shown in itertools.permutations(views):
        scheduler = make()
        scheduler.start(shown, slots=1)
        admitted = []
        while len(admitted) < len(views):
            left = [view for view in shown if view.index not in admitted]
            admitted.append(scheduler.plan(left, [], 1)[0])
        assert admitted == order


def test_steps_are_one_less_than_tokens_and_within_the_limit():
    views = [
        Waiting(0, "p", 100, 20.4),
        Waiting(1, "p", 100, 500.0),
        Waiting(2, "p", 100, 0.0),
        Waiting(3, "p", 100, None),
    ]
    assert planned_steps(views) == {0: 19, 1: 99, 2: 1, 3: 99}  # the mean of the known is 173, above the limit


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"epsilon": float("nan")}, {"max_states": 0}, {"refill": "fifo"}])
def test_settings_that_make_no_sense_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=f"scheduler.{next(iter(wrong))}"):
        fptas(**wrong)
