"""DARTS, which unlearns the task here: of more rollouts than are trained on, the short and certain ones
(arXiv 2605.30859).

    kept = the m of n rollouts with the fewest tokens; of equally long ones those with the larger mean log-probability

Read from the abstract and secondary sources: that trajectories are chosen from a redundant set so that the policy's
distribution moves to conciseness and certainty. Not recovered, and so not here: how the paper samples from both ends of
the lengths, and how many redundant rollouts each prompt gets. The order above is ours, as is `shortest` for its name
(`collector=dars` is another paper).

It does not read rewards, but lengths correlate with them: the gradient favours a policy that ends sooner.

Measured: docs/studies.md (the embedded model unlearns its task).
"""

from __future__ import annotations

import numpy as np

from grpo_cli.experimental.sample_and_rank import mean_logprob
from grpo_cli.types import ScoredGroup


def shortest(group: ScoredGroup, keep: int, rng: np.random.Generator) -> list[int]:
    """Return the rollouts with the fewest sampled tokens; of equal length the likeliest per token; then any of them."""
    by = [(rollout.num_sampled, -mean_logprob(rollout) if rollout.num_sampled else 0.0) for rollout in group.rollouts]
    return sorted(rng.permutation(len(by)).tolist(), key=by.__getitem__)[:keep]
