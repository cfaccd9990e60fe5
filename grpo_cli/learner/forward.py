"""How a batch goes through the model: packed into one row without padding, each prompt once, where a model's layers are
known; else as padded rows.

Both give the same log-probabilities and gradients to rounding (`tests/test_passes.py`); they differ in time and memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.learner.batch import micro_batch_rows
from grpo_cli.learner.logprobs import (
    PLAIN,
    ByRow,
    Entropy,
    chosen_logprobs,
    token_logprobs,
)
from grpo_cli.model.anatomy import backbone, is_llama_shaped, place_of
from grpo_cli.model.packed import Tree, allow_packing, packed_hidden
from grpo_cli.model.transfer import send
from grpo_cli.native.ops import no_tree_attention
from grpo_cli.settings import ModelSettings, TrainSettings
from grpo_cli.support.errors import UserError
from grpo_cli.types import Batch


class RowShape(NamedTuple):
    """What a row's shape in a forward depends on: its number of tokens, and which rows share its prompt."""

    prompt: int
    completion: int
    group: Hashable = None


@dataclass(frozen=True)
class Forward(ABC):
    """Splits a batch into micro-batches, and computes one of them at the sampling temperature.

    A micro-batch has at most `tokens` tokens, unless a single row has more; `chunk` positions reach the head at a time.
    """

    tokens: int
    chunk: int
    temperature: float
    by_row: ByRow = PLAIN

    @abstractmethod
    def prepare(self, model: Any) -> None:
        """Called before the first forward through a model."""

    def micro_batches(self, batch: Batch) -> list[Tensor]:
        """The rows of each micro-batch."""
        return [torch.tensor(rows) for rows in self.cut(row_shapes(batch))]

    @abstractmethod
    def cut(self, rows: Sequence[RowShape]) -> list[list[int]]:
        """As `micro_batches`, for rows of these lengths."""

    @abstractmethod
    def logprobs(self, model: Any, part: Batch, entropy: Entropy | None = None) -> Float[Tensor, "B T"]:
        """Like `logprobs.token_logprobs`: takes a part on the host, returns results on the model's device. The backward
        pass measures `entropy`."""


def make_forward(
    train: TrainSettings, temperature: float, packs: bool, by_row: ByRow = PLAIN, natively: bool = False
) -> Forward:
    """Return the forward of a model that `packs_rows` or does not. UserError if `train` does not say how many tokens go
    through at once."""
    if train.micro_batch_tokens == "auto":
        raise UserError(
            "train.micro_batch_tokens=auto is decided by the command line, before anything is built: give a number"
        )
    words = train.micro_batch_tokens, train.logprob_chunk, temperature, by_row
    return PackedTrees(*words, natively=natively) if packs else Padded(*words)


def packs_rows(model: ModelSettings, device: torch.device, can_pack: bool) -> bool:
    """Return whether updates pack rows: a GPU has kernels for packed rows in 16 bits only."""
    return can_pack and (device.type == "cpu" or "bfloat16" in (model.dtype, model.autocast))


def attends_natively(train: TrainSettings, model: Any, packs: bool) -> tuple[bool | str, bool]:
    """Return whether packed rows are attended to in C, or why not; and whether that is a fault of what the machine
    has."""
    if not train.native or place_of(model).type != "cpu" or not packs:
        return False, False
    config = backbone(model).config
    heads, queries = config.num_key_value_heads, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // queries
    found = no_tree_attention(heads, queries // heads, dim)
    return (True, False) if found is None else (str(found), found.is_fault)


@dataclass(frozen=True)
class Padded(Forward):
    """Rows of about equal length, padded on the right to the longest; `tokens` counts the padding."""

    def prepare(self, model: Any) -> None:
        """On a GPU transformers would check whether the positions are those of packed rows, and wait for the result."""
        if place_of(model).type == "cuda" and is_llama_shaped(model):
            allow_packing(model)

    def cut(self, rows: Sequence[RowShape]) -> list[list[int]]:
        return micro_batch_rows([row.prompt + row.completion for row in rows], self.tokens)

    def logprobs(self, model: Any, part: Batch, entropy: Entropy | None = None) -> Float[Tensor, "B T"]:
        given = part.input_ids, part.response_mask, self.temperature, self.chunk
        return token_logprobs(model, *given, self.by_row, entropy)


@dataclass(frozen=True)
class PackedTrees(Forward):
    """Rows packed one after the other, those with the same prompt as one tree: the prompt goes through the model once,
    and a group of m rows costs P + R_1 + ... + R_m tokens in place of m P + R_1 + ... + R_m. With `natively` attention
    is computed in C (`native/tree.c`).
    """

    natively: bool = field(default=False, kw_only=True)

    def prepare(self, model: Any) -> None:
        allow_packing(model)

    def cut(self, rows: Sequence[RowShape]) -> list[list[int]]:
        """At most `tokens` tokens each, but at least one row. A group that is too large is split between its rows."""
        parts: list[list[int]] = []
        used = 0
        for group in prompt_groups(rows):
            opened = False  # whether the group's prompt is in the last part
            for row in group:
                whole = rows[row].prompt + rows[row].completion
                cost = whole - (rows[row].prompt if opened else 0)
                if parts and used + cost <= self.tokens:
                    parts[-1].append(row)
                    used += cost
                else:
                    parts.append([row])
                    used = whole
                opened = True
        return parts

    def logprobs(self, model: Any, part: Batch, entropy: Entropy | None = None) -> Float[Tensor, "B T"]:
        device, packed = place_of(model), pack(part)
        tables = part.input_ids[packed.rows, packed.columns], packed.rows, packed.columns
        targeted = [table[packed.targets] for table in tables]
        ids, predicting, labels, *places = send(
            device, *(table.numpy() for table in (tables[0], packed.predicting, *targeted))
        )
        # A prompt's last state predicts several tokens, whose gradients are added up; with several threads the backward
        # pass of plain indexing does so in an order that differs from run to run.
        states = packed_hidden(model, ids, packed.trees, self.natively).index_select(0, predicting)
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


def pack(batch: Batch) -> Packed:
    """The rows of a batch as trees, in the order in which their prompts come."""
    lengths = row_shapes(batch)
    groups = prompt_groups(lengths)
    rows, columns, targets, predicting = [], [], [], []
    end = 0
    for group in groups:
        width = lengths[group[0]].prompt
        rows.append(torch.full((width,), group[0]))
        columns.append(torch.arange(width))
        last = end + width - 1  # the prompt's last token predicts each completion's first
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
    asked = batch.response_mask[all_rows[all_targets], all_columns[all_targets]]  # not an environment's answers
    return Packed(all_rows, all_columns, tuple(_trees(lengths, groups)), all_targets[asked], all_predicting[asked])


def row_shapes(batch: Batch) -> list[RowShape]:
    """Return the rows' lengths, and their prompts' tokens."""
    prompts = torch.where(batch.response_mask.any(dim=1), batch.response_mask.int().argmax(dim=1), batch.lengths)
    lengths = zip(prompts.tolist(), (batch.lengths - prompts).tolist(), strict=True)
    return [
        RowShape(prompt, completion, tuple(batch.input_ids[row, :prompt].tolist()))
        for row, (prompt, completion) in enumerate(lengths)
    ]


def prompt_groups(rows: Sequence[RowShape]) -> list[list[int]]:
    """Return the rows with the same prompt, in the order in which prompts first come."""
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group, []).append(number)
    return list(groups.values())


def _trees(rows: Sequence[RowShape], groups: Sequence[Sequence[int]]) -> list[Tree]:
    """A tree for each group; a row that shares its prompt with no other is a plain sequence."""
    trees = []
    for group in groups:
        prompt, completions = rows[group[0]].prompt, tuple(rows[row].completion for row in group)
        trees.append(Tree(prompt + completions[0]) if len(group) == 1 else Tree(prompt, completions))
    return trees
