"""The state of every slot as tensors, one row a slot, so that a decode step touches no request one by one.

Running rows are always the first ones, without holes: what falls free is refilled or closed by moving the last row in.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_cli.engine.attention import Rows
from grpo_cli.engine.cache import KvLayout, KvStore, PromptPool
from grpo_cli.engine.keeper import Due, KeepAll, Keeper, Tally
from grpo_cli.engine.padding import Padding, round_up
from grpo_cli.engine.sample import SamplingTable, uniforms
from grpo_cli.engine.sequence import Parked, Sequence


class Slots:
    """`count` slots with room for `max_new_tokens` tokens and `capacity` keys (a multiple of the slot tile) each."""

    def __init__(
        self,
        layout: KvLayout,
        count: int,
        capacity: int,
        padding: Padding,
        max_new_tokens: int,
        keeper: KeepAll | Keeper,
        device: torch.device,
    ) -> None:
        self.kv = KvStore(layout, count, capacity, device)
        self.keeper = keeper
        self._padding = padding
        self._tokens = torch.zeros(count, max_new_tokens, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(count, max_new_tokens, device=device)
        self._uniforms = torch.zeros(count, max_new_tokens, dtype=torch.float64, device=device)
        self._first_cell = torch.arange(count, device=device) * max_new_tokens  # of a slot, in the three tables above
        # One column each: prompt length, tokens generated, most tokens to generate, last token, keys held less tokens
        # generated (-1 while nothing was evicted), prompt keys that are seen in the pool (0 after an eviction of some),
        # most response keys held when the slot was cut down, fewest prompt keys among those in the slot.
        self._counts = torch.zeros(count, 8, dtype=torch.long, device=device)
        columns = self._counts.unbind(1)
        self._prompt_length, self._generated, self._limit, self._last, self._offset, self._prompt_seen = columns[:6]
        self._kept, self._prompt_kept = columns[6:]
        self._sampling = SamplingTable(count, device)
        self.sequences: list[Sequence | None] = [None] * count
        self.running = 0  # how many slots are taken
        # The host's own copies, so that widths and prompt tables need no look at the device.
        self.host_generated = np.zeros(count, dtype=np.int64)
        self._host_offset = np.zeros(count, dtype=np.int64)
        self._host_prompt = np.zeros(count, dtype=np.int64)
        self._host_seen = np.zeros(count, dtype=np.int64)
        self._host_entry = np.zeros(count, dtype=np.int64)
        self._host_columns = (
            self.host_generated,
            self._host_offset,
            self._host_prompt,
            self._host_seen,
            self._host_entry,
        )
        self._table: Tensor | None = None
        self._place: Tensor | None = None
        self._placed = 0  # how many running rows the two were made for
        self._in_order = False

    @property
    def count(self) -> int:
        return len(self.sequences)

    def free(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is None]

    def generated(self, slot: int) -> int:
        return int(self.host_generated[slot])

    def claim(self, slots: Seq[int], sequences: Seq[Sequence]) -> None:
        """Give each sequence its slot; nothing of the slot's last tenant is left."""
        requests = [sequence.request for sequence in sequences]
        device = self._tokens.device
        index = torch.tensor(slots, device=device)
        counts = [_counts(sequence) for sequence in sequences]
        self._counts[index] = torch.tensor(counts, device=device)
        self._uniforms[index] = uniforms([r.seed for r in requests], self._uniforms.shape[1]).to(device)
        self._sampling.put(slots, [r.sampling for r in requests])
        for slot, sequence, (prompt, made, _, _, offset, seen, *_) in zip(slots, sequences, counts, strict=True):
            assert self.sequences[slot] is None, f"slot {slot} is taken"
            if self._host_entry[slot] != sequence.entry:
                self._table = None
            self.sequences[slot] = sequence
            self.running += 1
            self.host_generated[slot], self._host_offset[slot] = made, offset
            self._host_prompt[slot], self._host_seen[slot] = prompt, seen
            self._host_entry[slot] = sequence.entry
            if sequence.parked is None:
                self.keeper.claim(slot, sequence.entry)
            else:
                self._unpark(slot, sequence.parked)
                sequence.parked = None

    def record(self, rows: Tensor, logits: Float[Tensor, "R V"], eos: Int[Tensor, "E"]) -> Bool[Tensor, "R"]:
        """Draw the next token of each of `rows` and note it; True where the sequence ends with it."""
        made = self._generated[rows]
        cells = self._first_cell[rows] + made
        tokens, logprobs = self._sampling.draw(logits, self._uniforms.view(-1)[cells], rows)
        self._tokens.view(-1).index_copy_(0, cells, tokens)
        self._logprobs.view(-1).index_copy_(0, cells, logprobs)
        made = made + 1
        self._last[rows] = tokens
        self._generated[rows] = made
        return (tokens[:, None] == eos).any(-1) | (made >= self._limit[rows])

    def count_tokens(self, slots: Seq[int] | slice) -> None:
        """The host's note that each of `slots` has made a token."""
        self.host_generated[slots] += 1

    def kept_kv(self, slots: Seq[int]) -> list[int]:
        """Most response keys that each slot has held of its sequence, in the layer and head that held most."""
        return self._most_response_keys(torch.tensor(slots, device=self._counts.device)).tolist()

    def _most_response_keys(self, index: Int[Tensor, "R"]) -> Int[Tensor, "R"]:
        held = self._generated[index] + self._offset[index]
        return torch.maximum(self._kept[index], held - self._prompt_kept[index])

    def _held(self) -> np.ndarray:
        return self.host_generated + self._host_offset

    def make_room(self, running: int, prompts: PromptPool) -> None:
        """Cut down those of the first `running` slots that have no room for one more key, and count what they hold."""
        tally = self._tally(running)
        for due in self.keeper.due(tally):
            requests = [s.index for slot in due.rows.tolist() if (s := self.sequences[slot]) is not None]
            prompt_kept = self.keeper.evict(due, requests, self._host_entry[due.rows].tolist(), self.kv, prompts)
            self._cut_down(due, prompt_kept)
            tally = self._tally(running)
        self.keeper.count(tally, prompts.held_keys)

    def _cut_down(self, due: Due, prompt_kept: Int[Tensor, "R"]) -> None:
        index = torch.from_numpy(due.rows).to(self._offset.device)
        self._kept[index] = self._most_response_keys(index)
        self._prompt_kept[index] = prompt_kept
        self._offset[index] += due.left - due.own
        self._host_offset[due.rows] += due.left - due.own
        if due.prompt:
            self._prompt_seen[index] = 0
            self._host_seen[due.rows] = 0

    def _tally(self, running: int) -> Tally:
        first = slice(0, running)
        return Tally(self._held()[first], self._host_seen[first], self.host_generated[first], self._host_prompt[first])

    def rows(self, running: int, fixed: int | None = None) -> Rows:
        """What the decoder reads for a step over the first `running` slots.

        With `fixed`, the number of entries in the prompt pool, over all slots, running or not, and in shapes that
        seldom change (see `graph.py`).
        """
        count = running if fixed is None else self.count
        generated = self._generated[:count]
        if self._table is None:
            self._table, self._place, self._in_order = prompt_table(
                self._host_entry[:running], count, fixed, self._padding.columns, self._last.device
            )
        assert self._place is not None
        seen = self._host_seen[:running]
        alike = bool((seen == self._host_prompt[:running]).all())
        width = round_up(int(self._held()[:running].max()) + 1, self._padding.slot_tile)
        return Rows(
            tokens=self._last[:count],
            positions=self._prompt_length[:count] + generated - 1,
            # A slot that stopped when it was full has no room left; what it writes is not read.
            lengths=(generated + self._offset[:count]).clamp_(max=self.kv.capacity - 1),
            width=width if fixed is None else min(_power_of_two(width), self.kv.capacity),
            table=self._table,
            place=self._place,
            in_order=self._in_order,
            prompt_lengths=None if alike else self._prompt_seen[:count],
            blind=not seen.any(),
        )

    def tails(self, rows: Seq[int], count: int) -> list[list[int]]:
        """The last `count` tokens of each row, or as many as it has made, on the host."""
        made = self.host_generated[list(rows)]
        first = np.maximum(made - count, 0)
        columns = np.minimum(first[:, None] + np.arange(min(count, self._tokens.shape[1])), self._tokens.shape[1] - 1)
        index = torch.tensor(rows, dtype=torch.long, device=self._tokens.device)[:, None]
        tokens = self._tokens[index, torch.from_numpy(columns).to(index.device)].tolist()
        return [tail[:length] for tail, length in zip(tokens, (made - first).tolist(), strict=True)]

    def read(self, slots: Seq[int]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens and log-probabilities of each slot, on the host."""
        index = torch.tensor(slots, device=self._tokens.device)
        lengths = self.host_generated[list(slots)].tolist()
        longest = max(lengths)
        tokens = self._tokens[index, :longest].tolist()
        logprobs = self._logprobs[index, :longest].tolist()
        return [(tuple(t[:length]), tuple(p[:length])) for t, p, length in zip(tokens, logprobs, lengths, strict=True)]

    def park(self, slots: Seq[int]) -> list[Parked]:
        """Everything needed to go on with these slots' sequences in others."""
        index = torch.tensor(slots, device=self._counts.device)
        counts = torch.stack([self._kept[index], self._prompt_kept[index]], dim=1).tolist()
        return [
            Parked(
                *self.kv.read(slot, int(self._held()[slot])),
                token_ids,
                logprobs,
                bool(self._host_seen[slot]),
                kept,
                prompt_kept,
                self.keeper.park(slot),
            )
            for slot, (token_ids, logprobs), (kept, prompt_kept) in zip(slots, self.read(slots), counts, strict=True)
        ]

    def _unpark(self, slot: int, parked: Parked) -> None:
        count = len(parked.token_ids)
        self.kv.restore(slot, parked.keys, parked.values)
        self.keeper.unpark(slot, parked.notes)
        self._tokens[slot, :count] = torch.tensor(parked.token_ids, device=self._tokens.device)
        self._logprobs[slot, :count] = torch.tensor(parked.logprobs, device=self._tokens.device)
        self._last[slot] = parked.token_ids[-1]

    def release(self, slot: int) -> None:
        self.sequences[slot] = None
        self.running -= 1

    def close_holes(self) -> int:
        """Move running rows down until they are the first ones; returns how many there are."""
        running = self.running
        if self._placed != running:
            self._table, self._placed = None, running
        holes = [slot for slot in range(running) if self.sequences[slot] is None]
        movers = [slot for slot in range(running, self.count) if self.sequences[slot] is not None]
        for hole, mover in zip(holes, movers, strict=True):
            self._move(mover, hole)
        if holes:
            self._table = None
        return running

    def _move(self, source: int, target: int) -> None:
        made = self.generated(source)
        self.kv.move(source, target, int(self._held()[source]))
        self.keeper.move(source, target)
        self._counts[target] = self._counts[source]
        self._tokens[target, :made] = self._tokens[source, :made]
        self._logprobs[target, :made] = self._logprobs[source, :made]
        self._uniforms[target] = self._uniforms[source]
        self._sampling.move(source, target)
        for column in self._host_columns:
            column[target] = column[source]
        self.sequences[target], self.sequences[source] = self.sequences[source], None


def _counts(sequence: Sequence) -> tuple[int, ...]:
    """A new tenant's row of counts (see `Slots`)."""
    prompt, parked = len(sequence.request.prompt.token_ids), sequence.parked
    limit = sequence.request.sampling.max_new_tokens
    if parked is None:
        return prompt, 0, limit, 0, -1, prompt, 0, 0
    made, seen = len(parked.token_ids), prompt if parked.sees_prompt else 0
    return prompt, made, limit, 0, parked.keys.shape[2] - made, seen, parked.kept, parked.prompt_kept


def _power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << (count - 1).bit_length()


def prompt_table(
    entries: np.ndarray, rows: int, fixed: int | None, multiple: int, device: torch.device
) -> tuple[Int[Tensor, "E C"], Int[Tensor, "R"], bool]:
    """For each pool entry the rows that belong to it, where each row stands in that table flattened, and whether both
    are simply 0, 1, 2, ...

    Columns are a multiple of `multiple` (see `padding.py`). With `fixed` both sides are powers of two (but at most
    `fixed` entries), `rows` beyond `entries` stand anywhere, and no order is claimed.

    >>> table, place, in_order = prompt_table(np.array([1, 0, 1]), 3, None, 4, torch.device("cpu"))
    >>> table.tolist(), place.tolist(), in_order
    ([[1, 0, 0, 0], [0, 2, 0, 0]], [4, 0, 5], False)
    >>> table, place, in_order = prompt_table(np.array([1, 2, 1]), 4, 3, 4, torch.device("cpu"))
    >>> table.tolist(), place.tolist(), in_order
    ([[0, 0, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0]], [4, 8, 5, 0], False)
    """
    counts = np.bincount(entries)
    height, columns = len(counts), round_up(int(counts.max()), multiple)
    if fixed is not None:
        height, columns = min(_power_of_two(height), fixed), _power_of_two(columns)
    order = np.argsort(entries, kind="stable")
    starts = np.cumsum(counts) - counts
    column = np.empty_like(entries)
    column[order] = np.arange(len(entries)) - starts[entries[order]]
    place = np.zeros(rows, dtype=np.int64)
    place[: len(entries)] = entries * columns + column
    table = np.zeros(height * columns, dtype=np.int64)
    table[place[: len(entries)]] = np.arange(len(entries))
    in_order = fixed is None and len(table) == len(place) and bool((place == np.arange(len(place))).all())
    by_entry = torch.from_numpy(table.reshape(height, columns))
    return by_entry.to(device), torch.from_numpy(place).to(device), in_order
