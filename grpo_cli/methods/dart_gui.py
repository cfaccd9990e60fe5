"""Only the most uncertain tokens are trained on (`credit=entropy`; DART-GUI, arXiv 2509.23866).

    1 / keep for the `keep` share of the step's response tokens with the largest entropy, 0 for the others

so that the weights still add up to the number of tokens. Entropies are of the policy before the step; of equal ones the
first count. Ours: single tokens, where the paper chooses steps of an episode, and their share. Of the paper this is one
part of several.

Not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import History
from grpo_cli.support.facts import facts
from grpo_cli.support.ranges import Range
from grpo_cli.types import Batch, Readout


@facts(reads=("entropies",))
def most_uncertain(
    batch: Batch,
    problems: Sequence[str],
    history: History,
    readout: Readout,
    *,
    keep: Annotated[float, Range(0, 1, "1 is every token", above=True)],
) -> Float[Tensor, "B T"]:
    """1 / keep for the most uncertain response tokens of the batch, rounded up in number, 0 for the others."""
    assert readout.entropies is not None, "it is read"
    entropies = readout.entropies[batch.response_mask]
    order = torch.argsort(entropies, descending=True, stable=True)
    chosen = torch.zeros_like(entropies)
    chosen[order[: math.ceil(keep * len(entropies))]] = 1 / keep
    return torch.zeros_like(batch.weights).masked_scatter(batch.response_mask, chosen.to(batch.weights.dtype))
