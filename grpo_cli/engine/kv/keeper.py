"""Carries out eviction: records what policies need to know of past steps, and cuts full slots down in place.

A keeper reads and moves keys. The slots tell it how much each row holds, and record themselves what is left.

    slot, budget + buffer entries     oldest ... newest               one more step, and it would not fit:
    before                            k k k k k k k k k k k k w w w   w: the window, always kept
    after                             k . k k . . k . k . . . w w w   closed up to the left, order kept
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.kv.cache import KvArena, KvLayout
from grpo_cli.engine.kv.eviction import Budget, Candidates, Dense
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.model.transfer import send


@dataclass(frozen=True)
class SlotShape:
    """The shape of the slots and of the model's attention, for a keeper."""

    layout: KvLayout
    slots: int
    capacity: int
    prompt_width: int
    group: int  # queries per key-value head
    scale: float
    device: torch.device


@dataclass(frozen=True)
class Tally:
    """What the running rows hold before a step, one entry per row."""

    held: np.ndarray  # keys in the slot
    seen: np.ndarray  # prompt keys that the row attends to in the pool
    made: np.ndarray  # tokens generated
    prompt: np.ndarray  # prompt tokens


@dataclass(frozen=True)
class Due:
    """Rows to be cut down now, all with the same number of candidates."""

    rows: np.ndarray
    own: int  # candidates in the slot
    prompt: int  # candidates in the prompt pool; from now on the row reads only its slot
    sinks: np.ndarray  # candidates at the front that must stay, for each row
    left: int  # keys in the slot afterwards
    first: np.ndarray  # position of the first candidate, for each row
    now: np.ndarray  # position of the token that no longer sees what is dropped, for each row


class KeepAll:
    """Evicts and records nothing."""

    notes_prompts = False
    nbytes = 0

    def prefilled(self, entries: Sequence[int], received: Float[Tensor, "L P H W"]) -> None:
        pass

    def claim(self, slot: int, entry: int) -> None:
        pass

    def prepare(self, rows: Rows) -> None:
        pass

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "RH G n"] | None) -> None:
        pass

    def repeated(self) -> AbstractContextManager[None]:
        return nullcontext()

    def due(self, tally: Tally) -> Sequence[Due]:
        return ()

    def evict(self, due: Due, requests: Sequence[int], entries: Sequence[int], kv: KvArena) -> Sequence[Tensor]:
        raise AssertionError("nothing is ever due")

    def prompt_kept(self, rows: int) -> Sequence[Int[Tensor, "R"]]:
        return ()

    def count(self, tally: Tally, prompt_keys: int) -> None:
        pass

    def move(self, source: int, target: int) -> None:
        pass

    def park(self, slot: int) -> tuple[Tensor, ...]:
        return ()

    def unpark(self, slot: int, notes: tuple[Tensor, ...]) -> None:
        pass

    def details(self) -> Mapping[str, float]:
        return {}


class Keeper:
    """Cuts a row down to `budget` keys whenever it holds `budget + buffer`, in all layers and heads at once.

    When depends only on the row's own length, so neighbours change nothing. Temporary copies are of a few rows at a
    time: at most one layer's share of all slots.
    """

    def __init__(self, policy: Budget, shape: SlotShape) -> None:
        self._policy, self._scale = policy, shape.scale
        self._rows_at_once = max(1, shape.slots // shape.layout.layers)
        self._queries = _Queries(shape, policy.window) if policy.needs_queries else None
        evictable_width = 0 if policy.protect_prompt else shape.prompt_width
        self._received = _Received(shape, evictable_width) if policy.needs_received else None
        self._watches = tuple(note for note in (self._queries, self._received) if note is not None)
        self._prompt_kept = None if policy.protect_prompt else _PromptKept(shape)
        self._notes = tuple(note for note in (*self._watches, self._prompt_kept) if note is not None)
        self._evictions = 0
        self._reads = np.zeros(2, dtype=np.int64)  # keys attended to, and the same for a dense run
        self._peak = np.zeros(2, dtype=np.int64)  # most keys held at a time, and the same for a dense run

    @property
    def notes_prompts(self) -> bool:
        """Whether prefill has to return the attention inside prompts."""
        return self._policy.needs_received and not self._policy.protect_prompt

    @property
    def nbytes(self) -> int:
        """Bytes of the notes."""
        return sum(note.nbytes for note in self._notes)

    def prefilled(self, entries: Sequence[int], received: Float[Tensor, "L P H W"]) -> None:
        """Prompts were added to the pool, with the attention that their keys received."""
        assert self._received is not None, "requested by notes_prompts"
        for entry, of_prompt in zip(entries, received.unbind(1), strict=True):
            self._received.prompts[entry] = of_prompt

    def claim(self, slot: int, entry: int) -> None:
        """A new sequence in the slot, whose prompt is in `entry`."""
        if self._received is not None:
            self._received.claim(slot, entry)

    def prepare(self, rows: Rows) -> None:
        """A step begins."""
        for note in self._watches:
            note.prepare(rows)

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "RH G n"] | None) -> None:
        """A layer's queries and attention weights: over all prompt keys that it read, then the slot's."""
        for note in self._watches:
            note.see(layer, queries, weights)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Undoes the notes of steps inside, which are run again afterwards."""
        before = None if self._received is None else self._received.store.clone()
        yield
        if self._received is not None and before is not None:
            self._received.store.copy_(before)

    def due(self, tally: Tally) -> Iterator[Due]:
        """The rows that must be cut down before the next key comes.

        If the prompt's keys are candidates too and alone fill the budget, nothing is evicted before the row has made
        `window` tokens: as in the releases, a score needs the queries of a row's own last `window` steps.
        """
        policy = self._policy
        evictable = np.zeros_like(tally.seen) if policy.protect_prompt else tally.seen
        full = (tally.held + evictable >= policy.budget + policy.buffer) & (tally.held >= policy.window)
        if not full.any():
            return
        rows = np.flatnonzero(full)
        shapes = np.stack([tally.held[rows], evictable[rows]], axis=1)
        before = tally.prompt if policy.protect_prompt else np.zeros_like(tally.prompt)
        sinks = np.maximum(policy.sinks - before, 0)
        now = tally.prompt + tally.made - 1
        for own, prompt in np.unique(shapes, axis=0).tolist():
            some = rows[(shapes == (own, prompt)).all(axis=1)]
            yield Due(some, own, prompt, sinks[some], policy.budget, before[some], now[some])

    def evict(self, due: Due, requests: Sequence[int], entries: Sequence[int], kv: KvArena) -> list[Tensor]:
        """Cut the rows down; `requests` and `entries` are theirs, in the same order. Returns which of the candidates
        stay, [L, R, H, B] for a few rows after the other."""
        stay = list[Tensor]()
        self._evictions += len(due.rows)
        to_send = (due.rows, due.sinks, kv.rows.pages[due.rows, 0], kv.prompt_pages(entries, due.prompt))
        parts = zip(*(one.split(self._rows_at_once) for one in send(kv.device, *to_send)), strict=True)
        for place, (rows, sinks, pages, of_prompt) in enumerate(parts):
            candidates = Candidates(
                keys=_candidates(due, kv.row_keys, pages, kv.prompt_keys, of_prompt),
                window=self._policy.window,
                scale=self._scale,
                queries=None if self._queries is None else self._queries.of(rows),
                received=None if self._received is None else self._received.of(rows, due),
            )
            kept = self._policy.choose(candidates, sinks)
            values = _candidates(due, kv.row_values, pages, kv.prompt_values, of_prompt)
            _write(kv.row_keys, pages, candidates.keys, kept)
            _write(kv.row_values, pages, values, kept)
            if self._received is not None and candidates.received is not None:
                self._received.keep(rows, candidates.received.gather(-1, kept))
            if self._prompt_kept is not None:
                self._prompt_kept.keep(rows, due, kept)
            if self._policy.observer is not None:
                first = place * self._rows_at_once
                self._policy.observer.evicted(requests[first : first + len(rows)], due.prompt, kept)
            stay.append(kept)
        return stay

    def prompt_kept(self, rows: int) -> Sequence[Int[Tensor, "R"]]:
        """If prompt keys can be evicted: how many each of the first `rows` slots still has, in the layer and head with
        the fewest. Meaningless for a row that still reads its prompt in the pool."""
        return () if self._prompt_kept is None else (self._prompt_kept.store[:, :rows].amin((0, 2)),)

    def count(self, tally: Tally, prompt_keys: int) -> None:
        """A step is about to add a key to each row; `prompt_keys` are in the pool, each prompt once."""
        held, made = int(tally.held.sum()) + len(tally.held), int(tally.made.sum())
        self._reads += (held + int(tally.seen.sum()), made + int(tally.prompt.sum()))
        self._peak = np.maximum(self._peak, (held + prompt_keys, made + prompt_keys))

    def move(self, source: int, target: int) -> None:
        for note in self._notes:
            note.store[:, target] = note.store[:, source]

    def park(self, slot: int) -> tuple[Tensor, ...]:
        """A row's notes, to continue in another slot."""
        return tuple(note.store[:, slot].clone() for note in self._notes)

    def unpark(self, slot: int, notes: tuple[Tensor, ...]) -> None:
        for note, kept in zip(self._notes, notes, strict=True):
            note.store[:, slot] = kept

    def details(self) -> Mapping[str, float]:
        """The number of evictions, and the shares saved of keys read and of keys held at the peak."""
        reads, peak = (1.0 - float(kept / full) if full else 0.0 for kept, full in (self._reads, self._peak))
        return {
            "engine/evictions": float(self._evictions),
            "engine/kv_saving_mean": reads,
            "engine/kv_saving_peak": peak,
            "engine/eviction_note_bytes": float(self.nbytes),
        }


def keeper_of(sparsity: Dense | Budget, shape: SlotShape) -> KeepAll | Keeper:
    """The keeper for one `generate`."""
    return Keeper(sparsity, shape) if isinstance(sparsity, Budget) else KeepAll()


def _candidates(
    due: Due,
    views: Sequence[Float[Tensor, "N H C D"]],
    pages: Int[Tensor, "R"],
    prompts: Sequence[Float[Tensor, "M H P D"]],
    of_prompt: Int[Tensor, "R K"],
) -> Float[Tensor, "L R H T D"]:
    """A copy of the prompt keys (or values) that the rows see, then of what their slots hold."""
    mine = torch.stack([view[pages, :, : due.own] for view in views])
    if not due.prompt:
        return mine
    seen = torch.stack([view[of_prompt].transpose(1, 2).flatten(2, 3)[:, :, : due.prompt] for view in prompts])
    return torch.cat([seen, mine], dim=3)


def _write(
    views: Sequence[Float[Tensor, "N H C D"]],
    pages: Int[Tensor, "R"],
    candidates: Float[Tensor, "L R H T D"],
    kept: Int[Tensor, "L R H B"],
) -> None:
    chosen = candidates.gather(3, kept[..., None].expand(*kept.shape, candidates.shape[-1]))
    for view, some in zip(views, chosen, strict=True):
        view[pages, :, : kept.shape[-1]] = some


class _SlotNote:
    """Recorded for each slot: `store` is [layers, slots, ...]."""

    store: Tensor

    @property
    def nbytes(self) -> int:
        return self.store.nbytes


class _PromptKept(_SlotNote):
    """How many keys of its prompt each row holds in its slot, where they come first."""

    def __init__(self, shape: SlotShape) -> None:
        layout = shape.layout
        self.store = torch.zeros(layout.layers, shape.slots, layout.heads, dtype=torch.long, device=shape.device)

    def keep(self, rows: Int[Tensor, "R"], due: Due, kept: Int[Tensor, "L R H B"]) -> None:
        """After `kept` was chosen among what was due."""
        # While a row reads its prompt in the pool, it has none of it in its slot.
        candidates = due.prompt or self.store[:, rows][..., None]
        self.store[:, rows] = (kept < candidates).sum(-1)


class _Queries(_SlotNote):
    """The queries of each row's last `window` steps; that of position p at index p modulo window.

    What an earlier sequence left is overwritten before it is read: no row is cut down before `window` steps.
    """

    def __init__(self, shape: SlotShape, window: int) -> None:
        layout = shape.layout
        sizes = (layout.layers, shape.slots, window, layout.heads, shape.group, layout.dim)
        self.store = torch.zeros(sizes, dtype=layout.dtype, device=shape.device)
        self._first = torch.arange(shape.slots, device=shape.device) * window
        self._window = window
        self._write_at = self._first

    def prepare(self, rows: Rows) -> None:
        self._write_at = self._first[: len(rows.positions)] + rows.positions % self._window

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "RH G n"] | None) -> None:
        places = self.store[layer].flatten(0, 1)
        places.index_copy_(0, self._write_at, queries.to(places.dtype).reshape(-1, *places.shape[1:]))

    def of(self, rows: Int[Tensor, "R"]) -> Float[Tensor, "L R H G W D"]:
        return self.store[:, rows].permute(0, 1, 3, 4, 2, 5)


class _Received(_SlotNote):
    """The attention that each key has received: summed over the steps since it was added, mean over a group's queries.

    A row's first `prompt_width` columns are its prompt's, and start from the attention of the prompt's own queries.
    """

    def __init__(self, shape: SlotShape, prompt_width: int) -> None:
        sizes = (shape.layout.layers, shape.slots, shape.layout.heads, prompt_width + shape.capacity)
        self.store = torch.zeros(sizes, device=shape.device)
        self.prompts: dict[int, Float[Tensor, "L H W"]] = {}  # of each entry in the pool
        self._prompt_width = prompt_width
        self._width = 0  # the slots' own columns of this step

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(received.nbytes for received in self.prompts.values())

    def claim(self, slot: int, entry: int) -> None:
        self.store[:, slot] = 0.0
        if self._prompt_width:
            of_prompt = self.prompts[entry]
            self.store[:, slot, :, : of_prompt.shape[-1]] = of_prompt

    def prepare(self, rows: Rows) -> None:
        self._width = rows.width

    def see(self, layer: int, queries: Float[Tensor, "R HG D"], weights: Float[Tensor, "RH G n"] | None) -> None:
        assert weights is not None, "steps were chosen by `watches`"
        paid = weights.mean(1, dtype=torch.float32)
        received = self.store[layer, : len(queries)].flatten(0, 1)
        received[:, self._prompt_width : self._prompt_width + self._width] += paid[:, -self._width :]
        if self._prompt_width:
            shown = paid.shape[1] - self._width  # prompt columns
            received[:, :shown] += paid[:, :shown]

    def of(self, rows: Int[Tensor, "R"], due: Due) -> Float[Tensor, "L R H T"]:
        received = self.store[:, rows]
        mine = received[..., self._prompt_width : self._prompt_width + due.own]
        return torch.cat([received[..., : due.prompt], mine], dim=-1) if due.prompt else mine

    def keep(self, rows: Int[Tensor, "R"], kept: Float[Tensor, "L R H B"]) -> None:
        left = torch.zeros_like(self.store[:, rows])
        left[..., self._prompt_width : self._prompt_width + kept.shape[-1]] = kept
        self.store[:, rows] = left
