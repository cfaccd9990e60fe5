"""ETS: of a tree of completions only that part continues which is worth its nodes (`search=ets`, arXiv 2502.13575).

    grow      each unfinished completion by at most `every` tokens: a node of the tree
    choose    leaves S with the largest  sum over S of o_i - cost (nodes kept for S) / (nodes)
              + diversity (clusters in S) / (clusters);  o: REBASE's counts, over their sum
    count     REBASE's over S (arXiv 2408.00724, as `search=dora` has it)
    answer    when all have ended, the one with the largest sum of q

Nodes are the prompt and the steps from it to the leaves; clusters are of the leaves' directions, by average linkage up
to a cosine distance of 0.05. The choice is exact, by branch and bound, for at most 20 leaves. Ours: that; and q, the
directions, the equal steps and the answer, as `search=dora` has them. A completion's beginning is read again at each
step, so that what is cut saves tokens alone.

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

import numpy as np
from jaxtyping import Float
from pydantic import Field

from grpo_cli.experimental.dora import Leaf, Tree, cosines, rebase

NEAR = 0.05  # the cosine distance up to which directions are one cluster

Weight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Ets(Tree):
    """A tree of which branches are cut that cost more than they are worth."""

    width: Annotated[int, Field(ge=1, le=20)]
    cost: Weight
    diversity: Weight

    def _counts(self, leaves: Sequence[Leaf], states: Float[np.ndarray, "L H"], places: int) -> list[int]:
        scores = [leaf.score for leaf in leaves]
        counts = rebase(scores, places, self.temperature)
        worth, labels = [count / sum(counts) for count in counts], clusters(cosines(states))
        kept = chosen(worth, [leaf.path for leaf in leaves], labels, self.cost, self.diversity)
        again = dict(zip(kept, rebase([scores[i] for i in kept], places, self.temperature), strict=True))
        return [again.get(i, 0) for i in range(len(leaves))]


def chosen(
    worth: Sequence[float], paths: Sequence[tuple[int, ...]], labels: Sequence[int], cost: float, diversity: float
) -> list[int]:
    """Return the leaves that continue, at least one: those that are worth most together.

    `paths` are of the leaves' parents, from the root. A leaf is a node of its own.
    """
    nodes = [{("leaf", i), *(path[:end] for end in range(len(path) + 1))} for i, path in enumerate(paths)]
    per_node, per_cluster = cost / len(set().union(*nodes)), diversity / len(set(labels))
    order = sorted(range(len(worth)), key=lambda i: -worth[i])

    def value(some: Sequence[int]) -> float:
        kept = len(set().union(*(nodes[i] for i in some)))
        return sum(worth[i] for i in some) - per_node * kept + per_cluster * len({labels[i] for i in some})

    best = max(([i] for i in order), key=value)
    # Depth first, each leaf taken before it is left; what is left can add no more than its worth and new clusters.
    waiting: list[tuple[int, list[int]]] = [(0, [])]
    while waiting:
        place, some = waiting.pop()
        if some and value(some) > value(best):
            best = some
        left = order[place:]
        new = {labels[i] for i in left} - {labels[i] for i in some}
        bound = (value(some) if some else 0.0) + sum(worth[i] for i in left) + per_cluster * len(new)
        if left and bound > value(best):
            waiting += [(place + 1, some), (place + 1, [*some, left[0]])]
    return sorted(best)


def clusters(cos: Float[np.ndarray, "L L"]) -> list[int]:
    """Return each one's cluster: the two nearest by the mean distance of their members are joined, until none is
    nearer than NEAR."""
    groups = [[i] for i in range(len(cos))]
    while len(groups) > 1:
        pairs = [*combinations(range(len(groups)), 2)]
        far, (a, b) = min((1.0 - float(cos[np.ix_(groups[a], groups[b])].mean()), (a, b)) for a, b in pairs)
        if far > NEAR:
            break
        groups[a] += groups.pop(b)
    return [next(number for number, group in enumerate(groups) if i in group) for i in range(len(cos))]
