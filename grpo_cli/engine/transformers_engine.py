"""Rollouts by the model's own `generate`, for families whose layers nothing else here knows.

`transformers` runs the model and keeps its cache; what is drawn and when a reply ends is decided here, by the draws of
the torch engine. So tokens are a function of the weights and the request, to rounding: who else is in a round changes
the shapes of products, and may change a token where a draw falls on the border between two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from grpo_cli.engine.admission import Admission
from grpo_cli.engine.common import SequenceEngine, Tally, check_context
from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.length_predictor import Predictor
from grpo_cli.engine.rounds import generate
from grpo_cli.engine.samplers import KvShape, Sampler
from grpo_cli.engine.sampling import draw, drawing_of, uniforms
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Decode, Sequence
from grpo_cli.engine.trial import pads_in_peace
from grpo_cli.interfaces import Meter, facts
from grpo_cli.model.anatomy import can_pack, place_of, unwrapped
from grpo_cli.model.checks import ARCHITECTURES, context_of
from grpo_cli.support.errors import refuse
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import EngineStats, Finish, Request, Rollout


@facts(any_family=True)
class GenerateEngine(SequenceEngine):
    """Whole rounds, each decoded to the end of its longest reply. The modules are the trainer's own."""

    reads_stop_strings = True

    def __init__(
        self,
        model: Any,
        eos_token_ids: Seq[int],
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
        self._sampler, self._per_step = sampler, rollouts_per_step
        self._scheduler, self._predictor, self._decode = scheduler, predictor, decode
        self._span = (meter or NullMeter()).span
        self._pads = pads_in_peace(model, pad_token_id)
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
            name = type(sparsity).__name__.lower()
            yield f"sparsity={name} is not supported by engine=generate; choose engine=torch or sparsity=dense"
        if sampler.refills and not sampler.all_at_once:
            name = type(sampler).__name__.lower()
            yield f"sampler={name} refills slots, which engine=generate cannot do; choose sampler=micro or sampler=full"
        if sampler.kv_budget is not None:
            yield f"sampler.kv_budget={sampler.kv_budget} is not supported by engine=generate; use sampler.slots"
        if scheduler.needs_lengths and predictor.prefix_tokens > 0:
            yield (
                "engine=generate does not expose its hidden states, which predictor=prefix reads; choose "
                "predictor=mean, or scheduler=fifo"
            )

    def generate(self, requests: Seq[Request], enough: Callable[[Rollout], bool] | None = None) -> Iterator[Rollout]:
        """One rollout per request, in order of finishing. They come once their round is over, which ends early as soon
        as `enough` returns True."""
        self._stats = EngineStats()
        if not requests:
            return
        check_context(requests, context_of(unwrapped(self._model).config))
        sequences = [Sequence(index, request) for index, request in enumerate(requests)]
        if predicts := self._predictor.prefix_tokens == 0:
            self._predict(sequences)
        # Without a budget, bytes do not matter.
        tally = Tally(self._sampler.fit(KvShape(len(requests), 0, 0, 0, 0), self._per_step).slots)
        admission, served, cache, details = Admission(sequences, tally.slots, False), [], 0, dict[str, float]()
        admission.start(self._scheduler, sequences)
        stopped = False
        try:
            while admission and not stopped:
                # Prompts that may not be padded are read in parts of one length.
                entered = sorted(admission.admit(()), key=lambda s: 0 if self._pads else s.prompt_length)
                for _, part in groupby(entered, lambda s: 0 if self._pads else s.prompt_length):
                    if not stopped:
                        ended, stopped, size = self._part(list(part), enough, tally)
                        cache = max(cache, size)
                        for sequence in ended:
                            served.append((sequence, sequence.rollout()))
                            yield served[-1][1]
            for sequence in sequences:
                if sequence.finish is None:
                    tally.generated += len(sequence.tokens)
                    served.append((sequence, sequence.rollout(Finish.PARTIAL)))
                    yield served[-1][1]
        finally:
            if predicts and len(served) == len(requests):
                details |= self._learn(served)
            self._stats = tally.stats(cache, details | dict(self._scheduler.details))

    def _part(
        self, sequences: Seq[Sequence], enough: Callable[[Rollout], bool] | None, tally: Tally
    ) -> tuple[list[Sequence], bool, int]:
        """One call of the model's `generate`: those that have ended, in this order; whether that is `enough`; and the
        bytes of the cache. A row that has ended is computed on until all have, and what comes of it is dropped."""
        settings, device = [sequence.request.sampling for sequence in sequences], place_of(self._model)
        most = max(sequence.limit for sequence in sequences)
        by = drawing_of(settings, device)
        uniform = torch.from_numpy(uniforms([sequence.request.seed for sequence in sequences], most)).to(device)
        ended, stopped, steps = list[Sequence](), False, 0

        def drawn(logits: Tensor) -> Tensor:
            nonlocal stopped, steps
            with self._span("decode"):  # within the other; a worker of engine=ray that opens none counts as stuck
                tokens, logprobs = draw(logits, uniform[:, steps], by)
                steps += 1
                for s, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
                    if s.finish is None:
                        s.append(token, logprob)
                        s.kept = len(s.tokens) - 1
                        if s.ends(self._eos, self._decode):
                            ended.append(s)
                            stopped = stopped or (enough is not None and enough(s.rollout()))
                return tokens

        with self._span("decode"):  # prompts included
            prompts = [sequence.request.prompt.token_ids for sequence in sequences]
            cache = generate(
                self._model, prompts, self._pad, most, drawn, lambda: stopped or len(ended) == len(sequences)
            )
        tally.steps += steps
        tally.row_steps += sum(len(sequence.tokens) for sequence in sequences)
        tally.generated += sum(len(sequence.tokens) for sequence in ended)
        tally.prefilled += sum(map(len, prompts))
        return ended, stopped, cache

    def facts(self) -> Mapping[str, Any]:
        """The engine's part of `summary.json`."""
        return {"invariant": False, "pads": self._pads}
