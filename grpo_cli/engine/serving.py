"""Engines whose tokens another library computes: the loop that admits sequences, adds their tokens and ends them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar

from grpo_cli.engine.admission import Admission
from grpo_cli.engine.common import EngineParts, Enough, SequenceEngine, Tally
from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.length_predictor import Predictor
from grpo_cli.engine.samplers import Sampler
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Sequence
from grpo_cli.types import EngineStats, Finish, Request, Rollout


@dataclass
class Serving:
    """The sequences of one `generate`: those that run, and those that have ended, in this order."""

    sequences: Seq[Sequence]
    enough: Enough | None
    parts: EngineParts
    tally: Tally
    running: list[Sequence] = field(default_factory=list)
    ended: list[tuple[Sequence, Rollout]] = field(default_factory=list)
    stopped: bool = False

    def add(self, sequence: Sequence, token: int, logprob: float) -> None:
        """Add a sampled token, with which the sequence may end, and all others may stop. After its end nothing is
        added."""
        if sequence.finish is None:
            sequence.append(token, logprob)
            if sequence.ends(self.parts.eos_token_ids, self.parts.decode):
                self.end(sequence)
                self.stopped = self.stopped or (self.enough is not None and self.enough(self.ended[-1][1]))

    def end(self, sequence: Sequence, finish: Finish | None = None) -> None:
        self.ended.append((sequence, sequence.rollout(finish)))
        self.tally.generated += len(sequence.tokens)


class ServingEngine(SequenceEngine):
    """Rollouts by another library, dense and in the scheduler's order. With stop strings, or `enough`, sequences end in
    the step that decides it."""

    choice: ClassVar[str]  # of conf/engine
    _slots = 0
    _kv_bytes = 0

    @classmethod
    def refuses(
        cls, *, sampler: Sampler, scheduler: Scheduler, predictor: Predictor, sparsity: Dense | Budget
    ) -> Iterator[str]:
        """Yield what can be checked without a model."""
        if isinstance(sparsity, Budget):
            name = type(sparsity).__name__.lower()
            yield f"sparsity={name} is not supported by engine={cls.choice}; choose engine=torch or sparsity=dense"
        if scheduler.needs_lengths and predictor.prefix_tokens > 0:
            yield (
                f"engine={cls.choice} does not expose its hidden states, which predictor=prefix reads; choose "
                "predictor=mean, or scheduler=fifo"
            )

    def generate(self, requests: Seq[Request], enough: Enough | None = None) -> Iterator[Rollout]:
        """Yield one rollout per request, in order of finishing. Once `enough` returns True for a finished one, the
        others are partial, except those that end in the same step."""
        self._stats = EngineStats()
        if not requests:
            return
        details, parts = dict(self._start(requests)), self._parts
        sequences = [Sequence(index, request) for index, request in enumerate(requests)]
        serving = Serving(sequences, enough, parts, Tally(self._slots))
        if predicts := self._predictor.prefix_tokens == 0:
            self._predict(sequences)
        admission, given = Admission(self._slots, parts.sampler.refills), 0
        admission.start(self._scheduler, sequences)
        try:
            while given < len(requests):
                if serving.stopped:
                    for sequence in (one for one in sequences if one.finish is None):
                        serving.end(sequence, Finish.PARTIAL)
                else:
                    entered = admission.admit(serving.running)
                    serving.running += entered
                    with parts.span("decode"):  # prompts included
                        self._advance(serving, entered)
                    serving.running = [one for one in serving.running if one.finish is None]
                for _, rollout in serving.ended[given:]:
                    given += 1
                    yield rollout
        finally:
            self._stop(serving)
            if predicts and given == len(requests):
                details |= self._learn(serving.ended)
            self._stats = serving.tally.stats(self._kv_bytes, details)

    @abstractmethod
    def _start(self, requests: Seq[Request]) -> Mapping[str, float]:
        """Check the requests and prepare for them; set the number of slots. Return details."""

    @abstractmethod
    def _advance(self, serving: Serving, entered: Seq[Sequence]) -> None:
        """Begin what has entered, and add at least one token to a running sequence."""

    def _stop(self, serving: Serving) -> None:
        """Drop what still runs."""
