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
        of = {_key(remaining_request(one)): one for one in partial}
        conversation = Conversation(task, lambda rest: joined(of[_key(rest.request)], rest, version), spent)
        requests = [_ending(remaining_request(one), task) for one in partial]
        yield from _generated(engine, partial, requests, version, enough, spent, answers=conversation)
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
        answer: Future[Sequence[str] | None] = Future()
        if len(episode.turns) < self._task.turns:
            answer = self._task.respond(episode.request.prompt, episode.turns)
        else:
            answer.set_result(None)
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


def _in_rounds(
    engine: Engine, task: Dialogue, partial: Sequence[Episode], version: int, enough: Enough | None, spent: Spent
) -> Iterator[Episode]:
    """Play rounds: each samples one turn of every episode left, then all get their answers."""
    conversation = Conversation(task, lambda episode: episode, spent)
    left, stopped = list(partial), False
    while left and not stopped:
        numbers: dict[Request, int] = {}
        replies: dict[int, tuple[int, ...] | None] = {}

        def ask(episode: Episode, numbers: dict[Any, int] = numbers) -> None:
            is_full = len(episode) >= episode.request.sampling.max_new_tokens
            if not is_full and episode.request not in numbers:
                numbers[episode.request] = conversation.ask(episode)

        def reply_to(episode: Episode, numbers: Any = numbers, replies: Any = replies) -> tuple[int, ...] | None:
            number = numbers.get(episode.request)
            while number is not None and number not in replies:
                replies.update(conversation.answers(wait=True))
            return replies.get(number)

        def stops(episode: Episode) -> bool:
            nonlocal stopped
            assert enough is not None, "else this is not called"
            ask(episode)
            reply, limit = reply_to(episode), episode.request.sampling.max_new_tokens
            stopped = (reply is None or len(episode) + len(reply) >= limit) and enough(episode)
            return stopped

        requests = [_one_turn_of(_ending(remaining_request(one), task)) for one in left]
        turned = []
        for episode in _generated(engine, left, requests, version, enough and stops, spent):
            if episode.finish is Finish.PARTIAL:
                yield episode
            else:
                ask(episode)
                turned.append(episode)
        left = []
        for episode in turned:
            reply = reply_to(episode)
            if reply is None:
                yield episode
            elif len(episode) + len(reply) < episode.request.sampling.max_new_tokens:  # the model has room for a token
                left.append(with_observation(episode, reply))
            else:
                yield replace(episode, finish=Finish.LENGTH)
    yield from left


def _generated(
    engine: Engine,
    partial: Sequence[Episode],
    requests: Sequence[Request],
    version: int,
    enough: Enough | None,
    spent: Spent,
    **answers: Conversation,
) -> Iterator[Episode]:
    """Generate the rest of each. Without `enough`, a custom engine need not be able to stop early."""
    of = {_key(request): one for request, one in zip(requests, partial, strict=True)}

    def whole(rest: Rollout) -> Episode:
        return joined(of[_key(rest.request)], rest, version)

    any_engine: Any = engine
    stops = () if enough is None else (lambda rest: enough(whole(rest)),)
    for rest in any_engine.generate(requests, *stops, **answers):
        assert rest.finish is not Finish.PARTIAL or enough, "without `enough` an engine stops nothing"
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
