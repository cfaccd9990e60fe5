"""How a batch goes through the model: padded rows, or one run of tokens without padding and each prompt once.

All ways give the same log-probabilities and gradients to rounding; they differ in time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_cli.errors import UserError
from grpo_cli.learner.batch import micro_batch_rows, micro_batches
from grpo_cli.learner.logprobs import chosen_logprobs, logprobs_at, token_logprobs
from grpo_cli.model.packed import Tree, allow_packing, packed_hidden
from grpo_cli.settings import TrainSettings
from grpo_cli.types import Batch


class Row(NamedTuple):
    """All of a row that its shape in a pass depends on: its tokens, and with whom it has its prompt in common."""

    prompt: int
    reply: int
    group: Hashable = None


@runtime_checkable
class Pass(Protocol):
    """Cuts a batch into micro-batches, and computes one of them. Both can be had from lengths alone as well, so that
    what a pass would take can be told without a batch."""

    def __hash__(self) -> int:
        """A pass is a value: what it would take need be found out once."""

    @property
    def plain(self) -> bool:
        """Whether this is the way that the others are compared with."""

    @property
    def tokens(self) -> int:
        """The most that a micro-batch may have, unless a single row has more."""

    def prepare(self, model: Any) -> None:
        """Called before a model is computed with for the first time."""

    def parts(self, batch: Batch) -> list[Tensor]:
        """The rows of each micro-batch."""

    def cut(self, rows: Sequence[Row]) -> list[list[int]]:
        """The same for rows of these lengths."""

    def size(self, rows: Sequence[Row]) -> int:
        """Tokens that go through the model for these rows, padding included."""

    def blank(self, model: Any, rows: Sequence[Row], temperature: float) -> Float[Tensor, "N"]:
        """The computation of a micro-batch of these lengths, all of whose tokens are token 0."""

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

    def cut(self, rows: Sequence[Row]) -> list[list[int]]:
        return micro_batch_rows([row.prompt + row.reply for row in rows], self.tokens)

    def size(self, rows: Sequence[Row]) -> int:
        return len(rows) * max(row.prompt + row.reply for row in rows)

    def blank(self, model: Any, rows: Sequence[Row], temperature: float) -> Float[Tensor, "N"]:
        ids = torch.zeros(len(rows), self.size(rows) // len(rows), dtype=torch.long)
        places = torch.ones(sum(row.reply for row in rows), dtype=torch.long)
        return logprobs_at(model, ids, 0 * places, places, temperature, self.chunk)

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
        return [torch.tensor(rows) for rows in self.cut(_rows(batch, self.share))]

    def cut(self, rows: Sequence[Row]) -> list[list[int]]:
        """At most `tokens` tokens each, but at least one row. A group that is too large is cut between its rows."""
        parts: list[list[int]] = []
        used = 0
        for group in _groups(rows, self.share):
            opened = False  # whether the group's prompt stands in the last part
            for row in group:
                whole = rows[row].prompt + rows[row].reply
                cost = whole - (rows[row].prompt if opened and self.share else 0)
                if parts and used + cost <= self.tokens:
                    parts[-1].append(row)
                    used += cost
                else:
                    parts.append([row])
                    used = whole
                opened = True
        return parts

    def size(self, rows: Sequence[Row]) -> int:
        return sum(map(len, _trees(rows, _groups(rows, self.share))))

    def blank(self, model: Any, rows: Sequence[Row], temperature: float) -> Float[Tensor, "N"]:
        trees = _trees(rows, _groups(rows, self.share))
        ids = torch.zeros(sum(map(len, trees)), dtype=torch.long)
        places = torch.zeros(sum(row.reply for row in rows), dtype=torch.long)
        return chosen_logprobs(model, packed_hidden(model, ids, trees)[places], places, temperature, self.chunk)

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
    rows = max(_groups(_rows(batch, True), True), key=len)[:_ROWS_COMPARED]
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
    lengths = _rows(batch, share)
    groups = _groups(lengths, share)
    rows, columns, targets, predicting = [], [], [], []
    end = 0
    for group in groups:
        width = lengths[group[0]].prompt
        rows.append(torch.full((width,), group[0]))
        columns.append(torch.arange(width))
        last = end + width - 1  # the prompt's last token predicts the first of every reply
        end += width
        for row in group:
            reply = lengths[row].reply
            places = torch.arange(end, end + reply)
            rows.append(torch.full_like(places, row))
            columns.append(width + torch.arange(reply))
            targets.append(places)
            predicting.append(torch.cat([torch.tensor([last]), places[:-1]]))
            end += reply
    joined = (torch.cat(parts) for parts in (rows, columns, targets, predicting))
    all_rows, all_columns, all_targets, all_predicting = joined
    return Run(all_rows, all_columns, tuple(_trees(lengths, groups)), all_targets, all_predicting)


def _rows(batch: Batch, share: bool) -> list[Row]:
    """The rows' lengths; with `share` also which have the same prompt."""
    replies = batch.response_mask.sum(dim=1)
    lengths = zip((batch.lengths - replies).tolist(), replies.tolist(), strict=True)
    if not share:
        return [Row(prompt, reply) for prompt, reply in lengths]
    ids = batch.input_ids.cpu()
    return [Row(prompt, reply, tuple(ids[row, :prompt].tolist())) for row, (prompt, reply) in enumerate(lengths)]


def _groups(rows: Sequence[Row], share: bool) -> list[list[int]]:
    """Rows with the same prompt, in the order in which prompts first come; without `share` each row by itself."""
    if not share:
        return [[row] for row in range(len(rows))]
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group, []).append(number)
    return list(groups.values())


def _trees(rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> list[Tree]:
    """A tree for each group; a row that shares its prompt with none is a plain sequence."""
    trees = []
    for group in groups:
        prompt, replies = rows[group[0]].prompt, tuple(rows[row].reply for row in group)
        trees.append(Tree(prompt + replies[0]) if len(group) == 1 else Tree(prompt, replies))
    return trees
