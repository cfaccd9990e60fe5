"""Plans and orders: that they lose nobody, keep their guarantees against exact solvers, and change with names only."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import fptas, infinite, micro
from orders import GivenLengths
from small import make_engine, small_model, some_requests

from grpo_cli.engine.assignment import assign, lower_bound, lpt, makespan
from grpo_cli.engine.scheduling import Fifo, Lpt, Scheduler, Sjf, planned_steps
from grpo_cli.engine.sequence import Sequence
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request

SCHEDULERS = [Fifo, Sjf, Lpt, fptas]
instances = settings(max_examples=60)
jobs = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def waiting(predicted: Seq[float | None], limit: int = 10_000) -> list[Sequence]:
    sampling = Sampling.plain(limit)
    requests = [Request(Prompt("p", (1,), ""), index, 0, sampling) for index in range(len(predicted))]
    return [Sequence(index, one, predicted=predicted[index]) for index, one in enumerate(requests)]


def simulated(
    lengths: Seq[int], predicted: Seq[float | None], scheduler: Scheduler, slots: int, rounds: bool = False
) -> tuple[int, list[tuple[int, int, int]]]:
    """The torch engine's clock: the decode steps, and the index, slot and first step of each request.

    A request of L tokens holds its slot for L - 1 steps, as the first token comes from the prompt's logits, and a free
    slot is refilled for the next step.
    """
    slots, left = min(slots, len(lengths)), len(lengths)
    running: list[tuple[int, int, int]] = []  # a heap of (step after its last, slot, index)
    admitted, free, now = list[tuple[int, int, int]](), list(range(slots)), 0
    sequences = waiting(predicted)
    scheduler.start(sequences, slots, not rounds)
    while left or running:
        for slot in free[:left] if not (rounds and running) else ():
            index = scheduler.next([sequences[i] for *_, i in running]).index
            free, left = free[1:], left - 1
            admitted.append((index, slot, now))
            heapq.heappush(running, (now + lengths[index] - 1, slot, index))
        now = running[0][0]
        while running and running[0][0] == now:
            free.append(heapq.heappop(running)[1])
        free.sort()
    return now, admitted


def with_true_lengths(steps: Seq[int], scheduler: Scheduler, slots: int, rounds: bool = False) -> int:
    """Return the makespan of decode steps: a request has one token more."""
    return simulated([count + 1 for count in steps], [count + 1.0 for count in steps], scheduler, slots, rounds)[0]


def optimum(lengths: Seq[int], slots: int) -> int:
    """The least makespan, of every way to give jobs to slots; the first job's slot is as good as another."""
    ways = itertools.product(range(slots), repeat=len(lengths) - 1)
    divided = ([*zip(lengths, (0, *way), strict=True)] for way in ways)
    return min(max(sum(x for x, at in pairs if at == slot) for slot in range(slots)) for pairs in divided)


@instances
@given(jobs, st.integers(1, 4), st.sampled_from([0.02, 0.1, 0.5]), st.sampled_from([2, 20_000]), st.randoms())
def test_a_plan_keeps_its_word(lengths, slots, epsilon, max_states, shuffler):
    """With few states the trimmed programme is given up; reordering jobs reorders the plan only."""
    best, plan = optimum(lengths, slots), assign(lengths, slots, epsilon, max_states)
    assert sorted(itertools.chain(*plan)) == list(range(len(lengths)))
    assert best <= makespan(plan, lengths) <= makespan(lpt(lengths, slots), lengths) <= 4 / 3 * best
    assert slots > 3 or max_states == 2 or makespan(plan, lengths) <= (1 + max(epsilon, 0.001)) * best
    for one in plan:
        assert [lengths[job] for job in one] == sorted((lengths[job] for job in one), reverse=True)
    order = list(range(len(lengths)))
    shuffler.shuffle(order)
    moved = [lengths[job] for job in order]
    shuffled = assign(moved, slots, epsilon, max_states)
    loads = [sorted([of[job] for job in one] for one in p) for p, of in ((plan, lengths), (shuffled, moved))]
    assert loads[0] == loads[1]


def test_equal_jobs_are_known_to_be_divided_in_the_best_way_without_a_search():
    """Of 1,000 jobs of 10, some slot of three has 334."""
    assert lower_bound([10] * 1000, 3) == 3340 == makespan(assign([10] * 1000, 3, 0.1, max_states=-1), [10] * 1000)


@pytest.mark.parametrize("make", SCHEDULERS)
@instances
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=16), data=st.data())
def test_every_request_begins_once(make, lengths, data):
    slots, rounds, guess = data.draw(st.integers(1, 6)), data.draw(st.booleans()), st.none() | st.floats(0, 50)
    predicted = data.draw(st.lists(guess, min_size=len(lengths), max_size=len(lengths)))
    _, admitted = simulated(lengths, predicted, make(), slots, rounds)
    assert sorted(index for index, _, _ in admitted) == list(range(len(lengths)))


@instances
@given(jobs, st.integers(1, 4))
def test_orders_of_true_lengths_keep_their_bounds(steps, slots):
    best, longest_first = optimum(steps, slots), with_true_lengths(steps, Lpt(), slots)
    assert longest_first <= (4 / 3 - 1 / (3 * slots)) * best
    planned = makespan(assign(steps, slots, 0.1), steps)
    assert with_true_lengths(steps, fptas(), slots) <= planned <= longest_first
    ordered = sorted(steps, reverse=True)  # the longest of each round of `slots`, in the best division
    for scheduler in (Lpt(), fptas()):
        assert with_true_lengths(steps, scheduler, slots, rounds=True) == sum(ordered[::slots])


@pytest.mark.parametrize(
    ("make", "order"),
    [(Fifo, [0, 1, 2, 3, 4]), (Sjf, [1, 3, 0, 2, 4]), (Lpt, [4, 0, 2, 1, 3]), (fptas, [4, 0, 2, 1, 3])],
)
def test_ties_go_by_request_index_whatever_the_order_they_are_shown_in(make, order):
    for shown in itertools.islice(itertools.permutations(waiting([5.0, 3.0, 5.0, 3.0, 8.0])), 0, None, 13):
        scheduler = make()
        scheduler.start(shown, 1, True)
        assert [scheduler.next([]).index for _ in shown] == order


def test_the_clock_counts_what_the_engine_does():
    steps = planned_steps(waiting([20.4, 500.0, 0.0, None], limit=100))
    assert [*steps.values()] == [19, 99, 1, 99]  # the mean of the known is 173, above the limit
    # Slot 0: 4 steps, then 2. Slot 1: 1 step, then 3, then (at 4, when request 0 ends too, but after it by slot) none.
    assert simulated([5, 2, 4, 3], [None] * 4, Fifo(), 2) == (6, [(0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 0, 4)])
    assert simulated([5, 2, 4, 3], [None] * 4, Fifo(), 2, rounds=True)[0] == 4 + 3
    requests, model = some_requests(prompts=2, n=4, tokens=16), small_model()
    lengths = {rollout.request: float(len(rollout)) for rollout in make_engine(model).generate(requests)}
    true = [int(lengths[request]) for request in requests]
    for sampler, scheduler in itertools.product([micro(slots=3), infinite(slots=3)], [Sjf, fptas]):
        engine = make_engine(model, sampler=sampler, scheduler=scheduler(), predictor=GivenLengths(lengths))
        assert len(list(engine.generate(requests))) == len(requests)
        steps, _ = simulated(true, [*map(float, true)], scheduler(), 3, rounds=not sampler.refills)
        assert engine.stats().decode_steps == steps
        assert engine.stats().slot_utilisation == pytest.approx(sum(length - 1 for length in true) / (3 * steps))
