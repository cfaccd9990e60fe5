"""One call of `generate`: its slots, its prompts in flight, and the three beats that serve waiting sequences.

admit     whom the scheduler chooses enters a free slot; its prompt is prefilled if nobody did it before
run       one batched forward pass, one drawn token per running row
settle    rows that ended become rollouts, their slots and (after a prompt's last sample) its entry fall free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from grpo_cli.engine.cache import PromptPool
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.graph import Capture, FixedSteps, Step
from grpo_cli.engine.interfaces import Running, Scheduler
from grpo_cli.engine.keeper import keeper_of
from grpo_cli.engine.line import Line
from grpo_cli.engine.padding import round_up
from grpo_cli.engine.sampler import Capped, Sampler
from grpo_cli.engine.sequence import Sequence
from grpo_cli.engine.sizes import Sizes
from grpo_cli.engine.slots import Slots
from grpo_cli.engine.stop import NeverStop, StopStrings
from grpo_cli.interfaces import Meter
from grpo_cli.types import EngineStats, Finish, Request, Rollout

# Tokens, padding included, that one prefill may hold: bounds its activations, whatever the number of prompts.
PREFILL_TOKENS = 16_384


class Generation:
    """What exists while one list of requests is served. Requests whose prompts have one id share one prefill.

    With `capture`, decode steps are of fixed shape and captured by it (see `graph.py`). `prefix` is that of `Sizes`.
    `details` are named numbers to go with the cost.
    """

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: Seq[int],
        sampler: Sampler | Capped,
        sparsity: Dense | Budget,
        requests: Seq[Request],
        capture: Capture | None,
        stop: StopStrings | NeverStop,
        meter: Meter,
        prefix: int = 0,
    ) -> None:
        self.decoder = decoder = decoder.in_its_precision()
        self.sizes = Sizes.of(decoder, sampler, sparsity, requests, prefix)
        shape = self.sizes.slots
        self.slots = Slots(shape, decoder.padding, self.sizes.max_new_tokens, keeper_of(sparsity, shape))
        pool = (self.sizes.entries, self.sizes.most_entries, shape.prompt_width, decoder.vocabulary, shape.device)
        self.prompts = PromptPool(shape.layout, *pool)
        self.waiting = [Sequence(index, request) for index, request in enumerate(requests)]
        self.details: dict[str, float] = {}
        self._fixed = capture is not None
        self._step: Step = decoder.step if capture is None else FixedSteps(decoder.step, capture)
        self._refills = sampler.refills
        self._eos = torch.tensor(eos_token_ids, dtype=torch.long, device=decoder.device)
        self._eos_ids = frozenset(eos_token_ids)
        self._stop = stop
        self._stopped: set[int] = set()  # requests that a stop string has ended
        self._span = meter.span
        self._unfinished = Counter(request.prompt.id for request in requests)
        self._entry: dict[str, int] = {}  # of each prompt in the pool
        self._parked_bytes = self._kv_peak = 0
        self._steps = self._row_steps = self._generated = self._prefilled = 0

    def serve(self, scheduler: Scheduler, park_at: int | None = None) -> Iterator[tuple[Sequence, Rollout]]:
        """Serve everything that waits, in the scheduler's order, and yield what ends.

        With `park_at`, a sequence that has made so many tokens without ending gives its slot back, keeps its keys and
        its last hidden state, and is what waits afterwards.
        """
        line = Line(self.waiting, scheduler, self.slots.count)
        self.waiting = []
        while line or self.slots.running:
            done = self._admit(line)
            if not done:
                with self._span("decode"):
                    done = self._run(park_at)
            yield from self._settle(done)

    def _admit(self, line: Line) -> list[int]:
        free = self.slots.free()
        if not line or not free or (self.slots.running and not self._refills):
            return []
        entering = line.leave(self._running_views(), free, self._may_begin())
        if not entering:
            return []
        slots, sequences = zip(*entering, strict=True)
        return self._enter(list(slots), list(sequences))

    def _may_begin(self) -> Callable[[Sequence], bool]:
        """Whether there is an entry for a sequence's prompt, where all that were asked about before and may, begin."""
        opening = set[str]()

        def may_begin(sequence: Sequence) -> bool:
            name = sequence.request.prompt.id
            if name not in self._entry and name not in opening:
                if len(opening) == self.prompts.left:
                    return False
                opening.add(name)
            return True

        return may_begin

    @torch.inference_mode()
    def _enter(self, slots: list[int], sequences: list[Sequence]) -> list[int]:
        """Claim the slots; a fresh sequence draws its first token from the prompt's logits, without a decode step."""
        self._prefill(sequences)
        fresh = [(slot, s.entry) for slot, s in zip(slots, sequences, strict=True) if s.parked is None]
        self._note_kv()
        self._parked_bytes -= sum(s.parked.nbytes for s in sequences if s.parked is not None)
        self.slots.claim(slots, sequences)
        if not fresh:
            return []
        rows, entries = (torch.tensor(column, device=self._eos.device) for column in zip(*fresh, strict=True))
        ended = self.slots.record(rows, self.prompts.logits[entries], self._eos)
        return self._ended([fresh[row][0] for row in _true(ended)], [slot for slot, _ in fresh])

    def _note_kv(self) -> None:
        """To be called when prompts have come into the pool, and before less is parked."""
        now = self.slots.kv.nbytes + self.prompts.take_peak() + self._parked_bytes
        self._kv_peak = max(self._kv_peak, now)

    def _prefill(self, sequences: Seq[Sequence]) -> None:
        """Run the prompts that nobody has run yet, those of one padded width together."""
        new = {s.request.prompt.id: s.request.prompt for s in sequences if s.request.prompt.id not in self._entry}
        widths: dict[int, list[str]] = {}
        for name, prompt in new.items():
            widths.setdefault(round_up(len(prompt.token_ids), self.decoder.padding.prompt_tile), []).append(name)
        for width, names in widths.items():
            at_once = max(1, PREFILL_TOKENS // width)
            for start in range(0, len(names), at_once):
                some = names[start : start + at_once]
                with self._span("prefill"):
                    self._prefill_together(some, [new[name].token_ids for name in some])
        for sequence in sequences:
            sequence.entry = self._entry[sequence.request.prompt.id]

    def _prefill_together(self, names: Seq[str], prompts: Seq[Seq[int]]) -> None:
        keeper = self.slots.keeper
        done = self.decoder.prefill(prompts, keeper.notes_prompts)
        entries = [self.prompts.claim() for _ in names]
        self.prompts.put(entries, done.keys, done.values, done.logits, [len(ids) for ids in prompts])
        if done.received is not None:
            keeper.prefilled(entries, done.received)
        self._entry.update(zip(names, entries, strict=True))
        self._prefilled += sum(len(ids) for ids in prompts)

    @torch.inference_mode()
    def _run(self, park_at: int | None) -> list[int]:
        """One token for every running row. The one look at the device is the list of rows that ended."""
        running = self.slots.close_holes()
        self.slots.make_room(running, self.prompts)
        step_rows = self.slots.rows(running, self.prompts.entries if self._fixed else None)
        hidden = self._step(step_rows, self.slots.kv, self.prompts, self.slots.keeper)[:running]
        self.slots.advance(running)
        ended = self.slots.record(slice(0, running), self.decoder.logits(hidden), self._eos)
        self._steps += 1
        self._row_steps += running
        done = self._ended(_true(ended), range(running))
        if park_at is not None:
            self._park([slot for slot in self.slots.that_made(park_at) if slot not in done], hidden)
        return done

    def _ended(self, done: list[int], rows: Seq[int]) -> list[int]:
        """Those of `rows` that ended with the token just drawn: `done`, and those that a stop string ends."""
        hits = self._stop.hits(self.slots, rows)
        self._stopped.update(s.index for row in hits if (s := self.slots.sequences[row]) is not None)
        return sorted({*done, *hits}) if hits else done

    def _park(self, slots: Seq[int], hidden: Tensor) -> None:
        if not slots:
            return
        states = hidden[slots].float().cpu()
        for slot, parked, state in zip(slots, self.slots.park(slots), states, strict=True):
            sequence = self.slots.sequences[slot]
            assert sequence is not None, "a running row has a sequence"
            sequence.parked, sequence.hidden = parked, state
            self._parked_bytes += parked.nbytes
            self.slots.release(slot)
            self.waiting.append(sequence)

    def _settle(self, done: Seq[int]) -> Iterator[tuple[Sequence, Rollout]]:
        if not done:
            return
        kept = self.slots.kept_kv(done)
        for slot, (token_ids, logprobs), kept_kv in zip(done, self.slots.read(done), kept, strict=True):
            sequence = self.slots.sequences[slot]
            assert sequence is not None, "a row that ended has a sequence"
            self.slots.release(slot)
            self._leave_prompt(sequence.request.prompt.id)
            self._generated += len(token_ids)
            yield sequence, Rollout(sequence.request, token_ids, logprobs, self._finish(sequence, token_ids), kept_kv)

    def _finish(self, sequence: Sequence, token_ids: Seq[int]) -> Finish:
        if token_ids[-1] in self._eos_ids:
            return Finish.EOS
        return Finish.STOP if sequence.index in self._stopped else Finish.LENGTH

    def _leave_prompt(self, name: str) -> None:
        self._unfinished[name] -= 1
        if not self._unfinished[name]:
            self.prompts.release(self._entry.pop(name))

    def _running_views(self) -> list[Running]:
        return [
            Running(s.index, slot, self.slots.generated(slot), s.predicted)
            for slot, s in enumerate(self.slots.sequences)
            if s is not None
        ]

    def stats(self) -> EngineStats:
        """What serving has cost so far."""
        capacity = self._steps * self.slots.count
        return EngineStats(
            decode_steps=self._steps,
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            slots=self.slots.count,
            slot_utilisation=self._row_steps / capacity if capacity else 1.0,
            kv_peak_bytes=self._kv_peak,
            details={**self._sparsity_details(), **self.details},
        )

    def _sparsity_details(self) -> dict[str, float]:
        """What the keeper says of itself, and the share saved of the bytes that as many dense slots would take."""
        details = dict(self.slots.keeper.details())
        if details:
            pool = self.prompts.store.nbytes
            dense = self.sizes.dense_bytes
            details["engine/kv_saving_allocated"] = 1 - (self.slots.kv.nbytes + pool) / (dense + pool)
        return details


def _true(flags: Bool[Tensor, "R"]) -> list[int]:
    """Where they are true. Looked for on the host: on a GPU, to ask how many there are would be a second wait."""
    return np.flatnonzero(flags.cpu().numpy()).tolist()
