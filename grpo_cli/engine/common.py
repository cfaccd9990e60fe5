"""The base of all engines: the check of requests, predicted lengths, state, and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.length_predictor import Predictor
from grpo_cli.engine.samplers import Sampler
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.engine.sequence import Decode, Sequence
from grpo_cli.support.errors import UserError
from grpo_cli.types import EngineStats, Request, Rollout

Enough = Callable[[Rollout], bool]  # takes each rollout that ends, until it returns True: then the others stop


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts of an engine, whatever its own settings are. `rollouts_per_step` is None where it is not known;
    `decode` turns tokens into text, and is used only for requests with stop strings."""

    model: Any
    eos_token_ids: Seq[int]
    sampler: Sampler
    scheduler: Scheduler
    predictor: Predictor
    sparsity: Dense | Budget
    pad_token_id: int = 0
    seed: int = 0
    rollouts_per_step: int | None = None
    decode: Decode | None = None
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # of a meter
    warn: Callable[[str], None] = print


class SequenceEngine:
    """An engine that serves sequences in a scheduler's order."""

    reads_stop_strings = True
    _stats = EngineStats()

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._predictor, self._scheduler = parts, parts.predictor, parts.scheduler
        self._warned = set[str]()

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._parts.warn(text)

    def stats(self) -> EngineStats:
        """Return the cost of the last `generate`; complete once its iterator is exhausted."""
        return self._stats

    def update_weights(self) -> None:
        """Do nothing: the modules are the trainer's."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run continues from bit for bit."""
        return {"predictor": self._predictor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._predictor.load_state_dict(state["predictor"])

    def _predict(self, sequences: Seq[Sequence]) -> None:
        if not sequences:
            return
        predicted = self._predictor.predict([s.request for s in sequences], _hidden(sequences))
        for sequence, length in zip(sequences, predicted or (), strict=predicted is not None):
            sequence.predicted = length

    def _learn(self, served: Seq[tuple[Sequence, Rollout]]) -> Mapping[str, float]:
        """Pass finished rollouts to the predictor; return a metric of what it had predicted of them."""
        whole = [(s, r) for s, r in served if not (r.is_partial or r.request.held_out or r.request.resumed_tokens)]
        self._predictor.learn([rollout for _, rollout in whole], _hidden([s for s, _ in whole]))
        prefix = self._predictor.prefix_tokens
        errors = [abs(s.predicted - (len(r) - prefix)) for s, r in whole if s.predicted is not None]
        return {"predictor/mean_absolute_error": float(np.mean(errors))} if errors else {}


def _hidden(sequences: Seq[Sequence]) -> torch.Tensor | None:
    states = [s.hidden for s in sequences if s.hidden is not None]
    return torch.stack(states) if states else None


def check_context(requests: Iterable[Request], context: int, more: str = "") -> None:
    """Raise UserError for a request that is longer than the context."""
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
    """The cost of serving so far. `row_steps` are decode steps of single sequences."""

    slots: int
    steps: int = 0
    row_steps: int = 0
    generated: int = 0
    prefilled: int = 0

    def stats(self, kv_bytes: int, details: Mapping[str, float]) -> EngineStats:
        capacity = self.steps * self.slots
        busy = self.row_steps / capacity if capacity else 1.0
        return EngineStats(self.steps, self.generated, self.prefilled, self.slots, busy, kv_bytes, details)


# Details that are summed (as are those in seconds); of bytes the largest counts, all others are averaged over steps.
_SUMMED = {"engine/evictions", "engine/preemptions"}


def together(parts: Seq[EngineStats]) -> EngineStats:
    """Return the total of `parts`, of which there is at least one: of successive rounds, or of portions at workers."""
    if len(parts) == 1:
        return parts[0]
    capacity = [part.decode_steps * part.slots for part in parts]
    busy = [part.slot_utilisation for part in parts]
    details = dict[str, float]()
    for name in dict.fromkeys(name for part in parts for name in part.details):
        having = [part for part in parts if name in part.details]
        values = [part.details[name] for part in having]
        if name in _SUMMED or name.endswith("_seconds"):
            details[name] = sum(values)
        elif name.endswith("_bytes"):
            details[name] = max(values)
        else:
            details[name] = float(np.average(values, weights=[max(1, part.decode_steps) for part in having]))
    return EngineStats(
        decode_steps=sum(part.decode_steps for part in parts),
        generated_tokens=sum(part.generated_tokens for part in parts),
        prefill_tokens=sum(part.prefill_tokens for part in parts),
        slots=max(part.slots for part in parts),
        slot_utilisation=float(np.average(busy, weights=capacity)) if sum(capacity) else 1.0,
        kv_peak_bytes=max(part.kv_peak_bytes for part in parts),
        details=details,
    )
