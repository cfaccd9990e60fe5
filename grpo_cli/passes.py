"""How a batch goes through the model: padded rows, or one run of tokens without padding and each prompt once.

All ways give the same log-probabilities and gradients to rounding; they differ in time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_cli.batch import micro_batches
from grpo_cli.errors import UserError
from grpo_cli.logprobs import chosen_logprobs, token_logprobs
from grpo_cli.model.packed import Tree, allow_packing, packed_hidden
from grpo_cli.settings import TrainSettings
from grpo_cli.types import Batch


@runtime_checkable
class Pass(Protocol):
    """Cuts a batch into micro-batches, and computes one of them."""

    @property
    def plain(self) -> bool:
        """Whether this is the way that the others are compared with."""

    def prepare(self, model: Any) -> None:
        """Called before a model is computed with for the first time."""

    def parts(self, batch: Batch) -> list[Tensor]:
        """The rows of each micro-batch."""

    def logprobs(self, model: Any, part: Batch, temperature: float) -> Float[Tensor, "B T"]:
        """As `logprobs.token_logprobs`."""


def make_pass(train: TrainSettings) -> Pass:
    """What `train` asks for."""
    if train.shared_prefix or train.padding_free:
        return PaddingFree(train.micro_batch_tokens, train.logprob_chunk, train.shared_prefix)
    return Padded(train.micro_batch_tokens, train.logprob_chunk)


@dataclass(frozen=True)
class Padded:
    """Rows of about equal length, padded on the right to the longest; `tokens` bounds them, padding included."""

    tokens: int
    chunk: int

    @property
    def plain(self) -> bool:
        return True

    def prepare(self, model: Any) -> None:
        """Any model will do as it is."""

    def parts(self, batch: Batch) -> list[Tensor]:
        return micro_batches(batch, self.tokens)

    def logprobs(self, model: Any, part: Batch, temperature: float) -> Float[Tensor, "B T"]:
        return token_logprobs(model, part.input_ids, part.response_mask, temperature, self.chunk)


@dataclass(frozen=True)
class PaddingFree:
    """Rows one after the other as a single run. With `share`, rows with the same prompt are one tree: the prompt goes
    through the model once, and a group of m rows costs P + R_1 + ... + R_m tokens in place of m P + R_1 + ... + R_m.
    """

    tokens: int
    chunk: int
    share: bool

    @property
    def plain(self) -> bool:
        return False

    def prepare(self, model: Any) -> None:
        allow_packing(model)

    def parts(self, batch: Batch) -> list[Tensor]:
        """At most `tokens` tokens each, but at least one row. A group that is too large is cut between its rows."""
        prompts, replies = _lengths(batch)
        parts: list[list[int]] = []
        used = 0
        for rows in _groups(batch, prompts, self.share):
            opened = False  # whether the group's prompt stands in the last part
            for row in rows:
                shared = prompts[row] if opened and self.share else 0
                cost = prompts[row] + replies[row] - shared
                if parts and used + cost <= self.tokens:
                    parts[-1].append(row)
                    used += cost
                else:
                    parts.append([row])
                    used = prompts[row] + replies[row]
                opened = True
        return [torch.tensor(rows) for rows in parts]

    def logprobs(self, model: Any, part: Batch, temperature: float) -> Float[Tensor, "B T"]:
        device = part.input_ids.device
        run = flatten(part, self.share)
        rows, columns, predicting, targets = (
            x.to(device) for x in (run.rows, run.columns, run.predicting, run.targets)
        )
        ids = part.input_ids[rows, columns]
        states = packed_hidden(model, ids, run.trees)[predicting]
        chosen = chosen_logprobs(model, states, ids[targets], temperature, self.chunk)
        return torch.zeros(part.input_ids.shape, device=device).index_put((rows[targets], columns[targets]), chosen)


# What rounding may make of the difference between two ways, in means of log-probabilities and in relative gradients.
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_ROWS_COMPARED = 4
_GRADIENTS_COMPARED = 4096  # numbers of each weight's gradient, evenly spread


@dataclass(frozen=True)
class Outcome:
    """What one way made of a micro-batch. `gradients` are samples, weight by weight."""

    logprobs: Float[Tensor, "B T"]
    loss: Tensor
    gradients: tuple[Tensor, ...]


def outcome(
    way: Pass, model: Any, part: Batch, temperature: float, loss_of: Callable[[Tensor], Tensor], autocast: Any
) -> Outcome:
    """Log-probabilities, loss and gradients of a micro-batch; the model's gradients are empty before and after."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with autocast:
        logprobs = way.logprobs(model, part, temperature)
    loss = loss_of(logprobs)
    loss.backward()
    samples = []
    for weight in weights:
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        stride = max(1, gradient.numel() // _GRADIENTS_COMPARED)
        samples.append(gradient.flatten()[::stride].float().clone())
        weight.grad = None
    return Outcome(logprobs.detach(), loss.detach(), tuple(samples))


def require_agreement(plain: Outcome, other: Outcome, mask: Bool[Tensor, "B T"], dtype: torch.dtype) -> None:
    """Raises UserError, with the numbers, unless the two differ by rounding only."""
    tokens = float((plain.logprobs - other.logprobs)[mask].abs().mean())
    loss = float((plain.loss - other.loss).abs() / plain.loss.abs().clamp(min=1.0))
    ours, theirs = torch.cat(other.gradients), torch.cat(plain.gradients)
    gradient = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
    if not max(tokens, loss, gradient) <= _ROUNDING[dtype]:
        raise UserError(
            "train.shared_prefix or train.padding_free does not give what padded rows give for this model: "
            f"log-probabilities differ by {tokens:.2g} in the mean, the loss by {loss:.2g} and the gradient by "
            f"{gradient:.2g} of its norm, where {_ROUNDING[dtype]:g} is rounding; set both to false"
        )


def rows_to_compare(batch: Batch, tokens: int) -> Tensor:
    """A few rows of the largest group with one prompt, as many as fit into `tokens` when padded, at least one."""
    prompts, _ = _lengths(batch)
    rows = max(_groups(batch, prompts, True), key=len)[:_ROWS_COMPARED]
    widest = max(int(batch.lengths[row]) for row in rows)
    return torch.tensor(rows[: max(1, tokens // widest)])


@dataclass(frozen=True)
class Run:
    """A batch as one run of N tokens: where each comes from, and which of them say what of which."""

    rows: Int[Tensor, "N"]
    columns: Int[Tensor, "N"]
    trees: tuple[Tree, ...]
    targets: Int[Tensor, "M"]  # places in the run of the replies' tokens
    predicting: Int[Tensor, "M"]  # places of the tokens before those


def flatten(batch: Batch, share: bool) -> Run:
    """The rows of a batch as trees, in the order in which their prompts come."""
    prompts, replies = _lengths(batch)
    rows, columns, targets, predicting = [], [], [], []
    trees = []
    end = 0
    for group in _groups(batch, prompts, share):
        width = prompts[group[0]]
        rows.append(torch.full((width,), group[0]))
        columns.append(torch.arange(width))
        last = end + width - 1  # the prompt's last token predicts the first of every reply
        end += width
        for row in group:
            places = torch.arange(end, end + replies[row])
            rows.append(torch.full_like(places, row))
            columns.append(width + torch.arange(replies[row]))
            targets.append(places)
            predicting.append(torch.cat([torch.tensor([last]), places[:-1]]))
            end += replies[row]
        alone = len(group) == 1
        trees.append(Tree(width + replies[group[0]]) if alone else Tree(width, tuple(replies[row] for row in group)))
    joined = (torch.cat(parts) for parts in (rows, columns, targets, predicting))
    all_rows, all_columns, all_targets, all_predicting = joined
    return Run(all_rows, all_columns, tuple(trees), all_targets, all_predicting)


def _lengths(batch: Batch) -> tuple[list[int], list[int]]:
    """Prompt and reply tokens of each row."""
    replies = batch.response_mask.sum(dim=1)
    return (batch.lengths - replies).tolist(), replies.tolist()


def _groups(batch: Batch, prompts: Sequence[int], share: bool) -> list[list[int]]:
    """Rows with the same prompt, in the order in which prompts first come; without `share` each row by itself."""
    if not share:
        return [[row] for row in range(len(batch))]
    ids = batch.input_ids.cpu()
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, width in enumerate(prompts):
        groups.setdefault(tuple(ids[row, :width].tolist()), []).append(row)
    return list(groups.values())
