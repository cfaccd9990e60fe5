"""One call of `generate`: its sequences, its cache, and the loop that serves what waits.

begin     admitted sequences draw their first tokens; a prompt is prefilled unless it already was
step      one batched forward pass, one more token for every running sequence, unless a first token has ended one
settle    those that have ended become rollouts; their blocks and (after a prompt's last sample) its blocks are freed
observe   those whose turn has ended read an observation token by token, in the steps that run anyway; while it is
          awaited, the sequence pauses and another one runs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.admission import Admission, Forecast
from grpo_cli.engine.common import EngineParts, Enough, Tally
from grpo_cli.engine.cuda_graph import Capture, GraphedSteps, StepOutput
from grpo_cli.engine.decoder import TILE, Decoder
from grpo_cli.engine.eviction import Budget
from grpo_cli.engine.evictor import Evictor
from grpo_cli.engine.kv_cache import BLOCK, CachedPrompt, KvPlan, PagedCache, blocks_for, round_up, table_of
from grpo_cli.engine.sampling import draw, row_sampling, uniforms
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Rows, RunningBatch, Sequence, Status
from grpo_cli.interfaces import EnvironmentAnswers
from grpo_cli.model.transfer import read, send
from grpo_cli.types import EngineStats, Finish, Request, Rollout

# The most tokens of one prefill, padding included: bounds its activations, whatever the number of prompts.
PREFILL_TOKENS = 16_384


class Generation:
    """The state while one list of requests is served. Requests whose prompts have the same id share a prefill.

    `prefix`: how many tokens every rollout makes before lengths are predicted. With `capture`, steps have fixed shapes
    and are captured (see `cuda_graph.py`). Once `enough` returns True for a finished rollout, serving is `stopped`. No
    part refers to it, so keys, values and copies of weights are freed with it, before the update.
    """

    def __init__(
        self,
        decoder: Decoder,
        parts: EngineParts,
        requests: Seq[Request],
        prefix: int = 0,
        capture: Capture | None = None,
        observations: EnvironmentAnswers | None = None,
        enough: Enough | None = None,
    ) -> None:
        sampler, sparsity, per_step = parts.sampler, parts.sparsity, parts.rollouts_per_step
        self._decoder = decoder = decoder.prepared(sparsity.needs_received)
        pauses, padding_slot = observations is not None, int(capture is not None)
        self.plan = plan = KvPlan.of(decoder.layout, sampler, sparsity, requests, per_step, prefix, pauses)
        slots, device, block_limits = plan.slots, decoder.device, (plan.own_blocks, plan.prompt_blocks)
        self._cache = PagedCache(decoder.layout, plan.blocks, device, capture is not None)
        self._evictor: Evictor | None = None
        if isinstance(sparsity, Budget):
            self._evictor = Evictor(sparsity, decoder.layout, slots + padding_slot, block_limits, decoder.scale, device)
        self._sequences = [Sequence(index, request) for index, request in enumerate(requests)]
        self.waiting, self._paused = list(self._sequences), list[Sequence]()
        longest = max(sequence.limit for sequence in self._sequences)
        self._forecast = None if sampler.kv_budget is None else Forecast(BLOCK * plan.own_blocks, longest / 2)
        self._admission = Admission(slots, sampler.refills)
        padding_block = self._cache.count if padding_slot else None
        self._batch = RunningBatch(slots, block_limits, device, decoder.is_native, padding_block)
        self._graphs = None if capture is None else GraphedSteps(capture)
        self._observations, self._enough, self.stopped = observations, enough, False
        self._awaiting_observation: dict[int, Sequence] = {}  # by the number of its request
        self._eos, self._decode, self._span = frozenset(parts.eos_token_ids), parts.decode, parts.span
        self._unfinished = Counter(request.prompt.id for request in requests)
        self._preempted = self._most_running = self._most_held = 0
        self._tally = Tally(slots)

    def serve(self, scheduler: Scheduler, pause_at: int | None = None) -> Iterator[tuple[Sequence, Rollout]]:
        """Serve everything that waits, in the scheduler's order, and yield what ends.

        With `pause_at`, a sequence that has made this number of tokens without ending pauses with its last hidden
        state, and waits for the next `serve`. When it is `stopped`, all unfinished ones are yielded partial.
        """
        self._admission.start(scheduler, self.waiting)
        self.waiting, running = [], self._batch.sequences
        while not self.stopped and (len(self._admission) or running or self._awaiting_observation):
            done = self._begin(self._admission.admit(running, self._try_take_room))
            if not done and running:  # else free slots are filled first
                with self._span("decode"):
                    done = self._step(pause_at)
            for sequence, rollout in chain(self._settle(done), self._take_observations()):
                self.stopped = self.stopped or self._enough is not None and self._enough(rollout)
                yield sequence, rollout
        if self.stopped:
            while self._awaiting_observation:  # so that a partial rollout ends where the model writes next
                yield from self._take_observations()
            for sequence in self._sequences:
                if sequence.status is not Status.FINISHED:
                    yield sequence, self._finish(sequence, Finish.PARTIAL)

    @torch.inference_mode()
    def _begin(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Start the sequences, or let them continue; a new one draws its first token from its prompt's logits, without
        a decode step. Return those that end, or whose turn ends, with it."""
        if not sequences:
            return []
        prompts = dict.fromkeys(s.prompt for s in sequences if s.prompt is not None)
        self._prefill([prompt for prompt in prompts if prompt.logits is None])
        numbers = uniforms([s.request.seed for s in sequences], max(s.limit for s in sequences) + 1)
        for sequence, own in zip(sequences, numbers, strict=True):
            sequence.status, sequence.uniforms = Status.RUNNING, own
            self._batch.add(sequence)
            if self._evictor is not None:
                self._evictor.begin(sequence)
            if not sequence.computed and sequence.tokens:  # preempted: its first token is known, the others are read
                sequence.computed = 1
        self._most_running = max(self._most_running, len(self._batch.sequences))
        new = [sequence for sequence in sequences if not sequence.computed]
        if not new:
            return []
        logits = torch.stack([x for s in new if s.prompt is not None and (x := s.prompt.logits) is not None])
        (first,) = send(self._decoder.device, np.array([s.uniforms[0] for s in new]))
        by = row_sampling([s.request.sampling for s in new], self._decoder.device, self._decoder.is_native)
        return self._append(new, *read(*draw(logits, first, by)))

    def _prefill(self, prompts: Seq[CachedPrompt]) -> None:
        """Prefill prompts, those of one padded width together."""
        policy = None if self._evictor is None else self._evictor.policy
        needs_received = policy is not None and policy.needs_received and not policy.protect_prompt
        for width, alike in groupby(sorted(prompts, key=_width), _width):
            some, prompts_per_prefill = list(alike), max(1, PREFILL_TOKENS // width)
            for start in range(0, len(some), prompts_per_prefill):
                together = some[start : start + prompts_per_prefill]
                with self._span("prefill"):
                    token_ids = [prompt.token_ids for prompt in together]
                    keys, values, logits, received = self._decoder.prefill(token_ids, needs_received)
                    self._cache.write(table_of([prompt.blocks for prompt in together], -1), keys, values)
                    for place, prompt in enumerate(together):
                        prompt.logits = logits[place].clone()
                        prompt.received = torch.stack([of[place] for of in received]) if received else None
                        self._tally.prefilled += prompt.length

    @torch.inference_mode()
    def _step(self, pause_at: int | None) -> list[Sequence]:
        """Make one token for every running sequence; return those that end, or whose turn ends, with it."""
        self._take_blocks()
        running, prompt_keys = list(self._batch.sequences), sum(one.length for one in self._cache.prompts.values())
        if self._evictor is not None:
            self._evictor.make_room(running, self._cache)
        held = sum([sequence.held + 1 for sequence in running]) + sum([sequence.held for sequence in self._paused])
        self._most_held = max(self._most_held, held + prompt_keys)
        rows = self._batch.rows()
        hidden, *drawn = self._compute(rows) if self._graphs is None else self._graphs(self._compute, rows)
        columns = read(*(x[: len(running)] for x in drawn))
        self._tally.steps += 1
        self._tally.row_steps += len(running)
        for sequence in running:
            sequence.held += 1
        done = self._append(running, *columns)
        if pause_at is not None:
            self._pause([s for s in running if s.computed == pause_at and s.finish is None], running, hidden)
        return done

    def _compute(self, rows: Rows) -> StepOutput:
        hidden = self._decoder.step(rows, self._cache, self._evictor)
        return hidden, *draw(self._decoder.logits(hidden), rows.uniform, rows.sampling)

    def _append(self, sequences: Seq[Sequence], tokens: np.ndarray, logprobs: np.ndarray) -> list[Sequence]:
        """Add drawn tokens, but not to sequences that still read; return those that end, or whose turn ends."""
        ended = []
        for s, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            if s.computed < len(s.tokens):
                s.computed += 1
                continue
            s.append(token, logprob)
            if s.ends(self._eos, self._decode, self._observations is not None):
                ended.append(s)
        return ended

    def _take_blocks(self) -> None:
        """Give every sequence the blocks for its next key. If too few are left, the sequence that loses least, the last
        of those that have made the fewest tokens, is preempted: it reads its tokens again later."""
        running, cache = self._batch.sequences, self._cache
        while wanted := [(s, count) for s in running if (count := self._missing(s)) > 0]:
            if self._make_free(sum(count for _, count in wanted)):
                for sequence, count in wanted:
                    self._batch.grow(sequence, cache.take(count))
                return
            assert len(running) > 1, "there is room for one sequence"
            self._preempt(youngest := min(reversed(running), key=lambda sequence: sequence.computed))
            self._admission.put_first(youngest)

    def _missing(self, sequence: Sequence) -> int:
        """Return how many blocks a sequence lacks for its next key; below 0 where an eviction will free some."""
        left = sequence.held if self._evictor is None else self._evictor.left(sequence)
        return left // BLOCK + 1 - len(sequence.blocks)

    def _make_free(self, blocks: int, reader: Sequence | None = None) -> bool:
        """Free blocks of idle prompts, then of paused sequences, but not `reader`'s; return True if enough are free."""
        while len(self._cache.free) < blocks:
            if not self._cache.drop_idle_prompts(() if reader is None else (reader.request.prompt.id,)):
                paused = [sequence for sequence in self._paused if sequence is not reader]
                if not paused:
                    return False
                self._preempt(paused[-1])
        return True

    def _try_take_room(self, sequence: Sequence, running: Seq[Sequence]) -> bool:
        """Give a sequence and its prompt their first blocks, if that leaves enough for all; return True if so."""
        cache, (name, ids) = self._cache, (sequence.request.prompt.id, sequence.request.prompt.token_ids)
        own, was_paused = self._missing(sequence), sequence.status is Status.PAUSED
        of_prompt = 0 if was_paused or name in cache.prompts else blocks_for(len(ids))
        if running and self._forecast is not None:
            kept = [prompt.blocks for key, prompt in cache.prompts.items() if prompt.users or key == name]
            room = cache.count - of_prompt - sum(map(len, kept))
            if self._forecast.held([*running, sequence]) > BLOCK * room:
                return False
        if not self._make_free(own + of_prompt, sequence):
            return False
        if was_paused:
            self._paused.remove(sequence)
        else:
            if of_prompt:
                cache.prompts[name] = CachedPrompt(cache.take(of_prompt), ids)
            sequence.prompt = cache.prompts[name]
            sequence.prompt.users += 1
        sequence.blocks += cache.take(own)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._preempted += 1
        self._stop(sequence, Status.WAITING)
        sequence.computed, sequence.held, sequence.statistics = 0, 0, ()

    def _pause(self, sequences: Seq[Sequence], running: Seq[Sequence], hidden: Tensor) -> None:
        """Pause sequences: they keep their keys and hidden states, and wait for the next `serve`."""
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
            self._paused.append(sequence)
            return
        self._cache.give_back(sequence.blocks)
        sequence.blocks = []
        if sequence.prompt is not None:
            sequence.prompt.users -= 1
            sequence.prompt = None

    def _settle(self, done: Seq[Sequence]) -> Iterator[tuple[Sequence, Rollout]]:
        """Yield finished rollouts; request an observation for each other sequence."""
        for sequence in done:
            if self._observations is None or not sequence.has_room(0):
                yield sequence, self._finish(sequence)
            else:
                self._awaiting_observation[self._observations.ask(sequence.rollout())] = sequence

    def _take_observations(self) -> Iterator[tuple[Sequence, Rollout]]:
        """Continue or end the sequences whose observations have arrived; pause the others that await one."""
        if self._observations is None or not self._awaiting_observation:
            return
        awaiting = set(self._awaiting_observation.values())
        must_wait = self.stopped or not (len(self._admission) or any(s not in awaiting for s in self._batch.sequences))
        for number, observation in self._observations.answers(wait=must_wait):
            sequence = self._awaiting_observation.pop(number)
            if observation is None or not sequence.has_room(len(observation)):
                yield sequence, self._finish(sequence, Finish.LENGTH if observation else None)
                continue
            sequence.read(observation)
            if sequence.status is not Status.RUNNING:
                self._admission.put_first(sequence)
        for sequence in self._awaiting_observation.values():
            if sequence.status is Status.RUNNING:
                self._stop(sequence, Status.PAUSED)

    def _finish(self, sequence: Sequence, finish: Finish | None = None) -> Rollout:
        """Return the rollout of a sequence, which gives back its blocks and its share of the prompt's."""
        rollout, name = sequence.rollout(finish), sequence.request.prompt.id
        self._stop(sequence, Status.FINISHED)
        sequence.uniforms = sequence.uniforms[:0].copy()  # as long as its limit, and all rollouts stay
        self._unfinished[name] -= 1
        if not self._unfinished[name] and name in self._cache.prompts:
            self._cache.drop_prompt(name)
        self._tally.generated += rollout.num_sampled
        if self._forecast is not None:
            self._forecast.finish(len(rollout))
        return rollout

    def stats(self, details: Mapping[str, float]) -> EngineStats:
        """Return the cost of serving so far, with further `details`."""
        details = {**details, "engine/kv_held_bytes": float(self._most_held * self._cache.layout.bytes_per_token)}
        if self._forecast is not None:
            self._tally.slots = self._most_running
            details["engine/preemptions"] = float(self._preempted)
        if self._evictor is not None:
            details["engine/evictions"] = float(self._evictor.evictions)
        return self._tally.stats(self._cache.peak_bytes, details)


def _width(prompt: CachedPrompt) -> int:
    return round_up(prompt.length, TILE)
