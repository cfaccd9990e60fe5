"""Carries out eviction: records what policies need to know of past steps, and cuts full sequences down.

budget + buffer keys        oldest ... newest               one more step, and it would not fit:
before                      k k k k k k k k k k k k w w w   w: the window, always kept
after                       k . k k . . k . k . . . w w w   closed up to the left, order kept; blocks behind are freed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.kv.cache import BLOCK, KvLayout, PagedCache, blocks_for, table_of
from grpo_cli.engine.kv.eviction import Budget, Candidates
from grpo_cli.engine.sequence import Sequence
from grpo_cli.engine.step.rows import Rows
from grpo_cli.model.transfer import send


@dataclass(frozen=True)
class SlotShape:
    """The shape of what is recorded: for how many sequences at a time, each with the most keys of its own and of its
    prompt."""

    layout: KvLayout
    slots: int
    capacity: int
    prompt_width: int
    scale: float
    device: torch.device


class KeepAll:
    """Evicts and records nothing."""

    needs_received = False

    def left(self, sequence: Sequence) -> int:
        return sequence.held

    def claim(self, sequence: Sequence) -> None:
        pass

    def release(self, sequence: Sequence, pauses: bool = False) -> None:
        pass

    def make_room(self, running: Seq[Sequence], cache: PagedCache) -> bool:
        return False

    def prepare(self, rows: Rows) -> None:
        pass

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "R H G n"] | None) -> None:
        pass

    @contextmanager
    def repeated(self) -> Iterator[None]:
        yield

    def prompt_kept(self, rows: Rows) -> Seq[Int[Tensor, "R"]]:
        return ()

    def count(self, running: Seq[Sequence], prompt_keys: int) -> None:
        pass

    def details(self) -> Mapping[str, float]:
        return {}


class Keeper(KeepAll):
    """Cuts a sequence down to `budget` keys whenever it holds `budget + buffer`, in all layers and heads at once.

    When depends only on its own length, so neighbours change nothing. Temporary copies are of a few sequences at a
    time: at most one layer's share of all slots.
    """

    def __init__(self, policy: Budget, shape: SlotShape) -> None:
        self._policy, self._scale, self._device = policy, shape.scale, shape.device
        self._at_once = max(1, shape.slots // shape.layout.layers)
        self._queries = _Queries(shape, policy.window) if policy.needs_queries else None
        evictable = 0 if policy.protect_prompt else shape.prompt_width
        self._received = _Received(shape, evictable) if policy.needs_received else None
        self._prompt_kept = None if policy.protect_prompt else _PromptKept(shape)
        self._notes = tuple(note for note in (self._queries, self._received, self._prompt_kept) if note is not None)
        self._free = list(range(shape.slots))[::-1]
        self.needs_received = policy.needs_received and not policy.protect_prompt
        self._evictions = 0
        self._reads = np.zeros(2, dtype=np.int64)  # keys attended to, and the same for a dense run
        self._peak = np.zeros(2, dtype=np.int64)  # most keys held at a time, and the same for a dense run

    def _of_prompt(self, sequence: Sequence) -> int:
        """Keys of its prompt that can be evicted."""
        return 0 if self._policy.protect_prompt or sequence.prompt is None else sequence.prompt.length

    def _is_due(self, sequence: Sequence) -> bool:
        """True if it must be cut down before the next key comes.

        If the prompt's keys are candidates too and alone fill the budget, nothing is evicted before the sequence has
        made `window` tokens: as in the releases, a score needs the queries of its own last `window` steps.
        """
        policy = self._policy
        full = sequence.held + self._of_prompt(sequence) >= policy.budget + policy.buffer
        return full and sequence.held >= policy.window

    def left(self, sequence: Sequence) -> int:
        """The keys of its own that it has when the next one comes."""
        return self._policy.budget if self._is_due(sequence) else sequence.held

    def claim(self, sequence: Sequence) -> None:
        """The sequence begins, or goes on."""
        sequence.slot = self._free.pop()
        if self._received is not None:
            self._received.claim(sequence)
        for note, kept in zip(self._notes, sequence.notes, strict=bool(sequence.notes)):
            note.store[:, sequence.slot] = kept
        sequence.notes = ()

    def release(self, sequence: Sequence, pauses: bool = False) -> None:
        """The sequence ends, or pauses with what was recorded of it."""
        if pauses:
            sequence.notes = tuple(note.store[:, sequence.slot].clone() for note in self._notes)
        self._free.append(sequence.slot)
        sequence.slot = -1

    def prepare(self, rows: Rows) -> None:
        """A step begins."""
        for note in self._notes:
            note.prepare(rows)

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "R H G n"] | None) -> None:
        """A layer's queries, and its attention weights over prompts' keys and then its own."""
        for note in self._notes:
            note.see(layer, queries, weights)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Undoes the notes of steps inside, which are run again afterwards."""
        before = None if self._received is None else self._received.store.clone()
        yield
        if self._received is not None and before is not None:
            self._received.store.copy_(before)

    def make_room(self, running: Seq[Sequence], cache: PagedCache) -> bool:
        """Cut down the sequences that are due; return whether there were any."""

        def shape(sequence: Sequence) -> tuple[int, int]:
            return sequence.held, self._of_prompt(sequence)

        due = sorted(filter(self._is_due, running), key=shape)
        self._evictions += len(due)
        for _, alike in groupby(due, shape):
            some = list(alike)
            for first in range(0, len(some), self._at_once):
                self.evict(some[first : first + self._at_once], cache)
        return bool(due)

    def evict(self, sequences: Seq[Sequence], cache: PagedCache) -> Int[Tensor, "L R H B"]:
        """Cut down sequences that hold alike, and return which of the candidates stay."""
        policy, own, prompt = self._policy, sequences[0].held, self._of_prompt(sequences[0])
        mine = table_of([sequence.blocks for sequence in sequences])
        theirs = table_of([s.prompt.blocks for s in sequences if s.prompt is not None and prompt])
        before = [sequence.prompt_length if policy.protect_prompt else 0 for sequence in sequences]
        sinks = np.maximum(policy.sinks - np.array(before), 0)
        slots = np.array([sequence.slot for sequence in sequences])
        at, shared, rows, protected = send(self._device, mine, theirs, slots, sinks)

        def held(views: Seq[Tensor]) -> Float[Tensor, "L R H T D"]:
            own_keys = cache.read(views, at, own)
            return torch.cat([cache.read(views, shared, prompt), own_keys], dim=3) if prompt else own_keys

        received = None if self._received is None else self._received.of(rows, own, prompt)
        queries = None if self._queries is None else self._queries.of(rows)
        candidates = Candidates(held(cache.keys), policy.window, self._scale, queries, received)
        kept = policy.choose(candidates, protected)
        chosen = [
            x.gather(3, kept[..., None].expand(*kept.shape, x.shape[-1])) for x in (candidates.keys, held(cache.values))
        ]
        count = blocks_for(policy.budget)
        cache.write(mine[:, :count], *chosen)
        if self._received is not None and received is not None:
            self._received.keep(rows, received.gather(-1, kept))
        if self._prompt_kept is not None:
            self._prompt_kept.keep(rows, prompt, kept)
        for sequence in sequences:
            sequence.held = policy.budget
            needed = blocks_for(policy.budget + 1)
            cache.give_back(sequence.blocks[needed:])
            del sequence.blocks[needed:]
            if prompt and sequence.prompt is not None:
                sequence.prompt.users -= 1
                sequence.prompt = None
        return kept

    def prompt_kept(self, rows: Rows) -> Seq[Int[Tensor, "R"]]:
        """If prompt keys can be evicted: how many each row still has, in the layer and head with the fewest.
        Meaningless for a row that still reads its prompt's blocks."""
        return () if self._prompt_kept is None else (self._prompt_kept.store[:, rows.slots].amin((0, 2)),)

    def count(self, running: Seq[Sequence], prompt_keys: int) -> None:
        """A step is about to add a key to each sequence; `prompt_keys` are cached, each prompt once."""
        held, made = sum(s.held + 1 for s in running), sum(s.made for s in running)
        seen = sum(s.prompt.length for s in running if s.prompt is not None)
        self._reads += (held + seen, made + sum(s.prompt_length for s in running))
        self._peak = np.maximum(self._peak, (held + prompt_keys, made + prompt_keys))

    def details(self) -> Mapping[str, float]:
        """The number of evictions, and the shares saved of keys read and of keys held at the peak."""
        reads, peak = (1.0 - float(kept / full) if full else 0.0 for kept, full in (self._reads, self._peak))
        return {
            "engine/evictions": float(self._evictions),
            "engine/kv_saving_mean": reads,
            "engine/kv_saving_peak": peak,
            "engine/eviction_note_bytes": float(sum(note.store.nbytes for note in self._notes)),
        }


class _Note:
    """Recorded for each slot: `store` is [layers, slots, ...]."""

    store: Tensor

    def prepare(self, rows: Rows) -> None:
        pass

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "R H G n"] | None) -> None:
        pass


class _PromptKept(_Note):
    """How many keys of its prompt each sequence holds among its own, where they come first."""

    def __init__(self, shape: SlotShape) -> None:
        layout = shape.layout
        self.store = torch.zeros(layout.layers, shape.slots, layout.heads, dtype=torch.long, device=shape.device)

    def keep(self, rows: Int[Tensor, "R"], prompt: int, kept: Int[Tensor, "L R H B"]) -> None:
        """After `kept` was chosen, with so many candidates in the prompt's blocks."""
        candidates = prompt or self.store[:, rows][..., None]
        self.store[:, rows] = (kept < candidates).sum(-1)


class _Queries(_Note):
    """The queries of each sequence's last `window` steps; that of position p at index p modulo window.

    What an earlier sequence left is overwritten before it is read: none is cut down before `window` steps.
    """

    def __init__(self, shape: SlotShape, window: int) -> None:
        layout = shape.layout
        sizes = (layout.layers, shape.slots, window, layout.heads, layout.group, layout.dim)
        self.store = torch.zeros(sizes, dtype=layout.dtype, device=shape.device)
        self._window = window

    def prepare(self, rows: Rows) -> None:
        self._write_at = rows.slots * self._window + rows.positions % self._window

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "R H G n"] | None) -> None:
        places = self.store[layer].flatten(0, 1)
        places.index_copy_(0, self._write_at, queries.to(places.dtype).reshape(-1, *places.shape[1:]))

    def of(self, rows: Int[Tensor, "R"]) -> Float[Tensor, "L R H G W D"]:
        return self.store[:, rows].permute(0, 1, 3, 4, 2, 5)


class _Received(_Note):
    """The attention that each key has received: summed over the steps since it was added, mean over a group's queries.

    A sequence's first `prompt_width` columns are its prompt's, and start from the attention of the prompt's queries.
    """

    def __init__(self, shape: SlotShape, prompt_width: int) -> None:
        sizes = (shape.layout.layers, shape.slots, shape.layout.heads, prompt_width + shape.capacity)
        self.store = torch.zeros(sizes, device=shape.device)
        self._prompt_width = prompt_width

    def claim(self, sequence: Sequence) -> None:
        self.store[:, sequence.slot] = 0.0
        if self._prompt_width and sequence.prompt is not None and sequence.prompt.received is not None:
            of_prompt = sequence.prompt.received
            self.store[:, sequence.slot, :, : of_prompt.shape[-1]] = of_prompt

    def prepare(self, rows: Rows) -> None:
        self._slots, self._own = rows.slots, BLOCK * rows.own.shape[1]

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "R H G n"] | None) -> None:
        assert weights is not None, "steps were chosen by `watches`"
        paid = weights.mean(2, dtype=torch.float32)
        shown = paid.shape[2] - self._own  # of the prompt
        wide = paid.new_zeros(*paid.shape[:2], self.store.shape[-1])
        wide[..., self._prompt_width : self._prompt_width + self._own] = paid[..., shown:]
        if self._prompt_width:
            wide[..., :shown] = paid[..., :shown]
        self.store[layer].index_add_(0, self._slots, wide)

    def of(self, rows: Int[Tensor, "R"], own: int, prompt: int) -> Float[Tensor, "L R H T"]:
        received = self.store[:, rows]
        mine = received[..., self._prompt_width : self._prompt_width + own]
        return torch.cat([received[..., :prompt], mine], dim=-1) if prompt else mine

    def keep(self, rows: Int[Tensor, "R"], kept: Float[Tensor, "L R H B"]) -> None:
        left = torch.zeros_like(self.store[:, rows])
        left[..., self._prompt_width : self._prompt_width + kept.shape[-1]] = kept
        self.store[:, rows] = left
