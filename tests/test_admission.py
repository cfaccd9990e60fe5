"""Which sequences begin: in the scheduler's order, as far as there is room for them, and none is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq

import torch

from grpo_cli.engine.admission import Admission, Memory
from grpo_cli.engine.kv_cache import CachedPrompt, KvLayout, PagedCache, blocks_for
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


def memory(blocks: int, tokens: int = 9, paused: Collection[Sequence] = ()) -> tuple[Memory, PagedCache]:
    cache = PagedCache(KvLayout(1, 1, 1, torch.float32), blocks, torch.device("cpu"))
    return Memory(cache, blocks_for(tokens), tokens, 0, False, paused), cache


def begin(cache: PagedCache, some: Seq[Sequence]) -> None:
    """As an engine does."""
    for one in some:
        name = one.request.prompt.id
        if name not in cache.prompts:
            cache.prompts[name] = CachedPrompt(cache.take(1), 16, torch.zeros(1))
        one.prompt = cache.prompts[name]
        one.prompt.users += 1
        one.blocks = cache.take(1)
        one.append(5, 0.0)


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
    """Of 4 blocks, a prompt takes one and a sequence one: one sequence of each of two prompts fits."""
    waiting, (room, cache) = sequences("bbab", 2), memory(4, 2)
    admission = Admission(4, True, room)
    admission.start(InTurn([0, 2, 1, 3]), waiting)
    first = admission.admit([])
    begin(cache, first)
    assert indices(first) == [0, 2] and not cache.free
    for one in first:  # both end: their blocks come back, and their prompts are idle
        assert one.prompt is not None
        cache.give_back(one.blocks)
        one.prompt.users -= 1
    second = admission.admit([])
    begin(cache, second)
    assert indices(second) == [1, 3] and len(admission) == 0


def test_one_that_was_preempted_begins_before_all_others_and_one_that_paused_whatever_waits() -> None:
    waiting = sequences("aaaa")
    admission = Admission(2, False)
    admission.start(InTurn([0, 1, 2, 3]), waiting)
    running = admission.admit([])
    admission.put_first(running.pop())
    assert admission.admit(running) == [], "a round goes on"
    assert indices(admission.admit([])) == [1, 2]
    admission.return_soon(waiting[0])
    assert indices(admission.admit([waiting[1]])) == [0]


def test_sequences_fit_with_half_of_everybodys_last_block_left_empty_and_without_paused_ones() -> None:
    """A prompt and two sequences that are expected to end at 16 tokens: 32 + 2 x 8 take 3 blocks beside the prompt."""
    for blocks, paused, fits in ((4, 0, True), (3, 0, False), (4, 1, False), (5, 1, True)):
        late = sequences("b")[0]
        late.blocks = [8] * paused
        waiting, (room, cache) = sequences("aa", 16), memory(9, 16, [late])
        begin(cache, waiting)
        for one in waiting:
            one.predicted = 16.0
        cache.count = blocks
        assert room.is_full(waiting) != fits
