"""Which sequences begin: in the scheduler's order, as far as there is room for them, and none is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from grpo_cli.engine.admission import Admission, Forecast
from grpo_cli.engine.kv_cache import BLOCK
from grpo_cli.engine.scheduling import Fifo
from grpo_cli.engine.sequence import Sequence
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request


class InTurn(Fifo):
    """The given order."""

    def __init__(self, order: Seq[int]) -> None:
        self._order = order

    def start(self, waiting: Seq[Sequence], slots: int, refills: bool) -> None:
        self.began = indices(waiting), slots, refills
        self._queue = deque(waiting[index] for index in self._order)


def sequences(prompts: str, tokens: int = 9) -> list[Sequence]:
    """Of requests whose prompts, of 16 tokens, are named by these letters."""
    requests = [Request(Prompt(name, (1,) * 16, ""), i, 0, Sampling.plain(tokens)) for i, name in enumerate(prompts)]
    return [Sequence(index, request) for index, request in enumerate(requests)]


def indices(some: Seq[Sequence]) -> list[int]:
    return [one.index for one in some]


def test_slots_are_refilled_in_the_plans_order_or_in_rounds() -> None:
    for refills in (True, False):
        scheduler, waiting = InTurn([3, 1, 0, 2]), sequences("aabb")
        admission = Admission(2, refills)
        admission.start(scheduler, waiting)
        assert scheduler.began == ([0, 1, 2, 3], 2, refills) and len(admission) == 4
        assert indices(admission.admit([])) == [3, 1]
        assert indices(admission.admit([waiting[1]])) == [0] * refills
        assert indices(admission.admit([])) == ([2] if refills else [0, 2])


def test_one_without_room_waits_before_all_that_are_chosen_later_and_others_begin() -> None:
    """There is room for sequences 1 and 3 at first, then for all."""
    waiting = sequences("aaaa")
    admission = Admission(4, True)
    admission.start(InTurn([0, 1, 2, 3]), waiting)
    assert indices(admission.admit([], lambda one, _: one.index in {1, 3})) == [1, 3] and len(admission) == 2
    assert indices(admission.admit([waiting[1]])) == [0, 2] and len(admission) == 0


def test_one_that_has_begun_continues_before_all_others_and_in_a_round_that_goes_on() -> None:
    waiting = sequences("aaaa")
    admission = Admission(2, False)
    admission.start(InTurn([0, 1, 2, 3]), waiting)
    first, second = admission.admit([])
    admission.put_first(second)
    assert admission.admit([first]) == [], "it has no token"
    second.append(5, 0.0)
    assert indices(admission.admit([first])) == [1]
    assert admission.admit([second]) == [] and indices(admission.admit([])) == [2, 3]


def test_what_sequences_hold_is_half_of_what_they_begin_and_end_with() -> None:
    """Of 4 tokens now and 10 at the end, and of 0 and 20, of which 12 are kept; and of half a block each."""
    forecast, (one, other) = Forecast(12, 8.0), sequences("aa")
    one.made, one.predicted, other.predicted = 4, 8.0, 20.0
    # The mean is of 8 + 4 tokens in one rollout, and 4 + 12 / 2 is more than the 8 that were predicted.
    assert forecast.held([one, other]) == (4 + 10 + 0 + 12) / 2 + 2 * BLOCK / 2
    forecast.finish(20)
    one.predicted = other.predicted = None
    assert forecast.held([one, other]) == (4 + 12 + 0 + 12) / 2 + 2 * BLOCK / 2, "16 each"
