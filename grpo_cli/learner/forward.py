"""How a batch goes through the model: padded rows, or packed into one without padding and each prompt once.

Both give the same log-probabilities and gradients to rounding; they differ in time and memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.learner.batch import micro_batch_rows, micro_batches
from grpo_cli.learner.logprobs import PLAIN, ByRow, Entropy, chosen_logprobs, logprobs_at, token_logprobs
from grpo_cli.model.anatomy import place_of
from grpo_cli.model.packed import Tree, allow_packing, packed_hidden
from grpo_cli.model.transfer import send
from grpo_cli.settings import TrainSettings
from grpo_cli.support.errors import UserError
from grpo_cli.types import Batch


class RowShape(NamedTuple):
    """All of a row that its shape in a forward depends on: its tokens, and which rows share its prompt."""

    prompt: int
    completion: int
    group: Hashable = None


@dataclass(frozen=True)
class Forward(ABC):
    """Cuts a batch into micro-batches, and computes one of them at the temperature that it was sampled at.

    A micro-batch has at most `tokens` tokens, unless a single row has more; `chunk` positions reach the head at a time.
    """

    tokens: int
    chunk: int
    temperature: float
    by_row: ByRow = PLAIN

    @abstractmethod
    def prepare(self, model: Any) -> None:
        """Called before a model is computed with for the first time."""

    @abstractmethod
    def micro_batches(self, batch: Batch) -> list[Tensor]:
        """The rows of each micro-batch."""

    @abstractmethod
    def cut(self, rows: Sequence[RowShape]) -> list[list[int]]:
        """As `micro_batches`, for rows of these lengths."""

    @abstractmethod
    def size(self, rows: Sequence[RowShape]) -> int:
        """Tokens that go through the model for these rows, padding included."""

    @abstractmethod
    def blank(self, model: Any, rows: Sequence[RowShape]) -> Float[Tensor, "N"]:
        """The computation of a micro-batch of these lengths, all of whose tokens are token 0."""

    @abstractmethod
    def logprobs(self, model: Any, part: Batch, entropy: Entropy | None = None) -> Float[Tensor, "B T"]:
        """As `logprobs.token_logprobs`: of a part that lies on the host, where the model is. The backward pass measures
        `entropy`."""


def make_forward(train: TrainSettings, temperature: float, by_row: ByRow = PLAIN) -> Forward:
    """What `train` asks for. UserError if it leaves open how much goes through at once."""
    plain = make_padded(train, temperature, by_row)
    if train.shared_prefix or train.padding_free:
        return PaddingFree(plain.tokens, plain.chunk, temperature, by_row, share=train.shared_prefix)
    return plain


def make_padded(train: TrainSettings, temperature: float, by_row: ByRow = PLAIN) -> Padded:
    """The same in the plain way."""
    if train.micro_batch_tokens == "auto":
        raise UserError(
            "train.micro_batch_tokens=auto is decided by the command line, before anything is built: give a number, or "
            "the settings that grpo_cli.profile.micro_batch.decided makes of these"
        )
    return Padded(train.micro_batch_tokens, train.logprob_chunk, temperature, by_row)


@dataclass(frozen=True)
class Padded(Forward):
    """Rows of about equal length, padded on the right to the longest; `tokens` counts the padding."""

    def prepare(self, model: Any) -> None:
        """On a GPU transformers would look whether positions are those of packed rows, and wait for what it sees."""
        if place_of(model).type == "cuda":
            allow_packing(model)

    def micro_batches(self, batch: Batch) -> list[Tensor]:
        return micro_batches(batch, self.tokens)

    def cut(self, rows: Sequence[RowShape]) -> list[list[int]]:
        return micro_batch_rows([row.prompt + row.completion for row in rows], self.tokens)

    def size(self, rows: Sequence[RowShape]) -> int:
        return len(rows) * max(row.prompt + row.completion for row in rows)

    def blank(self, model: Any, rows: Sequence[RowShape]) -> Float[Tensor, "N"]:
        ids = torch.zeros(len(rows), self.size(rows) // len(rows), dtype=torch.long)
        places = torch.ones(sum(row.completion for row in rows), dtype=torch.long)
        return logprobs_at(model, ids, 0 * places, places, self.temperature, self.chunk)

    def logprobs(self, model: Any, part: Batch, entropy: Entropy | None = None) -> Float[Tensor, "B T"]:
        given = part.input_ids, part.response_mask, self.temperature, self.chunk
        return token_logprobs(model, *given, self.by_row, entropy)


@dataclass(frozen=True)
class PaddingFree(Forward):
    """Rows packed one after the other. With `share`, rows with the same prompt are one tree: the prompt goes through
    the model once, and a group of m rows costs P + R_1 + ... + R_m tokens in place of m P + R_1 + ... + R_m.
    """

    share: bool = field(kw_only=True)

    def prepare(self, model: Any) -> None:
        allow_packing(model)

    def micro_batches(self, batch: Batch) -> list[Tensor]:
        return [torch.tensor(rows) for rows in self.cut(row_shapes(batch, self.share))]

    def cut(self, rows: Sequence[RowShape]) -> list[list[int]]:
        """At most `tokens` tokens each, but at least one row. A group that is too large is cut between its rows."""
        parts: list[list[int]] = []
        used = 0
        for group in prompt_groups(rows, self.share):
            opened = False  # whether the group's prompt stands in the last part
            for row in group:
                whole = rows[row].prompt + rows[row].completion
                cost = whole - (rows[row].prompt if opened and self.share else 0)
                if parts and used + cost <= self.tokens:
                    parts[-1].append(row)
                    used += cost
                else:
                    parts.append([row])
                    used = whole
                opened = True
        return parts

    def size(self, rows: Sequence[RowShape]) -> int:
        return sum(map(len, _trees(rows, prompt_groups(rows, self.share))))

    def blank(self, model: Any, rows: Sequence[RowShape]) -> Float[Tensor, "N"]:
        trees = _trees(rows, prompt_groups(rows, self.share))
        ids = torch.zeros(sum(map(len, trees)), dtype=torch.long)
        places = torch.zeros(sum(row.completion for row in rows), dtype=torch.long)
        return chosen_logprobs(model, packed_hidden(model, ids, trees)[places], places, self.temperature, self.chunk)

    def logprobs(self, model: Any, part: Batch, entropy: Entropy | None = None) -> Float[Tensor, "B T"]:
        device, packed = place_of(model), pack(part, self.share)
        tables = part.input_ids[packed.rows, packed.columns], packed.rows, packed.columns
        targeted = [table[packed.targets] for table in tables]
        ids, predicting, labels, *places = send(
            device, *(table.numpy() for table in (tables[0], packed.predicting, *targeted))
        )
        states = packed_hidden(model, ids, packed.trees)[predicting]
        room = None if entropy is None else entropy.room(*places)
        chosen = chosen_logprobs(model, states, labels, self.temperature, self.chunk, self.by_row, room)
        return torch.zeros(part.input_ids.shape, device=device).index_put(tuple(places), chosen)


@dataclass(frozen=True)
class Packed:
    """A batch as one sequence of N tokens without padding.

    Token i comes from the batch's cell `rows[i], columns[i]`; `targets[j]` is the position of a completion's token, and
    `predicting[j]` that of the token whose state predicts it.
    """

    rows: Int[Tensor, "N"]
    columns: Int[Tensor, "N"]
    trees: tuple[Tree, ...]
    targets: Int[Tensor, "M"]
    predicting: Int[Tensor, "M"]


def pack(batch: Batch, share: bool) -> Packed:
    """The rows of a batch as trees, in the order in which their prompts come."""
    lengths = row_shapes(batch, share)
    groups = prompt_groups(lengths, share)
    rows, columns, targets, predicting = [], [], [], []
    end = 0
    for group in groups:
        width = lengths[group[0]].prompt
        rows.append(torch.full((width,), group[0]))
        columns.append(torch.arange(width))
        last = end + width - 1  # the prompt's last token predicts the first of every completion
        end += width
        for row in group:
            completion = lengths[row].completion
            places = torch.arange(end, end + completion)
            rows.append(torch.full_like(places, row))
            columns.append(width + torch.arange(completion))
            targets.append(places)
            predicting.append(torch.cat([torch.tensor([last]), places[:-1]]))
            end += completion
    joined = (torch.cat(parts) for parts in (rows, columns, targets, predicting))
    all_rows, all_columns, all_targets, all_predicting = joined
    asked = batch.response_mask[all_rows[all_targets], all_columns[all_targets]]  # not what an environment answered
    return Packed(all_rows, all_columns, tuple(_trees(lengths, groups)), all_targets[asked], all_predicting[asked])


def row_shapes(batch: Batch, share: bool) -> list[RowShape]:
    """The rows' lengths; with `share` also which have the same prompt."""
    prompts = torch.where(batch.response_mask.any(dim=1), batch.response_mask.int().argmax(dim=1), batch.lengths)
    lengths = zip(prompts.tolist(), (batch.lengths - prompts).tolist(), strict=True)
    if not share:
        return [RowShape(prompt, completion) for prompt, completion in lengths]
    return [
        RowShape(prompt, completion, tuple(batch.input_ids[row, :prompt].tolist()))
        for row, (prompt, completion) in enumerate(lengths)
    ]


def prompt_groups(rows: Sequence[RowShape], share: bool) -> list[list[int]]:
    """Rows with the same prompt, in the order in which prompts first come; without `share` each row by itself."""
    if not share:
        return [[row] for row in range(len(rows))]
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group, []).append(number)
    return list(groups.values())


def _trees(rows: Sequence[RowShape], groups: Sequence[Sequence[int]]) -> list[Tree]:
    """A tree for each group; a row that shares its prompt with none is a plain sequence."""
    trees = []
    for group in groups:
        prompt, completions = rows[group[0]].prompt, tuple(rows[row].completion for row in group)
        trees.append(Tree(prompt + completions[0]) if len(group) == 1 else Tree(prompt, completions))
    return trees
