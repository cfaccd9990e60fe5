"""Scored groups to one batch of prefix trees; splits a batch: minibatches for several updates, parts of some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.interfaces import Correction
from grpo_cli.types import ENVIRONMENT, GIVEN, Batch, Group, Rollout, ScoredGroup, Span, Totals, Verdict


def collate(groups: Sequence[Group | ScoredGroup], version: int = 0) -> Batch:
    """Return one row per rollout, group by group, on the CPU. `version` is that of the weights at the start of the
    step.

    Every response token is trained on with weight 1 until a correction changes it. The NaN of tokens that were not
    sampled is removed here; that of a sampled token stays, for the correction to refuse.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompts: dict[tuple[int, ...], int] = {}
    group = [prompts.setdefault(rollout.request.prompt.token_ids, len(prompts)) for rollout in rollouts]
    response = torch.tensor(
        [not theirs for rollout in rollouts for theirs, tokens in rollout.parts for _ in tokens], dtype=torch.bool
    )
    logprobs = torch.tensor([value for rollout in rollouts for value in rollout.sampler_logprobs], dtype=torch.float32)
    ages = _token_ages(rollouts, version)
    return Batch(
        prompts=tuple(prompts),
        group=torch.tensor(group, dtype=torch.long),
        lengths=torch.tensor([len(rollout) for rollout in rollouts], dtype=torch.long),
        token_ids=torch.tensor([token for rollout in rollouts for token in rollout.token_ids], dtype=torch.long),
        response_mask=response,
        loss_mask=response,
        weights=response.float(),
        sampler_logprobs=logprobs.masked_fill(~response if ages is None else ~response | (ages == GIVEN), 0.0),
        old_logprobs=None,
        ref_logprobs=None,
        advantages=torch.zeros(len(response)),
        token_ages=ages,
    )


def _token_ages(rollouts: Sequence[Rollout], version: int) -> Int[Tensor, "N"] | None:
    """Return by how many updates each token is older than `version`, or why there is no such number; None: all are
    current."""
    spans = [span for one in rollouts for span in one.spans or (Span(version, len(one)),)]
    if all(span.version in (version, ENVIRONMENT) for span in spans):
        return None
    ages = [{ENVIRONMENT: 0, GIVEN: GIVEN}.get(span.version, version - span.version) for span in spans]
    return torch.tensor(ages).repeat_interleave(torch.tensor([span.count for span in spans]))


def totals(batch: Batch, max_new_tokens: int) -> Totals:
    """Return the divisors of this batch as one update: all sequences, and their tokens that are trained on."""
    return Totals(sequences=len(batch), tokens=int(batch.loss_mask.sum()), max_new_tokens=max_new_tokens)


def verdict_on(correction: Correction, batch: Batch, old_logprobs: Float[Tensor, "N"]) -> Verdict:
    """Return a correction's verdict on the sampled tokens of a batch, by the old policy's log-probabilities.

    Copied tokens (`GIVEN`: of a prefix or a demonstration) get weight 1 where their row is trained on, and stay if any
    sampled token of the row does. A row without a sampled token is not subject to the correction.
    """
    verdict = correction(batch, old_logprobs)
    sampled = batch.sampled_mask
    given = batch.response_mask & ~sampled
    if not given.any():
        return verdict
    only_given = batch.any(given) & ~batch.any(sampled)
    reasons = tuple("" if one else why for why, one in zip(verdict.reasons, only_given.tolist(), strict=True))
    trained = torch.tensor([not why for why in reasons])
    left = batch.any(verdict.mask) | only_given
    return replace(
        verdict,
        weights=torch.where(given, batch.per_token(trained.float()), verdict.weights),
        mask=verdict.mask | (given & batch.per_token(left)),
        reasons=reasons,
    )


def corrected(batch: Batch, verdict: Verdict) -> Batch:
    """Return the batch with a correction's weights, times those that it had, and the tokens that both leave."""
    weights = batch.weights * (verdict.weights * verdict.mask)
    return replace(batch, weights=weights, loss_mask=batch.loss_mask & verdict.mask)


def with_rows_untrained(batch: Batch, rows: Sequence[bool]) -> Batch:
    """Return the batch with the weights of these rows set to 0, and their tokens out of `loss_mask`."""
    left = ~batch.per_token(torch.tensor(rows))
    return replace(batch, weights=batch.weights * left, loss_mask=batch.loss_mask & left)


def rows_of(batch: Batch, rows: Int[Tensor, "R"]) -> Batch:
    """Return only these rows, in their order."""
    tokens = tokens_of(batch, rows)
    return _with(batch, lambda name, value: value[rows if name in ("group", "lengths") else tokens])


def tokens_of(batch: Batch, rows: Int[Tensor, "R"]) -> Int[Tensor, "_"]:
    """Return the places of these rows' tokens."""
    lengths, ends = batch.lengths[rows], batch.lengths.cumsum(0)[rows]
    before = ends - lengths.cumsum(0)  # tokens of the batch that are left out before a row
    return torch.arange(int(lengths.sum())) + before.repeat_interleave(lengths)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch of the host on the device, through pinned memory so that nothing waits."""
    if device.type == "cpu":
        return batch
    return _with(batch, lambda _, value: value.pin_memory().to(device, non_blocking=True))


def _with(batch: Batch, change: Callable[[str, Tensor], Tensor]) -> Batch:
    """Return the batch with each of its tensors changed."""
    found: dict[str, Any] = {name: change(name, at) for name, at in vars(batch).items() if isinstance(at, Tensor)}
    return replace(batch, **found)


def minibatches(batch: Batch, count: int, rng: np.random.Generator) -> list[Batch]:
    """Return `count` parts of equal size (to one row), shuffled; fewer parts when there are fewer rows."""
    if count == 1:
        return [batch]
    order = torch.from_numpy(rng.permutation(len(batch)))
    return [rows_of(batch, rows.sort().values) for rows in order.tensor_split(min(count, len(batch)))]
