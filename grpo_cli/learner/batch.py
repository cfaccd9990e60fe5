"""Scored groups to one padded batch; splits a batch: minibatches for several updates, micro-batches for memory.

Padding is on the right, where a causal model never sees it. A part is trimmed to its own longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from grpo_cli.interfaces import Correction
from grpo_cli.types import ENVIRONMENT, GIVEN, Batch, Group, Rollout, ScoredGroup, Totals, Verdict

# What a forward and backward pass costs beyond its tokens, in tokens (measured with the embedded model on a CPU, where
# 256 to 1024 are within a few per cent of each other).
PASS_COST = 512


def collate(groups: Sequence[Group | ScoredGroup], pad_token_id: int, version: int = 0) -> Batch:
    """One row per rollout, group by group, on the CPU. `version` is that of the weights at the start of the step.

    Every response token is trained on with weight 1 until a correction says otherwise; an environment's answers are
    read and are no response. The NaN of tokens that were not drawn is removed here; that of a drawn token stays, for
    the correction to refuse.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    starts = [len(rollout.request.prompt.token_ids) for rollout in rollouts]
    lengths = [start + len(rollout) for start, rollout in zip(starts, rollouts, strict=True)]
    input_ids = torch.full((len(rollouts), max(lengths)), pad_token_id, dtype=torch.long)
    sampler_logprobs = torch.zeros(input_ids.shape)
    response_mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    for row, (rollout, start, length) in enumerate(zip(rollouts, starts, lengths, strict=True)):
        input_ids[row, :length] = torch.tensor([*rollout.request.prompt.token_ids, *rollout.token_ids])
        sampler_logprobs[row, start:length] = torch.tensor(rollout.sampler_logprobs)
        response_mask[row, start:length] = True
        for theirs, tokens in rollout.parts:
            response_mask[row, start : start + len(tokens)] = not theirs
            start += len(tokens)
    sampler_logprobs.masked_fill_(~response_mask, 0.0)
    lags = _lags(rollouts, starts, input_ids.shape, version)
    if lags is not None:
        sampler_logprobs.masked_fill_(lags == GIVEN, 0.0)
    return Batch(
        input_ids=input_ids,
        response_mask=response_mask,
        loss_mask=response_mask,
        weights=response_mask.float(),
        sampler_logprobs=sampler_logprobs,
        policy_logprobs=None,
        ref_logprobs=None,
        advantages=torch.zeros(len(rollouts)),
        lengths=torch.tensor(lengths),
        lags=lags,
    )


def _lags(rollouts: Sequence[Rollout], starts: Sequence[int], shape: torch.Size, version: int) -> Tensor | None:
    """By how many updates each token is older than `version`, or why there is no such number; None: all are current."""
    if all(span.version in (version, ENVIRONMENT) for rollout in rollouts for span in rollout.spans):
        return None
    lags = torch.zeros(shape, dtype=torch.long)
    for row, (rollout, start) in enumerate(zip(rollouts, starts, strict=True)):
        for span in rollout.spans:
            if span.version != ENVIRONMENT:
                lags[row, start : start + span.count] = span.version if span.version < 0 else version - span.version
            start += span.count
    return lags


def totals(batch: Batch, max_new_tokens: int) -> Totals:
    """The divisors of this batch as one update: all sequences, and their tokens that are trained on."""
    return Totals(sequences=len(batch), tokens=int(batch.loss_mask.sum()), max_new_tokens=max_new_tokens)


def verdict_on(correction: Correction, batch: Batch, old_logprobs: Tensor) -> Verdict:
    """A correction's verdict on a batch; it sees only the drawn tokens. `old_logprobs` (B T) are the old policy's, of
    the response tokens.

    Given tokens get weight 1 where their row is trained on, and stay if any token of the row is left. A row without a
    drawn token is not subject to the correction.
    """
    drawn = batch.drawn_mask
    verdict = correction(batch.sampler_logprobs, old_logprobs, drawn, batch.advantages)
    given = batch.response_mask & ~drawn
    if not given.any():
        return verdict
    only_given = given.any(dim=1) & ~drawn.any(dim=1)
    reasons = tuple("" if one else why for why, one in zip(verdict.reasons, only_given.tolist(), strict=True))
    trained = torch.tensor([not why for why in reasons])
    weights = torch.where(given, trained.float()[:, None], verdict.weights)
    left = verdict.mask.any(dim=1) | only_given
    return replace(verdict, weights=weights, mask=verdict.mask | (given & left[:, None]), reasons=reasons)


def corrected(batch: Batch, verdict: Verdict) -> Batch:
    """The batch with a correction's weights, times those that it had, and the tokens that both leave."""
    weights = batch.weights * (verdict.weights * verdict.mask)
    return replace(batch, weights=weights, loss_mask=batch.loss_mask & verdict.mask)


def without_rows(batch: Batch, rows: Sequence[bool]) -> Batch:
    """The batch with nothing to train on in these rows, which stay in it."""
    left = ~torch.tensor(rows)[:, None]
    return replace(batch, weights=batch.weights * left, loss_mask=batch.loss_mask & left)


def rows_of(batch: Batch, rows: Tensor) -> Batch:
    """Only these rows, trimmed to the longest of them."""
    width = int(batch.lengths[rows].max())
    taken = {name: t[rows, :width] if t.dim() > 1 else t[rows] for name, t in _tensors(batch).items()}
    return replace(batch, **taken)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """The fields that the batch has."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if value is not None}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch moved from the host to the device, through pinned memory so that nothing waits."""
    if device.type == "cpu":
        return batch
    moved = {name: value.pin_memory().to(device, non_blocking=True) for name, value in _tensors(batch).items()}
    return replace(batch, **moved)


def minibatches(batch: Batch, count: int, rng: np.random.Generator) -> list[Batch]:
    """`count` parts of equal size (to one row), rows drawn at random; fewer parts when there are fewer rows."""
    if count == 1:
        return [batch]
    order = torch.from_numpy(rng.permutation(len(batch)))
    return [rows_of(batch, rows.sort().values) for rows in order.tensor_split(min(count, len(batch)))]


def micro_batch_rows(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows cut into parts of at most `tokens` tokens, padding included, longest first.

    A part also ends where its padding would cost more than another pass, so that a large budget is no loss of time. A
    row that is longer than `tokens` is a part of its own: nothing is dropped or cut.

    >>> micro_batch_rows([3, 9, 4, 10], tokens=20)
    [[3, 1], [2, 0]]
    """
    parts: list[list[int]] = []
    padding = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        width = lengths[parts[-1][0]] if parts else 0
        padding += width - lengths[row]
        if parts and (len(parts[-1]) + 1) * width <= tokens and padding <= PASS_COST:
            parts[-1].append(row)
        else:
            parts.append([row])
            padding = 0
    return parts
