"""Which worker makes which rollouts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MadeUpCluster, requests_of, served

from grpo_cli.engine.ray.dealing import Deal, Portion

EQUAL = {0: 1.0, 1: 1.0}


def dealt(deal: Deal, worker: int, speeds: dict[int, float] | None = None, now: float = 0.0) -> tuple[int, ...]:
    portion = deal.next(worker, speeds or EQUAL, now)
    return () if portion is None else portion.indices


def test_one_worker_gets_everything_at_once():
    requests = requests_of(4, 4)
    assert dealt(Deal(requests, None, 1, False), 0, {0: 1.0}) == tuple(range(8))


def test_a_first_portion_is_three_quarters_of_a_fair_share_and_later_ones_halve_what_is_left():
    # 16 prompts of one sample: fair shares are 8. What is left after the first two portions is 4, of which half is 2,
    # and of that one worker's share 1.
    deal = Deal(requests_of(*[1] * 16), None, 2, False)
    assert dealt(deal, 0) == tuple(range(6))
    assert dealt(deal, 1) == tuple(range(6, 12))
    assert all(deal.deliver(index) for index in range(6))
    deal.end(0, now=1.0)
    assert dealt(deal, 0) == (12,)


def test_little_is_held_back_from_workers_whose_speed_is_known():
    # Shares of 20: 18 at first instead of 15.
    for known, first in ((False, 15), (True, 18)):
        deal = Deal(requests_of(*[1] * 40), None, 2, False, known_speeds=known)
        assert len(dealt(deal, 0)) == len(dealt(deal, 1)) == first


def test_where_a_worker_runs_a_portion_as_one_batch_its_first_is_its_whole_share():
    deal = Deal(requests_of(*[1] * 16), None, 2, at_once=True)
    assert (dealt(deal, 0), dealt(deal, 1)) == (tuple(range(8)), tuple(range(8, 16)))


def test_shares_go_by_speed():
    deal = Deal(requests_of(*[1] * 16), None, 2, at_once=True)
    assert len(dealt(deal, 0, {0: 3.0, 1: 1.0})) == 12


def test_samples_of_a_prompt_stay_together():
    deal = Deal(requests_of(3, 3, 3, 3), None, 2, False)
    # Three quarters of 6 are 4.5: one prompt, and half of the next would be as near; it is taken.
    assert dealt(deal, 0) == (0, 1, 2, 3, 4, 5)


def test_a_group_that_is_more_than_a_share_is_cut():
    deal = Deal(requests_of(8), None, 2, at_once=True)
    assert (dealt(deal, 0), dealt(deal, 1)) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_where_lengths_are_predicted_the_longest_go_first():
    deal = Deal(requests_of(1, 1, 1, 1), [10.0, 40.0, 20.0, 30.0], 4, False)
    workers = dict.fromkeys(range(4), 1.0)
    assert [dealt(deal, worker, workers) for worker in range(4)] == [(1,), (3,), (2,), (0,)]


def test_what_a_lost_worker_has_not_delivered_is_dealt_again_before_all_else():
    deal = Deal(requests_of(*[1] * 16), None, 2, False)
    dealt(deal, 0)
    assert deal.deliver(0) and deal.deliver(3)
    deal.lose(0)
    assert deal.again == 4
    assert dealt(deal, 1)[:4] == (1, 2, 4, 5)


def test_the_first_answer_counts():
    deal = Deal(requests_of(1), None, 1, False)
    dealt(deal, 0, {0: 1.0})
    assert deal.open and deal.deliver(0) and not deal.deliver(0) and not deal.open


def test_a_straggler_is_asked_twice_and_only_for_what_is_missing():
    deal = Deal(requests_of(*[1] * 8), None, 2, at_once=True)
    dealt(deal, 0), dealt(deal, 1, now=0.0)
    for index in (0, 1, 2, 3):
        deal.deliver(index)
    deal.end(0, now=10.0)
    deal.deliver(5)
    assert dealt(deal, 0, now=20.0) == ()  # twice as long as the longest, and not more
    assert dealt(deal, 0, now=20.1) == (4, 6, 7)
    assert dealt(deal, 2, EQUAL | {2: 1.0}, now=20.1) == ()  # twice, and not three times
    deal.lose(1)  # others have them
    deal.end(0, now=20.2)
    # They were not delivered after all: a worker's share of them, half and a little more.
    assert dealt(deal, 0, now=20.3) == (4, 6)


def test_a_worker_whose_portion_is_heavier_may_take_longer():
    deal = Deal(requests_of(*[1] * 8), None, 2, at_once=True)
    speeds = {0: 1.0, 1: 3.0}
    assert (len(dealt(deal, 0, speeds)), len(dealt(deal, 1, speeds))) == (2, 6)
    for index in (0, 1):
        deal.deliver(index)
    deal.end(0, now=10.0)
    assert dealt(deal, 0, speeds, now=59.0) == ()
    assert len(dealt(deal, 0, speeds, now=60.1)) == 6


@given(
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    workers=st.integers(1, 6),
    at_once=st.booleans(),
    ends=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60),
)
def test_everything_is_dealt_and_nothing_to_two_at_a_time(groups, workers, at_once, ends):
    requests = requests_of(*groups)
    deal = Deal(requests, None, workers, at_once)
    speeds = {worker: 1.0 + worker for worker in range(workers)}
    held: dict[int, Portion] = {}
    for turn in range(1000):
        for worker in speeds.keys() - held.keys():
            if portion := deal.next(worker, speeds, now=0.0):
                held[worker] = portion
        times = Counter(index for portion in held.values() for index in portion.indices)
        assert not times or max(times.values()) == 1
        if not held:
            break
        wanted, dies = ends[turn] if turn < len(ends) else (0, False)
        worker = sorted(held)[wanted % len(held)]
        portion = held.pop(worker)
        if dies:
            deal.lose(worker)
        else:
            assert all(deal.deliver(index) for index in portion.indices)
            deal.end(worker, now=0.0)
    assert not deal.open


@pytest.mark.parametrize("at_once", [False, True])
def test_a_slow_worker_takes_fewer(at_once):
    requests = requests_of(*[4] * 64)
    found = served(MadeUpCluster(speeds=[100.0, 100.0, 10.0]), requests, at_once=at_once)
    orders = len(found.cluster.orders)
    again = served(found.cluster, requests, at_once=at_once, crew=found.crew)  # it is known now
    made = Counter(worker for worker, order in found.cluster.orders[orders:] for _ in order.requests)
    assert len(again.answers) == 256
    assert made[2] < made[0] / 4


def test_sixty_four_workers_of_all_speeds_end_together():
    speeds = [50.0 + 7 * number for number in range(64)]
    requests = requests_of(*[4] * 512)
    cluster = MadeUpCluster(speeds)
    found = served(cluster, requests)
    start = cluster.now
    again = served(cluster, requests, crew=found.crew)
    assert sorted(answer.index for answer in again.answers) == list(range(2048))
    tokens = sum(len(answer.token_ids) for answer in again.answers)
    # A prompt's four samples take the slowest worker two thirds of the whole time: finer it does not go.
    assert cluster.now - start < 1.4 * tokens / sum(speeds)
