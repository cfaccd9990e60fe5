"""Who leaves the queue: in the scheduler's order, as far as there is room for a prompt, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_cli.engine.interfaces import Plan, Running, Waiting
from grpo_cli.engine.torch.forecast import RunningRows
from grpo_cli.engine.torch.queue import WaitingQueue
from grpo_cli.engine.torch.sequence import Sequence as Rollout
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request


class InTurn:
    """The given order, at most so many at a time; notes what it was shown."""

    needs_lengths = False
    details: dict[str, float] = {}

    def __init__(self, order: Sequence[int], at_once: int = 99) -> None:
        self._order, self._at_once = order, at_once
        self.shown: list[tuple[list[int], list[tuple[int, int]], list[int]]] = []

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        self.began = [view.index for view in waiting], slots

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_slots: Sequence[int]) -> Plan:
        left = [view.index for view in waiting]
        self.shown.append((left, [(view.index, view.slot) for view in running], list(free_slots)))
        order = [index for index in self._order if index in left]
        return Plan(tuple(zip(order[: self._at_once], free_slots, strict=False)))


def queue(prompts: str, scheduler: InTurn) -> WaitingQueue:
    """A line of requests whose prompts are named by these letters."""
    requests = [Request(Prompt(name, (1,), ""), i, 0, Sampling.plain(9)) for i, name in enumerate(prompts)]
    return WaitingQueue([Rollout(index, request) for index, request in enumerate(requests)], scheduler, 2)


def room_for(prompts: str) -> Callable[[Rollout], bool]:
    return lambda sequence: sequence.request.prompt.id in prompts


def places(entering: list[tuple[int, Rollout]]) -> list[tuple[int, int]]:
    return [(sequence.index, slot) for slot, sequence in entering]


def test_with_room_for_all_the_plan_is_followed() -> None:
    scheduler = InTurn([3, 1, 0, 2])
    waiting = queue("aabb", scheduler)
    assert scheduler.began == ([0, 1, 2, 3], 2) and len(waiting) == 4
    assert places(waiting.leave([], [5, 2], room_for("ab"))) == [(3, 5), (1, 2)]
    assert places(waiting.leave([Running(1, 2, 4, None)], [5], room_for("ab"))) == [(0, 5)]
    assert len(waiting) == 1
    assert scheduler.shown == [([0, 1, 2, 3], [], [5, 2]), ([0, 2], [(1, 2)], [5])]


def test_who_has_no_room_waits_before_all_that_are_chosen_later_and_others_begin() -> None:
    scheduler = InTurn([2, 3, 0, 4, 1])
    waiting = queue("aabbc", scheduler)
    # Both rollouts of b are chosen and have no room; so the two of a begin, and c is chosen on the way.
    assert places(waiting.leave([], [0, 1], room_for("a"))) == [(0, 0), (1, 1)]
    assert scheduler.shown[0] == ([0, 1, 2, 3, 4], [], [0, 1])
    assert scheduler.shown[1] == ([0, 1, 4], [], [0, 1])
    assert scheduler.shown[2] == ([1], [(0, 0)], [1])
    # No choice is left: there is room for all now, and two of the three begin in the order they were chosen in.
    assert len(waiting) == 3
    assert places(waiting.leave([], [1, 0], room_for("abc"))) == [(2, 1), (3, 0)]
    assert len(scheduler.shown) == 3 and len(waiting) == 1
    assert places(waiting.leave([Running(3, 0, 1, None)], [1], room_for("abc"))) == [(4, 1)]
    assert not waiting


def test_a_scheduler_that_leaves_slots_empty_is_not_asked_again_in_the_same_step() -> None:
    scheduler = InTurn([0, 1, 2], at_once=1)
    waiting = queue("aaa", scheduler)
    assert places(waiting.leave([], [0, 1], room_for("a"))) == [(0, 0)]
    assert len(scheduler.shown) == 1
    idle = queue("aa", InTurn([0, 1], at_once=0))
    assert idle.leave([Running(7, 1, 1, None)], [0], room_for("a")) == []


def test_running_rows_fit_with_half_of_everybodys_last_page_left_empty() -> None:
    """Two rows that end at 4 tokens hold 8; half of two pages of 16 is 16 more."""
    assert RunningRows([0, 0], [4, 4], 24, 16).fits and not RunningRows([0, 0], [4, 4], 23, 16).fits
    assert RunningRows([0, 0], [4, 4], 8, 1).fits is False, "with pages of 1 half of two is 1"


def test_who_is_admitted_belongs_to_them_and_who_is_not_leaves_them_as_they_were() -> None:
    running = RunningRows([0], [4], 29, 16)  # 4 + 8; another with a prompt of 5 makes 8 + 16 of 24
    assert not running.admits(0, 4, 6) and running.admits(0, 4, 5)
    assert running.fits and not running.admits(0, 1, 0)
