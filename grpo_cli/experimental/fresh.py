"""Advantages of GRPO for tokens of the current weights alone (`advantage=fresh`; ours, for APRIL, arXiv 2509.18521,
which trains on older ones too).

    A for tokens of the newest weights that sampled any of the group and for given ones, 0 for older ones

A token of advantage 0 stays in the divisors of the policy loss, and in its KL.

Measured: docs/studies.md (accuracy was lower).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_cli.rules.advantage import Epsilon, StatsOver, grpo
from grpo_cli.types import GIVEN, ScoredGroup


def weighed(advantages: Float[Tensor, " K"], weights: Sequence[Any]) -> Float[Tensor, "K T"]:
    """Return each rollout's advantage times the weights of its tokens."""
    rows = [torch.as_tensor(own, dtype=torch.float64) for own in weights]
    return advantages[:, None] * pad_sequence(rows, batch_first=True)


def fresh(group: ScoredGroup, kept: Sequence[int], *, stats_over: StatsOver, eps: Epsilon) -> Float[Tensor, "K T"]:
    """Weigh tokens by whether they are new. A group that was stored whole is fresh by that: it goes with collectors
    that finish groups in the step."""
    spans = [[(span.version, span.count) for span in one.spans] or [(0, len(one))] for one in group.rollouts]
    own = [np.repeat([version for version, _ in of], [count for _, count in of]) for of in spans]
    newest = max(int(of.max(initial=0)) for of in own)
    weights = [(own[index] == newest) | (own[index] == GIVEN) for index in kept]
    return weighed(grpo(group, kept, stats_over=stats_over, eps=eps), weights)
