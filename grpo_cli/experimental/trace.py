"""TRACE, no difference from equal groups seen here: rollouts where right and wrong answers to a prompt are likely to
come together (arXiv 2606.11119).

    gain of a rollout after k others = E[v^k (1 - v)] + E[(1 - v)^k v], v ~ Beta(solved, failed)

Measured: docs/studies.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from jaxtyping import Float
from pydantic import Field

from grpo_cli.interfaces import StepRollouts
from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup


def mixed(
    step: StepRollouts,
    *,
    pool: Annotated[int, Field(ge=1)],
    most: Annotated[int | None, Field(ge=3)],
    prior: Annotated[float, Field(gt=0)],
    decay: Annotated[float, Field(ge=0, le=1)],
) -> list[ScoredGroup]:
    """Share as many rollouts as a plain step has among `pool` times its prompts so that as many groups as possible
    have right and wrong answers (TRACE, arXiv 2606.11119, its allocation at the root).

    A prompt's chance to be solved is taken to be of a Beta distribution, `prior` and the decayed counts of its earlier
    rollouts. A prompt gets none or at least two, at most `most` (null: 2n).
    """
    room = 2 * step.n if most is None else most
    prompts = step.pick(pool * step.prompts)
    if len(prompts) * room < step.n * step.prompts:
        raise UserError(
            f"collector.most={room} has no room for n={step.n} rollouts of train.prompts={step.prompts} among "
            f"{len(prompts)} problems: raise it, or collector.pool"
        )
    known = np.array([step.history.beta(prompt.id, decay, prior) for prompt in prompts])
    gains = mixed_gains(known[:, 0], known[:, 1], room)
    counts = hand_out(gains.tolist(), step.n * step.prompts, step.rng)
    step.note("expected_mixed", sum(gains[place, : count + 1].sum() for place, count in enumerate(counts)))
    return step.score(step.generate(zip(prompts, counts, strict=True)))


def mixed_gains(
    solved: Float[np.ndarray, " Q"], failed: Float[np.ndarray, " Q"], most: int
) -> Float[np.ndarray, "Q most_and_1"]:
    """Return how much the k-th rollout of each prompt adds to the chance of a mixed group, for k = 0..most.

    With v ~ Beta(solved, failed) that chance is 1 - E[v^k] - E[(1-v)^k], and a further rollout adds E[v^k (1-v)] +
    E[(1-v)^k v], which is a sum of products without any difference: nothing cancels.
    """
    gains = np.zeros((len(solved), most + 1))
    all_right, all_wrong = solved / (solved + failed), failed / (solved + failed)
    for count in range(1, most):
        seen = solved + failed + count
        gains[:, count + 1] = (all_right * failed + all_wrong * solved) / seen
        all_right = all_right * (solved + count) / seen
        all_wrong = all_wrong * (failed + count) / seen
    return gains


def hand_out(gains: Sequence[Sequence[float]], budget: int, rng: np.random.Generator) -> list[int]:
    """Return how many rollouts each prompt has after `budget` of them went, one by one, to the largest gains.

    `gains[q][k]` is the gain of prompt q's k-th rollout, up to the length of the list. A prompt without any gets two
    at once, with the total gain `gains[q][2]`, or none. Ties are broken at random. One is left over where all that have
    some are full. O(budget log prompts).
    """
    counts, turns = [0] * len(gains), rng.permutation(len(gains)).tolist()

    def entry(problem: int) -> tuple[float, int, int]:
        row, count = gains[problem], counts[problem]
        return (-row[count + 1] if count else -row[2] / 2), turns[problem], problem

    heap = [*map(entry, range(len(gains)))]
    heapq.heapify(heap)
    while budget and heap:
        problem = heap[0][2]
        taken = 1 if counts[problem] else 2
        if taken <= budget:
            counts[problem] += taken
            budget -= taken
        if counts[problem] and counts[problem] + 1 < len(gains[problem]):
            heapq.heapreplace(heap, entry(problem))
        else:
            heapq.heappop(heap)
    return counts
