"""The state of every slot as tensors, one row a slot, so that a decode step touches no request one by one.

Running rows are always the first ones, without holes: what falls free is refilled or closed by moving the last row in.

    a prompt of 3 tokens, 5 generated     p p p | g g g g g      the last token's key is written by the next step,
    held, while nothing was evicted               k k k k        so a slot holds a key less than it has made tokens
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_cli.engine.attention import Rows
from grpo_cli.engine.cache import KvArena
from grpo_cli.engine.columns import Columns, Index
from grpo_cli.engine.compiled import bucket
from grpo_cli.engine.keeper import Due, KeepAll, Keeper, SlotShape, Tally
from grpo_cli.engine.padding import Padding, round_up
from grpo_cli.engine.pieces import Pieces, Runs, sides
from grpo_cli.engine.prompts import PromptPool
from grpo_cli.engine.sample import SamplingTable, uniforms
from grpo_cli.engine.sequence import Parked, Sequence


class Slots:
    """Slots of a shape, with room for `max_new_tokens` tokens each; their keys and values lie in `kv`.

    With `fixed`, each has one page for good, and steps are over all of them, in shapes that seldom change (`graph.py`).
    """

    def __init__(
        self,
        shape: SlotShape,
        padding: Padding,
        max_new_tokens: int,
        keeper: KeepAll | Keeper,
        kv: KvArena,
        fixed: bool = False,
    ) -> None:
        count, device = shape.slots, shape.device
        self.kv, self.keeper, self.capacity, self._fixed = kv, keeper, shape.capacity, fixed
        self._padding = padding
        self._tokens = torch.zeros(count, max_new_tokens, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(count, max_new_tokens, device=device)
        self._uniforms = torch.zeros(count, max_new_tokens, dtype=torch.float64, device=device)
        # Of a slot, in the three tables above: the cell before its first.
        self._cell_before = torch.arange(count, device=device) * max_new_tokens - 1
        self._numbers = Columns(count, mirrored=4, more=4, device=device)
        # Tokens of the prompt; tokens generated, the one that is drawn now included; keys held; prompt keys that are
        # seen in the pool (0 after an eviction of some).
        self._prompt, self._generated, self._held, self._seen = self._numbers.mirrored
        # Most tokens to generate; the last token; most response keys held when the slot was cut down; fewest prompt
        # keys, over layers and heads, among those that are held.
        self._limit, self._last, self._kept, self._prompt_kept = self._numbers.more
        self._sampling = SamplingTable(count, device)
        self._entries = np.zeros(count, dtype=np.int64)  # of the prompt that each slot reads
        self._own: tuple[object, Pieces | Runs] | None = None  # as they were laid out last, and for what
        self._of_prompts: tuple[object, Pieces | Runs] | None = None
        self.sequences: list[Sequence | None] = [None] * count
        self.running = 0  # how many slots are taken

    @property
    def count(self) -> int:
        return len(self.sequences)

    def free(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is None]

    def generated(self, slot: int) -> int:
        return self._generated.get(slot)

    def that_made(self, tokens: int) -> list[int]:
        """The running slots that have made so many tokens."""
        return np.flatnonzero(self._generated.host[: self.running] == tokens).tolist()

    def claim(self, slots: Seq[int], sequences: Seq[Sequence]) -> None:
        """Give each sequence its slot; nothing of the slot's last tenant is left. A fresh one draws its first token
        next, from its prompt's logits."""
        requests = [sequence.request for sequence in sequences]
        device = self._tokens.device
        index = torch.tensor(slots, device=device)
        self._numbers.put(slots, index, [_numbers(sequence) for sequence in sequences])
        self._uniforms[index] = uniforms([r.seed for r in requests], self._uniforms.shape[1]).to(device)
        self._sampling.put(slots, [r.sampling for r in requests])
        for slot, sequence in zip(slots, sequences, strict=True):
            assert self.sequences[slot] is None, f"slot {slot} is taken"
            self._entries[slot] = sequence.entry
            if not self._fixed:
                self.kv.rows.take(slot, self.kv.rows.lacks(slot, sequence.held + 1))
            self.sequences[slot] = sequence
            self.running += 1
            if sequence.parked is None:
                self.keeper.claim(slot, sequence.entry)
            else:
                self._unpark(slot, sequence.parked)
                sequence.parked = None

    def advance(self, running: int) -> None:
        """The first `running` slots have each been fed a token, whose key they hold now, and draw the next one."""
        first = slice(0, running)
        self._generated.add(first, 1)
        self._held.add(first, 1)

    def record(self, rows: Index, logits: Float[Tensor, "R V"], eos: Int[Tensor, "E"]) -> Bool[Tensor, "R"]:
        """Draw the next token of each of `rows` and note it; True where the sequence ends with it."""
        made = self._generated.device[rows]
        cells = self._cell_before[rows] + made
        tokens, logprobs = self._sampling.draw(logits, self._uniforms.view(-1)[cells], rows)
        self._tokens.view(-1).index_copy_(0, cells, tokens)
        self._logprobs.view(-1).index_copy_(0, cells, logprobs)
        self._last[rows] = tokens
        return (tokens[:, None] == eos).any(-1) | (made >= self._limit[rows])

    def kept_kv(self, slots: Seq[int]) -> list[int]:
        """Most response keys that each slot has held of its sequence, in the layer and head that held most."""
        return self._most_response_keys(torch.tensor(slots, device=self._tokens.device)).tolist()

    def _most_response_keys(self, index: Int[Tensor, "R"]) -> Int[Tensor, "R"]:
        return torch.maximum(self._kept[index], self._held.device[index] - self._prompt_kept[index])

    def make_room(self, running: int, prompts: PromptPool) -> None:
        """Cut down those of the first `running` slots that have no room for one more key, and count what they hold."""
        for due in self.keeper.due(self._tally(running)):
            requests = [s.index for slot in due.rows.tolist() if (s := self.sequences[slot]) is not None]
            entries = self._entries[due.rows].tolist()
            self._cut_down(due, self.keeper.evict(due, requests, entries, self.kv))
        self.keeper.count(self._tally(running), prompts.held_keys)

    def _cut_down(self, due: Due, prompt_kept: Int[Tensor, "R"]) -> None:
        index = torch.from_numpy(due.rows).to(self._tokens.device)
        self._kept[index] = self._most_response_keys(index)
        self._prompt_kept[index] = prompt_kept
        self._held.set(due.rows, index, due.left)
        if due.prompt:
            self._seen.set(due.rows, index, 0)

    def _tally(self, running: int) -> Tally:
        columns = (self._held, self._seen, self._generated, self._prompt)
        return Tally(*(column.host[:running].copy() for column in columns))

    def held(self, slots: Seq[int]) -> int:
        """Keys of their own in all of them."""
        return int(self._held.host[list(slots)].sum())

    def made(self, slots: Seq[int]) -> np.ndarray:
        """Tokens that each has made."""
        return self._generated.host[list(slots)]

    def lacking(self) -> list[int]:
        """The running slots that have no page for one more key."""
        rows = self.kv.rows
        return [slot for slot in self.taken() if rows.lacks(slot, min(self._held.get(slot) + 1, self.capacity))]

    def taken(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]

    def rows(self, running: int, prompts: PromptPool) -> Rows:
        """What the decoder reads for a step over the first `running` slots, or all of them where shapes are fixed."""
        count = min(self.count, bucket(running)) if self._fixed else running
        own, of_prompts = self._pieces(running, count, prompts)
        held, page = self._held.host[:running], self.kv.rows.tokens
        several = own.of_row.shape[1] > 1
        width = (
            page
            if several or self.kv.layout.by_token
            else min(page, round_up(int(held.max()) + 1, self._padding.slot_tile))
        )
        if self._fixed:
            width = min(_power_of_two(width), page)
        write_to = own.of_row[:, 0]
        if several:
            pages = self.kv.rows.pages[np.arange(running), np.minimum(held, self.capacity - 1) // page]
            write_to = torch.from_numpy(pages).to(write_to.device)
        return Rows(
            tokens=self._last[:count],
            positions=self._prompt.device[:count] + self._generated.device[:count] - 1,
            # A slot that stopped when it was full has no room left; what it writes is not read.
            lengths=self._held.device[:count].clamp(max=self.capacity - 1),
            write_to=write_to,
            width=width,
            own=own,
            prompt=of_prompts,
        )

    def _pieces(self, running: int, count: int, prompts: PromptPool) -> tuple[Pieces | Runs, Pieces | Runs]:
        """How rows and pages find each other, laid out anew only when that has changed."""
        kv, device = self.kv, self._tokens.device
        own_side, prompt_side = sides(kv.layout.by_token)
        now: object = (kv.rows.version, count)
        if self._own is None or self._own[0] != now:
            most = int(kv.rows.count[:count].max())
            self._own = now, own_side(kv.rows.pages[:count, :most], kv.rows.tokens, device)
        sees = self._seen.host[:running] > 0
        entries = self._entries[:running].copy()
        now = (kv.prompts.version, count, entries.tobytes(), sees.tobytes())
        if self._of_prompts is None or self._of_prompts[0] != now:
            fixed = count if self._fixed else None
            found = prompt_side(entries, sees, prompts.places(), self._padding.columns, fixed, device)
            self._of_prompts = now, found
        return self._own[1], self._of_prompts[1]

    def tails(self, rows: Seq[int], count: int) -> list[list[int]]:
        """The last `count` tokens of each row, or as many as it has made, on the host."""
        made = self._generated.host[list(rows)]
        first = np.maximum(made - count, 0)
        columns = np.minimum(first[:, None] + np.arange(min(count, self._tokens.shape[1])), self._tokens.shape[1] - 1)
        index = torch.tensor(rows, dtype=torch.long, device=self._tokens.device)[:, None]
        tokens = self._tokens[index, torch.from_numpy(columns).to(index.device)].tolist()
        return [tail[:length] for tail, length in zip(tokens, (made - first).tolist(), strict=True)]

    def read(self, slots: Seq[int]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens and log-probabilities of each slot, on the host."""
        index = torch.tensor(slots, device=self._tokens.device)
        lengths = self._generated.host[list(slots)].tolist()
        longest = max(lengths)
        tokens = self._tokens[index, :longest].tolist()
        logprobs = self._logprobs[index, :longest].tolist()
        return [(tuple(t[:length]), tuple(p[:length])) for t, p, length in zip(tokens, logprobs, lengths, strict=True)]

    def park(self, slots: Seq[int]) -> list[Parked]:
        """Everything needed to go on with these slots' sequences in others."""
        index = torch.tensor(slots, device=self._tokens.device)
        counts = torch.stack([self._kept[index], self._prompt_kept[index]], dim=1).tolist()
        return [
            Parked(
                *self.kv.read(slot, self._held.get(slot)),
                token_ids,
                logprobs,
                bool(self._seen.get(slot)),
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

    def release(self, slot: int) -> None:
        self.sequences[slot] = None
        self.running -= 1
        if not self._fixed:
            self.kv.rows.drop(slot)

    def close_holes(self) -> int:
        """Move running rows down until they are the first ones, and pages likewise; returns how many rows there are."""
        running = self.running
        holes = [slot for slot in range(running) if self.sequences[slot] is None]
        movers = [slot for slot in range(running, self.count) if self.sequences[slot] is not None]
        for hole, mover in zip(holes, movers, strict=True):
            self._move(mover, hole)
        self.kv.close()
        return running

    def _move(self, source: int, target: int) -> None:
        made = self.generated(source)
        if self._fixed:
            self.kv.copy(source, target)
        else:
            self.kv.rows.rename(source, target)
        self.keeper.move(source, target)
        self._numbers.move(source, target)
        self._entries[target] = self._entries[source]
        self._tokens[target, :made] = self._tokens[source, :made]
        self._logprobs[target, :made] = self._logprobs[source, :made]
        self._uniforms[target] = self._uniforms[source]
        self._sampling.move(source, target)
        self.sequences[target], self.sequences[source] = self.sequences[source], None


def _numbers(sequence: Sequence) -> tuple[int, ...]:
    """A new tenant's numbers, in the order of `Slots`'s columns."""
    prompt, parked = len(sequence.request.prompt.token_ids), sequence.parked
    limit = sequence.request.sampling.max_new_tokens
    if parked is None:
        return prompt, 1, 0, prompt, limit, 0, 0, 0
    seen = prompt if parked.sees_prompt else 0
    made, last = len(parked.token_ids), parked.token_ids[-1]
    return prompt, made, parked.keys.shape[2], seen, limit, last, parked.kept, parked.prompt_kept


def _power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << (count - 1).bit_length()
