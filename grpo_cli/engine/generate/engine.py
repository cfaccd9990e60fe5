"""Rollouts by the model's own `generate`, for families whose layers nothing else here knows.

`transformers` runs the model and keeps its cache; what is drawn and when a reply ends is decided here, by the draws of
the torch engine. So tokens are a function of the weights and the request, to rounding: who else is in a round changes
the shapes of products, and may change a token where a draw falls on the border between two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from grpo_cli.engine.batching import Capped, KvShape, Sampler
from grpo_cli.engine.generate.rounds import Drawing, generate
from grpo_cli.engine.generate.trial import pads_in_peace
from grpo_cli.engine.interfaces import Predictor, Scheduler, Waiting
from grpo_cli.engine.kv.eviction import Budget, Dense
from grpo_cli.interfaces import Meter, facts
from grpo_cli.model.anatomy import can_pack, place_of, unwrapped
from grpo_cli.model.checks import ARCHITECTURES, context_of
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import EngineStats, Finish, Request, Rollout

Decode = Callable[[Sequence[int]], str]


@facts(any_family=True)
class GenerateEngine:
    """Whole rounds, each decoded to the end of its longest reply. The modules are the trainer's own."""

    reads_stop_strings = True

    def __init__(
        self,
        model: Any,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        sampler: Sampler,
        scheduler: Scheduler,
        predictor: Predictor,
        sparsity: Dense | Budget,
        rollouts_per_step: int | None = None,
        decode: Decode | None = None,
        meter: Meter | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        refuse([*self.refuses(sampler, scheduler, predictor, sparsity)])
        self._model, self._eos, self._pad = model, frozenset(eos_token_ids), pad_token_id
        self._sampler = Capped(sampler, rollouts_per_step)
        self._scheduler, self._predictor, self._decode = scheduler, predictor, decode
        self._span, self._warn = (meter or NullMeter()).span, warn
        self._pads = pads_in_peace(model, pad_token_id)
        self._stats = EngineStats()
        apart = "" if self._pads else f", and {type(unwrapped(model)).__name__} takes prompts of one length at a time"
        known, here = ", ".join(ARCHITECTURES.values()), ", this model among them" if can_pack(model) else ""
        warn(
            f"engine=generate is slow: every reply waits for the longest of its round{apart}; engine=torch serves "
            f"{known}{here}"
        )

    @staticmethod
    def refuses(
        sampler: Sampler, scheduler: Scheduler, predictor: Predictor, sparsity: Dense | Budget
    ) -> Iterator[str]:
        """What can be checked without a model."""
        if isinstance(sparsity, Budget):
            yield (
                f"sparsity={type(sparsity).__name__.lower()} is not supported by engine=generate, whose cache is the "
                "model's own; choose engine=torch or sparsity=dense"
            )
        if sampler.refills:
            yield (
                f"sampler={type(sampler).__name__.lower()} refills slots, which engine=generate cannot do: a round of "
                "transformers' generate starts and ends as a whole; choose sampler=micro or sampler=full"
            )
        if sampler.kv_budget is not None:
            yield (
                f"sampler.kv_budget={sampler.kv_budget} is not supported by engine=generate, as each family's cache "
                "grows in its own way; use sampler.slots"
            )
        if scheduler.needs_lengths and predictor.prefix_tokens > 0:
            yield (
                "engine=generate does not expose its hidden states, which predictor=prefix reads; choose "
                "predictor=mean or oracle, or scheduler=fifo"
            )

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        """One rollout per request, in order of finishing. They come once their round is over, which ends early as soon
        as `enough` says so."""
        self._stats = EngineStats()
        if not requests:
            return
        self._check(requests)
        work = _Work(requests, self._sampler, self._scheduler, self._predicted(requests))
        finished: list[Rollout] = []
        try:
            while work.queue and not work.stopped:
                for rollout in self._round(work, enough):
                    finished.append(rollout)
                    yield rollout
            yield from (Rollout(requests[index], (), (), Finish.PARTIAL, 0) for index in work.queue)
        finally:
            taught = [r for r in finished if r.request.teaches_length and r.finish is not Finish.PARTIAL]
            learns = self._predictor.prefix_tokens == 0 and len(finished) == len(requests)
            details = self._predictor.learn(taught, None) if learns else {}
            self._stats = work.stats(dict(details) | dict(self._scheduler.details))

    def _predicted(self, requests: Sequence[Request]) -> Sequence[float] | None:
        return self._predictor.predict(requests, None) if self._predictor.prefix_tokens == 0 else None

    def _round(self, work: _Work, enough: Callable[[Rollout], bool] | None) -> Iterator[Rollout]:
        """Those who enter now, in parts where their prompts may not be padded."""
        entered = work.enter()
        parts: dict[int, list[int]] = {}
        for index in entered:
            length = 0 if self._pads else len(work.requests[index].prompt.token_ids)
            parts.setdefault(length, []).append(index)
        for indices in parts.values():
            if work.stopped:
                return
            yield from self._part(work, indices, enough)

    def _part(self, work: _Work, indices: Sequence[int], enough: Callable[[Rollout], bool] | None) -> Iterator[Rollout]:
        """One call of the model's `generate`."""
        requests = [work.requests[index] for index in indices]
        drawing = Drawing(requests, self._eos, self._decode, enough, place_of(self._model))
        prompts = [request.prompt.token_ids for request in requests]

        def draw(logits: Tensor) -> Tensor:
            with self._span("decode"):  # within the other; a worker of engine=ray that opens none counts as stuck
                return drawing.draw(logits)

        with self._span("decode"):  # prompts included
            cache = generate(self._model, prompts, self._pad, drawing.most, draw, lambda: drawing.over)
        work.count(drawing, cache)
        work.stopped = work.stopped or drawing.stopped
        left = set(range(len(requests))) - {row for row, _ in drawing.ended} if drawing.stopped else set()
        for row, finish in [*drawing.ended, *((row, Finish.PARTIAL) for row in sorted(left))]:
            del work.queue[indices[row]]
            yield drawing.rollout(row, finish)

    def _check(self, requests: Sequence[Request]) -> None:
        context = context_of(unwrapped(self._model).config)
        for request in requests:
            prompt, reply = len(request.prompt.token_ids), request.sampling.max_new_tokens
            if prompt + reply > context:
                raise UserError(
                    f"prompt {request.prompt.id} has {prompt} tokens and sampling.max_new_tokens={reply}, together "
                    f"{prompt + reply}, but the model has positions for {context}: lower sampling.max_new_tokens, or "
                    "leave such prompts out"
                )

    def stats(self) -> EngineStats:
        """What the last `generate` cost; complete once its iterator is exhausted."""
        return self._stats

    def facts(self) -> Mapping[str, Any]:
        """What `summary.json` says of the engine."""
        return {"invariant": False, "pads": self._pads}

    def update_weights(self) -> None:
        """The modules are the trainer's own: there is nothing to do."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must keep so that a resumed run goes on."""
        return {"predictor": self._predictor.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._predictor.load_state(state["predictor"])


class _Work:
    """One call of `generate`: who has not come to an end, and what it has cost so far."""

    def __init__(
        self, requests: Sequence[Request], sampler: Capped, scheduler: Scheduler, predicted: Sequence[float] | None
    ) -> None:
        self.requests, self.stopped = requests, False
        lengths = [None] * len(requests) if predicted is None else predicted
        self.queue = {
            index: Waiting(index, request.prompt.id, request.sampling.max_new_tokens, length)
            for index, (request, length) in enumerate(zip(requests, lengths, strict=True))
        }
        self._sampler, self._scheduler = sampler, scheduler
        self._slots = self._rows()
        self._steps = self._capacity = self._generated = self._read = self._most = 0
        scheduler.start(tuple(self.queue.values()), self._slots)

    def _rows(self) -> int:
        return self._sampler.fit(KvShape(len(self.queue), 0, 0, 0, 0)).slots  # without a budget no bytes are asked for

    def enter(self) -> list[int]:
        """Who is in the next round, by the scheduler's plan."""
        plan = self._scheduler.plan(tuple(self.queue.values()), (), tuple(range(self._rows())))
        assert plan.admit, "a scheduler must admit a request when nothing is running"
        return [index for index, _ in plan.admit]

    def count(self, drawing: Drawing, cache: int) -> None:
        self._steps += drawing.steps
        self._capacity += drawing.steps * self._slots
        self._generated += sum(drawing.lengths)
        self._read += sum(len(request.prompt.token_ids) for request in drawing.requests)
        self._most = max(self._most, cache)

    def stats(self, details: Mapping[str, float]) -> EngineStats:
        return EngineStats(
            decode_steps=self._steps,
            generated_tokens=self._generated,
            prefill_tokens=self._read,
            slots=self._slots,
            slot_utilisation=self._generated / self._capacity if self._capacity else 1.0,
            kv_peak_bytes=self._most,
            details=details,
        )
