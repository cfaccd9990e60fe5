"""Keys, values and lengths of every slot, and of every prompt once: claim, write, move, release.

      prompts  [layer, entry, head, token, dim]   written once by prefill, read by every sample of the prompt
      slots    [layer, slot,  head, token, dim]   response keys only; row `length` is the next to be written

A slot's keys attend together with its prompt's, which is where a group's memory is saved: n samples of one prompt hold
its keys once. What is allocated is what the shapes say, from the first step to the last (prompt entries may grow).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class KvLayout:
    """The shape of one token's keys and values in a model."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """c_kv: 2 * layers * key-value heads * head dimension * bytes per element."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


class KvStore:
    """A block of keys and values, [layers, rows, heads, capacity, dim] each, zeroed so that no garbage is read."""

    def __init__(self, layout: KvLayout, rows: int, capacity: int, device: torch.device) -> None:
        shape = (layout.layers, rows, layout.heads, capacity, layout.dim)
        self.layout = layout
        self.rows = rows
        self.capacity = capacity
        self.keys = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.values = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.layer_keys = list(self.keys.unbind(0))
        self.layer_values = list(self.values.unbind(0))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(
        self, layer: int, index: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Float[Tensor, "N D"]
    ) -> None:
        """Write one head's entry per row of `index`, which counts over (row, head, token) flattened."""
        dim = self.layout.dim
        self.layer_keys[layer].view(-1, dim).index_copy_(0, index, keys.to(self.keys.dtype))
        self.layer_values[layer].view(-1, dim).index_copy_(0, index, values.to(self.values.dtype))

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` entries of a row over another row."""
        self.keys[:, target, :, :tokens] = self.keys[:, source, :, :tokens]
        self.values[:, target, :, :tokens] = self.values[:, source, :, :tokens]

    def read(self, row: int, tokens: int) -> tuple[Tensor, Tensor]:
        """A copy of the first `tokens` entries of a row: two tensors [layers, heads, tokens, dim]."""
        return self.keys[:, row, :, :tokens].clone(), self.values[:, row, :, :tokens].clone()

    def restore(self, row: int, keys: Float[Tensor, "L H T D"], values: Float[Tensor, "L H T D"]) -> None:
        """Put back what `read` gave."""
        self.keys[:, row, :, : keys.shape[2]] = keys
        self.values[:, row, :, : values.shape[2]] = values


class PromptPool:
    """The prompts in flight: an entry per prompt, held from its first sample's start to its last one's end.

    It begins with `entries` of them and doubles when they do not suffice, up to `most`. While it grows, the old and the
    new one lie side by side.
    """

    def __init__(
        self, layout: KvLayout, entries: int, most: int, capacity: int, vocabulary: int, device: torch.device
    ) -> None:
        self.store = KvStore(layout, entries, capacity, device)
        self.lengths = torch.zeros(entries, dtype=torch.long, device=device)
        self.logits = torch.zeros(entries, vocabulary, device=device)  # after the last prompt token
        self.held_keys = 0  # in all held entries, without padding
        self._tokens: dict[int, int] = {}  # of each held entry
        self._free = list(reversed(range(entries)))
        self._most = most
        self._peak = 0  # bytes of keys and values, since somebody asked

    @property
    def entries(self) -> int:
        return self.store.rows

    @property
    def left(self) -> int:
        """How many more prompts can be held."""
        return self._most - self.entries + len(self._free)

    def take_peak(self) -> int:
        """Most bytes of keys and values that lay here at a time since this was last asked."""
        peak, self._peak = max(self._peak, self.store.nbytes), 0
        return peak

    def claim(self) -> int:
        """A free entry, the pool grown if there is none."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def release(self, entry: int) -> None:
        self.held_keys -= self._tokens.pop(entry)
        self._free.append(entry)

    def put(
        self, entries: Sequence[int], keys: Tensor, values: Tensor, logits: Float[Tensor, "P V"], lengths: Sequence[int]
    ) -> None:
        """Fill claimed entries with prefilled prompts; keys and values are [layers, P, heads, width, dim]."""
        index = torch.tensor(entries, device=self.lengths.device)
        width = keys.shape[3]
        self.store.keys[:, index, :, :width] = keys.to(self.store.keys.dtype)
        self.store.values[:, index, :, :width] = values.to(self.store.values.dtype)
        self.lengths[index] = torch.tensor(lengths, device=index.device)
        self._tokens.update(zip(entries, lengths, strict=True))
        self.held_keys += sum(lengths)
        self.logits[index] = logits

    def _grow(self) -> None:
        old, rows = self.store, self.store.rows
        more = min(rows, self._most - rows)
        assert more > 0, "nobody claims an entry when none is left"
        self.store = KvStore(old.layout, rows + more, old.capacity, old.keys.device)
        self.store.keys[:, :rows] = old.keys
        self.store.values[:, :rows] = old.values
        self._peak = max(self._peak, old.nbytes + self.store.nbytes)
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(more)])
        self.logits = torch.cat([self.logits, self.logits.new_zeros(more, self.logits.shape[1])])
        self._free = list(reversed(range(rows, rows + more)))
