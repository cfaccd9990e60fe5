"""One step's rollouts: the collector's requests are numbered, seeded, made, grouped, and judged once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_cli.collect.episodes import Spent, has_turns, play
from grpo_cli.collect.requests import Goal, check_sampling, score_all, seed_of, with_rewards
from grpo_cli.collect.resuming import begun, limited, unlimited
from grpo_cli.engine.costs import together
from grpo_cli.history import History
from grpo_cli.interfaces import Collector, Counts, Curriculum, Engine, Task
from grpo_cli.metrics import turn_metrics
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import (
    EngineStats,
    Finish,
    Group,
    Prompt,
    Request,
    Reward,
    Rollout,
    Round,
    ScoredGroup,
)

MOST_ROUNDS = 1000  # a collector that asks for more is considered endless
MOST_ROLLOUTS = 2**22  # and problems, of a step: each is a Python object


class StepCollection:
    """What a collector is given (see `interfaces.Collection`), and what has come of its rounds.

    `version` is the number of updates that the weights have seen, of which every token that is drawn here is.
    `tokens_left` is how many the run is to generate yet; with `zero_truncated` what is cut off earns nothing.
    `has_advantage` says whether the step would give some rollout of a group an advantage.
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
        tokens_left: float = math.inf,
        zero_truncated: bool = False,
        has_advantage: Callable[[ScoredGroup], bool] = lambda group: True,
    ) -> None:
        self._most, self._tokens_left, self._zero_truncated = most, tokens_left, zero_truncated
        self._has_advantage = has_advantage
        self.max_new_tokens = sampling.max_new_tokens
        self.n, self.prompts, self.step, self.version = n, prompts, step, version
        self._sampling, self._seed = sampling, seed
        self._curriculum, self._task, self.history = curriculum, task, history
        self._span, self._autocast = span, autocast
        self.rng = np.random.default_rng(seed_of(seed, step, "collector"))
        self._picked: dict[str, Prompt] = {}
        self._rollouts: dict[str, dict[int, Rollout]] = {}  # by problem and sample, in order of the requests
        self._rewards: dict[str, dict[int, Reward]] = {}  # of those that were judged
        self._limited, self._dropped = False, 0  # whether a round had a limit; rollouts that ended there
        self._held: set[str] = set()  # problems of groups that an earlier step has made
        self._notes: dict[str, float] = {}
        self._rounds, self._spent = 0, Spent()
        self.rollout_seconds = 0.0

    @property
    def at_limit(self) -> bool:
        return self._generated >= self._tokens_left

    def pick(self, count: int, without: Set[str] = frozenset()) -> Sequence[Prompt]:
        self._refuse_too_many("problems", len(self._picked) + count)
        found = self._curriculum.pick(self.step, count, self._picked.keys() | without)
        self._picked |= {prompt.id: prompt for prompt in found}
        return found

    def _refuse_too_many(self, what: str, count: int) -> None:
        if count > self._most:
            raise UserError(
                f"the collector asks for {count} {what} in a step of n={self.n} rollouts of train.prompts="
                f"{self.prompts} problems, and {self._most} are the most: lower its settings, n or train.prompts"
            )

    def score(self, groups: Sequence[Group]) -> Sequence[ScoredGroup]:
        lacking = [unjudged for group in groups if (unjudged := self._unjudged(group)).rollouts]
        if lacking:
            with self._span("reward"):
                fresh = score_all(self._task, lacking)
            for group in fresh:
                samples = [rollout.request.sample for rollout in group.rollouts]
                rewards = [self._earned(*each) for each in zip(group.rollouts, group.rewards, strict=True)]
                self._rewards.setdefault(group.prompt.id, {}).update(zip(samples, rewards, strict=True))
        return [self._judged(group) for group in groups]

    def teaches(self, group: ScoredGroup) -> bool:
        return group.mixed and self._has_advantage(group)

    def _earned(self, rollout: Rollout, reward: Reward) -> Reward:
        if not (self._zero_truncated and rollout.finish is Finish.LENGTH):
            return reward
        return replace(reward, total=0.0, parts=dict.fromkeys(reward.parts, 0.0))

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
        """All groups so far, in order of their first request, each sorted by sample."""
        return [
            Group(self._picked[name], tuple(of[sample] for sample in sorted(of)))
            for name, of in self._rollouts.items()
            if of
        ]

    @property
    def made(self) -> list[ScoredGroup]:
        """All groups that have become whole in this step and were judged, whether they are trained on or not."""
        new = (group for group in self.groups if group.whole and group.prompt.id not in self._held)
        return with_rewards([self._judged(group) for group in new if not self._unjudged(group).rollouts])

    def run(self, collector: Collector, engine: Engine) -> list[ScoredGroup]:
        """Run the collector to its end; returns the groups to train on. UserError for impossible requests."""
        rounds: Any = collector(self)
        if not isinstance(rounds, Generator):
            raise UserError(f"the collector is no generator, but a {type(rounds).__name__}: yield its rounds")
        answer = None
        for number in range(MOST_ROUNDS + 1):
            try:
                wanted = rounds.send(answer)
            except StopIteration as end:
                return self._trained_on(self.score(self._chosen(end.value)))
            partial = self._begun(wanted, number)
            self._make(partial, self._goal(wanted.enough, partial, number), engine, wanted.limit)
            answer = self.groups
        raise UserError(f"the collector has no end: it asked for more than {MOST_ROUNDS} rounds in one step")

    def _trained_on(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups without what their judge has failed on. UserError where nothing is left."""
        left = with_rewards(groups)
        if not left:
            raise UserError(
                "the judge scored no rollout of the step (the warnings above say why); fix the judge, then continue "
                "with grpo train resume=auto"
            )
        if len(left) < len(groups):
            self.note("unjudged_groups", len(groups) - len(left))
        return left

    def _begun(self, wanted: Any, number: int) -> list[Rollout]:
        """The partial rollouts that a round completes, most of them without a token yet."""
        if not isinstance(wanted, Round):
            kind = type(wanted).__name__
            raise UserError(f"round {number + 1} of the collector is a {kind}: yield Round((GroupRequest(...), ...))")
        if not wanted.requests and not wanted.resumed and not wanted.held:
            raise UserError(f"round {number + 1} of the collector is empty: leave it out")
        if (limit := wanted.limit) is not None and (wanted.enough is not None or not 0 < limit < self.max_new_tokens):
            raise UserError(
                f"round {number + 1} of the collector has limit={limit}: use 1 to less than sampling.max_new_tokens="
                f"{self.max_new_tokens}, and no enough beside it"
            )
        self._limited |= limit is not None
        for held in wanted.held:
            self._join(held, number)
        found = [rollout for group in wanted.resumed for rollout in self._resumed(group, number)]
        if len({_key(rollout.request) for rollout in found}) < len(found):
            raise UserError(f"round {number + 1} of the collector resumes a group twice: name it once")
        found += self._requests(wanted, number)
        for rollout in found:
            self._rollouts.setdefault(rollout.request.prompt.id, {})[rollout.request.sample] = rollout
        return found

    def _resumed(self, group: Group, number: int) -> list[Rollout]:
        """Return the partial rollouts of a resumed group, which becomes one of this step."""
        name, own = group.prompt.id, self._rollouts.setdefault(group.prompt.id, {})
        known = [own.setdefault(rollout.request.sample, rollout) for rollout in group.rollouts]
        if self._picked.setdefault(name, group.prompt) != group.prompt or any(
            one.request != rollout.request for one, rollout in zip(known, group.rollouts, strict=True)
        ):
            raise UserError(
                f"round {number + 1} of the collector resumes problem {name!r}, of which this step has made another "
                "group: pick no problem of which one is held (collection.pick(count, without=...))"
            )
        partial = [rollout for rollout in known if rollout.finish is Finish.PARTIAL]
        if not partial:
            raise UserError(
                f"round {number + 1} of the collector resumes problem {name!r}, of which no rollout is partial: leave "
                "it out"
            )
        for rollout in partial:
            check_sampling(rollout.request, self._sampling)
        return partial

    def _join(self, group: ScoredGroup, number: int) -> None:
        """A whole group of an earlier step becomes one of this step."""
        name = group.prompt.id
        if name in self._picked or name in self._rollouts:
            raise UserError(
                f"round {number + 1} of the collector brings a held group of problem {name!r}, which this step has "
                "already: pick no problem of which one is held (collection.pick(count, without=...))"
            )
        samples = [rollout.request.sample for rollout in group.rollouts]
        for rollout in group.rollouts:
            check_sampling(rollout.request, self._sampling)
        self._held.add(name)
        self._picked[name] = group.prompt
        self._rollouts[name] = dict(zip(samples, group.rollouts, strict=True))
        self._rewards[name] = dict(zip(samples, group.rewards, strict=True))

    def _requests(self, wanted: Round, number: int) -> list[Rollout]:
        """New rollouts, without any tokens but those that are given."""
        made: list[Rollout] = []
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
            before = len(self._rollouts.get(name, {}))
            first = before + sum(one.request.prompt.id == name for one in made)
            for sample in range(first, first + group.count):
                seed = seed_of(self._seed, self.step, name, sample)
                made.append(begun(Request(group.prompt, sample, seed, self._sampling)))
        return made

    def _goal(self, enough: int | None, partial: Sequence[Rollout], number: int) -> Goal | None:
        whole = sum(group.whole for group in self.groups)
        if enough is not None and enough <= whole:
            raise UserError(
                f"round {number + 1} of the collector ends at enough={enough} whole groups, and there are {whole} "
                "before it: ask for more, or leave the round out"
            )
        return None if enough is None else Goal(enough, whole, partial)

    def _make(self, partial: Sequence[Rollout], goal: Goal | None, engine: Engine, limit: int | None) -> None:
        if limit is not None:
            partial = [limited(one, limit) for one in partial if len(one) < limit]
        if not partial:  # all that the round asks for is there
            return
        start = time.perf_counter()
        with self._span("rollout"), self._autocast():
            for rollout in play(engine, self._task, partial, self.version, goal, self._spent):
                own = self._rollouts[rollout.request.prompt.id]
                before = own[rollout.request.sample]
                own[rollout.request.sample] = rollout if limit is None else unlimited(rollout, before)
        self.rollout_seconds += time.perf_counter() - start
        self._rounds += 1

    def _chosen(self, names: Sequence[str] | None) -> list[Group]:
        if not self._rollouts:
            raise UserError("the collector ended without a round: it has to yield at least one")
        unfinished = [g.prompt.id for g in self.groups if not g.whole and (names is None or g.prompt.id in names)]
        if self._limited:
            self._drop(unfinished)
        elif unfinished:
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

    def _drop(self, problems: Sequence[str]) -> None:
        """Leave out the rollouts of these problems that ended at a limit."""
        for name in problems:
            whole = {s: one for s, one in self._rollouts[name].items() if one.finish is not Finish.PARTIAL}
            self._dropped += len(self._rollouts[name]) - len(whole)
            self._rollouts |= {name: whole}

    @property
    def stats(self) -> EngineStats:
        """The total cost of all rounds."""
        return together(self._spent.costs) if self._spent.costs else EngineStats()

    @property
    def _generated(self) -> int:
        return sum(cost.generated_tokens for cost in self._spent.costs)

    def metrics(self) -> dict[str, float]:
        """Counts of requests, and the collector's notes."""
        groups = [group for group in self.groups if group.prompt.id not in self._held]
        sizes = [len(group.rollouts) for group in groups]
        with_turns = has_turns(self._task)
        return {
            **(turn_metrics(groups) | {"time/environment": self._spent.environment_seconds} if with_turns else {}),
            "collect/rounds": float(self._rounds),
            "collect/problems": float(len(sizes)),
            "collect/rollouts_min": float(min(sizes, default=0)),
            "collect/rollouts_max": float(max(sizes, default=0)),
            **({"collect/dropped": float(self._dropped)} if self._limited else {}),
            **self._notes,
            **(self._task.counted() if isinstance(self._task, Counts) else {}),
        }


def _key(request: Request) -> tuple[str, int]:
    """Identifies a rollout; a request that resumes one has a different prompt."""
    return request.prompt.id, request.sample


def _ended(group: Group) -> tuple[Rollout, ...]:
    return tuple(rollout for rollout in group.rollouts if rollout.finish is not Finish.PARTIAL)
