"""LATR: rollouts of a problem grow as a tree that branches where the policy hesitates (`collector=lookahead`, arXiv
2510.24302).

    one rollout of each problem; every `chunk` tokens, while a problem has fewer than its share of n, in order of time
    a branch begins at a token with p_2 > tau_abs and p_1 - p_2 < tau_rel, with that of the two that was not taken
    r tokens (of `prune_after`) after its birth it is given up if
        edit distance to the same stretch of the rollout that it left / r < tau_edit
    all that is left goes on by itself at `hand_over` tokens, or once every problem has its share

The tokens that a branch shares with the rollout that it left are given to it, and count in both; a correction sees only
those that were drawn. Ours: rollouts are drawn as always and not by their likeliest tokens until `hand_over`, so the
first one of each problem is an ordinary one; no branch begins with the end of a text, or in the chunk in which it is
born; all trees have to be full for an early end. Left out: that stretches which begin with a symbol or a digit are not
judged (a collector reads no text), and an engine's fork: what is shared is prefilled again (engine/prefill_tokens).

Measured: scripts/reproduce/frontier_d.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.collect.resuming import look_at
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.support.facts import Others, facts
from grpo_cli.support.ranges import Count, Share
from grpo_cli.types import Finish, Group, GroupRequest, Readout, Rollout, Round

Name = tuple[str, int]  # a problem's id and a sample


@dataclass
class _Branch:
    """Where it left which rollout, and how many of `prune_after` it has passed."""

    parent: Name
    place: int
    passed: int = 0


@dataclass
class _Tree:
    """What is known of a step's rollouts: how far each was read, and of branches where they began."""

    read: dict[Name, int] = field(default_factory=dict)
    branches: dict[Name, _Branch] = field(default_factory=dict)
    pruned: int = 0


def _goes_with(own: Mapping[str, Any], others: Others) -> Iterator[str]:
    name = others.named("collector")
    if len(own["share"]) != len(own["since"]) or list(own["since"]) != sorted({0, *own["since"]}):
        yield (
            f"collector.since={list(own['since'])} must be the steps, from 0 on, at which each of collector.share="
            f"{list(own['share'])} begins: as many, and in order"
        )
    if list(own["prune_after"]) != sorted(set(own["prune_after"])) or min(own["prune_after"], default=1) < 1:
        yield f"collector.prune_after={list(own['prune_after'])} must be numbers of tokens, from 1 on, in order"
    if others.setting("correction", "prox") == "drawn":
        yield (
            f"correction.prox=drawn takes the sampler for the old policy, but {name} gives branches tokens that it did "
            "not draw for them; use correction.prox=now"
        )
    if others.says("sparsity", "evicts"):
        yield (
            f"{name} goes on from tokens that are there, which {others.named('sparsity')} would count as prompt and "
            "never evict; use sparsity=dense, or collector=equal"
        )
    if (others.setting("task", "turns") or 1) > 1:
        yield f"{name} branches in replies of one turn, and {others.named('task')} has several; use task.turns=1"


@facts(goes_with=_goes_with, reads=("top",), arms=True)
def lookahead(
    collection: Collection,
    *,
    tau_abs: Share,
    tau_rel: Share,
    tau_edit: Share,
    chunk: Count,
    prune_after: Sequence[int],
    hand_over: Count | None,
    share: Sequence[Share],
    since: Sequence[int],
) -> Rounds:
    """A share of each group branches off one rollout of the problem; the others are plain."""
    until = look_at("collector.hand_over", hand_over, collection.max_new_tokens)
    begun = [part for step, part in zip(since, share, strict=True) if step <= collection.step]
    leaves = round(begun[-1] * collection.n)
    prompts, tree, length = collection.pick(collection.prompts), _Tree(), min(chunk, until)
    groups: Sequence[Group] = ()
    if leaves:
        groups = yield Round(tuple(GroupRequest(prompt, 1) for prompt in prompts), limit=length)
    while leaves and length < until:
        groups = _pruned(collection, groups, tree, prune_after, tau_edit)
        asked = _branches(collection, groups, tree, leaves, tau_abs, tau_rel)
        live = _live(groups)
        if not asked and (not live or _is_settled(groups, tree, leaves, prune_after)):
            break
        length = min(length + chunk, until)
        requests = tuple(GroupRequest(group.prompt, 1, prefix=prefix) for group, prefix, _ in asked)
        groups = yield Round(requests, live, limit=length)
        _born(groups, tree, [(group.prompt.id, branch) for group, _, branch in asked])
    counts = {group.prompt.id: len(group.rollouts) for group in groups}
    rest = tuple(GroupRequest(p, lacking) for p in prompts if (lacking := collection.n - counts.get(p.id, 0)))
    if rest or _live(groups):
        yield Round(rest, _live(groups))
    collection.note("branches", len(tree.branches))
    collection.note("pruned", tree.pruned)
    return None


def _name(rollout: Rollout) -> Name:
    return rollout.request.about.id, rollout.request.sample


def _live(groups: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(partial for group in groups if (partial := group.partial).rollouts)


def _pruned(
    collection: Collection, groups: Sequence[Group], tree: _Tree, prune_after: Sequence[int], tau: float
) -> list[Group]:
    """The groups without the branches that have stayed too close to what they left, which are dropped."""
    known = {_name(rollout): rollout for group in groups for rollout in group.rollouts}
    left = []
    for group in groups:
        doomed = tuple(one for one in group.rollouts if _stays_close(one, known, tree, prune_after, tau))
        collection.drop([Group(group.prompt, doomed)])
        tree.pruned += len(doomed)
        left.append(Group(group.prompt, tuple(one for one in group.rollouts if one not in doomed)))
    return left


def _stays_close(
    one: Rollout, known: Mapping[Name, Rollout], tree: _Tree, prune_after: Sequence[int], tau: float
) -> bool:
    """Whether some stretch that has come up since the last look is too close; not judged where either has ended."""
    branch = tree.branches.get(_name(one))
    if branch is None or one.finish is not Finish.PARTIAL:
        return False
    close, parent, start = False, known.get(branch.parent), branch.place
    for after in prune_after[branch.passed :]:
        if len(one) < start + after:
            break
        branch.passed += 1
        if parent is not None and parent.finish is Finish.PARTIAL and len(parent) >= start + after:
            stretches = (r.token_ids[start : start + after] for r in (one, parent))
            close = close or edit_distance(*stretches) / after < tau
    return close


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Fewest tokens to put in, take out or exchange.

    >>> edit_distance("kitten", "sitting"), edit_distance("", "ab"), edit_distance("ab", "ab")
    (3, 2, 0)
    """
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _branches(
    collection: Collection, groups: Sequence[Group], tree: _Tree, leaves: int, tau_abs: float, tau_rel: float
) -> list[tuple[Group, tuple[int, ...], _Branch]]:
    """Where branches begin in what has come up since the last look: problem by problem, the earliest first."""
    grown = [Group(g.prompt, tuple(r for r in g.rollouts if len(r) > tree.read.get(_name(r), 0))) for g in groups]
    grown = [g for g, whole in zip(grown, groups, strict=True) if g.rollouts and len(whole.rollouts) < leaves]
    rows = [rollout for group in grown for rollout in group.rollouts]
    readout = collection.read(grown, {"top"}, None, 1) if rows else None
    found: dict[str, list[tuple[int, int, Rollout, int]]] = {}
    for row, rollout in enumerate(rows):
        assert readout is not None, "it was read"
        for place, other in _hesitations(readout, row, rollout, tree.read.get(_name(rollout), 0), tau_abs, tau_rel):
            if other not in collection.ends:
                found.setdefault(rollout.request.about.id, []).append((place, rollout.request.sample, rollout, other))
    tree.read |= {_name(rollout): len(rollout) for group in groups for rollout in group.rollouts}
    begun = []
    for group in groups:
        earliest = sorted(found.get(group.prompt.id, []), key=lambda one: one[:2])
        for place, _, parent, other in earliest[: leaves - len(group.rollouts)]:
            begun.append((group, (*parent.token_ids[:place], other), _Branch(_name(parent), place)))
    return begun


def _hesitations(
    readout: Readout, row: int, rollout: Rollout, since: int, tau_abs: float, tau_rel: float
) -> Iterator[tuple[int, int]]:
    """Places from `since` on at which the two likeliest tokens are close, and the one that was not taken."""
    assert readout.top_probs is not None and readout.top_ids is not None, "they are read"
    start = len(rollout.request.prompt.token_ids)
    probs, ids = (top[row, start:].tolist() for top in (readout.top_probs, readout.top_ids))
    for place, ((first, second), (likeliest, next_one)) in enumerate(zip(probs, ids, strict=True)):
        if since <= place < len(rollout) and second > tau_abs and first - second < tau_rel:
            yield place, next_one if rollout.token_ids[place] == likeliest else likeliest


def _is_settled(groups: Sequence[Group], tree: _Tree, leaves: int, prune_after: Sequence[int]) -> bool:
    """Whether every tree has its leaves, and no branch of them is to be judged yet."""
    names = (_name(rollout) for group in groups for rollout in group.partial.rollouts)
    young = any(name in tree.branches and tree.branches[name].passed < len(prune_after) for name in names)
    return not young and all(len(group.rollouts) >= leaves for group in groups)


def _born(groups: Sequence[Group], tree: _Tree, asked: Sequence[tuple[str, _Branch]]) -> None:
    """The samples of the branches, which are a problem's newest in order; what came up with them is passed over."""
    for group in groups:
        new = [rollout for rollout in group.rollouts if _name(rollout) not in tree.read]
        its = [branch for problem, branch in asked if problem == group.prompt.id]
        for rollout, branch in zip(new, its, strict=True):
            tree.branches[_name(rollout)], tree.read[_name(rollout)] = branch, len(rollout)
