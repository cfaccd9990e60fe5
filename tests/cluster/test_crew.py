"""Workers that die, hang, refuse, come late: everything is made, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MadeUpCluster, place_of, requests_of, served

from grpo_cli.engine.ray.crew import Crew
from grpo_cli.engine.ray.messages import Failed
from grpo_cli.support.errors import UserError


def indices(found) -> list[int]:
    return sorted(answer.index for answer in found.answers)


@given(
    groups=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    speeds=st.lists(st.sampled_from([5.0, 50.0, 500.0]), min_size=1, max_size=5),
    dies=st.frozensets(st.integers(1, 40), max_size=4),
    hangs=st.frozensets(st.integers(1, 40), max_size=3),
    at_once=st.booleans(),
)
def test_nothing_is_lost_and_nothing_comes_twice(groups, speeds, dies, hangs, at_once):
    requests = requests_of(*groups)
    cluster = MadeUpCluster(speeds, dies, hangs)
    try:
        found = served(cluster, requests, at_once=at_once)
    except UserError as error:
        # All workers may die at their first answer so often that they are given up.
        assert "no worker is left" in str(error) and len(dies | hangs) >= 3 * len(speeds)
        return
    assert indices(found) == list(range(len(requests)))
    again = served(cluster, requests, at_once=at_once, crew=found.crew)
    assert indices(again) == list(range(len(requests)))


def test_a_worker_that_dies_is_started_anew_with_what_it_had_learnt_and_used():
    cluster = MadeUpCluster([10.0, 10.0], dies=frozenset({30}))
    requests = requests_of(*[1] * 40)
    found = served(cluster, requests)
    assert indices(found) == list(range(40))
    assert found.deal.again >= 1
    orders = len(cluster.orders)
    again = served(cluster, requests, crew=found.crew)
    assert {worker for worker, _ in cluster.orders[orders:]} == {0, 1}
    assert [said for said in found.said if "is lost (it was killed)" in said]
    restarted = cluster.starts[-1]
    assert len(cluster.starts) == 3 and restarted[1] in (None, {"worker": restarted[0]})
    assert indices(again) == list(range(40))


def test_a_silent_worker_is_given_up_after_the_timeout():
    cluster = MadeUpCluster([10.0], hangs=frozenset({2}))
    found = served(cluster, requests_of(4), timeout=30.0)
    assert indices(found) == [0, 1, 2, 3]
    assert found.said == [
        "worker 0 is lost (it gave no sign of life for 30 s (engine.timeout)); what it has not delivered goes to "
        "others, and it starts anew"
    ]


def test_a_long_silence_between_two_generates_is_nobodys_fault():
    cluster = MadeUpCluster([10.0, 10.0])
    found = served(cluster, requests_of(4, 4), timeout=30.0)
    cluster.now += 10_000  # a long update
    again = served(cluster, requests_of(4, 4), timeout=30.0, crew=found.crew)
    assert indices(again) == list(range(8)) and not found.said


def test_a_worker_that_hangs_in_a_portion_that_was_called_off_is_found_out_over_several_generates():
    # The first answer of all is worker 0's, and never comes; worker 1 makes its share.
    cluster = MadeUpCluster([1000.0, 999.0], hangs=frozenset({1}))
    requests = requests_of(*[1] * 12)
    found = served(cluster, requests, timeout=3.0)
    for _ in range(60):
        served(cluster, requests, timeout=3.0, crew=found.crew)
    assert [said for said in found.said if "no sign of life for 3 s" in said]
    assert {worker for worker, _ in cluster.orders[-4:]} == {0, 1}


def test_when_nobody_is_left_the_error_says_why():
    cluster = MadeUpCluster([10.0, 10.0], stillborn=frozenset({0, 1}))
    with pytest.raises(UserError, match="no worker is left to make rollouts: worker 0: it never came up; worker 1: it"):
        served(cluster, requests_of(4))
    assert len(cluster.starts) == 6


def test_others_go_on_where_one_never_comes_up():
    cluster = MadeUpCluster([10.0, 10.0], stillborn=frozenset({1}))
    found = served(cluster, requests_of(*[4] * 16))
    assert indices(found) == list(range(64))
    assert found.said[-1] == ("worker 1 is given up after 3 starts in which it delivered nothing: it never came up")


def test_what_an_engine_refuses_is_said_at_once():
    cluster = MadeUpCluster([10.0], refuses={0: Failed(None, "lower sampling.max_new_tokens", refused=True)})
    with pytest.raises(UserError, match="^lower sampling.max_new_tokens$"):
        served(cluster, requests_of(4))
    assert len(cluster.starts) == 1


def test_an_engine_that_fails_again_and_again_is_given_up_with_its_reason():
    cluster = MadeUpCluster([10.0], refuses={0: Failed(None, "RuntimeError: no kernel", refused=False)})
    with pytest.raises(UserError, match="worker 0: RuntimeError: no kernel"):
        served(cluster, requests_of(4))
    assert len(cluster.starts) == 3


def test_a_worker_that_comes_late_takes_part():
    class Slow(MadeUpCluster):
        def start(self, worker, state):
            super().start(worker, state)
            if worker == 1:
                when, *rest = self._events.pop(next(i for i, e in enumerate(self._events) if e[2] == 1))
                self._events.append((when + 20, *rest))

    found = served(Slow([10.0, 10.0]), requests_of(*[1] * 64))
    assert {worker for worker, _ in found.cluster.orders} == {0, 1}
    assert indices(found) == list(range(64))


def test_a_place_that_cannot_be_borne_ends_it():
    def check(place):
        raise UserError(f"not {place.host}")

    cluster = MadeUpCluster([10.0])
    crew = Crew(cluster, 1, 60.0, print, check=check, clock=cluster.clock)
    with pytest.raises(UserError, match="not h0"):
        served(cluster, requests_of(1), crew=crew)


def test_who_stops_asking_leaves_nothing_at_work():
    cluster = MadeUpCluster([10.0, 10.0])
    found = served(cluster, requests_of(4, 4))
    requests = requests_of(8, 8)
    from made_up import order_of

    from grpo_cli.engine.ray.dealing import Deal

    serving = found.crew.serve(Deal(requests, None, 2, False), lambda portion: order_of(portion, requests))
    next(serving)
    serving.close()
    again = served(cluster, requests, crew=found.crew)
    assert indices(again) == list(range(16))  # none of them from the portions before


def test_rates_and_ends_are_those_of_the_last_generate():
    cluster = MadeUpCluster([100.0, 90.0])
    found = served(cluster, requests_of(*[1] * 64))
    assert sorted(found.crew.rates) == pytest.approx([90, 100])
    assert sum(end.portion is not None for end in found.crew.ends) == len(cluster.orders)
    assert found.crew.weights_seconds == pytest.approx(
        max(0.5 * sum(worker == number for worker, _ in cluster.orders) for number in (0, 1))
    )
    assert place_of(0).host == found.crew.places[0].host


def test_speeds_are_known_once_everybody_has_delivered_something():
    cluster = MadeUpCluster([10.0, 10.0])
    crew = Crew(cluster, 2, 60.0, print, clock=cluster.clock)
    served(cluster, requests_of(1), crew=crew)  # by one of them
    assert not crew.knows_speeds
    served(cluster, requests_of(1, 1, 1, 1), crew=crew)
    assert crew.knows_speeds
