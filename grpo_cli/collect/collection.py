"""One step's rollouts: prompts are picked, requests numbered, seeded and completed, answers judged once."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_cli.collect.episodes import Spent, has_turns, play
from grpo_cli.collect.requests import Goal, check_rewards, check_sampling, only_judged, requests_for, score_all, seed_of
from grpo_cli.collect.resuming import unstarted, with_limit, without_limit
from grpo_cli.engine.common import together
from grpo_cli.history import History
from grpo_cli.interfaces import Collector, Curriculum, Engine, HasMetrics, Task
from grpo_cli.metrics import turn_metrics
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError, own_code_unless_ours
from grpo_cli.support.facts import name_of
from grpo_cli.support.meter import ReportProgress, uncounted
from grpo_cli.types import EngineStats, Finish, Group, Prompt, Reward, Rollout, ScoredGroup

MOST_CALLS = 4000  # of a step's methods; a collector that makes more is considered endless
MOST_ROLLOUTS = 2**22  # and prompts, of a step: each is a Python object


@dataclass
class StepCollection:
    """A step's rollouts: what a collector makes them with (see `interfaces.StepRollouts`), and what became of them.

    `prompt_count` is how many the task has, and `tokens_left` how many tokens the run is to generate yet.
    """

    n: int
    prompts: int
    sampling: Sampling
    seed: int
    step: int
    curriculum: Curriculum
    engine: Engine
    task: Task
    history: History
    version: int = 0
    prompt_count: int | float = math.inf
    tokens_left: int | float = math.inf
    truncated: str = "train"
    span: Callable[[str], AbstractContextManager[ReportProgress]] = lambda name: nullcontext(uncounted)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(seed_of(self.seed, self.step, "collector"))
        self.rollout_seconds = 0.0
        self._prompts: dict[str, Prompt] = {}  # picked, requested or resumed, by prompt
        self._rollouts: dict[str, dict[int, Rollout]] = {}  # by prompt and sample, in order of the requests
        self._rewards: dict[str, dict[int, Reward]] = {}  # of those that were judged
        self._ended_before = set[tuple[str, int]]()  # those of them that were whole when the step got them
        self._returned = set[str]()  # prompts of the groups that the collector returned
        self._trained: dict[str, ScoredGroup] = {}  # those of them with a judgement
        self._notes: dict[str, float] = {}
        self._calls, self._rounds, self._spent, self._limited = 0, 0, Spent(), False

    @property
    def at_limit(self) -> bool:
        return sum(cost.generated_tokens for cost in self._spent.costs) >= self.tokens_left

    @property
    def groups(self) -> list[Group]:
        return [self._group(name) for name in self._rollouts]

    def _group(self, name: str) -> Group:
        own = self._rollouts[name]
        return Group(self._prompts[name], tuple(own[sample] for sample in sorted(own)))

    def pick(self, count: int, without: Set[str] = frozenset()) -> Sequence[Prompt]:
        """Return new prompts of the curriculum, and keep them as this step's."""
        self._called()
        self._refuse_many("prompts", len(self._prompts) + count)
        known = self._prompts.keys() | without
        count = int(min(count, self.prompt_count - len(known)))
        found = self.curriculum.pick(self.step, count, known) if count > 0 else ()
        self._prompts |= {prompt.id: prompt for prompt in found}
        return found

    def _called(self) -> None:
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise UserError(f"the collector has no end: it made {MOST_CALLS} calls in one step; let it return groups")

    def _refuse_many(self, what: str, count: int) -> None:
        if count > MOST_ROLLOUTS:
            raise UserError(f"the collector requests {count} {what}, {MOST_ROLLOUTS} at most: lower n or train.prompts")

    def generate(self, requests: Iterable[Any], *, enough: int | None = None, limit: int | None = None) -> list[Group]:
        """Make what the requested groups lack, and return them."""
        self._called()
        if enough is not None and limit is not None:
            raise UserError("the collector gives step.generate both enough= and limit=: give it one of them")
        count_all, requested = sum(map(len, self._rollouts.values())), dict[str, None]()
        partial: dict[tuple[str, int], Rollout] = {}
        for wanted in requests:
            added = wanted.rollouts if isinstance(wanted, Group) else ()
            prompt, count = (wanted.prompt, 0) if isinstance(wanted, Group) else _pair(wanted)
            count_all += count
            self._refuse_many("rollouts", count_all)
            if self._prompts.setdefault(prompt.id, prompt) != prompt:
                raise UserError(f"the collector requests two prompts with the id {prompt.id!r}: give each its own")
            own = self._rollouts.setdefault(prompt.id, {})
            new = requests_for([prompt], len(own) + count, self.sampling, self.seed, self.step)[len(own) :]
            for rollout in added or map(unstarted, new):
                name = prompt.id, rollout.request.sample
                if not rollout.is_partial and rollout.request.sample not in own:
                    self._ended_before.add(name)
                known = own.setdefault(rollout.request.sample, rollout)
                if known.request != rollout.request:
                    raise UserError(
                        f"the collector resumes prompt {prompt.id!r}, of which this step has another group: pass its "
                        "id to step.pick(count, without=...)"
                    )
                if known.is_partial:
                    check_sampling(known.request, self.sampling)
                    partial[name] = known
            if own:
                requested[prompt.id] = None
            else:
                del self._rollouts[prompt.id]
        whole = len(requested) - len({name for name, _ in partial})
        if enough is None or whole < enough:
            self._make([*partial.values()], None if enough is None else Goal(enough - whole, partial.values()), limit)
        return [self._group(name) for name in requested]

    def _make(self, partial: Sequence[Rollout], goal: Goal | None, token_limit: int | None) -> None:
        """Continue partial rollouts until the goal is reached, to `token_limit` tokens each at most."""
        if token_limit is not None:
            unmet = [one for one in partial if len(one) < token_limit]
            self._limited, partial = True, [with_limit(one, token_limit) for one in unmet]
        if not partial:
            return
        start, tokens = time.perf_counter(), 0
        with self.span("rollout") as count, self.autocast():
            ended = play(self.engine, self.task, partial, self.version, goal, self._spent)
            for done, rollout in enumerate(ended, 1):
                own, sample = self._rollouts[rollout.request.prompt.id], rollout.request.sample
                tokens += len(rollout) - len(own[sample])
                own[sample] = rollout if token_limit is None else without_limit(rollout, own[sample])
                count(done, len(partial), tokens)
        self.rollout_seconds += time.perf_counter() - start
        self._rounds += 1

    def score(self, groups: Iterable[Group]) -> list[ScoredGroup]:
        """Judge the finished rollouts that were not judged before, and return the groups with their rewards."""
        self._called()
        groups = [self._current(group) for group in groups]
        unscored = [unjudged for group in groups if (unjudged := self._unjudged(group)).rollouts]
        if unscored:
            with self.span("reward"):
                scored = score_all(self.task, unscored)
            for group in scored:
                samples = [rollout.request.sample for rollout in group.rollouts]
                rewards = self._zeroed(group).rewards
                self._rewards.setdefault(group.prompt.id, {}).update(zip(samples, rewards, strict=True))
        return [self._judged(group) for group in groups]

    def _current(self, group: Group) -> Group:
        """Return the group with its rollouts as far as they have come."""
        own = self._rollouts.get(group.prompt.id, {})
        return Group(group.prompt, tuple(own.get(one.request.sample, one) for one in group.rollouts))

    def _zeroed(self, group: ScoredGroup) -> ScoredGroup:
        """Return the group; with `truncated` "zero" what was cut off gets no reward, also if others have judged it."""
        if self.truncated != "zero":
            return group
        rewards = [*group.rewards]
        for i, rollout in enumerate(group.rollouts):
            if rollout.finish is Finish.LENGTH:
                rewards[i] = replace(rewards[i], total=0.0, parts=dict.fromkeys(rewards[i].parts, 0.0))
        return replace(group, rewards=tuple(rewards))

    def _unjudged(self, group: Group) -> Group:
        known = self._rewards.get(group.prompt.id, {})
        return Group(group.prompt, tuple(r for r in _ended(group) if r.request.sample not in known))

    def _judged(self, group: Group) -> ScoredGroup:
        rollouts, rewards = _ended(group), self._rewards.get(group.prompt.id, {})
        return ScoredGroup(group.prompt, rollouts, tuple(rewards[r.request.sample] for r in rollouts))

    def differs(self, group: ScoredGroup) -> bool:
        left_out = Finish.LENGTH if self.truncated == "leave_out" else None
        pairs = zip(group.rollouts, group.rewards, strict=True)
        return len({reward.answer for rollout, reward in pairs if reward.judged and rollout.finish is not left_out}) > 1

    def note(self, figure: str, value: int | float) -> None:
        """Record a number for `metrics`."""
        self._notes[f"collect/{figure}"] = float(value)

    def run(self, collector: Collector) -> list[ScoredGroup]:
        """Run the collector; return the groups to train on, without rollouts whose judge has failed. UserError for what
        is no list of different scored groups."""
        with own_code_unless_ours(f"collector {name_of(collector)}", getattr(collector, "func", collector)):
            groups = self._checked(collector)
        self._returned = {group.prompt.id for group in groups}
        self._trained = {group.prompt.id: self._zeroed(group) for group in only_judged(groups)}
        if not self._trained:
            raise UserError("the judge scored no rollout of the step (see above): fix it, then grpo train resume=auto")
        if len(self._trained) < len(groups):
            self.note("unjudged_groups", len(groups) - len(self._trained))
        return [*self._trained.values()]

    def _checked(self, collector: Collector) -> list[ScoredGroup]:
        returned: Any = collector(self)
        fault = f"collector {name_of(collector)} returned"
        if not isinstance(returned, Sequence) or not returned:
            raise UserError(f"{fault} {returned!r:.40}: return a list of what step.score(...) returns")
        names = set[str]()
        for group in returned:
            scored = isinstance(group, ScoredGroup) and 0 < len(group.rewards) == len(group.rollouts)
            if not scored or len(_ended(group)) < len(group.rollouts):
                named = f"prompt {group.prompt.id!r}" if isinstance(group, Group | ScoredGroup) else f"{group!r:.40}"
                raise UserError(f"{fault} {named} unscored: return what step.score(...) returns")
            if group.prompt.id in names:
                raise UserError(f"{fault} prompt {group.prompt.id!r} twice: return each group once")
            own = self._rollouts.get(group.prompt.id, {}).values()
            if not self._limited and any(one.is_partial for one in own):
                raise UserError(f"{fault} prompt {group.prompt.id!r} with unfinished rollouts: generate them first")
            names.add(group.prompt.id)
            check_rewards(group)
            check_sampling(group.rollouts[0].request, self.sampling)
        return [*returned]

    @property
    def finished_groups(self) -> list[ScoredGroup]:
        """Return the judged groups whose rollouts have all ended in this step, trained on or not."""
        ended = [group for group in self.groups if group.whole and not self._unjudged(group).rollouts]
        judged = {group.prompt.id: self._judged(group) for group in ended} | self._trained
        return only_judged([judged[name] for name in self._rollouts if name in judged])

    @property
    def stats(self) -> EngineStats:
        """Return the total cost of all rounds."""
        return together(self._spent.costs or [EngineStats()])

    def metrics(self) -> dict[str, float]:
        """Return counts of rollouts, and the collector's notes."""
        groups = self.groups
        sizes = [len(group.rollouts) for group in groups]
        dropped = [group for group in groups if group.whole and group.prompt.id not in self._returned]
        lost = [one for group in dropped for one in group.rollouts]
        lost += [one for group in groups if group.prompt.id in self._trained for one in group.partial.rollouts]
        of_turns = dict[str, float]()
        if has_turns(self.task):
            each = {(name, sample): one for name, own in self._rollouts.items() for sample, one in own.items()}
            ended = [one for key, one in each.items() if not one.is_partial and key not in self._ended_before]
            of_turns = turn_metrics(ended) | {"time/environment": self._spent.environment_seconds}
        return {
            **of_turns,
            "collect/rounds": float(self._rounds),
            "collect/problems": float(len(sizes)),
            "collect/rollouts_min": float(min(sizes, default=0)),
            "collect/rollouts_max": float(max(sizes, default=0)),
            "collect/dropped_groups": float(len(dropped)),
            "collect/tokens_dropped": float(sum(s.count for one in lost for s in one.spans if s.version >= 0)),
            **self._notes,
            **(self.task.take_metrics() if isinstance(self.task, HasMetrics) else {}),
        }


def _pair(wanted: Any) -> tuple[Prompt, int]:
    """Return a prompt and how many new rollouts of it are wanted. UserError for anything else."""
    with suppress(TypeError, ValueError):
        prompt, count = wanted
        if isinstance(prompt, Prompt) and operator.index(count) >= 0:
            return prompt, operator.index(count)
    raise UserError(f"the collector requests {wanted!r:.40}: give step.generate(...) groups, or (prompt, number)")


def _ended(group: Group | ScoredGroup) -> tuple[Rollout, ...]:
    return tuple(rollout for rollout in group.rollouts if not rollout.is_partial)
