"""The forward pass of a batch: packed into one row without padding, each prompt once, where a model's layers are
known; else as padded rows.

Both give the same log-probabilities and gradients to rounding (`tests/test_passes.py`); they differ in time and memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_cli.learner.logprobs import chosen_logprobs
from grpo_cli.model.anatomy import backbone, can_pack
from grpo_cli.model.checkpointing import last_states
from grpo_cli.model.packed import packed_hidden
from grpo_cli.model.transfer import send
from grpo_cli.native.library import tried
from grpo_cli.native.ops import Trees, tree_attention_is_exact
from grpo_cli.settings import ModelSettings, TrainSettings
from grpo_cli.support.errors import UserError
from grpo_cli.types import Batch

# What a forward and backward pass costs beyond its tokens, in tokens (measured with the embedded model on a CPU, where
# 256 to 1024 are within a few percent of each other).
PASS_COST = 512


@dataclass(frozen=True)
class Forward(ABC):
    """The cut of a batch into micro-batches, and a pass over each at the sampling temperature.

    A micro-batch has at most `tokens` tokens, unless a single row has more; `chunk` positions reach the head at a time.
    `native`: attention is computed in C (`native/tree.c`), or why it is not.
    """

    tokens: int
    chunk: int
    temperature: float
    native: bool | str = False

    @abstractmethod
    def cut(self, batch: Batch) -> list[list[int]]:
        """Return the rows of each micro-batch."""

    @abstractmethod
    def states(self, model: Any, part: Batch) -> Float[Tensor, "M H"]:
        """Compute the states that predict the tokens of a part's response."""

    def logprobs(self, model: Any, part: Batch, entropies: Float[Tensor, "M"] | None = None) -> Float[Tensor, "N"]:
        """Compute log p(token | tokens before) of a part that is on the host, 0 outside the response, on the model's
        device. `chosen_logprobs` writes to `entropies` those of the response's tokens."""
        device, (places,) = model.device, part.response_mask.nonzero(as_tuple=True)
        states = self.states(model, part)
        labels, at = send(device, part.token_ids[places].numpy(), places.numpy())
        chosen = chosen_logprobs(model, states, labels, self.temperature, self.chunk, entropies=entropies)
        return torch.zeros(len(part.token_ids), device=device).index_put((at,), chosen)


def make_forward(
    model: Any, settings: ModelSettings, train: TrainSettings, temperature: float, warn: Callable[[str], None]
) -> Forward:
    """Return the forward pass of a model. UserError if `train` does not set how many tokens go through at once."""
    if train.micro_batch_tokens == "auto":
        raise UserError(
            "train.micro_batch_tokens=auto is decided by the command line, before anything is built: give a number"
        )
    words, device = (train.micro_batch_tokens, train.logprob_chunk, temperature), model.device
    if not packs_rows(settings, device, can_pack(model)):
        return Padded(*words)
    if not train.native or device.type != "cpu":
        return PackedTrees(*words)
    attention = backbone(model).layers[0].self_attn
    heads = attention.config.num_key_value_heads, attention.num_key_value_groups, attention.head_dim
    dtype = torch.bfloat16 if "bfloat16" in (settings.dtype, settings.autocast) else torch.float32
    slower = "updates attend by PyTorch's kernel, which is slower: {}. To do without: train.native=false"
    return PackedTrees(*words, tried(lambda: tree_attention_is_exact(*heads, dtype), slower, warn))


def packs_rows(model: ModelSettings, device: torch.device, can_pack: bool) -> bool:
    """True if updates pack rows: a GPU has kernels for packed rows in 16 bits only."""
    return can_pack and (device.type == "cpu" or "bfloat16" in (model.dtype, model.autocast))


@dataclass(frozen=True)
class Padded(Forward):
    """Rows of about equal length, padded on the right to the longest, where a causal model never sees it; `tokens`
    counts the padding."""

    def cut(self, batch: Batch) -> list[list[int]]:
        return padded_parts((batch.prompt_lengths + batch.lengths).tolist(), self.tokens)

    def states(self, model: Any, part: Batch) -> Float[Tensor, "M H"]:
        rows = part.per_token(torch.arange(len(part)))[part.response_mask]
        tables = padded(part), rows, part.positions[part.response_mask] - 1
        ids, rows, columns = send(model.device, *(table.numpy() for table in tables))
        return last_states(model, input_ids=ids)[rows, columns]


def padded(batch: Batch) -> Int[Tensor, "B T"]:
    """Return each row's prompt and completion, and zeros up to the end of the longest."""
    completions = batch.token_ids.split(batch.lengths.tolist())
    prompts = [torch.tensor(prompt) for prompt in batch.prompts]
    rows = [torch.cat([prompts[at], own]) for at, own in zip(batch.group.tolist(), completions, strict=True)]
    return pad_sequence(rows, batch_first=True)


def padded_parts(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut rows into parts of at most `tokens` tokens, padding included, longest first.

    A part also ends where its padding would cost more than another pass, so that a large budget is no loss of time. A
    row that is longer than `tokens` is a part of its own: nothing is dropped or cut.

    >>> padded_parts([3, 9, 4, 10], tokens=20)
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


@dataclass(frozen=True)
class PackedTrees(Forward):
    """Rows packed one after the other, those with the same prompt as one tree: the prompt goes through the model once,
    and a group of m rows costs P + R_1 + ... + R_m tokens in place of m P + R_1 + ... + R_m.
    """

    def cut(self, batch: Batch) -> list[list[int]]:
        """Return parts of at most `tokens` tokens each, but of at least one row. A group that is too large is split
        between its rows."""
        prompts, lengths = batch.prompt_lengths.tolist(), batch.lengths.tolist()
        groups: dict[int, list[int]] = {}
        for row, at in enumerate(batch.group.tolist()):
            groups.setdefault(at, []).append(row)
        parts: list[list[int]] = []
        used = 0
        for group in groups.values():
            for place, row in enumerate(group):
                cost = lengths[row] + (0 if place else prompts[row])  # the first brings the prompt
                if parts and used + cost <= self.tokens:
                    parts[-1].append(row)
                    used += cost
                else:
                    parts.append([row])
                    used = prompts[row] + lengths[row]
        return parts

    def states(self, model: Any, part: Batch) -> Float[Tensor, "M H"]:
        ids, trees, predicting = pack(part)
        run, at = send(model.device, ids.numpy(), predicting[part.response_mask].numpy())
        # A prompt's last state predicts several tokens, whose gradients are added up; with several threads the backward
        # pass of plain indexing does so in an order that differs from run to run.
        return packed_hidden(model, run, trees, self.native is True).index_select(0, at)


def pack(batch: Batch) -> tuple[Int[Tensor, "T"], Trees, Int[Tensor, "N"]]:
    """Return the ids of a run of trees, the trees, and where the state is that predicts each token of the completions.

    Rows that share a prompt come one after the other; one that shares its prompt with none is a plain sequence.
    """
    ids, trees, predicting, end = list[Tensor](), list[tuple[int, ...]](), list[int](), 0
    completions = iter(batch.token_ids.split(batch.lengths.tolist()))
    for place, rows in groupby(batch.group.tolist()):
        branches, prompt = [next(completions) for _ in rows], torch.tensor(batch.prompts[place])
        ids += [prompt, *branches]
        sizes = len(prompt), *map(len, branches)
        trees.append((sum(sizes),) if len(branches) == 1 else sizes)
        last = end + len(prompt) - 1  # the prompt's last token predicts each completion's first
        end += len(prompt)
        for size in sizes[1:]:
            predicting += [last, *range(end, end + size - 1)][:size]
            end += size
    return torch.cat(ids), trees, torch.tensor(predicting, dtype=torch.long)
