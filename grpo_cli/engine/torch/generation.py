"""One call of `generate`: its slots, its prompts in flight, and the loop that serves waiting sequences.

admit     a sequence chosen by the scheduler enters a free slot; its prompt is prefilled unless it already was
run       one batched forward pass, one drawn token per running row
settle    finished sequences become rollouts; their slots and (after a prompt's last sample) its entry are freed

In an episode of several turns a sequence stays in its slot while its environment answers, and reads the answer token by
token in the steps that run anyway. If the answer takes time, another sequence uses the slot meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.interfaces import Running, Scheduler
from grpo_cli.engine.kv.padding import round_up
from grpo_cli.engine.kv.prompts import PromptPool
from grpo_cli.engine.torch.forecast import Forecast, RunningRows
from grpo_cli.engine.torch.queue import WaitingQueue
from grpo_cli.engine.torch.sequence import Sequence
from grpo_cli.engine.torch.stop import NeverStop, StopStrings
from grpo_cli.engine.torch.transcripts import StepTokens, Transcripts, Turns
from grpo_cli.engine.torch.workspace import Workspace
from grpo_cli.interfaces import Meter, Replies
from grpo_cli.model.transfer import send
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Rollout

# The most tokens of one prefill, padding included: bounds its activations, whatever the number of prompts.
PREFILL_TOKENS = 16_384


class Generation:
    """The state while one list of requests is served. Requests whose prompts have the same id share a prefill.

    It runs in a `workspace` made for them. With `refills`, waiting sequences take the slots of those that ended.
    `details` are named numbers that are reported with the cost.
    """

    def __init__(
        self,
        workspace: Workspace,
        eos_token_ids: Seq[int],
        requests: Seq[Request],
        stop: StopStrings | NeverStop,
        meter: Meter,
        refills: bool,
        replies: Replies | None = None,
    ) -> None:
        self.workspace, self.refills = workspace, refills
        self.decoder, self.sizes = workspace.decoder, workspace.sizes
        self.kv, self.slots, self._turn, self._fixed = workspace.kv, workspace.slots, workspace.turn, workspace.fixed
        self.prompts = PromptPool(self.kv)
        self.waiting = [Sequence(index, request) for index, request in enumerate(requests)]
        self._requests, self._sequences = requests, tuple(self.waiting)
        limits = [request.sampling.max_new_tokens for request in requests]
        turns = None
        if replies is not None:
            most = [request.sampling.max_turn_tokens for request in requests]
            turns = Turns(max(limits), [request.in_turn for request in requests], most)
        self._transcripts = Transcripts(limits, eos_token_ids, turns)
        self._replies = replies
        self._asked: dict[int, Sequence] = {}  # whose environments have not answered yet
        self._answered: list[Sequence] = []  # that have lost their slots meanwhile
        self.details: dict[str, float] = {}
        self._eos_ids = frozenset(eos_token_ids)
        self._stop = stop
        self._stopped: set[int] = set()  # requests that a stop string has ended
        self.halted = False
        self._span = meter.span
        self._unfinished = Counter(request.prompt.id for request in requests)
        self._forecast = Forecast(self.sizes.prefix if self.sizes.room.probes else 0, self.sizes.max_new_tokens)
        self._restarts = self._restarted_tokens = self._most_rows = self._most_held = 0
        self._steps = self._row_steps = self._generated = self._prefilled = 0

    def serve(self, scheduler: Scheduler, park_at: int | None = None) -> Iterator[tuple[Sequence, Rollout]]:
        """Serve everything that waits, in the scheduler's order, and yield what ends.

        With `park_at`, a sequence that has made so many tokens without ending gives its slot back, keeps its keys and
        its last hidden state, and waits for the next `serve`. After `halt`, all unfinished ones are yielded partial.
        """
        if park_at is None:
            self.kv.set_aside = self.kv.parked
        queue = WaitingQueue(self.waiting, scheduler, self._rows_that_fit(self.waiting))
        self.waiting = []
        while not self.halted and (queue or self.slots.running or self._asked or self._answered):
            done = self._admit(queue)
            if not done:
                with self._span("decode"):
                    done = self._run(queue, park_at) if self.slots.running else []
            yield from self._settle(done)
            yield from self._hear(queue)
        if self.halted:
            while self._asked:  # so that what is partial goes on with a turn of the model
                yield from self._hear(queue)
            yield from self._left_over()

    def halt(self) -> None:
        """Make `serve` stop with what has been drawn until now."""
        self.halted = True

    def _left_over(self) -> Iterator[tuple[Sequence, Rollout]]:
        """All unfinished sequences with their tokens so far: running, parked, waiting, or given back."""
        for sequence in self._sequences:
            if not self._transcripts.has_ended(sequence.index):
                yield sequence, self._given_up(sequence, Finish.PARTIAL)

    def _rows_that_fit(self, sequences: Seq[Sequence]) -> int:
        """Roughly how many of them will run at a time."""
        if not self._bounded or not sequences:
            return self.slots.count
        room = self.kv.most_tokens - self.sizes.prompt_page
        if not self.sizes.rows_grow:
            return max(1, min(self.slots.count, room // self.sizes.row_page))
        expected = sum(self._forecast.length(sequence, sequence.made, 0) for sequence in sequences) / len(sequences)
        return max(1, min(self.slots.count, int(room / expected)))

    def _admit(self, queue: WaitingQueue) -> list[Sequence]:
        """Admit sequences, which draw their first tokens; returns those that end with it."""
        free = self.slots.free()
        if self._answered and free:
            back, self._answered = self._answered[: len(free)], self._answered[len(free) :]
            self._enter(free[: len(back)], back)
            free = self.slots.free()
        if not queue or not free or (self.slots.running and not self.refills):
            return []
        rows_now = None
        if self._bounded and self.sizes.rows_grow:
            rows_now = self._running_rows()
            if self.slots.running and (self._forecast.full or not rows_now.fits):
                return []
        entering = queue.leave(self._running_views(), free, self._may_begin(rows_now))
        if not entering:
            return []
        slots, sequences = zip(*entering, strict=True)
        return self._enter(list(slots), list(sequences))

    def _running_rows(self) -> RunningRows:
        """The running rows with their forecasts."""
        running = [(s, self.slots.generated(slot)) for slot, s in enumerate(self.slots.sequences) if s is not None]
        made = [tokens for _, tokens in running]
        lengths = [self._forecast.length(sequence, tokens, sum(made)) for sequence, tokens in running]
        prompts = sum(map(self.prompts.pages_of, {s.request.prompt.id for s, _ in running}))
        room = self.kv.reach() - prompts * self.kv.prompts.tokens
        return RunningRows(made, lengths, room, self.kv.rows.tokens)

    def _may_begin(self, rows_now: RunningRows | None) -> Callable[[Sequence], bool]:
        """A predicate: whether there is room for a sequence in addition to all that it has accepted before, now and, by
        forecast (`rows_now`; None if memory is unbounded, or rows do not grow), later too."""
        opening = set[str]()
        rows = prompts = 0
        in_flight = int(self.slots.made(self.slots.taken()).sum())
        busy = {s.request.prompt.id for s in self.slots.sequences if s is not None}

        def may_begin(sequence: Sequence) -> bool:
            nonlocal rows, prompts
            prompt, first = sequence.request.prompt, not (busy or opening)
            own = 0 if self._fixed else self.kv.rows.pages_for(sequence.held + 1)
            size = 0 if prompt.id in opening | busy else self.kv.prompts.pages_for(len(prompt.token_ids))
            length = self._forecast.length(sequence, sequence.made, in_flight)
            if rows_now and not rows_now.admits(sequence.made, length, size * self.kv.prompts.tokens) and not first:
                return False
            new = 0 if prompt.id in self.prompts else size
            while not self.kv.has_room(rows + own, prompts + new):
                if not self._forget_idle_prompts(opening | {prompt.id}):
                    assert not first, "there is room for one sequence"
                    return False
            rows, prompts = rows + own, prompts + new
            opening.add(prompt.id)
            return True

        return may_begin

    def _forget_idle_prompts(self, wanted: Set[str] = frozenset()) -> bool:
        """Drop the keys of prompts without a running row that are not wanted; False if there are none."""
        busy = {s.request.prompt.id for s in self.slots.sequences if s is not None} | wanted
        idle = [name for name in self.prompts.names if name not in busy]
        for name in idle:
            self.prompts.release(name)
        return bool(idle)

    @torch.inference_mode()
    def _enter(self, slots: list[int], sequences: list[Sequence]) -> list[Sequence]:
        """Claim the slots; a fresh sequence draws its first token from the prompt's logits, without a decode step.
        Returns those that end with it."""
        new = {s.request.prompt.id: s.request.prompt for s in sequences if s.request.prompt.id not in self.prompts}
        pages = 0 if self._fixed else sum(self.kv.rows.pages_for(sequence.held + 1) for sequence in sequences)
        had_room = self.kv.make_room(pages, sum(self.kv.prompts.pages_for(len(p.token_ids)) for p in new.values()))
        assert had_room, "sequences enter only where there is room"
        self._prefill(sequences, new)
        fresh = [(slot, s.entry) for slot, s in zip(slots, sequences, strict=True) if s.parked is None]
        parked = sum(s.parked.nbytes for s in sequences if s.parked is not None)
        self.kv.note_peak()
        self.slots.claim(slots, sequences)
        self.kv.parked -= parked
        self.kv.set_aside -= parked
        self._most_rows = max(self._most_rows, self.slots.running)
        if not fresh:
            return []
        rows, entries = zip(*fresh, strict=True)
        return self._note(self.slots.begin(rows, self.prompts.logits(entries)))

    def _prefill(self, sequences: Seq[Sequence], new: Mapping[str, Prompt]) -> None:
        """Prefill the new prompts, those of one padded width together."""
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
            sequence.entry = self.prompts.entry(sequence.request.prompt.id)

    def _prefill_together(self, names: Seq[str], prompts: Seq[Seq[int]]) -> None:
        keeper = self.slots.keeper
        done = self.decoder.prefill(prompts, keeper.notes_prompts)
        entries = self.prompts.put(names, done.keys, done.values, done.logits, [len(ids) for ids in prompts])
        if done.received is not None:
            keeper.prefilled(entries, done.received)
        self._prefilled += sum(len(ids) for ids in prompts)

    @torch.inference_mode()
    def _run(self, queue: WaitingQueue, park_at: int | None) -> list[Sequence]:
        """One token for every running row; returns the sequences now known to have ended."""
        self._let_grow(queue)
        running = self.slots.close_holes()
        self.slots.make_room(running, self.prompts)
        if self._replies is not None:
            self._feed(running)
        hidden, *drawn = self._turn(*self.slots.rows(running, self.prompts))
        self.slots.advance(running)
        tokens = self.slots.go_on(running, drawn)
        self._steps += 1
        self._row_steps += running
        parking = [] if park_at is None else self.slots.that_made(park_at)
        done = self._note(tokens)
        over = {sequence.slot for sequence in done}
        self._park([slot for slot in parking if slot not in over], hidden)
        return done

    def _feed(self, running: int) -> None:
        """Rows whose environment has answered read the answer instead of what they have drawn."""
        sequences = np.array([-1 if s is None else s.index for s in self.slots.sequences[:running]])
        given, tokens = self._transcripts.feed(sequences, self.slots.made(range(running)))
        if given.any():
            self.slots.feed(np.flatnonzero(given), tokens)

    def _note(self, drawn: StepTokens) -> list[Sequence]:
        """Record the drawn tokens; returns the sequences that end with them."""
        new, ended = self._transcripts.note(drawn)
        hits = self._stop.hits(self._transcripts, new, self._requests)
        self._transcripts.end(hits)
        self._stopped.update(hits)
        found = sorted({*ended, *hits}, key=new.index) if hits else ended
        return [self._sequences[index] for index in found]

    def _let_grow(self, queue: WaitingQueue) -> None:
        """One more page for every row that is about to need one. If none is left, the youngest row is restarted later
        and makes the same tokens again, which are counted."""
        if self._fixed:
            return
        while not self.kv.make_room(len(lacking := self.slots.lacking()), 0):
            if not self._forget_idle_prompts():
                self._restart(queue)
        for slot in lacking:
            self.kv.rows.take(slot, 1)
        held = self.slots.held(self.slots.taken()) + self.slots.running + self.prompts.held_keys
        self._most_held = max(self._most_held, held * self.sizes.slots.layout.bytes_per_token + self.kv.parked)

    def _restart(self, queue: WaitingQueue) -> None:
        taken = self.slots.taken()
        assert len(taken) > 1, "there is room for one sequence"
        slot = taken[int(np.argmin(self.slots.made(taken)[::-1])) * -1 - 1]
        sequence = self.slots.sequences[slot]
        assert sequence is not None, "a running row has a sequence"
        self._begin_anew(sequence)
        self._forecast.full = True
        queue.give_back(sequence)

    def _begin_anew(self, sequence: Sequence) -> None:
        """Restart it later: it gives up its slot and its tokens."""
        self._restarts += 1
        self._restarted_tokens += self.slots.generated(sequence.slot)
        self.slots.release(sequence.slot)

    @property
    def _bounded(self) -> bool:
        """Whether the bytes for keys and values are limited."""
        return self.sizes.room.budget is not None

    def _park(self, slots: Seq[int], hidden: Tensor) -> None:
        if not slots:
            return
        (index,) = send(hidden.device, np.array(slots))
        states = hidden[index].float().cpu()
        sequences = [s for slot in slots if (s := self.slots.sequences[slot]) is not None]
        last = [self._transcripts.last(sequence.index) for sequence in sequences]
        for slot, sequence, parked, state in zip(slots, sequences, self.slots.park(slots, last), states, strict=True):
            sequence.parked, sequence.hidden = parked, state
            self.slots.release(slot)
            self.kv.parked += parked.nbytes
            self.kv.note_peak()
            self.waiting.append(sequence)

    def _settle(self, done: Seq[Sequence]) -> Iterator[tuple[Sequence, Rollout]]:
        for sequence in done:
            if self._replies is None or self._transcripts.is_full(sequence.index):
                yield sequence, self._ended(sequence, self._finish(sequence))
            else:
                self._asked[self._replies.ask(self._rollout(sequence, self._finish(sequence)))] = sequence

    def _hear(self, queue: WaitingQueue) -> Iterator[tuple[Sequence, Rollout]]:
        """Continue or end the sequences whose environments have answered; the others give up their slots."""
        if self._replies is None or not self._asked:
            return
        in_slots = sum(sequence.slot >= 0 for sequence in self._asked.values())
        idle = self.halted or not (queue or self._answered or self.slots.running > in_slots)
        for number, reply in self._replies.answers(wait=idle):
            sequence = self._asked.pop(number, None)
            if sequence is None:
                continue  # it has been restarted since it was asked
            has_room = reply is not None and self._transcripts.has_room(sequence.index, len(reply))
            if reply is None or not has_room:
                yield sequence, self._ended(sequence, Finish.LENGTH if reply else self._finish(sequence))
                continue
            self._transcripts.go_on(sequence.index, reply)
            self._stopped.discard(sequence.index)
            if sequence.slot < 0 and self._bounded:
                queue.give_back(sequence)
            elif sequence.slot < 0:
                self._answered.append(sequence)
        self._set_aside([sequence for sequence in self._asked.values() if sequence.slot >= 0])

    def _set_aside(self, sequences: Seq[Sequence]) -> None:
        """They give up their slots and keep their keys. If memory is bounded they are instead restarted once they have
        been answered, and make the same tokens again."""
        if self._bounded:
            for sequence in sequences:
                self._begin_anew(sequence)
            return
        slots = [sequence.slot for sequence in sequences]
        last = [self._transcripts.last(sequence.index) for sequence in sequences]
        for sequence, parked in zip(sequences, self.slots.park(slots, last), strict=True):
            sequence.parked = parked
            self.slots.release(sequence.slot)
            self.kv.parked += parked.nbytes
            self.kv.set_aside += parked.nbytes
            self.kv.note_peak()

    def _ended(self, sequence: Sequence, finish: Finish) -> Rollout:
        rollout = self._given_up(sequence, finish)
        self._forecast.ended(len(rollout))
        return rollout

    def _given_up(self, sequence: Sequence, finish: Finish) -> Rollout:
        """The rollout of a sequence, which gives up its slot and prompt."""
        self._transcripts.read_all(sequence.index)
        if sequence.slot >= 0:
            self.slots.release(sequence.slot)
        self._leave_prompt(sequence.request.prompt.id)
        rollout = self._rollout(sequence, finish)
        self._generated += rollout.num_drawn
        return rollout

    def _rollout(self, sequence: Sequence, finish: Finish) -> Rollout:
        index = sequence.index
        of = self._transcripts
        return Rollout(sequence.request, *of.of(index), finish, of.kept(index), of.spans(index))

    def _finish(self, sequence: Sequence) -> Finish:
        if self._transcripts.last(sequence.index) in self._eos_ids:
            return Finish.EOS
        return Finish.STOP if sequence.index in self._stopped else Finish.LENGTH

    def _leave_prompt(self, name: str) -> None:
        self._unfinished[name] -= 1
        if not self._unfinished[name] and name in self.prompts:
            self.prompts.release(name)

    def _running_views(self) -> list[Running]:
        return [
            Running(s.index, slot, self.slots.generated(slot), s.predicted)
            for slot, s in enumerate(self.slots.sequences)
            if s is not None
        ]

    def stats(self) -> EngineStats:
        """The cost of serving so far."""
        bounded = self._bounded
        slots = self._most_rows if bounded else self.slots.count
        capacity = self._steps * slots
        found = {"engine/rows_mean": self._row_steps / self._steps} if self._steps else {}
        if bounded:
            restarted = {"engine/restarts": self._restarts, "engine/restarted_tokens": self._restarted_tokens}
            found |= {name: float(count) for name, count in restarted.items()}
        return EngineStats(
            decode_steps=self._steps,
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            slots=slots,
            slot_utilisation=self._row_steps / capacity if capacity else 1.0,
            kv_peak_bytes=self.kv.peak,
            details={
                "engine/kv_held_bytes": float(self._most_held),
                **found,
                **self._sparsity_details(),
                **self.details,
            },
        )

    def _sparsity_details(self) -> dict[str, float]:
        """The keeper's details, and the share of bytes saved compared with dense slots."""
        details = dict(self.slots.keeper.details())
        if details:
            beside = self.sizes.kv.prompts * self.sizes.kv.prompt_bytes
            whole = self.sizes.kv.slot_bytes * self.slots.count
            details["engine/kv_saving_allocated"] = 1 - (whole + beside) / (self.sizes.dense_bytes + beside)
        return details
