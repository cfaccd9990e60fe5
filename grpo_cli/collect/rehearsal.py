"""Tries a collector with scripted rewards before any weights are read, to find what it may ask for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

from grpo_cli.collect.collection import StepCollection
from grpo_cli.history import History, Visit
from grpo_cli.interfaces import Collector
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import own_code
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Reward, Rollout

# The most rollouts of a made-up group, and enough for a made-up step: more would only take time.
MOST_REHEARSED, ENOUGH = 4096, 1024
MOST_ASKED = 2**17  # by a collector, of a made-up step
# Rewards by sample: none, every second, or every rollout is right.
_SCRIPTS = ((0.0,), (0.0, 1.0), (1.0,))
_SOLVED = (0, 1, 2, 3, 4)  # of four tries in an earlier visit


@dataclass(frozen=True)
class CollectionSize:
    """The most that a step was seen to ask for: different problems picked, problems and rollouts of the largest round,
    rollouts altogether, rounds, and rollouts of the groups that are trained on; whether it leaves rollouts partial;
    whether it resumes rollouts of an earlier step; and whether it made groups of another size than n, in one of these
    steps or in one whose problems differ in how often they are and were solved."""

    picked: int
    problems: int
    at_once: int
    rollouts: int
    rounds: int
    trained: int
    partial: bool = False
    resumed: bool = False
    unequal: bool = False

    @classmethod
    def equal(cls, n: int, prompts: int) -> CollectionSize:
        """The size of a plain step."""
        return cls(prompts, prompts, n * prompts, n * prompts, 1, n * prompts)


def rehearsed(collector: Collector, n: int, prompts: int, longest: int = 3) -> CollectionSize:
    """Runs copies of `collector` through steps whose rollouts are all wrong, alternating, and all right, and may have
    `longest` tokens. UserError if it makes impossible requests or does not end."""
    size = min(n, MOST_REHEARSED)
    problems = max(1, min(prompts, ENOUGH // size))
    seen = [_tried(collector, size, problems, longest, [script], History()) for script in _SCRIPTS]
    few = max(problems, min(prompts, len(_SOLVED)))
    later = _tried(collector, size, few, longest, _SCRIPTS, _visited(few))

    def most(name: str, times: float) -> int:
        return ceil(times * max(getattr(one, name) for one in seen))

    wider = prompts / problems
    longer = wider * n / size
    return CollectionSize(
        picked=most("picked", wider),
        problems=most("problems", wider),
        at_once=most("at_once", longer),
        rollouts=most("rollouts", longer),
        rounds=most("rounds", 1.0),
        trained=most("trained", longer),
        partial=any(one.partial for one in seen),
        resumed=any(one.resumed for one in seen),
        unequal=any(one.unequal for one in (*seen, later)),
    )


def _visited(problems: int) -> History:
    """A history of problems solved never, always, or sometimes."""
    visits = {_name(place): Visit(0, _SOLVED[place % len(_SOLVED)], _SOLVED[-1]) for place in range(problems)}
    return History({name: [visit] for name, visit in visits.items()})


def _name(place: int) -> str:
    return f"rehearsal-{place}"


def _tried(
    collector: Collector, n: int, prompts: int, longest: int, scripts: Sequence[Sequence[float]], history: History
) -> CollectionSize:
    """The size of a step, or of two if the first leaves partial rollouts that the second may resume."""
    made_up, collector = _MadeUp(scripts, longest), copy.deepcopy(collector)
    first = _step(collector, n, prompts, made_up, 0, history)
    if not first.partial:
        return first
    second = _step(collector, n, prompts, made_up, 1, history)
    largest = {name: max(number, vars(second)[name]) for name, number in vars(first).items()}
    return CollectionSize(**largest)


def _step(collector: Collector, n: int, prompts: int, made_up: _MadeUp, step: int, history: History) -> CollectionSize:
    collection = StepCollection(
        n=n,
        prompts=prompts,
        sampling=Sampling.plain(made_up.longest),
        seed=0,
        step=step,
        curriculum=made_up,
        task=made_up,
        history=history,
        version=step,
        span=lambda name: nullcontext(),
        most=MOST_ASKED,
    )
    before, made_up.rounds, made_up.stopped = made_up.picked, [], False
    with own_code("collector"):
        groups = collection.run(collector, made_up)
    rounds = made_up.rounds
    return CollectionSize(
        picked=made_up.picked - before,
        # A resumed one has a longer prompt, whose id has a suffix.
        problems=max(len({request.prompt.id.partition("+")[0] for request in requests}) for requests in rounds),
        at_once=max(map(len, rounds)),
        rollouts=sum(map(len, rounds)),
        rounds=len(rounds),
        trained=sum(len(group.rollouts) for group in groups),
        partial=made_up.stopped,
        resumed=any(request.resumed for requests in rounds for request in requests),
        unequal=any(len(group.rollouts) != n for group in groups),
    )


class _MadeUp:
    """Curriculum, engine and task of a rehearsal."""

    reads_stop_strings = False

    def __init__(self, scripts: Sequence[Sequence[float]], longest: int) -> None:
        self._scripts = scripts  # of the problems in turn
        self.longest = longest
        self.picked = 0
        self.rounds: list[Sequence[Request]] = []
        self.stopped = False

    def pick(self, step: int, count: int, without: Set[str]) -> Sequence[Prompt]:
        self.picked += count
        return [Prompt(_name(i), (0,), "0") for i in range(self.picked - count, self.picked)]

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        """One token each; of the stopped ones every second has one, too. Every second one reaches a round's limit."""
        self.rounds.append(requests)
        stop = False
        for request in requests:
            if stop:
                tokens = 1 - request.sample % 2 if request.sampling.max_new_tokens > 1 else 0
                self.stopped = True
                yield Rollout(request, (0,) * tokens, (-1.0,) * tokens, Finish.PARTIAL, 0)
                continue
            most = request.sampling.max_new_tokens
            cut = request.resumed + most < self.longest and request.sample % 2
            tokens, finish = (most, Finish.LENGTH) if cut else (1, Finish.EOS)
            rollout = Rollout(request, (0,) * tokens, (-1.0,) * tokens, finish, 0)
            yield rollout
            stop = enough is not None and enough(rollout)

    def prompts(self, split: str) -> Sequence[Prompt]:
        return []

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        script = self._scripts[int(prompt.id.partition("-")[2]) % len(self._scripts)]
        return Reward(script[rollout.request.sample % len(script)])

    def text(self, token_ids: Sequence[int]) -> str:
        return ""

    def stats(self) -> EngineStats:
        return EngineStats()

    def update_weights(self) -> None: ...

    def facts(self) -> Mapping[str, Any]:
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
