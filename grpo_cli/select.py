"""Selection of the rollouts to train on, and their advantages: rejection, then down-sampling, then advantages.

The order matters where the rules meet. A rollout that the correction rejects, or that is cut off and left out for it
(train.truncated), contributes no gradient, so with n > m it is never chosen in place of one that does. With m = n
nothing is chosen: the rejected stay in the batch with weight 0, so that the divisors count them (as Sparse-RL's release
has it), or are left out altogether, by `count_rejected`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.interfaces import Advantage, Downsample
from grpo_cli.rules.advantage import advantages
from grpo_cli.rules.downsample import choose
from grpo_cli.types import Batch, Finish, ScoredGroup

NOT_CHOSEN = "not chosen by the down-sample rule"
CUT_OFF = "cut off: left out by train.truncated"
NO_TOKEN = "empty: no response token"


@dataclass(frozen=True)
class Selection:
    """A scored group, and what happened to its rollouts.

    `indices` are the places in the group of those in the batch, `advantages` are in the same order. `reasons` holds for
    each rollout of the group why it is not trained on, empty for one that is (for chosen ones, final only after
    `finalised` checks weights)."""

    group: ScoredGroup
    indices: tuple[int, ...]
    advantages: Float[Tensor, "K *T"]
    reasons: tuple[str, ...]


def select(
    group: ScoredGroup,
    rejections: Sequence[str],
    keep: int | None,
    rule: Downsample,
    advantage: Advantage,
    rng: np.random.Generator,
    count_rejected: bool,
) -> Selection:
    """Choose `keep` rollouts of a group, fewer if fewer are left, None: all, and compute their advantages.

    `rejections` has each rollout's reason of rejection, empty without. With `count_rejected` the
    rewards of the rejected still belong to the group's statistics (they were sampled from the same policy).
    """
    size = len(group.rollouts)
    left = [index for index in range(size) if not rejections[index]]
    baseline = list(range(size)) if count_rejected else left
    chosen = baseline if keep is None else [left[place] for place in choose(rule, group.take(left), keep, rng)]
    found = torch.zeros(0)
    if chosen:
        place = {index: at for at, index in enumerate(baseline)}
        counted = group if len(baseline) == size else group.take(baseline)
        found = advantages(advantage, counted, [place[index] for index in chosen])
    trained = set(chosen)
    reasons = tuple(why or ("" if index in trained else NOT_CHOSEN) for index, why in enumerate(rejections))
    return Selection(group, tuple(chosen), found, reasons)


def finalised(selected: Sequence[Selection], batch: Batch, rejections: Sequence[str]) -> list[Selection]:
    """Return the same selections once the weights of their `batch` are known: a chosen rollout whose tokens all have
    weight 0 gets a reason. `rejections` come from a correction that judged the batch, row by row; or there are
    none."""
    rows = zip(batch.any(batch.trained_mask).tolist(), rejections or [""] * len(batch), strict=True)
    found = []
    for selection in selected:
        reasons = list(selection.reasons)
        for index in selection.indices:
            is_trained, why = next(rows)
            reasons[index] = "" if is_trained else reasons[index] or why or NO_TOKEN
        found.append(replace(selection, reasons=tuple(reasons)))
    return found


def row_weights(selected: Sequence[Selection]) -> Float[Tensor, "K"]:
    """Return weights of the selected rollouts that make each prompt count the same: the mean number of rollouts per
    prompt in the batch, divided by the prompt's own. Their mean is 1; a prompt without rollouts is not counted."""
    counts = [len(selection.indices) for selection in selected if selection.indices]
    mean = sum(counts) / len(counts)
    return torch.tensor([mean / count for count in counts for _ in range(count)])


def batch_rows(selected: Sequence[Selection]) -> Int[Tensor, "K"]:
    """Return indices of the selected rollouts among all rollouts of the step, group by group."""
    rows, start = [], 0
    for selection in selected:
        rows += [start + index for index in selection.indices]
        start += len(selection.group.rollouts)
    return torch.tensor(rows)


def cut_off(groups: Sequence[ScoredGroup], truncated: str) -> list[str]:
    """Return of each rollout, group after group, why `train.truncated` leaves it out; empty where it does not."""
    left_out = Finish.LENGTH if truncated == "leave_out" else None
    return [CUT_OFF if one.finish is left_out else "" for group in groups for one in group.rollouts]


def batch_advantages(selected: Sequence[Selection]) -> Float[Tensor, "N"]:
    """Return the advantage of each token of the selected rows."""
    found = []
    for selection in selected:
        for index, own in zip(selection.indices, selection.advantages, strict=True):
            count = len(selection.group.rollouts[index])
            found.append(own.expand(count) if own.dim() == 0 else own[:count])
    return torch.cat(found)
