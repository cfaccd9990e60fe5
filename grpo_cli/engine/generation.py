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
from grpo_cli.engine.cuda_graph import Capture, GraphedSteps, StepOutput
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Budget, Evictor
from grpo_cli.engine.kv_cache import BLOCK, CachedPrompt, PagedCache, blocks_for, round_up, table_of
from grpo_cli.engine.samplers import KvPlan
from grpo_cli.engine.sampling import draw, drawing_of, uniforms
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Rows, RunningBatch, Sequence, Status
from grpo_cli.interfaces import EnvironmentAnswers
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
        answers: EnvironmentAnswers | None = None,
        enough: Callable[[Rollout], bool] | None = None,
    ) -> None:
        sampler, sparsity, per_step = parts.sampler, parts.sparsity, parts.rollouts_per_step
        self._decoder = decoder = decoder.prepared(sparsity.needs_received)
        self.plan = plan = KvPlan.of(decoder.layout, sampler, sparsity, requests, per_step, prefix, answers is not None)
        fills, slots, device = capture is not None, plan.slots, decoder.device
        self._cache = PagedCache(plan.layout, plan.blocks, device, fills)
        self._evictor: Evictor | None = None
        blocks = plan.own_blocks, plan.prompt_blocks
        if isinstance(sparsity, Budget):
            self._evictor = Evictor(sparsity, plan.layout, slots + fills, blocks, decoder.scale, device)
        self._sequences = [Sequence(index, request) for index, request in enumerate(requests)]
        self.waiting = list(self._sequences)
        self._paused = set[Sequence]()
        self._memory: Memory | None = None
        if plan.is_bounded:
            longest, evicts = max(s.limit for s in self._sequences), self._evictor is not None
            prefixed = prefix if plan.parked_blocks else 0
            self._memory = Memory(self._cache, plan.own_blocks, longest, prefixed, evicts, self._paused)
        self._admission = Admission(slots, sampler.refills, self._memory)
        self._batch = RunningBatch(slots, blocks, device, decoder.is_native, self._cache.count if fills else None)
        self._run_step: Callable[[Rows], StepOutput] = self._compute
        if capture is not None:
            self._run_step = GraphedSteps(self._compute, capture)
        self._answers, self._enough, self.halted = answers, enough, False
        self._unanswered: dict[int, Sequence] = {}  # by the number of the answer from its environment
        self._eos, self._decode = frozenset(parts.eos_token_ids), parts.decode
        self.details: dict[str, float] = {}
        self._span = parts.span
        self._unfinished = Counter(request.prompt.id for request in requests)
        self._preempted = self._preempted_tokens = self._most_running = self._most_held = 0
        self._tally = Tally(slots)

    def serve(self, scheduler: Scheduler, pause_at: int | None = None) -> Iterator[tuple[Sequence, Rollout]]:
        """Serve everything that waits, in the scheduler's order, and yield what ends.

        With `pause_at`, a sequence that has made so many tokens without ending pauses with its last hidden state, and
        waits for the next `serve`. When it is `halted`, all unfinished ones are yielded partial.
        """
        if self._memory is not None:
            self._memory.reserve = 0 if pause_at is None else len(self._sequences) * self.plan.parked_blocks
        self._admission.start(scheduler, self.waiting)
        self.waiting, running = [], self._batch.sequences
        while not self.halted and (len(self._admission) or running or self._unanswered):
            done = self._begin(self._admission.admit(running))
            if not done and running:
                with self._span("decode"):
                    done = self._step(pause_at)
            for sequence, rollout in chain(self._settle(done), self._take_answers()):
                self.halted = self.halted or self._enough is not None and self._enough(rollout)
                yield sequence, rollout
        if self.halted:
            while self._unanswered:  # so that what is partial continues with a turn of the model
                yield from self._take_answers()
            for sequence in self._sequences:
                if sequence.status is not Status.FINISHED:
                    yield sequence, self._finish(sequence, Finish.PARTIAL)

    def end(self) -> None:
        """Free keys, values and copies of weights now: in a cycle through its step they would stay for the update."""
        del self._run_step

    @torch.inference_mode()
    def _begin(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Start the sequences, or let them continue; a new one draws its first token from its prompt's logits, without
        a decode step. Returns those that end with it."""
        if not sequences:
            return []
        self._prefill({s.request.prompt.id: s.request.prompt for s in sequences if s.prompt is None and not s.made})
        numbers = uniforms([s.request.seed for s in sequences], max(s.limit for s in sequences) + 1)
        for sequence, own in zip(sequences, numbers, strict=True):
            if sequence.status is Status.PAUSED:
                self._paused.remove(sequence)
            else:
                sequence.prompt = self._cache.prompts[sequence.request.prompt.id]
                sequence.prompt.users += 1
            sequence.status, sequence.uniforms = Status.RUNNING, own
            sequence.blocks += self._cache.take(blocks_for(sequence.held + 1) - len(sequence.blocks))
            self._batch.add(sequence)
            if self._evictor is not None:
                self._evictor.begin(sequence)
            sequence.made += not sequence.made and bool(sequence.tokens)  # it reads them again
        self._most_running = max(self._most_running, len(self._batch.sequences))
        new = [sequence for sequence in sequences if not sequence.made]
        if not new:
            return []
        logits = torch.stack([s.prompt.logits for s in new if s.prompt is not None])
        (first,) = send(self._decoder.device, np.array([s.uniforms[0] for s in new]))
        by = drawing_of([s.request.sampling for s in new], self._decoder.device, self._decoder.is_native)
        return self._append(new, *read(*draw(logits, first, by)))

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
        needs_received = policy is not None and policy.needs_received and not policy.protect_prompt
        done = self._decoder.prefill([*prompts.values()], needs_received)
        for place, (name, ids) in enumerate(prompts.items()):
            received = None if done.received is None else done.received[:, place]
            blocks = self._cache.take(blocks_for(len(ids)))
            self._cache.prompts[name] = CachedPrompt(blocks, len(ids), done.logits[place].clone(), received)
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
        held = sum([sequence.held + 1 for sequence in running]) + sum([sequence.held for sequence in self._paused])
        self._most_held = max(self._most_held, held + prompt_keys)
        rows = self._batch.rows()
        hidden, *drawn = self._run_step(rows)
        columns = read(*(x[: len(running)] for x in drawn))
        self._tally.steps += 1
        self._tally.row_steps += len(running)
        for sequence in running:
            sequence.held += 1
        done = self._append(running, *columns)
        if pause_at is not None:
            self._pause([s for s in running if s.made == pause_at and s.finish is None], running, hidden)
        return done

    def _compute(self, rows: Rows) -> StepOutput:
        hidden = self._decoder.step(rows, self._cache, self._evictor)
        return hidden, *draw(self._decoder.logits(hidden), rows.uniform, rows.drawing)

    def _append(self, sequences: Seq[Sequence], tokens: np.ndarray, logprobs: np.ndarray) -> list[Sequence]:
        """Add the tokens that were drawn, except to a sequence that still has tokens to read; return those that end."""
        ended = []
        for s, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            if s.made < len(s.tokens):
                s.made += 1
                continue
            s.append(token, logprob)
            if s.ends(self._eos, self._decode, self._answers is not None):
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
                self._admission.put_first(youngest)

    def _preempt(self, sequence: Sequence) -> None:
        self._preempted += 1
        self._preempted_tokens += sequence.made
        self._stop(sequence, Status.PREEMPTED)
        sequence.made = sequence.held = 0

    def _pause(self, sequences: Seq[Sequence], running: Seq[Sequence], hidden: Tensor) -> None:
        """They keep their keys and hidden states, and wait for the next `serve`."""
        if not sequences:
            return
        (index,) = send(hidden.device, np.array([running.index(sequence) for sequence in sequences]))
        for sequence, state in zip(sequences, hidden[index].float().cpu(), strict=True):
            sequence.hidden = state
            self._stop(sequence, Status.PAUSED)
            self.waiting.append(sequence)

    def _stop(self, sequence: Sequence, status: Status) -> None:
        """Stop a sequence that runs or is paused; it gives its blocks back unless it pauses now."""
        if sequence in self._paused:
            self._paused.remove(sequence)
        elif sequence.status is Status.RUNNING:
            if self._evictor is not None and status is Status.PAUSED:
                self._evictor.pause(sequence)
            self._batch.remove(sequence)
        sequence.status = status
        if status is Status.PAUSED:
            self._paused.add(sequence)
            return
        self._cache.give_back(sequence.blocks)
        sequence.blocks = []
        if sequence.prompt is not None:
            sequence.prompt.users -= 1
            sequence.prompt = None

    def _settle(self, done: Seq[Sequence]) -> Iterator[tuple[Sequence, Rollout]]:
        """Yield the sequences that have ended; with environments, the others' turns are answered."""
        for sequence in done:
            if self._answers is None or sequence.is_full:
                yield sequence, self._finish(sequence)
            else:
                self._unanswered[self._answers.ask(sequence.rollout())] = sequence

    def _take_answers(self) -> Iterator[tuple[Sequence, Rollout]]:
        """Continue or end the sequences whose environments have answered. The others stop running: they pause, or are
        preempted where there is no spare room."""
        if self._answers is None or not self._unanswered:
            return
        late = set(self._unanswered.values())
        idle = self.halted or not (len(self._admission) or any(s not in late for s in self._batch.sequences))
        for number, answer in self._answers.answers(wait=idle):
            sequence = self._unanswered.pop(number)
            if answer is None or not sequence.has_room(len(answer)):
                yield sequence, self._finish(sequence, Finish.LENGTH if answer else None)
                continue
            sequence.read(answer)
            if sequence.status is Status.PREEMPTED:
                self._admission.put_first(sequence)
            elif sequence.status is Status.PAUSED:
                self._admission.return_soon(sequence)
        for sequence in self._unanswered.values():
            if sequence.status is Status.RUNNING:
                paused_blocks = sum(len(one.blocks) for one in (*self._paused, sequence))
                has_room = paused_blocks <= self.plan.spare_blocks
                self._stop(sequence, Status.PAUSED) if has_room else self._preempt(sequence)

    def _finish(self, sequence: Sequence, finish: Finish | None = None) -> Rollout:
        """Return the rollout of a sequence, which gives back its blocks and its share of the prompt's."""
        rollout, name = sequence.rollout(finish), sequence.request.prompt.id
        self._stop(sequence, Status.FINISHED)
        self._unfinished[name] -= 1
        if not self._unfinished[name] and name in self._cache.prompts:
            self._cache.drop_prompt(name)
        self._tally.generated += rollout.num_sampled
        if self._memory is not None:
            self._memory.finish(len(rollout))
        return rollout

    def stats(self) -> EngineStats:
        """Return the cost of serving so far."""
        tally, bytes_per_token = self._tally, self.plan.layout.bytes_per_token
        details = {"engine/kv_held_bytes": float(self._most_held * bytes_per_token)}
        if tally.steps:
            details["engine/rows_mean"] = tally.row_steps / tally.steps
        if self._memory is not None:
            tally.slots = self._most_running
            details["engine/restarts"] = float(self._preempted)
            details["engine/restarted_tokens"] = float(self._preempted_tokens)
        if self._evictor is not None:
            details["engine/evictions"] = float(self._evictor.evictions)
            details["engine/kv_saving_allocated"] = self.plan.saved
        return tally.stats(self._cache.peak_bytes, {**details, **self.details})
