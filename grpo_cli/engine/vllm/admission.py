"""Which requests run and which wait, for an engine that batches and caches itself: slots are only numbers here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_cli.engine.interfaces import Running, Scheduler, Waiting
from grpo_cli.types import EngineStats, Finish, Request, Rollout


class Work:
    """One call of `generate`: what waits, what runs in which slot, and its cost so far."""

    def __init__(self, requests: Sequence[Request], slots: int, refills: bool) -> None:
        self.requests = requests
        self.queue: dict[int, Waiting] = {}
        self.running: dict[int, tuple[int, int]] = {}  # index: slot and the steps done when it entered
        self.steps = 0
        self._free = list(range(slots))
        self._slots, self._refills = slots, refills
        self._row_steps = self._generated = self._prefilled = 0
        self._drawn: dict[int, tuple[list[int], list[float]]] = {}  # tokens and log-probabilities reported so far

    def start(self, scheduler: Scheduler, predicted: Sequence[float] | None) -> None:
        lengths = [None] * len(self.requests) if predicted is None else predicted
        for index, (request, length) in enumerate(zip(self.requests, lengths, strict=True)):
            self.queue[index] = Waiting(index, request.prompt.id, request.sampling.max_new_tokens, length)
        scheduler.start(tuple(self.queue.values()), self._slots)

    def admitted(self, scheduler: Scheduler) -> list[int]:
        """The requests that enter now, by the scheduler's plan."""
        if not self.queue or not self._free or (self.running and not self._refills):
            return []
        plan = scheduler.plan(tuple(self.queue.values()), self._views(), tuple(self._free))
        for index, slot in plan.admit:
            del self.queue[index]
            self._free.remove(slot)
            self.running[index] = slot, self.steps
        assert self.running, "a scheduler must admit a request when nothing is running"
        return [index for index, _ in plan.admit]

    def _views(self) -> list[Running]:
        return [Running(index, slot, self.steps - since, None) for index, (slot, since) in self.running.items()]

    def count_step(self) -> None:
        self.steps += 1
        self._row_steps += len(self.running)

    def note(self, output: Any) -> None:
        """Add what an output reports: everything, or only what is new since the previous one."""
        index, made = int(output.request_id), output.outputs[0]
        if index not in self._drawn:
            self._prefilled += len(self.requests[index].prompt.token_ids) - (output.num_cached_tokens or 0)
        tokens, logprobs = self._drawn.setdefault(index, ([], []))
        tokens += made.token_ids
        logprobs += made.logprobs.logprobs
        assert len(logprobs) == len(tokens), "vLLM gave half a completion"

    def settle(self, output: Any, eos: Sequence[int]) -> Rollout:
        """A finished request as a rollout; frees its slot."""
        index = int(output.request_id)
        assert output.outputs[0].finish_reason in ("stop", "length"), "vLLM gave half a completion"
        slot, _ = self.running.pop(index)
        self._free.append(slot)
        finish = Finish.EOS if self._drawn[index][0][-1] in eos else Finish.LENGTH
        return self._rollout(index, finish)

    def left_over(self) -> Iterator[Rollout]:
        """All unfinished requests as partial rollouts; afterwards nothing runs or waits."""
        indices = sorted((*self.running, *self.queue))
        self.running, self.queue = {}, {}
        yield from (self._rollout(index, Finish.PARTIAL) for index in indices)

    def _rollout(self, index: int, finish: Finish) -> Rollout:
        request, (tokens, logprobs) = self.requests[index], self._drawn.pop(index, ([], []))
        if request.sampling.temperature == 0:
            logprobs = [0.0] * len(tokens)  # a greedy row draws from a point mass
        self._generated += len(tokens)
        return Rollout(request, tuple(tokens), tuple(logprobs), finish, max(0, len(tokens) - 1))

    def stats(self, kv_bytes: int, details: Mapping[str, float]) -> EngineStats:
        """Every forward pass counts as a decode step, since vLLM reads prompts in the same passes."""
        capacity = self.steps * self._slots
        return EngineStats(
            decode_steps=self.steps,
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            slots=self._slots,
            slot_utilisation=self._row_steps / capacity if capacity else 1.0,
            kv_peak_bytes=kv_bytes,
            details=details,
        )
