"""Which requests are dealt together, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.ray_engine import portions


def test_nine_tenths_of_a_share_go_first_and_the_rest_in_equal_parts():
    # Shares of 100, of which 90; then 10 each.
    assert [len(portion) for portion in portions([1.0] * 200, 2, False)] == [90, 90, 10, 10]


def test_one_batch_each_where_a_portion_is_one_batch_and_everything_for_a_single_worker():
    assert portions([7.0] * 6, 2, True) == [(0, 1, 2), (3, 4, 5)]
    assert portions([7.0] * 3, 1, False) == [(0, 1, 2)]


def test_where_lengths_are_predicted_the_longest_go_first_and_portions_are_equally_long():
    assert portions([10.0, 40.0, 20.0, 30.0], 2, True) == [(1,), (3, 2, 0)]
    assert portions([10.0, 40.0, 20.0, 30.0], 4, True) == [(1,), (3,), (2, 0)]


@given(lengths=st.lists(st.floats(0, 99), min_size=1, max_size=60), workers=st.integers(1, 6), at_once=st.booleans())
def test_every_request_is_dealt_once(lengths, workers, at_once):
    dealt = portions(lengths, workers, at_once)
    assert all(dealt) and sorted(index for portion in dealt for index in portion) == list(range(len(lengths)))
    assert len(dealt) <= (workers if at_once or workers == 1 else 2 * workers)
