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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grpo_cli.experimental.adhint import begun_with
from grpo_cli.experimental.arrol import look_at
from grpo_cli.experimental.reading import read
from grpo_cli.interfaces import Runtime, StepRollouts, facts
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
        kept = [tuple(one for one in group.rollouts if one.key not in self.pruned) for group in groups]
        return [Group(group.prompt, some) for group, some in zip(groups, kept, strict=True)]


@facts(resumes=True, one_turn=True)
@dataclass(kw_only=True)
class Lookahead:
    """A share of each group branches off one rollout of the prompt; the others are plain (LATR, arXiv 2510.24302)."""

    tau_abs: Share
    tau_rel: Share
    tau_edit: Share
    chunk: Count
    prune_after: Sequence[int]
    hand_over: Count | None
    share: Sequence[Share]
    since: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.share) != len(self.since) or list(self.since) != sorted({0, *self.since}):
            raise UserError(
                f"collector.since={list(self.since)} must be the steps, from 0 on, at which each of collector.share="
                f"{list(self.share)} begins: as many, and in order"
            )
        ages = list(self.prune_after)
        if ages != sorted(set(ages)) or min(ages, default=1) < 1:
            raise UserError(f"collector.prune_after={ages} must be numbers of tokens, from 1 on, in order")

    def setup(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        until = look_at("collector.hand_over", self.hand_over, step.sampling.max_new_tokens)
        share = [share for first, share in zip(self.since, self.share, strict=True) if first <= step.step][-1]
        leaves = round(share * step.n)
        prompts, tree, length = step.pick(step.prompts), _Tree(), min(self.chunk, until)
        if leaves:
            step.generate(((prompt, 1) for prompt in prompts), limit=length)
        while leaves and length < until:
            known = {one.key: one for group in tree.left(step.groups) for one in group.rollouts}
            tree.pruned |= {name for name, one in known.items() if self._stays_close(one, known, tree)}
            left = tree.left(step.groups)
            begun, live = self._branches(left, tree, leaves), _live(left)
            if not begun and (not live or self._is_settled(left, tree, leaves)):
                break
            length = min(length + self.chunk, until)
            born = _born(step.groups, tree, begun)
            step.generate([*live, *(Group(one.request.prompt, (one,)) for one in born)], limit=length)
            fresh = {one.key for one in born}  # what comes up with a branch is passed over
            tree.read |= {one.key: len(one) for group in step.groups for one in group.rollouts if one.key in fresh}
        left = tree.left(step.groups)
        counts = {group.prompt.id: len(group.rollouts) for group in left}
        step.generate([*_live(left), *((p, step.n - counts.get(p.id, 0)) for p in prompts)])
        step.note("branches", len(tree.branches))
        step.note("pruned", len(tree.pruned))
        return step.score(step.groups)

    def _stays_close(self, one: Rollout, known: Mapping[Name, Rollout], tree: _Tree) -> bool:
        """True if a stretch since the last reading is too close to its origin; False where either has ended."""
        branch = tree.branches.get(one.key)
        if branch is None or not one.is_partial:
            return False
        close, parent, start = False, known.get(branch.parent), branch.place
        for after in self.prune_after[branch.passed :]:
            if len(one) < start + after:
                break
            branch.passed += 1
            if parent is not None and parent.is_partial and len(parent) >= start + after:
                stretches = (r.token_ids[start : start + after] for r in (one, parent))
                close = close or edit_distance(*stretches) / after < self.tau_edit
        return close

    def _branches(self, groups: Sequence[Group], tree: _Tree, leaves: int) -> list[tuple[Rollout, int, int]]:
        """Return where branches begin in what has come up since the last look, parent, place and token: prompt by
        prompt, the earliest first."""
        found: list[tuple[Rollout, int, int]] = []
        for group in groups:
            grown = [one for one in group.rollouts if len(one) > tree.read.get(one.key, 0)]
            if not grown or len(group.rollouts) >= leaves:
                continue
            reading, own = read(self._runtime, grown, tokens=True), list[tuple[Rollout, int, int]]()
            for one, probs, ids in zip(grown, reading.top_probs, reading.top_ids, strict=True):
                for place in range(tree.read.get(one.key, 0), len(one)):
                    (first, second), (likeliest, next_one) = probs[place], ids[place].tolist()
                    other = next_one if one.token_ids[place] == likeliest else likeliest
                    is_close = second > self.tau_abs and first - second < self.tau_rel
                    if is_close and other not in self._runtime.ends:
                        own.append((one, place, other))
            earliest = sorted(own, key=lambda begun: (begun[1], begun[0].request.sample))
            found += earliest[: leaves - len(group.rollouts)]
        tree.read |= {rollout.key: len(rollout) for group in groups for rollout in group.rollouts}
        return found

    def _is_settled(self, groups: Sequence[Group], tree: _Tree, leaves: int) -> bool:
        """True if every tree has its leaves, and no branch of them is to be judged yet."""
        names = (rollout.key for group in groups for rollout in group.partial.rollouts)
        young = any(name in tree.branches and tree.branches[name].passed < len(self.prune_after) for name in names)
        return not young and all(len(group.rollouts) >= leaves for group in groups)


def _born(groups: Sequence[Group], tree: _Tree, asked: Sequence[tuple[Rollout, int, int]]) -> list[Rollout]:
    """Return the branches, which begin with their parent's tokens."""
    sizes = {group.prompt.id: len(group.rollouts) for group in groups}
    born = []
    for parent, place, other in asked:
        name, given = parent.key[0], (*parent.token_ids[:place], other)
        sample, sizes[name] = sizes[name], sizes[name] + 1
        born.append(begun_with(parent.request, given, sample, "branch", place))
        tree.branches[name, sample] = _Branch(parent.key, place)
    return born


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
