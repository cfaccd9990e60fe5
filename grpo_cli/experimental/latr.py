"""LATR: rollouts of a prompt grow as a tree that branches where the policy hesitates (`collector=lookahead`, arXiv
2510.24302).

    one rollout of each prompt; every `chunk` tokens, while a prompt has fewer than its share of n, in order of time
    a branch begins at a token with p_2 > tau_abs and p_1 - p_2 < tau_rel, with that of the two that was not taken
    r tokens (of `prune_after`) after its birth it is given up if
        edit distance to the same stretch of the rollout that it left / r < tau_edit
    all that is left continues by itself at `hand_over` tokens, or once every prompt has its share

The tokens that a branch shares with the rollout that it left are given to it. Ours: rollouts are sampled and not by
their likeliest tokens; no branch begins with the end of a text, or in the chunk in which it is born. Left out: that
stretches which begin with a symbol or a digit are not judged, and an engine's fork: what is shared is prefilled again.

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from grpo_cli.experimental.arrol import look_at
from grpo_cli.experimental.given import begun_with
from grpo_cli.experimental.reading import read
from grpo_cli.interfaces import Runtime, StepRollouts
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count, Share
from grpo_cli.types import Group, Rollout, ScoredGroup

Name = tuple[str, int]  # a prompt's id and a sample


@dataclass
class _Branch:
    """A branch: where it left which rollout, and how many of `prune_after` it has passed."""

    parent: Name
    place: int
    passed: int = 0


@dataclass
class _Tree:
    """The state of a step's rollouts: how far each was read, and where branches began."""

    read: dict[Name, int] = field(default_factory=dict)
    branches: dict[Name, _Branch] = field(default_factory=dict)
    pruned: set[Name] = field(default_factory=set)

    def left(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups without what was given up."""
        found = [tuple(one for one in group.rollouts if _name(one) not in self.pruned) for group in groups]
        return [Group(group.prompt, some) for group, some in zip(groups, found, strict=True)]


class Lookahead:
    """A share of each group branches off one rollout of the prompt; the others are plain (LATR, arXiv 2510.24302)."""

    resumes: ClassVar[bool] = True
    one_turn: ClassVar[bool] = True
    _runtime: Runtime

    def __init__(
        self,
        *,
        tau_abs: Share,
        tau_rel: Share,
        tau_edit: Share,
        chunk: Count,
        prune_after: Sequence[int],
        hand_over: Count | None,
        share: Sequence[Share],
        since: Sequence[int],
    ) -> None:
        if len(share) != len(since) or list(since) != sorted({0, *since}):
            raise UserError(
                f"collector.since={list(since)} must be the steps, from 0 on, at which each of collector.share="
                f"{list(share)} begins: as many, and in order"
            )
        if list(prune_after) != sorted(set(prune_after)) or min(prune_after, default=1) < 1:
            raise UserError(f"collector.prune_after={list(prune_after)} must be numbers of tokens, from 1 on, in order")
        self._tau_abs, self._tau_rel, self._tau_edit = tau_abs, tau_rel, tau_edit
        self._chunk, self._prune_after, self._hand_over = chunk, prune_after, hand_over
        self._shares = list(zip(since, share, strict=True))

    def setup(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        until = look_at("collector.hand_over", self._hand_over, step.sampling.max_new_tokens)
        leaves = round([part for first, part in self._shares if first <= step.step][-1] * step.n)
        prompts, tree, length = step.pick(step.prompts), _Tree(), min(self._chunk, until)
        if leaves:
            step.generate(((prompt, 1) for prompt in prompts), limit=length)
        while leaves and length < until:
            self._prune(step.groups, tree)
            begun = self._branches(tree.left(step.groups), tree, leaves)
            live = _live(tree.left(step.groups))
            if not begun and (not live or self._is_settled(tree.left(step.groups), tree, leaves)):
                break
            length = min(length + self._chunk, until)
            born = _born(step.groups, tree, begun)
            step.generate([*live, *(Group(one.request.prompt, (one,)) for one in born)], limit=length)
            fresh = {_name(one) for one in born}  # what comes up with a branch is passed over
            grown = [one for group in step.groups for one in group.rollouts]
            tree.read |= {_name(one): len(one) for one in grown if _name(one) in fresh}
        left = tree.left(step.groups)
        counts = {group.prompt.id: len(group.rollouts) for group in left}
        step.generate([*_live(left), *((p, step.n - counts.get(p.id, 0)) for p in prompts)])
        step.note("branches", len(tree.branches))
        step.note("pruned", len(tree.pruned))
        return step.score(step.groups)

    def _prune(self, groups: Sequence[Group], tree: _Tree) -> None:
        """Give up the branches that have stayed too close to what they left."""
        known = {_name(rollout): rollout for group in tree.left(groups) for rollout in group.rollouts}
        tree.pruned.update([name for name, one in known.items() if self._stays_close(one, known, tree)])

    def _stays_close(self, one: Rollout, known: Mapping[Name, Rollout], tree: _Tree) -> bool:
        """True if a stretch since the last reading is too close to its origin; False where either has ended."""
        branch = tree.branches.get(_name(one))
        if branch is None or not one.is_partial:
            return False
        close, parent, start = False, known.get(branch.parent), branch.place
        for after in self._prune_after[branch.passed :]:
            if len(one) < start + after:
                break
            branch.passed += 1
            if parent is not None and parent.is_partial and len(parent) >= start + after:
                stretches = (r.token_ids[start : start + after] for r in (one, parent))
                close = close or edit_distance(*stretches) / after < self._tau_edit
        return close

    def _branches(self, groups: Sequence[Group], tree: _Tree, leaves: int) -> list[tuple[Rollout, int, int]]:
        """Return where branches begin in what has come up since the last look, parent, place and token: prompt by
        prompt, the earliest first."""
        found: list[tuple[Rollout, int, int]] = []
        for group in groups:
            grown = [one for one in group.rollouts if len(one) > tree.read.get(_name(one), 0)]
            if not grown or len(group.rollouts) >= leaves:
                continue
            reading = read(self._runtime, grown, tokens=True)
            own = [
                (one, place, other)
                for one, probs, ids in zip(grown, reading.top_probs, reading.top_ids, strict=True)
                for place, other in self._hesitations(one, probs, ids, tree.read.get(_name(one), 0))
                if other not in self._runtime.ends
            ]
            earliest = sorted(own, key=lambda begun: (begun[1], begun[0].request.sample))
            found += earliest[: leaves - len(group.rollouts)]
        tree.read |= {_name(rollout): len(rollout) for group in groups for rollout in group.rollouts}
        return found

    def _hesitations(
        self, rollout: Rollout, probs: Float[np.ndarray, "L 2"], ids: Int[np.ndarray, "L 2"], since: int
    ) -> Iterator[tuple[int, int]]:
        """Yield places from `since` on at which the two likeliest tokens are close, and the one that was not taken."""
        for place in range(since, len(rollout)):
            (first, second), (likeliest, next_one) = probs[place], ids[place].tolist()
            if second > self._tau_abs and first - second < self._tau_rel:
                yield place, next_one if rollout.token_ids[place] == likeliest else likeliest

    def _is_settled(self, groups: Sequence[Group], tree: _Tree, leaves: int) -> bool:
        """True if every tree has its leaves, and no branch of them is to be judged yet."""
        names = (_name(rollout) for group in groups for rollout in group.partial.rollouts)
        young = any(name in tree.branches and tree.branches[name].passed < len(self._prune_after) for name in names)
        return not young and all(len(group.rollouts) >= leaves for group in groups)


def _born(groups: Sequence[Group], tree: _Tree, asked: Sequence[tuple[Rollout, int, int]]) -> list[Rollout]:
    """Return the branches, which begin with their parent's tokens."""
    sizes = {group.prompt.id: len(group.rollouts) for group in groups}
    born = []
    for parent, place, other in asked:
        name, given = _name(parent)[0], (*parent.token_ids[:place], other)
        sample, sizes[name] = sizes[name], sizes[name] + 1
        born.append(begun_with(parent.request, given, sample, "branch", place))
        tree.branches[name, sample] = _Branch(_name(parent), place)
    return born


def _name(rollout: Rollout) -> Name:
    return rollout.request.prompt.id, rollout.request.sample


def _live(groups: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(partial for group in groups if (partial := group.partial).rollouts)


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Count tokens to insert, delete or replace.

    >>> edit_distance(b"kitten", b"sitting"), edit_distance(b"", b"ab"), edit_distance(b"ab", b"ab")
    (3, 2, 0)
    """
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
