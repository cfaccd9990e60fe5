"""A*-PO: one rollout a problem, regressed on its distance from a value that was estimated once, before training
(arXiv 2505.20686; `A2POTrainer` of TRL's experimental trainers).

    V* = b1 log mean exp(r / b1), over answers of the model as it was at the start;  A = r - V*
    loss = mean over rollouts of (b2 sum over tokens of log(pi / pi_ref) - A)^2

The formulas, b1 = 0.5 and b2 = 1e-3 are as TRL's release has them; the paper could not be read. Ours: r is 1 for a
solved problem and else 0, as the paper has rewards, whatever the reward's parts say; problems that no answer solved
(V* = 0) are not left out; a row counts by the mean weight of its tokens, 1 without a correction or a credit.

Not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.collect.profile import WRITE_IT
from grpo_cli.history import History, Visit
from grpo_cli.rules.loss import masked_float
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import Others, facts
from grpo_cli.support.ranges import Range
from grpo_cli.types import AdvantageInputs, Batch, LossOutput, Totals

Beta = Annotated[float, Range(0, 1e3, "it is the weight of a KL to the model as it was", above=True)]


def value(visit: Visit, beta: float) -> float:
    """beta log mean exp(r / beta) over answers of which `solved` of `tried` have r = 1, the others 0.

    >>> round(value(Visit(-1, 1, 2), 1.0), 4)  # log((1 + e) / 2)
    0.6201
    """
    share = visit.solved / visit.tried
    return 1.0 + beta * math.log(share + (1 - share) * math.exp(-1 / beta)) if share else 0.0


@facts(alone=True, needs_history=True)
def optimal(
    kept_rewards: Float[Tensor, " K"],
    group_rewards: Float[Tensor, " G"],
    inputs: AdvantageInputs,
    history: History,
    *,
    beta: Beta,
) -> Float[Tensor, " K"]:
    """1 or 0 for solved or not, less the problem's optimal value by what `train.history` knows of it. UserError for a
    problem that it does not know."""
    prompt = inputs.group.prompt.id
    if prompt not in history.profile:
        raise UserError(
            f"advantage=a2po needs the value of every problem, and train.history does not know {prompt}: write it of "
            f"all, with {WRITE_IT}, and train on those (the same task.train_problems)"
        )
    solved = [float(inputs.group.rewards[index].solved) for index in inputs.kept]
    return torch.tensor(solved, dtype=kept_rewards.dtype) - value(history.profile[prompt], beta)


def _goes_with(own: Mapping[str, Any], others: Others) -> Iterator[str]:
    if not others.says("advantage", "alone"):
        yield (
            f"{others.named('loss')} regresses on how far a reward is from its problem's value, which "
            f"{others.named('advantage')} does not say: use advantage=a2po n=1 train.history=<samples.jsonl>, which "
            f"{WRITE_IT} writes"
        )


@facts(goes_with=_goes_with)
@dataclass(frozen=True)
class Regression:
    """(beta * log(pi / pi_ref) of a whole rollout - its advantage)^2, the mean over rollouts (A*-PO, arXiv 2505.20686).

    On-policy its gradient is 2 beta times that of beta KL(pi || pi_ref) - reward, the value being a baseline.
    """

    beta: Beta

    needs_reference = True

    def __call__(self, logprobs: Float[Tensor, "B T"], batch: Batch, totals: Totals) -> LossOutput:
        mask = batch.loss_mask
        assert batch.ref_logprobs is not None, "it says that it needs a reference"
        moved = (masked_float(logprobs, mask) - masked_float(batch.ref_logprobs, mask).detach()).sum(dim=1)
        weights = masked_float(batch.weights, mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        loss = (weights * (self.beta * moved - batch.advantages.float()).square()).sum() / max(totals.sequences, 1)
        return LossOutput(loss, {"loss/policy": loss.detach()})
