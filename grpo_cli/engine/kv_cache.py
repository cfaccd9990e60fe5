"""Paged keys and values: one pool of blocks, of which each sequence and each prompt has a table.

Any block can hold any tokens, so nothing is ever moved: a sequence takes a block when its last one is full, and gives
blocks back when it ends or is cut down. A prompt's blocks are written once by prefill and shared by all its samples.
`KvPlan` computes how many blocks a generation needs from its requests, the model and the sampler's limits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.samplers import LEAST_AT_ONCE, Sampler
from grpo_cli.model.transfer import send
from grpo_cli.types import Request

BLOCK = 8  # tokens of a block, as PAGE in decode.c; on average half of a sequence's last block is empty


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that hold `tokens` tokens.

    >>> blocks_for(8), blocks_for(9)
    (1, 2)
    """
    return -(-tokens // BLOCK)


@dataclass(frozen=True)
class KvLayout:
    """The shape of one token's keys and values in a model.

    In memory a block is [heads, tokens, dim], or with `by_token` [tokens, heads, dim], as the kernel of a GPU reads it.
    """

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    by_token: bool = False
    group: int = 1  # queries per key-value head

    @property
    def bytes_per_token(self) -> int:
        """Compute 2 * layers * key-value heads * head dimension * bytes per element."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.bytes_per_token


@dataclass(frozen=True)
class KvPlan:
    """The blocks of a generation. A sequence takes blocks as it grows, at most `own_blocks`. A prompt of at most
    `prompt_blocks` is stored once, from the start of its first rollout to the end of its last. With `prefix_blocks`
    every rollout makes a prefix first, for the predictor, and keeps `prefix_blocks` blocks until it continues. Prompts
    that wait are computed again if there are more than LEAST_AT_ONCE and than can run.
    """

    slots: int  # sequences that run at a time
    blocks: int  # of the pool
    own_blocks: int
    prompt_blocks: int
    prefix_blocks: int
    spare_blocks: int  # for sequences that pause

    @classmethod
    def of(
        cls,
        layout: KvLayout,
        sampler: Sampler,
        sparsity: Dense | Budget,
        requests: Sequence[Request],
        per_step: int | None,
        prefix: int,
        pauses: bool,
    ) -> KvPlan:
        """Compute a plan. With `prefix`, every rollout makes its first `prefix` tokens before the rest is ordered, and
        keeps their keys while it waits, unless all run at a time or memory has a bound. `pauses`: sequences wait for
        environments, as many as can run; under a bound no blocks are reserved for them."""
        lengths = {request.prompt.id: len(request.prompt.token_ids) for request in requests}
        new = max(request.sampling.max_new_tokens for request in requests)
        both = max(lengths[request.prompt.id] + request.sampling.max_new_tokens for request in requests)
        own, prompt, count = blocks_for(sparsity.capacity(new, both)), blocks_for(max(lengths.values())), len(requests)
        slots, all_at_once = sampler.slots_for(count, per_step), prompt * len(lengths) + count * own
        budget = sampler.budget_for((prompt + own) * layout.block_bytes)
        bound = 0 if budget is None else budget // layout.block_bytes
        # One more token is drawn than is fed; a token's key is written in the next step.
        prefix_keys = sparsity.capacity(prefix + 1, max(lengths.values()) + prefix + 1)
        prefix_blocks = blocks_for(prefix_keys) if prefix and slots < count and not bound else 0
        # An evicting sequence soon holds what it may, and so does its slot.
        slots = min(slots, (bound - prompt) // (own if isinstance(sparsity, Budget) else 1)) if bound else slots
        spare = 0 if bound else count * prefix_blocks + slots * own * pauses
        held = count if prefix_blocks else max(slots * (1 + pauses), LEAST_AT_ONCE)
        blocks = min(all_at_once, bound or prompt * min(len(lengths), held) + slots * own + spare)
        return cls(slots, blocks, own, prompt, prefix_blocks, spare)


@dataclass(eq=False)
class CachedPrompt:
    """A prompt that was prefilled: its blocks, the logits after its last token, and the attention that its keys
    received, if an eviction policy needs it. `users` are the sequences that read its keys."""

    blocks: list[int]
    token_ids: Sequence[int]
    logits: Float[Tensor, "V"] | None = None  # until it is prefilled
    received: Float[Tensor, "L H W"] | None = None
    users: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)


class PagedCache:
    """A pool of `count` blocks. `keys` and `values` are those of each layer, [blocks, heads, tokens, dim].

    The lowest free block is taken first, so that on a CPU, where memory counts once it is written, the pool takes what
    it held at its peak. Nobody takes block number `count`, which is for rows that only fill up a shape.
    """

    def __init__(self, layout: KvLayout, count: int, device: torch.device, fills: bool = False) -> None:
        self.layout, self.count, self.device = layout, count, device
        self.prompts: dict[str, CachedPrompt] = {}
        self.free = list(range(count))  # a heap
        self._reached = count if device.type == "cuda" else 0  # one past the highest block that was ever taken
        sizes = (BLOCK, layout.heads) if layout.by_token else (layout.heads, BLOCK)
        with torch.inference_mode(False):  # writable in inference mode and outside it
            shape = (count + fills, *sizes, layout.dim)
            self.memory = [torch.empty(shape, dtype=layout.dtype, device=device) for _ in range(2 * layout.layers)]
        views = [memory.transpose(1, 2) if layout.by_token else memory for memory in self.memory]
        self.keys, self.values = views[: layout.layers], views[layout.layers :]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use; on a GPU all of them are, from the start."""
        return self._reached * self.layout.block_bytes

    def take(self, blocks: int) -> list[int]:
        taken = [heapq.heappop(self.free) for _ in range(blocks)]
        self._reached = max([self._reached, *(block + 1 for block in taken)])
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self.free, block)

    def drop_prompt(self, name: str) -> None:
        self.give_back(self.prompts.pop(name).blocks)

    def drop_idle_prompts(self, wanted: Iterable[str] = ()) -> bool:
        """Drop the prompts that no sequence reads and that are not wanted; return False if there are none."""
        idle = [name for name, prompt in self.prompts.items() if not prompt.users and name not in wanted]
        for name in idle:
            self.drop_prompt(name)
        return bool(idle)

    def read(self, views: Sequence[Tensor], table: Int[Tensor, "R K"], tokens: int) -> Float[Tensor, "L R H n D"]:
        """Return a copy of the first `tokens` keys, or values, of each row of a table."""
        return torch.stack([view[table].transpose(1, 2).flatten(2, 3)[:, :, :tokens] for view in views])

    def write(self, table: np.ndarray, keys: Float[Tensor, "L R H n D"], values: Float[Tensor, "L R H n D"]) -> None:
        """Fill the first blocks of each row of a table, [R, K] with -1 for none."""
        which, at = send(self.device, np.flatnonzero(table >= 0), table[table >= 0])
        width = table.shape[1]
        for views, tokens in ((self.keys, keys), (self.values, values)):
            for view, some in zip(views, tokens, strict=True):
                whole = F.pad(some, (0, 0, 0, width * BLOCK - some.shape[2])).unflatten(2, (width, BLOCK))
                view[at] = whole.transpose(1, 2).flatten(0, 1)[which].to(view.dtype)


def table_of(blocks: Sequence[Sequence[int]], fill: int = 0) -> np.ndarray:
    """Return a table with one row for each list of blocks.

    >>> table_of([[3], [0, 2]]).tolist()
    [[3, 0], [0, 2]]
    """
    width = max(map(len, blocks), default=0)
    rows = [[*row, *[fill] * (width - len(row))] for row in blocks]
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)
