"""One step's rollouts: what its collector requests is numbered, seeded, made, grouped, and judged once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from grpo_cli.collect.episodes import Spent, has_turns, play
from grpo_cli.collect.requests import score_all, seed_of
from grpo_cli.collect.resuming import begun
from grpo_cli.engine.costs import together
from grpo_cli.history import History
from grpo_cli.interfaces import Collector, Curriculum, Engine, Task
from grpo_cli.metrics import turn_metrics
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import EngineStats, Finish, Group, Prompt, Request, Reward, Rollout, Round, ScoredGroup

MOST_ROUNDS = 1000  # a collector that wants more is taken to have no end
MOST_ROLLOUTS = 2**22  # of a step, and problems that it looks at: each is an object before it is a token


class StepCollection:
    """What a collector is given (see `interfaces.Collection`), and what has come of its rounds.

    `version` is the number of updates that the weights have seen, of which every token that is drawn here is.
    """

    def __init__(
        self,
        *,
        n: int,
        prompts: int,
        sampling: Sampling,
        seed: int,
        step: int,
        curriculum: Curriculum,
        task: Task,
        history: History,
        version: int = 0,
        span: Callable[[str], AbstractContextManager[None]],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        most: int = MOST_ROLLOUTS,
    ) -> None:
        self._most = most
        self._n, self._prompts, self._step, self._version = n, prompts, step, version
        self._sampling, self._seed = sampling, seed
        self._curriculum, self._task, self._history = curriculum, task, history
        self._span, self._autocast = span, autocast
        self._rng = np.random.default_rng(seed_of(seed, step, "collector"))
        self._picked: dict[str, Prompt] = {}
        self._rollouts: dict[str, dict[int, Rollout]] = {}  # by problem and sample, in the order of the requests
        self._rewards: dict[str, dict[int, Reward]] = {}  # of those that were judged
        self._notes: dict[str, float] = {}
        self._rounds, self._spent = 0, Spent()
        self.rollout_seconds = 0.0

    @property
    def n(self) -> int:
        return self._n

    @property
    def prompts(self) -> int:
        return self._prompts

    @property
    def step(self) -> int:
        return self._step

    @property
    def version(self) -> int:
        return self._version

    @property
    def rng(self) -> np.random.Generator:
        return self._rng

    @property
    def history(self) -> History:
        return self._history

    def pick(self, count: int, without: Set[str] = frozenset()) -> Sequence[Prompt]:
        self._refuse_too_many("problems", len(self._picked) + count)
        found = self._curriculum.pick(self._step, count, self._picked.keys() | without)
        self._picked |= {prompt.id: prompt for prompt in found}
        return found

    def _refuse_too_many(self, what: str, count: int) -> None:
        if count > self._most:
            raise UserError(
                f"the collector asks for {count} {what} in a step of n={self._n} rollouts of train.prompts="
                f"{self._prompts} problems, and {self._most} are the most: lower its settings, n or train.prompts"
            )

    def score(self, groups: Sequence[Group]) -> Sequence[ScoredGroup]:
        lacking = [unjudged for group in groups if (unjudged := self._unjudged(group)).rollouts]
        if lacking:
            with self._span("reward"):
                fresh = score_all(self._task, lacking)
            for group in fresh:
                samples = [rollout.request.sample for rollout in group.rollouts]
                self._rewards.setdefault(group.prompt.id, {}).update(zip(samples, group.rewards, strict=True))
        return [self._judged(group) for group in groups]

    def _unjudged(self, group: Group) -> Group:
        known = self._rewards.get(group.prompt.id, {})
        return Group(group.prompt, tuple(r for r in _ended(group) if r.request.sample not in known))

    def _judged(self, group: Group) -> ScoredGroup:
        rollouts, rewards = _ended(group), self._rewards.get(group.prompt.id, {})
        return ScoredGroup(group.prompt, rollouts, tuple(rewards[r.request.sample] for r in rollouts))

    def note(self, figure: str, value: int | float) -> None:
        self._notes[f"collect/{figure}"] = float(value)

    @property
    def groups(self) -> list[Group]:
        """All so far, in the order in which they were first requested; each by its samples."""
        return [
            Group(self._picked[name], tuple(of[sample] for sample in sorted(of))) for name, of in self._rollouts.items()
        ]

    def run(self, collector: Collector, engine: Engine) -> list[ScoredGroup]:
        """Make what the collector requests until it requests no more; the groups to train on. UserError if it requests
        what cannot be had."""
        rounds: Any = collector(self)
        if not isinstance(rounds, Generator):
            raise UserError(f"the collector is no generator, but a {type(rounds).__name__}: yield its rounds")
        answer = None
        for number in range(MOST_ROUNDS + 1):
            try:
                wanted = rounds.send(answer)
            except StopIteration as end:
                return list(self.score(self._chosen(end.value)))
            partial = self._begun(wanted, number)
            self._make(partial, self._goal(wanted.enough, partial, number), engine)
            answer = self.groups
        raise UserError(f"the collector has no end: it asked for more than {MOST_ROUNDS} rounds in one step")

    def _begun(self, wanted: Any, number: int) -> list[Rollout]:
        """What a round is to bring to its end: partial rollouts, most of them with no token yet."""
        if not isinstance(wanted, Round):
            kind = type(wanted).__name__
            raise UserError(f"round {number + 1} of the collector is a {kind}: yield Round((GroupRequest(...), ...))")
        if not wanted.requests and not wanted.resumed:
            raise UserError(f"round {number + 1} of the collector is empty: leave it out")
        found = [rollout for group in wanted.resumed for rollout in self._resumed(group, number)]
        if len({_key(rollout.request) for rollout in found}) < len(found):
            raise UserError(f"round {number + 1} of the collector resumes a group twice: name it once")
        found += map(begun, self._requests(wanted, number))
        for rollout in found:
            self._rollouts.setdefault(rollout.request.prompt.id, {})[rollout.request.sample] = rollout
        return found

    def _resumed(self, group: Group, number: int) -> list[Rollout]:
        """The partial rollouts of a group, which becomes one of this step."""
        name, given = group.prompt.id, {rollout.request.sample: rollout for rollout in group.rollouts}
        own = self._rollouts.setdefault(name, given)
        if (
            self._picked.setdefault(name, group.prompt) != group.prompt
            or own.keys() < given.keys()
            or any(own[sample].request != rollout.request for sample, rollout in given.items())
        ):
            raise UserError(
                f"round {number + 1} of the collector resumes problem {name!r}, of which this step has made another "
                "group: pick no problem of which one is held (collection.pick(count, without=...))"
            )
        partial = [rollout for rollout in own.values() if rollout.finish is Finish.PARTIAL]
        if not partial:
            raise UserError(
                f"round {number + 1} of the collector resumes problem {name!r}, of which no rollout is partial: leave "
                "it out"
            )
        for rollout in partial:
            self._check_sampling(name, rollout.request.sampling)
        return partial

    def _check_sampling(self, name: str, before: Sampling) -> None:
        """One rollout is drawn in one way, and no longer than it was to be."""
        if before != self._sampling:
            now = vars(self._sampling)
            changed = {f"sampling.{key}": (value, now[key]) for key, value in vars(before).items() if value != now[key]}
            raise UserError(
                f"rollouts of problem {name!r} were begun with {_said(changed, 0)}, and this run has "
                f"{_said(changed, 1)}: resume with what they were begun with, or start a new run"
            )

    def _requests(self, wanted: Round, number: int) -> list[Request]:
        made: list[Request] = []
        before = sum(map(len, self._rollouts.values()))
        self._refuse_too_many("rollouts", before + sum(group.count for group in wanted.requests))
        for group in wanted.requests:
            name = group.prompt.id
            if self._picked.get(name) != group.prompt:
                raise UserError(
                    f"round {number + 1} of the collector names problem {name!r}, which this step has not picked: take "
                    "problems from collection.pick(...)"
                )
            if group.count < 1:
                raise UserError(
                    f"round {number + 1} of the collector asks for {group.count} rollouts of problem {name!r}: 1 is "
                    "the least, and a problem that is to have none is left out"
                )
            first = len(self._rollouts.get(name, {})) + sum(request.prompt.id == name for request in made)
            made += [
                Request(group.prompt, sample, seed_of(self._seed, self._step, name, sample), self._sampling)
                for sample in range(first, first + group.count)
            ]
        return made

    def _goal(self, enough: int | None, partial: Sequence[Rollout], number: int) -> _Goal | None:
        whole = sum(group.whole for group in self.groups)
        if enough is not None and enough <= whole:
            raise UserError(
                f"round {number + 1} of the collector ends at enough={enough} whole groups, and there are {whole} "
                "before it: ask for more, or leave the round out"
            )
        return None if enough is None else _Goal(enough, whole, partial)

    def _make(self, partial: Sequence[Rollout], goal: _Goal | None, engine: Engine) -> None:
        start = time.perf_counter()
        with self._span("rollout"), self._autocast():
            for rollout in play(engine, self._task, partial, self._version, goal, self._spent):
                self._rollouts[rollout.request.prompt.id][rollout.request.sample] = rollout
        self.rollout_seconds += time.perf_counter() - start
        self._rounds += 1

    def _chosen(self, names: Sequence[str] | None) -> list[Group]:
        if not self._rollouts:
            raise UserError("the collector ended without a round: it has to yield at least one")
        unfinished = [g.prompt.id for g in self.groups if not g.whole and (names is None or g.prompt.id in names)]
        if unfinished:
            raise UserError(
                f"the collector returned problem {unfinished[0]!r}, of which some rollouts are partial: resume them "
                "before it is trained on, in a later round or step"
            )
        if names is None:
            return self.groups
        unknown = [name for name in names if name not in self._rollouts]
        if unknown or not names:
            found = f"problem {unknown[0]!r}, of which it has requested nothing" if unknown else "no problem"
            raise UserError(f"the collector returned {found}: return the ids of what to train on, or None for all")
        return [group for group in self.groups if group.prompt.id in set(names)]

    @property
    def stats(self) -> EngineStats:
        """What all rounds cost together."""
        return together(self._spent.costs)

    def metrics(self) -> dict[str, float]:
        """How much was requested, and what the collector has noted."""
        sizes = [len(of) for of in self._rollouts.values()]
        with_turns = has_turns(self._task)
        return {
            **(turn_metrics(self.groups) | {"time/environment": self._spent.environment_seconds} if with_turns else {}),
            "collect/rounds": float(self._rounds),
            "collect/problems": float(len(sizes)),
            "collect/rollouts_min": float(min(sizes)),
            "collect/rollouts_max": float(max(sizes)),
            **self._notes,
        }


class _Goal:
    """Says when so many groups are whole, as the rollouts that are `under_way` end."""

    def __init__(self, enough: int, whole: int, under_way: Sequence[Rollout]) -> None:
        self._enough, self._whole = enough, whole
        self._left = Counter(rollout.request.prompt.id for rollout in under_way)

    def __call__(self, rollout: Rollout) -> bool:
        problem = rollout.request.prompt.id
        self._left[problem] -= 1
        self._whole += not self._left[problem]
        return self._whole >= self._enough


def _key(request: Request) -> tuple[str, int]:
    """By which an answer is known again; a request that resumes has a prompt of its own."""
    return request.prompt.id, request.sample


def _said(changed: Mapping[str, tuple[Any, Any]], which: int) -> str:
    return " ".join(f"{key}={values[which]}" for key, values in changed.items())


def _ended(group: Group) -> tuple[Rollout, ...]:
    return tuple(rollout for rollout in group.rollouts if rollout.finish is not Finish.PARTIAL)
