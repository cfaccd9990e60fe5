"""A*-PO: one rollout a prompt, regressed on its distance from a value that was estimated once, before training
(arXiv 2505.20686; `A2POTrainer` of TRL's experimental trainers).

    V* = b1 log mean exp(r / b1), over answers of the model as it was at the start;  A = r - V*
    loss = mean over rollouts of (b2 sum over tokens of log(pi / pi_ref) - A)^2

The answers are those of `advantage.answers`, the samples.jsonl that an evaluation wrote before training. The formulas,
b1 = 0.5 and b2 = 1e-3 are as TRL's release has them. Ours: r is 1 for a solved prompt and else 0; prompts that no
answer solved (V* = 0) are not left out; a row counts by the mean weight of its tokens; n is 2 or more.

Not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.interfaces import Runtime
from grpo_cli.rules.loss import masked_float
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.problems import records
from grpo_cli.tracking.examples import raw_text
from grpo_cli.types import Batch, LossOutput, ScoredGroup, Totals

Beta = Annotated[float, Field(gt=0, le=1e3)]
WRITE_IT = "grpo eval eval.split=train eval.problems=-1 eval.k=8"


def value(share: float, beta: float) -> float:
    """Return beta log mean exp(r / beta) over answers of which a share has r = 1, the others 0.

    >>> round(value(0.5, 1.0), 4)  # log((1 + e) / 2)
    0.6201
    """
    return 1.0 + beta * math.log(share + (1 - share) * math.exp(-1 / beta)) if share else 0.0


class Optimal:
    """1 or 0 for solved or not, less the prompt's optimal value by answers from before training (A*-PO)."""

    def __init__(self, *, beta: Beta, answers: str | None) -> None:
        if answers is None:
            raise UserError(f"advantage=a2po needs advantage.answers=<samples.jsonl>: write it with {WRITE_IT}")
        self._beta, self._file = beta, answers
        self._shares, self._texts = _shares_in(answers)

    def setup(self, runtime: Runtime) -> None:
        """Raise UserError for a prompt that the file does not know, or of which it has another text."""
        for prompt in runtime.task.prompts("train"):
            if self._texts.get(prompt.id) != raw_text(runtime.task, prompt.token_ids):
                raise UserError(f"advantage.answers has no answer to this run's {prompt.id}: write it with {WRITE_IT}")

    def __call__(self, group: ScoredGroup, kept: Sequence[int]) -> Float[Tensor, " K"]:
        solved = torch.tensor([float(group.rewards[index].solved) for index in kept])
        return solved - value(self._shares[group.prompt.id], self._beta)


def _shares_in(file: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return which share of its sampled answers solved each prompt, and the prompts. UserError for another kind of
    file."""
    found, texts = dict[str, list[bool]](), dict[str, str]()
    try:
        for _, row in records(file, "advantage.answers"):
            if row["reason"] == "sampled":
                found.setdefault(str(row["prompt_id"]), []).append(row["solved"] is True)
                texts[str(row["prompt_id"])] = row["prompt"]
    except (KeyError, TypeError) as error:
        raise UserError(f"advantage.answers={file} is no samples.jsonl ({error!r}); {WRITE_IT} writes one") from error
    if not found:
        raise UserError(f"advantage.answers={file} has no sampled answers: write it with {WRITE_IT}")
    return {problem: sum(solved) / len(solved) for problem, solved in found.items()}, texts


@dataclass(frozen=True)
class Regression:
    """(beta * log(pi / pi_ref) of a whole rollout - its advantage)^2, the mean over rollouts (A*-PO, arXiv 2505.20686).

    On-policy its gradient is 2 beta times that of beta KL(pi || pi_ref) - reward, the value being a baseline.
    """

    beta: Beta

    needs_reference = True

    def __call__(self, logprobs: Float[Tensor, "N"], batch: Batch, totals: Totals) -> LossOutput:
        mask = batch.loss_mask
        assert batch.ref_logprobs is not None, "it says that it needs a reference"
        moved = batch.sums(masked_float(logprobs, mask) - masked_float(batch.ref_logprobs, mask).detach())
        tokens = batch.sums(mask).clamp(min=1)
        weights, advantages = (batch.sums(masked_float(x, mask)) / tokens for x in (batch.weights, batch.advantages))
        loss = (weights * (self.beta * moved - advantages).square()).sum() / max(totals.sequences, 1)
        return LossOutput(loss, {"loss/policy": loss.detach()})
