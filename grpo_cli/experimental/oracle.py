"""Lengths that an earlier run recorded, for studies of Infinite Sampling's schedulers (arXiv 2506.22950).

Measured: docs/studies.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from grpo_cli.history import of_kind
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.problems import records
from grpo_cli.types import Request, Rollout


class Oracle:
    """Known lengths, as of the best possible predictor. For studies.

    `lengths` is the `rollouts.jsonl` of an earlier run with the same seed and settings that recorded all its rollouts
    (`record.rollouts=-1`). A prompt that comes for the k-th time gets the lengths of its k-th recorded step. Held-out
    requests, and requests none of whose prompts were recorded, get no prediction. Raises UserError if only some of the
    requests were recorded. Not for collectors that leave rollouts partial.
    """

    prefix_tokens = 0

    def __init__(self, lengths: str | Path) -> None:
        self._source = str(lengths)
        by_step: dict[str, dict[int, dict[int, int]]] = {}
        for number, row in records(self._source, "predictor.lengths"):
            match row:
                case {"prompt_id": str(name), "step": int(step), "sample": int(sample), "length": int(n)} if n > 0:
                    by_step.setdefault(name, {}).setdefault(step, {})[sample] = n
                case _:
                    raise UserError(
                        f"predictor.lengths={lengths}, line {number} is {str(row)[:80]}: give the rollouts.jsonl of an "
                        "earlier run"
                    )
        if not by_step:
            raise UserError(f"predictor.lengths={lengths} has no rollouts: record some with record.rollouts=-1")
        self._recorded = {prompt_id: [steps[step] for step in sorted(steps)] for prompt_id, steps in by_step.items()}
        self._replayed: Counter[str] = Counter()

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        if any(request.prompt.id in self._recorded and not request.held_out for request in requests):
            return [float(self._length(request)) for request in requests]
        return None

    def _length(self, request: Request) -> int:
        name, times = request.prompt.id, self._replayed[request.prompt.id]
        recorded = self._recorded.get(name, [])
        if times >= len(recorded) or request.sample not in recorded[times]:
            raise UserError(
                f"predictor.lengths: {self._source} has no length of sample {request.sample} of prompt {name} for time "
                f"{times + 1} (recorded: {len(recorded)} times). Record an earlier run of the same seed, n and steps "
                "with record.rollouts=-1, or choose another predictor"
            )
        return recorded[times][request.sample]

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None:
        self._replayed.update({r.request.prompt.id for r in finished} & self._recorded.keys())

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "oracle", "replayed": dict(self._replayed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "oracle")
        self._replayed = Counter({name: int(times) for name, times in state["replayed"].items()})
