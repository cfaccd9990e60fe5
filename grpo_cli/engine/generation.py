"""One call of `generate`: its sequences, its cache, and the loop that serves what waits.

begin     admitted sequences draw their first tokens; a prompt is prefilled unless it already was
step      one batched forward pass, one more token for every running sequence
settle    those that have ended become rollouts; their blocks and (after a prompt's last sample) its blocks are freed

In an episode of several turns a sequence keeps running while its environment answers, and reads the answer token by
token in the steps that run anyway. If the answer takes time, the sequence pauses, and another one runs meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.admission import Admission, Memory
from grpo_cli.engine.common import EngineParts, Tally
from grpo_cli.engine.cuda_graph import Capture, GraphedTurns, TurnOutput
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Budget, Evictor
from grpo_cli.engine.kv_cache import BLOCK, CachedPrompt, PagedCache, blocks_for, round_up, table_of
from grpo_cli.engine.samplers import KvPlan
from grpo_cli.engine.sampling import draw, drawing_of, uniforms
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Rows, RunningBatch, Sequence, Status
from grpo_cli.interfaces import Replies
from grpo_cli.model.transfer import read, send
from grpo_cli.types import EngineStats, Finish, Prompt, Request, Rollout

# The most tokens of one prefill, padding included: bounds its activations, whatever the number of prompts.
PREFILL_TOKENS = 16_384


class Generation:
    """The state while one list of requests is served. Requests whose prompts have the same id share a prefill.

    `prefix`: how many tokens every rollout makes before lengths are predicted. With `capture`, steps have fixed shapes
    and are captured (see `cuda_graph.py`). Once `enough` returns True for a finished rollout, serving is `halted`.
    `details` are named numbers that are reported with the cost.
    """

    def __init__(
        self,
        decoder: Decoder,
        parts: EngineParts,
        requests: Seq[Request],
        prefix: int = 0,
        capture: Capture | None = None,
        replies: Replies | None = None,
        enough: Callable[[Rollout], bool] | None = None,
    ) -> None:
        sampler, sparsity, per_step = parts.sampler, parts.sparsity, parts.rollouts_per_step
        self._decoder = decoder = decoder.prepared(sparsity.needs_received)
        self.plan = plan = KvPlan.of(decoder.layout, sampler, sparsity, requests, per_step, prefix, replies is not None)
        fills, slots = capture is not None, plan.room.slots
        self._cache = PagedCache(plan.layout, plan.blocks, decoder.device, fills)
        self._evictor: Evictor | None = None
        if isinstance(sparsity, Budget):
            sizes = slots + fills, BLOCK * plan.own_blocks, BLOCK * plan.prompt_blocks
            self._evictor = Evictor(sparsity, plan.layout, *sizes, decoder.scale, decoder.device)
        self._sequences = [Sequence(index, request) for index, request in enumerate(requests)]
        self.waiting = list(self._sequences)
        self._memory: Memory | None = None
        if plan.room.budget is not None:
            most, evicts = max(s.limit for s in self._sequences), self._evictor is not None
            self._memory = Memory(self._cache, most, prefix if plan.room.probes else 0, plan.keys, evicts)
        self._admission = Admission(slots, sampler.refills, self._memory)
        fill = self._cache.count if fills else None
        widths = plan.own_blocks, plan.prompt_blocks
        self._batch = RunningBatch(slots, widths, decoder.device, decoder.is_native, fill)
        self._turn: Callable[[Rows], TurnOutput] = self._computed
        if capture is not None:
            self._turn = GraphedTurns(self._computed, capture)
        self._replies, self._enough, self.halted = replies, enough, False
        self._asked: dict[int, Sequence] = {}  # whose environments have not answered yet
        self._eos, self._decode = frozenset(parts.eos_token_ids), parts.decode
        self.details: dict[str, float] = {}
        self._span = parts.span
        self._unfinished = Counter(request.prompt.id for request in requests)
        self._preempted = self._read_again = self._most_rows = self._most_held = 0
        self._paused_keys = self._paused_blocks = 0
        self._tally = Tally(slots)

    def serve(self, scheduler: Scheduler, pause_at: int | None = None) -> Iterator[tuple[Sequence, Rollout]]:
        """Serve everything that waits, in the scheduler's order, and yield what ends.

        With `pause_at`, a sequence that has made so many tokens without ending pauses with its last hidden state, and
        waits for the next `serve`. When it is `halted`, all unfinished ones are yielded partial.
        """
        if self._memory is not None:
            parked = self.plan.shape.parked_bytes // self.plan.layout.block_bytes
            self._memory.reserve = 0 if pause_at is None else len(self._sequences) * parked
        self._admission.start(scheduler, self.waiting)
        self.waiting, running = [], self._batch.sequences
        while not self.halted and (self._admission or running or self._asked):
            done = self._begin(self._admission.admit(running))
            if not done and running:
                with self._span("decode"):
                    done = self._step(pause_at)
            for sequence, rollout in chain(self._settle(done), self._hear()):
                self.halted = self.halted or self._enough is not None and self._enough(rollout)
                yield sequence, rollout
        if self.halted:
            while self._asked:  # so that what is partial goes on with a turn of the model
                yield from self._hear()
            for sequence in self._sequences:
                if sequence.status is not Status.FINISHED:
                    yield sequence, self._ended(sequence, Finish.PARTIAL)

    def end(self) -> None:
        """Free keys, values and copies of weights now: in a cycle through its step they would stay for the update."""
        del self._turn

    @torch.inference_mode()
    def _begin(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Start the sequences, or let them go on; a new one draws its first token from its prompt's logits, without a
        decode step. Returns those that end with it."""
        if not sequences:
            return []
        self._prefill({s.request.prompt.id: s.request.prompt for s in sequences if s.prompt is None and not s.made})
        numbers = uniforms([s.request.seed for s in sequences], max(s.limit for s in sequences) + 1)
        for sequence, own in zip(sequences, numbers, strict=True):
            if sequence.status is Status.PAUSED:
                self._count_paused(sequence, -1)
            else:
                sequence.prompt = self._cache.prompts[sequence.request.prompt.id]
                sequence.prompt.users += 1
            sequence.status, sequence.uniforms = Status.RUNNING, own
            sequence.blocks += self._cache.take(blocks_for(sequence.held + 1) - len(sequence.blocks))
            self._batch.add(sequence)
            if self._evictor is not None:
                self._evictor.begin(sequence)
            sequence.made += not sequence.made and bool(sequence.tokens)  # it reads them again
        self._most_rows = max(self._most_rows, len(self._batch.sequences))
        new = [sequence for sequence in sequences if not sequence.made]
        if not new:
            return []
        logits = torch.stack([s.prompt.logits for s in new if s.prompt is not None])
        (first,) = send(self._decoder.device, np.array([s.uniforms[0] for s in new]))
        by = drawing_of([s.request.sampling for s in new], self._decoder.device, self._decoder.is_native)
        return self._noted(new, *read(*draw(logits, first, by)))

    def _prefill(self, prompts: Mapping[str, Prompt]) -> None:
        """Prefill prompts that are not cached, those of one padded width together."""
        widths: dict[int, list[str]] = {}
        for name, prompt in prompts.items():
            if name not in self._cache.prompts:
                widths.setdefault(round_up(len(prompt.token_ids), BLOCK), []).append(name)
        for width, names in widths.items():
            at_once = max(1, PREFILL_TOKENS // width)
            for start in range(0, len(names), at_once):
                with self._span("prefill"):
                    self._prefill_together({name: prompts[name].token_ids for name in names[start : start + at_once]})

    def _prefill_together(self, prompts: Mapping[str, Seq[int]]) -> None:
        policy = None if self._evictor is None else self._evictor.policy
        watches = policy is not None and policy.needs_received and not policy.protect_prompt
        done = self._decoder.prefill([*prompts.values()], watches)
        for place, (name, ids) in enumerate(prompts.items()):
            received = None if done.received is None else done.received[:, place]
            blocks = self._cache.take(blocks_for(len(ids)))
            self._cache.add_prompt(name, CachedPrompt(blocks, len(ids), done.logits[place].clone(), received))
            self._tally.prefilled += len(ids)
        table = table_of([self._cache.prompts[name].blocks for name in prompts], fill=-1)
        self._cache.write(table, done.keys, done.values)

    @torch.inference_mode()
    def _step(self, pause_at: int | None) -> list[Sequence]:
        """Make one token for every running sequence; return those that have ended."""
        self._take_blocks()
        prompt_keys, running = self._cache.prompt_tokens, list(self._batch.sequences)
        if self._evictor is not None:
            self._evictor.make_room(running, self._cache)
            self._evictor.count(running, prompt_keys)
        held = sum([sequence.held + 1 for sequence in running]) + prompt_keys + self._paused_keys
        self._most_held = max(self._most_held, held)
        rows = self._batch.rows()
        hidden, *drawn = self._turn(rows)
        prompt_kept = () if self._evictor is None else self._evictor.prompt_kept(rows)
        columns = read(*(x[: len(running)] for x in (*drawn, *prompt_kept)))
        self._tally.steps += 1
        self._tally.row_steps += len(running)
        for sequence in running:
            sequence.held += 1
        done = self._noted(running, *columns)
        if pause_at is not None:
            self._pause([s for s in running if s.made == pause_at and s.finish is None], running, hidden)
        return done

    def _computed(self, rows: Rows) -> TurnOutput:
        hidden = self._decoder.step(rows, self._cache, self._evictor)
        return hidden, *draw(self._decoder.logits(hidden), rows.uniform, rows.drawing)

    def _noted(
        self, sequences: Seq[Sequence], tokens: np.ndarray, logprobs: np.ndarray, prompt_kept: np.ndarray | None = None
    ) -> list[Sequence]:
        """Record what was drawn; returns the sequences that end with it. One that has tokens to read drops it."""
        ended, of_prompt = [], [0] * len(sequences) if prompt_kept is None else prompt_kept.tolist()
        for s, token, logprob, kept in zip(sequences, tokens.tolist(), logprobs.tolist(), of_prompt, strict=True):
            s.kept = max(s.kept, s.held - (0 if s.prompt is not None else kept))
            if s.made < len(s.tokens):
                s.made += 1
                continue
            s.append(token, logprob)
            if s.ends(self._eos, self._decode, self._replies is not None):
                ended.append(s)
        return ended

    def _take_blocks(self) -> None:
        """Give every sequence the blocks for its next key. If too few are left, the sequence that loses least, the last
        of those that have made the fewest tokens, is preempted: it reads its tokens again later."""
        running, cache, evictor = self._batch.sequences, self._cache, self._evictor

        def missing(sequence: Sequence) -> int:
            left = sequence.held if evictor is None else evictor.left(sequence)
            return left // BLOCK + 1 - len(sequence.blocks)

        while wanted := [(s, count) for s in running if (count := missing(s)) > 0]:
            if sum(count for _, count in wanted) <= (len(cache.free) if self._memory is None else self._memory.free):
                for sequence, count in wanted:
                    self._batch.grow(sequence, cache.take(count))
                return
            if not cache.drop_idle_prompts():
                assert self._memory is not None and len(running) > 1, "there is room for one sequence"
                self._memory.was_exhausted = True
                self._preempt(youngest := min(reversed(running), key=lambda sequence: sequence.made))
                self._admission.first(youngest)

    def _preempt(self, sequence: Sequence) -> None:
        self._preempted += 1
        self._read_again += sequence.made
        self._leave(sequence, Status.PREEMPTED)
        sequence.made = sequence.held = 0

    def _leave(self, sequence: Sequence, status: Status) -> None:
        """Stop running a sequence, which gives its blocks back unless it pauses."""
        if sequence.status is Status.RUNNING:
            if self._evictor is not None and status is Status.PAUSED:
                self._evictor.pause(sequence)
            self._batch.remove(sequence)
        elif sequence.status is Status.PAUSED:
            self._count_paused(sequence, -1)
        sequence.status = status
        if status is Status.PAUSED:
            self._count_paused(sequence, 1)
            return
        self._cache.give_back(sequence.blocks)
        sequence.blocks = []
        if sequence.prompt is not None:
            sequence.prompt.users -= 1
            sequence.prompt = None

    def _count_paused(self, sequence: Sequence, by: int) -> None:
        self._paused_keys += by * sequence.held
        self._paused_blocks += by * len(sequence.blocks)
        if self._memory is not None:
            self._memory.paused_blocks = self._paused_blocks

    def _pause(self, sequences: Seq[Sequence], running: Seq[Sequence], hidden: Tensor) -> None:
        """They keep their keys and hidden states, and wait for the next `serve`."""
        if not sequences:
            return
        (index,) = send(hidden.device, np.array([running.index(sequence) for sequence in sequences]))
        for sequence, state in zip(sequences, hidden[index].float().cpu(), strict=True):
            sequence.hidden = state
            self._leave(sequence, Status.PAUSED)
            self.waiting.append(sequence)

    def _settle(self, done: Seq[Sequence]) -> Iterator[tuple[Sequence, Rollout]]:
        """Yield the sequences that have ended; with environments, the others' turns are answered."""
        for sequence in done:
            if self._replies is None or sequence.is_full:
                yield sequence, self._ended(sequence)
            else:
                self._asked[self._replies.ask(sequence.rollout())] = sequence

    def _hear(self) -> Iterator[tuple[Sequence, Rollout]]:
        """Continue or end the sequences whose environments have answered; the others run no more. They pause, or where
        there is no spare room they are preempted."""
        if self._replies is None or not self._asked:
            return
        waits = set(self._asked.values())
        idle = self.halted or not (len(self._admission) or any(s not in waits for s in self._batch.sequences))
        for number, answer in self._replies.answers(wait=idle):
            sequence = self._asked.pop(number)
            if answer is None or not sequence.has_room(len(answer)):
                yield sequence, self._ended(sequence, Finish.LENGTH if answer else None)
                continue
            sequence.read(answer)
            sequence.finish = None
            if sequence.status is Status.PREEMPTED:
                self._admission.first(sequence)
            elif sequence.status is Status.PAUSED:
                self._admission.go_on(sequence)
        for sequence in self._asked.values():
            if sequence.status is Status.RUNNING:
                has_room = self._paused_blocks + len(sequence.blocks) <= self.plan.spare_blocks
                self._leave(sequence, Status.PAUSED) if has_room else self._preempt(sequence)

    def _ended(self, sequence: Sequence, finish: Finish | None = None) -> Rollout:
        """Return the rollout of a sequence, which gives back its blocks and its share of the prompt's."""
        rollout, name = sequence.rollout(finish), sequence.request.prompt.id
        self._leave(sequence, Status.FINISHED)
        self._unfinished[name] -= 1
        if not self._unfinished[name] and name in self._cache.prompts:
            self._cache.drop_prompt(name)
        self._tally.generated += rollout.num_drawn
        if self._memory is not None:
            self._memory.ended(len(rollout))
        return rollout

    def stats(self) -> EngineStats:
        """Return the cost of serving so far."""
        tally, bytes_per_token = self._tally, self.plan.layout.bytes_per_token
        details = {"engine/kv_held_bytes": float(self._most_held * bytes_per_token)}
        if tally.steps:
            details["engine/rows_mean"] = tally.row_steps / tally.steps
        if self._memory is not None:
            tally.slots = self._most_rows
            details |= {"engine/restarts": float(self._preempted), "engine/restarted_tokens": float(self._read_again)}
        if self._evictor is not None:
            details |= {**self._evictor.details(), "engine/kv_saving_allocated": self.plan.saved}
        return tally.stats(self._cache.peak_bytes, {**details, **self.details})
