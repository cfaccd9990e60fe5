"""What a run knows about each problem: for each visit, how often it was tried and how often it was solved.

Kept by every run, and part of its checkpoint. Two rules may read one history differently: the caller says
how visits are weighted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeVar

from grpo_cli.support.errors import UserError
from grpo_cli.types import Prompt, ScoredGroup

KEPT = 8  # visits of a problem; with a decay of 0.7 the ninth would weigh 6 %
PROFILED = -1  # the step of a visit made before training
UNSEEN = 0.5  # the solve rate assumed for a problem before its first visit


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
_ABSENT: Any = object()


class Marked(dict[Key, Value]):
    """A mapping that can still be read as it was when last marked: the old values of later changes are kept.

    A run marks at the end of each step what its next checkpoint will hold, which costs nothing whatever the size; a
    copy is made only when a checkpoint is written. Items can only be changed one at a time.
    """

    def __init__(self, values: Mapping[Key, Value] | None = None) -> None:
        super().__init__(values or {})
        self._before: dict[Key, Value] = {}

    def __setitem__(self, key: Key, value: Value) -> None:
        self._before.setdefault(key, self.get(key, _ABSENT))
        super().__setitem__(key, value)

    def __delitem__(self, key: Key) -> None:
        self._before.setdefault(key, self.get(key, _ABSENT))
        super().__delitem__(key)

    def mark(self) -> Callable[[], dict[Key, Value]]:
        """A function that returns the mapping as it is now; valid until the next mark."""
        self._before = {}
        return lambda: {key: value for key, value in {**self, **self._before}.items() if value is not _ABSENT}


class Solved(StrEnum):
    """Which of a visit's rollouts solved the problem."""

    NONE = "none"
    MIXED = "mixed"
    ALL = "all"


@dataclass(frozen=True, slots=True)  # there is at least one for every problem that a run visits
class Visit:
    """Rollouts of a problem made in one step."""

    step: int
    solved: int
    tried: int

    @property
    def outcome(self) -> Solved:
        return Solved.NONE if self.solved == 0 else Solved.ALL if self.solved == self.tried else Solved.MIXED


def digest_of(prompt: Prompt) -> int:
    """Distinguishes problems with the same id: a 63-bit hash of what the model reads and the answer it is judged by."""
    text = f"{prompt.token_ids}{prompt.answer}"
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1


class History:
    """The last visits of every problem, by its id. A visit's `age` is how many later ones there are.

    A visit before training counts like any other, and is also kept in `profile`, since it drops out of the last visits
    in time. `digests` holds `digest_of` each problem visited.
    """

    def __init__(
        self, visits: Mapping[str, Sequence[Visit]] | None = None, digests: Mapping[str, int] | None = None
    ) -> None:
        given = {problem: tuple(some) for problem, some in (visits or {}).items() if some}
        self._visits = Marked({problem: some[-KEPT:] for problem, some in given.items()})
        self.profile = {problem: some[0] for problem, some in given.items() if some[0].step == PROFILED}
        self.digests = Marked(digests)
        self._distinct = self._count()

    def __len__(self) -> int:
        """How many different problems the run has visited; a profile does not count as a visit of the run."""
        return self._distinct

    def _count(self) -> int:
        return sum(visits[-1].step != PROFILED for visits in self._visits.values())

    def visits(self, problem: str) -> tuple[Visit, ...]:
        """The last ones, oldest first."""
        return self._visits.get(problem, ())

    def outcome(self, problem: str) -> Solved | None:
        """Of the last visit."""
        visits = self.visits(problem)
        return visits[-1].outcome if visits else None

    def rate(self, problem: str, decay: float) -> float:
        """The mean share of rollouts that solved it, visits weighted by decay^age; `UNSEEN` if there was none."""
        weights = self._weights(problem, decay)
        shares = [visit.solved / visit.tried for visit in self.visits(problem)]
        return sum(w * share for w, share in zip(weights, shares, strict=True)) / sum(weights) if weights else UNSEEN

    def beta(self, problem: str, decay: float, prior: float) -> tuple[float, float]:
        """Parameters of a Beta distribution over the chance of solving it: `prior` plus the decayed counts of rollouts
        that did and did not."""
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
            known = self.visits(group.prompt.id)
            self._distinct += not known or known[-1].step == PROFILED
            before = [visit for visit in known if visit.step < step]
            visit = Visit(step, group.solved, len(group.rollouts))
            self._visits[group.prompt.id] = (*before, visit)[-KEPT:]
            if group.prompt.id not in self.digests:
                self.digests[group.prompt.id] = digest_of(group.prompt)

    def forget(self, is_other: Callable[[str], bool]) -> None:
        """See `interfaces.Forgets`."""
        self._visits = Marked({name: visits for name, visits in self._visits.items() if not is_other(name)})
        self.profile = {name: visit for name, visit in self.profile.items() if not is_other(name)}
        self.digests = Marked({name: digest for name, digest in self.digests.items() if not is_other(name)})
        self._distinct = self._count()

    def state_dict(self) -> dict[str, Any]:
        return self._plain(self._visits, self.digests)

    def mark(self) -> Callable[[], Mapping[str, Any]]:
        """See `interfaces.Marks`."""
        visits, digests = self._visits.mark(), self.digests.mark()
        return lambda: self._plain(visits(), digests())

    def _plain(self, of: Mapping[str, Sequence[Visit]], digests: Mapping[str, int]) -> dict[str, Any]:
        plain = {name: [(v.step, v.solved, v.tried) for v in visits] for name, visits in of.items()}
        profile = {name: (visit.solved, visit.tried) for name, visit in self.profile.items()}
        return {"visits": plain, "profile": profile, "digests": dict(digests)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.profile = {name: Visit(PROFILED, *counts) for name, counts in state["profile"].items()}
        visits = {name: tuple(Visit(*visit) for visit in visits) for name, visits in state["visits"].items()}
        self._visits = Marked(visits)
        self.digests = Marked(state.get("digests", {}))  # older checkpoints do not have them
        self._distinct = self._count()


def of_kind(state: Mapping[str, Any] | None, group: str, kind: str) -> Mapping[str, Any]:
    """A rule's state from a checkpoint, checked to be of this kind of rule."""
    if state is None:
        raise UserError(
            f"the checkpoint holds nothing for {group}={kind}; leave {group} as the run had it, or start a new one"
        )
    if state.get("kind") != kind:
        raise UserError(
            f"the checkpoint holds what {group}={state.get('kind')} has learnt, but this run has {group}={kind}; "
            f"resume with {group}={state.get('kind')}, or start a new run"
        )
    return state
