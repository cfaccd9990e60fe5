"""Which requests are dealt together, and in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.engine.ray.pool import portions
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request


def requests_of(*groups: int) -> list[Request]:
    """So many samples of each prompt."""
    prompts = [Prompt(f"p{number}", (1, 2), "") for number in range(len(groups))]
    sizes = zip(prompts, groups, strict=True)
    return [Request(prompt, sample, sample, Sampling.plain(100)) for prompt, size in sizes for sample in range(size)]


def sizes(*groups: int, workers: int = 2, at_once: bool = False) -> list[int]:
    return [len(portion) for portion in portions(requests_of(*groups), None, workers, at_once)]


def test_nine_tenths_of_a_share_go_first_and_then_halves_of_what_is_left():
    # Shares of 20, of which 18; then halves of a share of what is left: 4 / 2 / 2 = 1 each, and so on.
    assert sizes(*[1] * 40) == [18, 18, 1, 1, 1, 1]


def test_one_batch_each_where_a_portion_is_one_batch_and_everything_for_a_single_worker():
    assert sizes(*[1] * 16, at_once=True) == [8, 8]
    assert sizes(4, 4, workers=1) == [8]


def test_samples_of_a_prompt_stay_together_unless_they_are_more_than_a_share():
    # 0.9 shares of 6 are 5.4: one prompt of 3, and half of the next is still within.
    assert portions(requests_of(3, 3, 3, 3), None, 2, False)[0] == (0, 1, 2, 3, 4, 5)
    assert portions(requests_of(8), None, 2, True) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_where_lengths_are_predicted_the_longest_go_first():
    assert portions(requests_of(1, 1, 1, 1), [10.0, 40.0, 20.0, 30.0], 4, False) == [(1,), (3,), (2,), (0,)]


@given(
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    workers=st.integers(1, 6),
    at_once=st.booleans(),
    data=st.data(),
)
def test_every_request_is_dealt_once(groups, workers, at_once, data):
    requests = requests_of(*groups)
    lengths = data.draw(st.none() | st.lists(st.floats(0, 99), min_size=len(requests), max_size=len(requests)))
    dealt = portions(requests, lengths, workers, at_once)
    assert all(dealt) and sorted(index for portion in dealt for index in portion) == list(range(len(requests)))
