"""The order in which waiting requests get slots. A scheduler changes time, never tokens; only the engine acts.

All of them read the predicted lengths once, when a `generate` starts, and then answer each `plan` from sorted queues:
a refill costs no sorting and does not look at the requests that stay behind. None leaves a slot empty while a request
waits, so any of them is within 2 - 1/slots of the shortest possible makespan, whatever was predicted (Graham).

With continuous sampling the decode steps are the makespan of the lengths on the slots: `lpt` is good there, `fptas`
close to the optimum (as far as the predictions are true; `lpt` bears their errors better), and `sjf`, the published
refill rule, the worst, because its longest requests start last.

With `micro` sampling the engine asks in rounds, when all slots are free, and the decode steps are the sum of the
longest length of each round. That sum is least when the requests are cut, longest first, into consecutive rounds: this
is `lpt`. `sjf` cuts from the other end: as good when the slots divide the requests evenly, else the incomplete round is
made of the longest ones. `fptas` can add nothing to `lpt` there, and becomes it from the second round on; its first
round, the heads of its lists, may be a little worse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

from pydantic import Field

from grpo_cli.engine.makespan import Assignment, assign
from grpo_cli.support.ranges import OneOf


@dataclass(frozen=True)
class Waiting:
    """A request that waits for a slot: its index in the list given to `generate`, and the predicted number of tokens
    that it has yet to generate, None without a prediction."""

    index: int
    prompt_id: str
    max_new_tokens: int
    predicted: float | None


@dataclass(frozen=True)
class Running:
    """A request that runs."""

    index: int
    generated: int
    predicted: float | None


@runtime_checkable
class Scheduler(Protocol):
    """Orders the waiting requests. Schedulers change time, never tokens; where generation stops early (`enough`), they
    decide which requests finish in time."""

    @property
    def needs_lengths(self) -> bool:
        """True if it is useless without predicted lengths, and so refused with `predictor=none`."""

    @property
    def details(self) -> Mapping[str, float]:
        """Metrics of the plan that was followed; empty when there are none."""

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        """Forget the previous `generate`, and plan a new one if the scheduler plans ahead."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free: int) -> Sequence[int]:
        """Return the indices of at most `free` waiting requests, each once, that begin now; at least one when nothing
        is running.

        An admitted request is not shown again. Under a tight `sampler.kv_budget` it may start later than it was
        admitted, but never after a request that was admitted later and needs as much memory.
        """


def planned_steps(waiting: Sequence[Waiting]) -> dict[int, int]:
    """Return the decode steps that each request is planned with, by its index; at least 1.

    One less than the predicted tokens, and within its limit: a request's first token comes from the prompt's logits and
    needs no step. A request without a prediction counts as the mean of the others; when none has one, all count the
    same and the order is by index.
    """
    known = [request.predicted for request in waiting if request.predicted is not None]
    mean = sum(known) / len(known) if known else 1.0
    steps = {}
    for request in waiting:
        tokens = round(mean if request.predicted is None else request.predicted)
        steps[request.index] = max(1, min(tokens, request.max_new_tokens) - 1)
    return steps


class InOrder(ABC):
    """Admits the waiting requests in an order fixed at the start, into any slot."""

    details: Mapping[str, float] = {}
    needs_lengths = True

    def __init__(self) -> None:
        self._queue: deque[int] = deque()

    @abstractmethod
    def rank(self, steps: int) -> int:
        """Return the sort key, given the planned steps: the smallest goes first, ties by request index."""

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        assert slots >= 1, "an engine without a slot has nothing to schedule"
        steps = planned_steps(waiting)
        self._queue = deque(sorted(steps, key=lambda index: (self.rank(steps[index]), index)))

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free: int) -> Sequence[int]:
        if len(waiting) != len(self._queue):  # the last plan was not followed
            self.start(waiting, len(running) + free)
        return [self._queue.popleft() for _ in range(min(free, len(waiting)))]


class Fifo(InOrder):
    """First come, first served, by request index."""

    needs_lengths = False

    def rank(self, steps: int) -> int:
        return 0


class Sjf(InOrder):
    """Shortest predicted job first, Infinite Sampling's refill rule: the best mean waiting time, a poor makespan."""

    def rank(self, steps: int) -> int:
        return steps


class Lpt(InOrder):
    """Longest predicted job first: makespan at most 4/3 - 1/(3 slots) of the optimum when the predictions are true."""

    def rank(self, steps: int) -> int:
        return -steps


class Fptas:
    """A list of requests for each slot, planned at the start so that all lists end together, and followed at run time.

    Infinite Sampling's "FPTAS" stage; what exactly the paper minimises is not public. Here it is the makespan of the
    predicted lengths (see `makespan.assign`): by the trimmed dynamic programme with its guarantee of (1 + epsilon) for
    up to three slots, unless one of its layers outgrows `max_states`; beyond that by LPT.

    A free slot takes the next, longest first, of the list whose request has ended. With an empty list it
    takes a request from another's: the one of all that wait with the shortest predicted length (`refill="sjf"`, as
    published) or the longest (`refill="lpt"`). While predictions are true this never makes the plan longer: the request
    starts no later than it would have. When nothing is running although the requests of the last plan had unequal
    lengths, the engine works in rounds (`micro`), and the longest requests form the next one.

    `assignment` is the plan that is followed, None when there was no prediction and the order is first come, first
    served. `details` are its makespan and lower bound in decode steps, their ratio, and a proven bound on makespan /
    optimum.
    """

    needs_lengths = True

    def __init__(
        self,
        *,
        epsilon: Annotated[float, Field(gt=0)],
        max_states: Annotated[int, Field(ge=1)],
        refill: Annotated[str, OneOf(("sjf", "lpt"))],
    ) -> None:
        self._epsilon = epsilon
        self._max_states = max_states
        self._refill = refill
        self._steps: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._lists: list[deque[int]] = []
        self._served: list[int | None] = []  # the request that each list sent out last
        self._shortest_first: deque[int] = deque()
        self._longest_first: deque[int] = deque()
        self._round_was_uneven = False
        self.details: Mapping[str, float] = {}
        self.assignment: Assignment | None = None

    def start(self, waiting: Sequence[Waiting], slots: int) -> None:
        assert slots >= 1, "an engine without a slot has nothing to schedule"
        self._steps = planned_steps(waiting)
        self._waiting = set(self._steps)
        by_index = sorted(self._steps)
        self._shortest_first = deque(sorted(by_index, key=lambda index: self._steps[index]))
        self._longest_first = deque(sorted(by_index, key=lambda index: -self._steps[index]))
        self._round_was_uneven = False
        self.assignment, self.details = None, {}
        self._lists = [deque() for _ in range(slots)]
        self._served = [None] * slots
        if any(request.predicted is not None for request in waiting):
            self._make_lists(by_index, slots)

    def _make_lists(self, indices: Sequence[int], slots: int) -> None:
        plan = assign([self._steps[index] for index in indices], slots, self._epsilon, self._max_states)
        self._lists = [deque(indices[job] for job in jobs) for jobs in plan.lists]
        self.assignment = plan
        self.details = {
            "engine/plan_makespan": float(plan.makespan),
            "engine/plan_lower_bound": float(plan.lower_bound),
            "engine/plan_bound_ratio": plan.bound_ratio,
            "engine/plan_guarantee": plan.guarantee,
        }

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free: int) -> Sequence[int]:
        if len(waiting) != len(self._waiting):  # the last plan was not followed
            self.start(waiting, len(running) + free)
        if not running and self._round_was_uneven:
            indices = [self._take(self._longest_first) for _ in range(min(free, len(waiting)))]
        else:
            indices = self._follow_lists({view.index for view in running}, min(free, len(waiting)))
        self._round_was_uneven = not running and len({self._steps[index] for index in indices}) > 1
        return indices

    def _follow_lists(self, running: set[int], count: int) -> list[int]:
        """Return the next requests of the lists that have none running; slots are anonymous."""
        refill = self._shortest_first if self._refill == "sjf" else self._longest_first
        idle = [place for place, index in enumerate(self._served) if index not in running]
        indices = []
        for place in idle[:count]:
            indices.append(self._take(self._lists[place], refill))
            self._served[place] = indices[-1]
        return indices

    def _take(self, *queues: deque[int]) -> int:
        """Return the first waiting request of the first queue that has one."""
        for queue in queues:
            while queue:
                index = queue.popleft()
                if index in self._waiting:
                    self._waiting.remove(index)
                    return index
        raise AssertionError("a plan is never longer than the requests that wait")
