"""sGPO: problem order and group sizes from a profile of answers (arXiv 2606.08854).

    size = the least of `sizes` with size * (solved / tried) >= 1 in the profile, else the largest
    phases in order of size; problems with solved / tried > trivial, and 1 - unsolved of the unsolved ones, are left out

Measured: scripts/reproduce/frontier_a.md (no difference at equal tokens seen).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from collections.abc import Collection as Ids
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.profile import MOST_PROFILED, WRITE_IT
from grpo_cli.collect.requests import seed_of
from grpo_cli.history import History, Visit, of_kind
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.facts import Others, facts
from grpo_cli.support.ranges import Share
from grpo_cli.types import GroupRequest, Prompt, Round, ScoredGroup


def bad_sizes(key: str, sizes: Sequence[Any]) -> Iterator[str]:
    """Problems with the group sizes, for messages."""
    whole = all(type(size) is int for size in sizes)
    if not (sizes and whole and sizes[0] >= 2 and all(a < b for a, b in zip(sizes, sizes[1:], strict=False))):
        yield f"{key}={[*sizes]} must be whole numbers of 2 or more, from the smallest to the largest: groups compare"


def size_for(visit: Visit, sizes: Sequence[int]) -> int | None:
    """The least of `sizes` in which one right rollout is expected, the largest if none is; None where no answer solved
    the problem."""
    if not visit.solved:
        return None
    return next((size for size in sizes if size * visit.solved >= visit.tried), sizes[-1])


def _goes_with(own: Mapping[str, Any], others: Others) -> Iterator[str]:
    sizes, here = others.setting("curriculum", "sizes"), own.get("sizes")
    if sizes is not None and sizes != here:
        yield f"curriculum.sizes={sizes} and collector.sizes={here} must be the same"


@facts(goes_with=_goes_with)
def profiled(collection: Collection, *, sizes: Sequence[int]) -> Rounds:
    """As many rollouts of each problem as its profile suggests, in one round (sGPO, arXiv 2606.08854).

    A problem that the profile does not know is made `n` rollouts of; one that it saw unsolved, as many as the largest
    group of the step's others, which under `curriculum=profile` is the size of its phase.
    """
    refuse([*bad_sizes("collector.sizes", sizes)])
    profile, prompts = collection.history.profile, collection.pick(collection.prompts)
    suited = {prompt.id: size_for(profile[prompt.id], sizes) for prompt in prompts if prompt.id in profile}
    unsolved = max((size for size in suited.values() if size), default=sizes[-1])
    counts = [(suited[prompt.id] or unsolved) if prompt.id in suited else collection.n for prompt in prompts]
    yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(prompts, counts, strict=True)))
    return None


@dataclass(frozen=True)
class Bucket:
    """The problems that are trained on while groups have one size, and their order. `own`: how many have that size of
    themselves, and were not unsolved."""

    size: int
    own: int
    ids: frozenset[str]
    order: Epochs


@facts(needs_history=True)
class Profiled:
    """Problems by the size of group that a profile suggests, the smallest first (sGPO, arXiv 2606.08854).

    Those that were solved in more than `trivial` of the answers are left out, and unsolved ones too but for a share
    `unsolved` of them, which come in every phase. Unknown ones are taken for such that want `n`; of a task with more
    problems than could be profiled they are left out. A phase without problems is skipped; one with fewer than a step
    wants is filled up from those after it, then those before.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_step: int,
        steps: int,
        n: int,
        seed: int,
        history: History,
        *,
        trivial: Share,
        unsolved: Share,
        sizes: Sequence[int],
        shares: Sequence[int | float] | None,
    ) -> None:
        refuse([*self.refuses(sizes=sizes, shares=shares)])
        self._prompts, self._per_step, self._steps, self._seed = prompts, per_step, steps, seed
        self._all_sizes, self._shares = tuple(sizes), shares
        # Of the problems that are trained on; 0: of every phase. Never changed in place: states hold this very one.
        self._sizes: dict[str, int] = {}
        self._phases: list[Bucket] = []
        self._borders: list[int] = []  # the step after each phase
        if history.profile:
            self._arrange(self._suited(history.profile, n, trivial, unsolved))

    @staticmethod
    def refuses(*, sizes: Sequence[int], shares: Sequence[int | float] | None) -> Iterator[str]:
        """Problems with its settings, for messages."""
        yield from bad_sizes("curriculum.sizes", sizes)
        if shares is not None and not (
            len(shares) == len(sizes) and all(_is_number(share) and share >= 0 for share in shares) and sum(shares) > 0
        ):
            yield (
                f"curriculum.shares={[*shares]} must be null, or a part of the steps for each of "
                f"curriculum.sizes={[*sizes]}, such as {[1] * len(sizes)}"
            )

    def _suited(self, profile: Mapping[str, Visit], n: int, trivial: float, unsolved: float) -> dict[str, int]:
        """The problems to train on, by group size."""
        largest, found = self._all_sizes[-1], dict[str, int]()
        few = len(self._prompts) <= MOST_PROFILED
        for prompt in self._prompts if few else self._those_of(profile):
            visit = profile.get(prompt.id)
            if visit is None:
                found[prompt.id] = next((size for size in self._all_sizes if size >= n), largest)
            elif visit.solved > trivial * visit.tried:
                continue
            elif size := size_for(visit, self._all_sizes):
                found[prompt.id] = size
            elif seed_of(self._seed, "unsolved", prompt.id) < unsolved * 2**64:
                found[prompt.id] = 0
        return found

    def _those_of(self, ids: Ids[str]) -> list[Prompt]:
        """Problems by their ids, in the task's order; those of a task may be many, and made as they are looked at."""
        return list(islice((prompt for prompt in self._prompts if prompt.id in ids), len(ids)))

    def _arrange(self, sizes: Mapping[str, int]) -> None:
        """The phases, and how long each is."""
        kept = self._those_of(sizes)
        if len(kept) < self._per_step:
            raise UserError(
                f"curriculum=profile leaves {len(kept)} of {len(self._prompts)} problems, and "
                f"train.prompts={self._per_step} are trained on in a step: raise curriculum.trivial or "
                "curriculum.unsolved, lower train.prompts, or take other problems"
            )
        self._sizes, own = dict(sizes), list(sizes.values())
        # Where nothing but unsolved problems is left, they have the largest size.
        present = [size for size in self._all_sizes if size in own] or [self._all_sizes[-1]]
        self._phases = [self._bucket(size, [p for p in kept if sizes[p.id] in (0, size)]) for size in present]
        weights = [float(phase.own) for phase in self._phases]
        if self._shares is not None:
            share_of = dict(zip(self._all_sizes, self._shares, strict=True))
            weights = [float(share_of[phase.size]) for phase in self._phases]
        weights = weights if sum(weights) else [1.0] * len(weights)
        self._borders = [round(self._steps * part / sum(weights)) for part in accumulate(weights)]

    def _bucket(self, size: int, prompts: Sequence[Prompt]) -> Bucket:
        order = Epochs(prompts, 1, seed_of(self._seed, "phase", size))
        own = sum(self._sizes[prompt.id] == size for prompt in prompts)
        return Bucket(size, own, frozenset(prompt.id for prompt in prompts), order)

    def _number(self, step: int) -> int:
        """The phase of a step; the last one with steps never ends."""
        last = self._borders.index(self._borders[-1])
        return next((i for i, border in enumerate(self._borders) if step < border), last)

    def pick(self, step: int, count: int, without: Set[str]) -> list[Prompt]:
        if not self._phases:
            raise UserError(f"curriculum=profile needs train.history=<samples.jsonl>; write it with {WRITE_IT}")
        first, found = self._number(step), list[Prompt]()
        for phase in (*self._phases[first:], *reversed(self._phases[:first])):
            taken = phase.ids.intersection({*without, *(prompt.id for prompt in found)})
            more = min(count - len(found), len(phase.ids) - len(taken))
            found += phase.order.pick(0, more, taken)  # 0: it begins where its order does, whenever that is
        if len(found) < count:
            raise UserError(
                f"step {step + 1} asks for {count + len(without)} different problems, but curriculum=profile leaves "
                f"{len(self._sizes)}: lower train.prompts, or raise curriculum.trivial or curriculum.unsolved"
            )
        return found

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        return {"curriculum/phase": float(self._phases[self._number(step)].size)}

    def forget(self, is_other: Callable[[str], bool]) -> None:
        """As `interfaces.Forgets` has it: phases without some of their problems would be other phases."""
        others = sum(map(is_other, self._sizes))
        if others:
            raise UserError(
                f"the checkpoint's curriculum=profile is of {len(self._sizes)} problems, of which this run's task does "
                f"not have {others} with the same prompt and answer; resume with the task as it was, or start a new run"
            )

    def state_dict(self) -> dict[str, Any]:
        orders = {str(phase.size): phase.order.state_dict() for phase in self._phases}
        return {"kind": "profile", "of": [*self._all_sizes], "sizes": self._sizes, "orders": orders}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        state = of_kind(state, "curriculum", "profile")
        if tuple(state["of"]) != self._all_sizes:
            raise UserError(
                f"the checkpoint was made with curriculum.sizes={state['of']}, but this run has "
                f"{[*self._all_sizes]}; resume with those of the checkpoint, or start a new run"
            )
        if state["sizes"]:  # else it was refused before it picked any
            self._arrange(state["sizes"])
        for phase in self._phases:
            phase.order.load_state_dict(state["orders"][str(phase.size)])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
