"""The state of every slot in arrays, one entry per slot, so that a decode step does not loop over requests.

The host tracks what a step changes, so no step has to read from the device to continue. Running rows are always the
first ones, without holes: a freed one is refilled or closed by moving the last row in.

    a prompt of 3 tokens, 5 generated     p p p | g g g g g      the last token's key is written by the next step,
    held, while nothing was evicted               k k k k        so a slot holds one key less than generated tokens
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.gpu.compiled import bucket
from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.keeper import KeepAll, Keeper, SlotShape, Tally
from grpo_cli.engine.kv.padding import Padding, round_up
from grpo_cli.engine.kv.prompts import PromptPool
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.engine.kv.tiles import PageTable, Pieces, sides
from grpo_cli.engine.step.sample import SamplingTable, uniforms
from grpo_cli.engine.torch.sequence import Parked, Sequence
from grpo_cli.engine.torch.transcripts import StepTokens
from grpo_cli.model.transfer import read, send

Index = slice | Int[Tensor, "R"]  # slots, on the device


class Slots:
    """Slots of a shape, with room for `max_new_tokens` tokens each; their keys and values lie in `kv`.

    With `fixed`, each has one page permanently, and steps run over all of them, in shapes that rarely change
    (`graph.py`).
    """

    def __init__(
        self,
        shape: SlotShape,
        padding: Padding,
        max_new_tokens: int,
        keeper: KeepAll | Keeper,
        kv: KvArena,
        fixed: bool = False,
        natively: bool = False,
    ) -> None:
        count, device = shape.slots, shape.device
        self.kv, self.keeper, self.capacity, self._fixed = kv, keeper, shape.capacity, fixed
        self._padding = padding
        self._last = torch.zeros(count, dtype=torch.long, device=device)  # the token that is fed next
        self._uniforms = np.zeros((count, max_new_tokens))
        self._numbers = np.zeros((4, count), dtype=np.int64)
        # Tokens of the prompt; tokens generated, including the one being drawn; keys held; prompt keys read in the pool
        # (0 once some were evicted).
        self._prompt_len, self._num_generated, self._num_held, self._num_prompt_seen = self._numbers
        self._sampling = SamplingTable(count, device, natively)
        self._entries = np.zeros(count, dtype=np.int64)  # of the prompt that each slot reads
        self._own: tuple[object, Pieces | PageTable] | None = None  # the last layout and its key
        self._of_prompts: tuple[object, Pieces | PageTable] | None = None
        self.sequences: list[Sequence | None] = [None] * count
        self.running = 0  # how many slots are taken

    @property
    def asked(self) -> tuple[bool, ...]:
        """What drawing depends on besides its arguments."""
        return self._sampling.asked

    @property
    def count(self) -> int:
        return len(self.sequences)

    def free(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is None]

    def generated(self, slot: int) -> int:
        return int(self._num_generated[slot])

    def that_made(self, tokens: int) -> list[int]:
        """The running slots that have made exactly `tokens`."""
        return np.flatnonzero(self._num_generated[: self.running] == tokens).tolist()

    def claim(self, slots: Seq[int], sequences: Seq[Sequence]) -> None:
        """Give each sequence its slot, overwriting all state of earlier ones. A fresh one draws its first token next,
        from its prompt's logits."""
        requests = [sequence.request for sequence in sequences]
        self._numbers[:, slots] = np.array([_numbers(sequence) for sequence in sequences]).T
        self._uniforms[slots] = uniforms([r.seed for r in requests], self._uniforms.shape[1])
        self._sampling.put(slots, [r.sampling for r in requests])
        for slot, sequence in zip(slots, sequences, strict=True):
            assert self.sequences[slot] is None, f"slot {slot} is taken"
            self._entries[slot] = sequence.entry
            if not self._fixed:
                self.kv.rows.take(slot, self.kv.rows.lacks(slot, sequence.held + 1))
            self.sequences[slot], sequence.slot = sequence, slot
            self.running += 1
            if sequence.parked is None:
                self.keeper.claim(slot, sequence.entry)
            else:
                self._unpark(slot, sequence.parked)
                sequence.parked = None

    def advance(self, running: int) -> None:
        """The first `running` slots have each been fed a token, whose key they now hold, and draw the next one."""
        self._num_generated[:running] += 1
        self._num_held[:running] += 1

    def begin(self, slots: Seq[int], logits: Float[Tensor, "R V"]) -> StepTokens:
        """Draw the first token of slots that were claimed."""
        rows = np.array(slots)
        index, uniform = send(self._last.device, rows, self._uniforms[rows, 0])
        return self._drawn(rows, self.draw(index, logits, uniform), ())

    def go_on(self, running: int, drawn: Seq[Tensor]) -> StepTokens:
        """What a step has drawn for the first slots, which have advanced."""
        kept = self.keeper.prompt_kept(running)
        return self._drawn(np.arange(running), [one[:running] for one in drawn], kept)

    def draw(self, rows: Index, logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"]) -> tuple[Tensor, ...]:
        """Draw each row's next token, to be fed in the next step, and what `SamplingTable.draw` says of it."""
        drawn = self._sampling.draw(logits, uniform, rows)
        self._last[rows] = drawn[0]
        return drawn

    def feed(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Make these slots read given tokens next instead of those that they drew."""
        index, given = send(self._last.device, slots, tokens)
        self._last[index] = given

    def _drawn(self, rows: np.ndarray, drawn: Seq[Tensor], prompt_kept: Seq[Tensor]) -> StepTokens:
        sequences = np.array([s.index for row in rows.tolist() if (s := self.sequences[row]) is not None])
        _, made, held, seen = self._numbers[:, rows]
        return StepTokens(sequences, made, held, seen > 0, read(*drawn, *prompt_kept))

    def make_room(self, running: int, prompts: PromptPool) -> None:
        """Cut down those of the first `running` slots that lack room for one more key, and count what they hold."""
        for due in self.keeper.due(self._tally(running)):
            requests = [s.index for slot in due.rows.tolist() if (s := self.sequences[slot]) is not None]
            entries = self._entries[due.rows].tolist()
            self.keeper.evict(due, requests, entries, self.kv)
            self._num_held[due.rows] = due.left
            if due.prompt:
                self._num_prompt_seen[due.rows] = 0
        self.keeper.count(self._tally(running), prompts.held_keys)

    def _tally(self, running: int) -> Tally:
        columns = (self._num_held, self._num_prompt_seen, self._num_generated, self._prompt_len)
        return Tally(*(column[:running].copy() for column in columns))

    def held(self, slots: Seq[int]) -> int:
        """The number of own keys in all of them."""
        return int(self._num_held[list(slots)].sum())

    def made(self, slots: Seq[int]) -> np.ndarray:
        """The tokens that each has made."""
        return self._num_generated[list(slots)]

    def lacking(self) -> list[int]:
        """The running slots that lack a page for one more key."""
        rows, taken = self.kv.rows, np.array(self.taken(), dtype=np.int64)
        needed = np.minimum(self._num_held[taken] + 1, self.capacity)
        found: list[int] = taken[needed > rows.count[taken] * rows.tokens].tolist()
        return found

    def taken(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]

    def rows(self, running: int, prompts: PromptPool) -> tuple[Rows, Float[Tensor, "R"]]:
        """What the decoder reads for a step over the first `running` slots (or all of them if shapes are fixed), and
        the uniforms for drawing their next tokens."""
        count = min(self.count, bucket(running)) if self._fixed else running
        own, of_prompts = self._pieces(running, count, prompts)
        held, page = self._num_held[:running], self.kv.rows.tokens
        several = own.of_row.shape[1] > 1
        width = (
            page
            if several or self.kv.layout.by_token
            else min(page, round_up(int(held.max()) + 1, self._padding.slot_tile))
        )
        if self._fixed:
            width = min(_power_of_two(width), page)
        first, made = np.arange(count), self._num_generated[:count]
        # A full slot that has stopped has no room left; what it writes and draws is not read.
        lengths = np.minimum(self._num_held[:count], self.capacity - 1)
        to_send = [self._prompt_len[:count] + made - 1, lengths]
        to_send.append(self._uniforms[first, np.minimum(made, self._uniforms.shape[1] - 1)])
        if several:
            to_send.append(self.kv.rows.pages[first, lengths // page])
        positions, lengths_there, uniform, *write_to = send(self._last.device, *to_send)
        rows = Rows(
            tokens=self._last[:count],
            positions=positions,
            lengths=lengths_there,
            write_to=write_to[0] if several else own.of_row[:, 0],
            width=width,
            own=own,
            prompt=of_prompts,
        )
        return rows, uniform

    def _pieces(self, running: int, count: int, prompts: PromptPool) -> tuple[Pieces | PageTable, Pieces | PageTable]:
        """The layouts of own and prompt pages, recomputed only when they have changed."""
        kv, device = self.kv, self._last.device
        own_side, prompt_side = sides(kv.layout.by_token)
        now: object = (kv.rows.version, count)
        if self._own is None or self._own[0] != now:
            most = int(kv.rows.count[:count].max())
            self._own = now, own_side(kv.rows.pages[:count, :most], kv.rows.tokens, device)
        sees = self._num_prompt_seen[:running] > 0
        entries = self._entries[:running].copy()
        now = (kv.prompts.version, count, entries.tobytes(), sees.tobytes())
        if self._of_prompts is None or self._of_prompts[0] != now:
            fixed = count if self._fixed else None
            found = prompt_side(entries, sees, prompts.places(), self._padding.columns, fixed, device)
            self._of_prompts = now, found
        return self._own[1], self._of_prompts[1]

    def park(self, slots: Seq[int], last: Seq[int]) -> list[Parked]:
        """Everything needed to continue these slots' sequences in others; `last` are their latest tokens."""
        return [
            Parked(
                *self.kv.read(slot, int(self._num_held[slot])),
                self.generated(slot),
                token,
                bool(self._num_prompt_seen[slot]),
                self.keeper.park(slot),
            )
            for slot, token in zip(slots, last, strict=True)
        ]

    def _unpark(self, slot: int, parked: Parked) -> None:
        self._last[slot] = parked.last
        self.kv.restore(slot, parked.keys, parked.values)
        self.keeper.unpark(slot, parked.notes)

    def release(self, slot: int) -> None:
        if (sequence := self.sequences[slot]) is not None:
            sequence.slot = -1
        self.sequences[slot] = None
        self.running -= 1
        if not self._fixed:
            self.kv.rows.drop(slot)

    def close_holes(self) -> int:
        """Move running rows down so that they are the first ones, and pages likewise; returns how many there are."""
        running = self.running
        holes = [slot for slot in range(running) if self.sequences[slot] is None]
        movers = [slot for slot in range(running, self.count) if self.sequences[slot] is not None]
        if holes:
            self._move(movers, holes)
        self.kv.close()
        return running

    def _move(self, sources: list[int], targets: list[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if self._fixed:
                self.kv.copy(source, target)
            else:
                self.kv.rows.rename(source, target)
            self.keeper.move(source, target)
            sequence = self.sequences[source]
            assert sequence is not None, "a running row has a sequence"
            self.sequences[target], self.sequences[source], sequence.slot = sequence, None, target
        for table in (self._numbers.T, self._entries, self._uniforms):
            table[targets] = table[sources]
        there, here = send(self._last.device, np.array(targets), np.array(sources))
        self._last[there] = self._last[here]
        self._sampling.move(sources, targets)


def _numbers(sequence: Sequence) -> tuple[int, ...]:
    """A sequence's entries in `Slots._numbers`."""
    prompt, parked = len(sequence.request.prompt.token_ids), sequence.parked
    if parked is None:
        return prompt, 1, 0, prompt
    return prompt, parked.made, sequence.held, prompt if parked.sees_prompt else 0


def _power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
