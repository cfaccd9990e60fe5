"""The record of each prompt in a run: for each visit, how many rollouts it had and how many solved it.

Kept by every run, and part of its checkpoint. Two rules may read one history differently: the caller sets
how visits are weighted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_cli.support.errors import UserError
from grpo_cli.types import ScoredGroup

KEPT = 8  # visits of a problem; with a decay of 0.7 the ninth would weigh 6%
UNSEEN = 0.5  # the solve rate assumed for a problem before its first visit


@dataclass(frozen=True, slots=True)  # there is at least one for every problem that a run visits
class Visit:
    """Rollouts of a problem made in one step."""

    step: int
    solved: int
    tried: int


class History:
    """The last visits of every problem, by its id. A visit's `age` is how many later ones there are."""

    def __init__(self, visits: Mapping[str, Sequence[Visit]] | None = None) -> None:
        self._visits = {problem: tuple(some)[-KEPT:] for problem, some in (visits or {}).items()}

    def __len__(self) -> int:
        """Return how many different prompts the run has visited."""
        return len(self._visits)

    def visits(self, problem: str) -> tuple[Visit, ...]:
        """Return the last visits, oldest first."""
        return self._visits.get(problem, ())

    def rate(self, problem: str, decay: float) -> float:
        """Return the mean share of rollouts that solved it, visits weighted by decay^age; `UNSEEN` if there was
        none."""
        weights = self._weights(problem, decay)
        shares = [visit.solved / visit.tried for visit in self.visits(problem)]
        return sum(w * share for w, share in zip(weights, shares, strict=True)) / sum(weights) if weights else UNSEEN

    def beta(self, problem: str, decay: float, prior: float) -> tuple[float, float]:
        """Return the parameters of a Beta distribution over the chance of solving it: `prior` plus the decayed
        counts of rollouts that did and did not."""
        seen = list(zip(self._weights(problem, decay), self.visits(problem), strict=True))
        solved = sum(weight * visit.solved for weight, visit in seen)
        failed = sum(weight * (visit.tried - visit.solved) for weight, visit in seen)
        return prior + solved, prior + failed

    def _weights(self, problem: str, decay: float) -> list[float]:
        count = len(self.visits(problem))
        return [decay ** (count - 1 - place) for place in range(count)]

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Add a step's groups. A step that is repeated, as in `grpo profile`, replaces its earlier visits and all later
        ones."""
        for group in groups:
            before = [visit for visit in self.visits(group.prompt.id) if visit.step < step]
            visit = Visit(step, group.solved, len(group.rollouts))
            self._visits[group.prompt.id] = (*before, visit)[-KEPT:]

    def state_dict(self) -> dict[str, Any]:
        plain = {name: [(v.step, v.solved, v.tried) for v in visits] for name, visits in self._visits.items()}
        return {"visits": plain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._visits = {name: tuple(Visit(*visit) for visit in visits) for name, visits in state["visits"].items()}


def of_kind(state: Mapping[str, Any] | None, group: str, kind: str) -> Mapping[str, Any]:
    """Return a rule's state from a checkpoint. UserError if it is not of this kind of rule."""
    if state is None or state.get("kind") != kind:
        found = f"what {group}={state.get('kind')} has learnt" if state else "nothing"
        answer = "resume with that choice" if state else f"leave {group}= out"
        raise UserError(f"the checkpoint holds {found} for {group}={kind}; {answer}, or start a new run")
    return state
