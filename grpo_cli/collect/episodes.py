"""Multi-turn episodes: an engine samples the model's turn, the task's environment answers, and so on to the end.

An engine that answers in place keeps a row's slot and its keys, and reads the answer in the decode steps that run
anyway. For any other one an ended turn is a partial rollout (`resuming.py`), which continues behind a longer prompt
once all turns of a round have ended. The tokens are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from grpo_cli.collect.resuming import joined, remaining_request, with_observation
from grpo_cli.interfaces import Dialogue, Engine, Task
from grpo_cli.tasks.turns import completed_future
from grpo_cli.types import EngineStats, Finish, Request, Rollout

GRACE = 0.005  # seconds in which an answer is worth waiting for: a row that leaves its slot has its keys copied twice
POLL = 0.0005  # seconds between two looks at answers that are open

Episode = Rollout  # under its own request, as `resuming.joined` makes it
Enough = Callable[[Episode], bool]


@dataclass
class Spent:
    """The engine's cost of each round, and the seconds in which nothing ran because everything left was waiting for its
    environment."""

    costs: list[EngineStats] = field(default_factory=list)
    environment_seconds: float = 0.0


def play(
    engine: Engine,
    task: Task,
    partial: Sequence[Episode],
    version: int = 0,
    enough: Enough | None = None,
    spent: Spent | None = None,
) -> Iterator[Episode]:
    """Yield partial rollouts (`resuming.unstarted`: of requests) once they have ended, in order of finishing. `enough`
    is called with each until it returns True; the others then come back partial."""
    spent = Spent() if spent is None else spent
    if not has_turns(task):
        yield from _generated(engine, partial, [remaining_request(one) for one in partial], version, enough, spent)
        return
    assert isinstance(task, Dialogue), "it has turns"
    if getattr(engine, "answers_in_place", False):
        requests = [_ending(remaining_request(one), task) for one in partial]
        yield from _generated(engine, partial, requests, version, enough, spent, task)
    else:
        yield from _in_rounds(engine, task, partial, version, enough, spent)


def has_turns(task: Task) -> bool:
    """True if an environment may answer the model."""
    return isinstance(task, Dialogue) and task.turns > 1


class Conversation:
    """The environments' answers to finished turns (an `EnvironmentAnswers`). `whole` turns what an engine has into an
    episode."""

    def __init__(self, task: Dialogue, whole: Callable[[Rollout], Episode], spent: Spent) -> None:
        self._task, self._whole, self._spent = task, whole, spent
        self._numbers = count()
        self._open: dict[int, tuple[Episode, Future[Sequence[str] | None]]] = {}
        self._fresh = False  # whether an answer was requested since the last look

    def ask(self, rollout: Rollout) -> int:
        """Request the answer to a finished turn; return the number that identifies it."""
        episode, number = self._whole(rollout), next(self._numbers)
        goes_on = len(episode.turns) < self._task.turns
        answer = self._task.respond(episode.request.prompt, episode.turns) if goes_on else completed_future(None)
        self._open[number], self._fresh = (episode, answer), True
        return number

    def answers(self, wait: bool) -> Sequence[tuple[int, tuple[int, ...] | None]]:
        """Return the answers since the last call, None for an episode that is over; with `wait`, at least one."""
        start = time.monotonic()
        until, self._fresh = start + GRACE * self._fresh, False
        while True:
            done = [number for number, (_, answer) in self._open.items() if answer.done()]
            if len(done) == len(self._open) or (done if wait else time.monotonic() >= until):
                break
            time.sleep(POLL)
        if wait:
            self._spent.environment_seconds += time.monotonic() - start
        return [(number, self._reply(number)) for number in done]

    def _reply(self, number: int) -> tuple[int, ...] | None:
        episode, answer = self._open.pop(number)
        messages = answer.result()
        if messages is None:
            return None
        reply = tuple(self._task.between(episode.turns, messages))
        assert reply, "between two turns there is at least a token"
        return reply


class _Round:
    """A turn of every episode left, and their answers. `is_last` once `enough` has stopped it."""

    def __init__(self, conversation: Conversation, enough: Enough | None) -> None:
        self._conversation, self._enough, self.is_last = conversation, enough, False
        self._numbers: dict[Request, int] = {}
        self._replies: dict[int, tuple[int, ...] | None] = {}

    def ask(self, episode: Episode) -> None:
        """Request the answer to a turn, once, and if there is room for one."""
        if len(episode) < episode.request.sampling.max_new_tokens and episode.request not in self._numbers:
            self._numbers[episode.request] = self._conversation.ask(episode)

    def answered(self, episode: Episode) -> Episode:
        """Return the episode with its answer, partial; or as it ended, without one or without room for a token more."""
        number, limit = self._numbers.get(episode.request), episode.request.sampling.max_new_tokens
        while number is not None and number not in self._replies:
            self._replies.update(self._conversation.answers(wait=True))
        reply = None if number is None else self._replies[number]
        if reply is None:
            return episode
        has_room = len(episode) + len(reply) < limit
        return with_observation(episode, reply) if has_room else replace(episode, finish=Finish.LENGTH)

    def stops(self, episode: Episode) -> bool:
        """Request the answer to a turn and wait for it; True if the episode is over, and enough are."""
        assert self._enough is not None, "else this is not called"
        self.ask(episode)
        ended = self.answered(episode)
        self.is_last = not ended.is_partial and self._enough(ended)
        return self.is_last


def _in_rounds(
    engine: Engine, task: Dialogue, partial: Sequence[Episode], version: int, enough: Enough | None, spent: Spent
) -> Iterator[Episode]:
    """Play rounds: each samples one turn of every episode left, then all get their answers."""
    conversation, left, is_last = Conversation(task, lambda episode: episode, spent), list(partial), False
    while left and not is_last:
        turn, ended = _Round(conversation, enough), list[Episode]()
        requests = [_one_turn_of(_ending(remaining_request(one), task)) for one in left]
        for episode in _generated(engine, left, requests, version, enough and turn.stops, spent):
            if episode.is_partial:
                yield episode
            else:
                turn.ask(episode)
                ended.append(episode)
        left, is_last = [], turn.is_last
        for answered in map(turn.answered, ended):
            if answered.is_partial:
                left.append(answered)
            else:
                yield answered
    yield from left


def _generated(
    engine: Engine,
    partial: Sequence[Episode],
    requests: Sequence[Request],
    version: int,
    enough: Enough | None,
    spent: Spent,
    in_place: Dialogue | None = None,
) -> Iterator[Episode]:
    """Generate the rest of each. Without `enough`, a custom engine need not be able to stop early."""
    of = {_key(request): one for request, one in zip(requests, partial, strict=True)}

    def whole(rest: Rollout) -> Episode:
        return joined(of[_key(rest.request)], rest, version)

    any_engine: Any = engine
    stops = () if enough is None else (lambda rest: enough(whole(rest)),)
    answers = {} if in_place is None else {"answers": Conversation(in_place, whole, spent)}
    for rest in any_engine.generate(requests, *stops, **answers):
        assert not rest.is_partial or enough, "without `enough` an engine stops nothing"
        yield whole(rest)
    spent.costs.append(engine.stats())


def _ending(request: Request, task: Dialogue) -> Request:
    """Return the request, with the strings that end a turn."""
    stop = (*request.sampling.stop, *task.turn_ends)
    return replace(request, sampling=replace(request.sampling, stop=stop)) if task.turn_ends else request


def _one_turn_of(request: Request) -> Request:
    """Return the request for one turn, for an engine without turns."""
    sampling = request.sampling
    if sampling.max_turn_tokens is None:
        return request
    most = min(sampling.max_new_tokens, sampling.max_turn_tokens - request.turn_tokens)
    return replace(request, sampling=replace(sampling, max_new_tokens=most, max_turn_tokens=None))


def _key(request: Request) -> tuple[str, int, int]:
    """Return what identifies an answer; a request that resumes has its own prompt and seed."""
    return request.prompt.id, request.sample, request.seed
