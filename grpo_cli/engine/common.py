"""What all engines share: the check of requests, predicted lengths, state, and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from grpo_cli.engine.interfaces import Predictor, Scheduler
from grpo_cli.engine.sequence import Sequence
from grpo_cli.support.errors import UserError
from grpo_cli.types import EngineStats, Finish, Request, Rollout


class SequenceEngine:
    """An engine that serves sequences in a scheduler's order."""

    _predictor: Predictor
    _scheduler: Scheduler
    _stats = EngineStats()

    def stats(self) -> EngineStats:
        """The cost of the last `generate`; complete once its iterator is exhausted."""
        return self._stats

    def update_weights(self) -> None:
        """Nothing to do: the modules are the trainer's."""

    def state_dict(self) -> Mapping[str, Any]:
        """For a checkpoint, so that a resumed run continues bit for bit."""
        return {"predictor": self._predictor.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._predictor.load_state(state["predictor"])

    def _predict(self, sequences: Seq[Sequence]) -> None:
        if not sequences:
            return
        predicted = self._predictor.predict([s.request for s in sequences], _hidden(sequences))
        for sequence, length in zip(sequences, predicted or (), strict=predicted is not None):
            sequence.predicted = length

    def _learn(self, served: Seq[tuple[Sequence, Rollout]]) -> Mapping[str, float]:
        taught = [(s, r) for s, r in served if r.request.teaches_length and r.finish is not Finish.PARTIAL]
        if not served:
            return {}
        return self._predictor.learn([rollout for _, rollout in taught], _hidden([s for s, _ in taught]))


def _hidden(sequences: Seq[Sequence]) -> torch.Tensor | None:
    states = [s.hidden for s in sequences if s.hidden is not None]
    return torch.stack(states) if states else None


def check_context(requests: Iterable[Request], context: int, more: str = "") -> None:
    """UserError for a request that is longer than the context."""
    for request in requests:
        needed = len(request.prompt.token_ids) + request.sampling.max_new_tokens
        if needed > context:
            raise UserError(
                f"prompt {request.prompt.id} has {len(request.prompt.token_ids)} tokens and "
                f"sampling.max_new_tokens={request.sampling.max_new_tokens}, together {needed}, but the context is "
                f"{context}: lower sampling.max_new_tokens or drop such prompts{more}"
            )


@dataclass
class Tally:
    """What serving has cost so far. `row_steps` are decode steps of single sequences."""

    slots: int
    steps: int = 0
    row_steps: int = 0
    generated: int = 0
    prefilled: int = 0

    def stats(self, kv_bytes: int, details: Mapping[str, float]) -> EngineStats:
        capacity = self.steps * self.slots
        busy = self.row_steps / capacity if capacity else 1.0
        return EngineStats(self.steps, self.generated, self.prefilled, self.slots, busy, kv_bytes, details)
