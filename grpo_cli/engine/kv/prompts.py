"""The prompts in flight: their pages in the arena, and the logits from which first tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.tiles import PromptPages


class PromptPool:
    """An entry for each prompt that is held, by name."""

    def __init__(self, kv: KvArena) -> None:
        self._kv = kv
        self._entries: dict[str, int] = {}
        self._free = list(reversed(range(len(kv.prompts.pages))))
        self._lengths = np.zeros(len(kv.prompts.pages), dtype=np.int64)
        self._logits: dict[int, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> int:
        return self._entries[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def pages_of(self, name: str) -> int:
        """The number of pages of a held prompt."""
        return int(self._kv.prompts.count[self._entries[name]])

    @property
    def held_keys(self) -> int:
        """Keys in all held entries, without padding."""
        return int(self._lengths.sum())

    def put(
        self, names: Sequence[str], keys: Tensor, values: Tensor, logits: Float[Tensor, "P V"], lengths: Sequence[int]
    ) -> list[int]:
        """Add prefilled prompts, for which there is room; keys and values are [layers, P, heads, width, dim]."""
        # Copies, to release the possibly padded batch of logits.
        entries = [self.hold(name, n, row.clone()) for name, n, row in zip(names, lengths, logits, strict=True)]
        self._kv.put_prompts(entries, keys, values)
        return entries

    def hold(self, name: str, length: int, logits: Float[Tensor, "V"]) -> int:
        """An entry with pages for a prompt of `length` tokens, with arbitrary content."""
        entry = self._free.pop()
        self._kv.prompts.take(entry, self._kv.prompts.lacks(entry, length))
        self._entries[name], self._lengths[entry], self._logits[entry] = entry, length, logits
        return entry

    def release(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._kv.prompts.drop(entry)
        self._lengths[entry] = 0
        del self._logits[entry]
        self._free.append(entry)

    def logits(self, entries: Sequence[int]) -> Float[Tensor, "R V"]:
        """After the last token of each entry's prompt."""
        return torch.stack([self._logits[entry] for entry in entries])

    def places(self) -> PromptPages:
        """The pages of all held prompts."""
        kv = self._kv
        height = int(np.flatnonzero(kv.prompts.count).max(initial=0)) + 1
        pages = kv.prompts.pages[:height]
        pages = np.where(pages < 0, -1, kv.prompt_place(pages))
        return PromptPages(pages, kv.prompts.used, self._lengths[:height], kv.prompts.tokens)
