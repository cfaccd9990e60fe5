"""Whether problems that a checkpoint or a record knows by their ids are in this run's task, and are the same there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from grpo_cli.history import digest_of
from grpo_cli.types import Prompt

MOST_GONE_THROUGH = 100_000  # problems: making more of them to find one would hold up every resume


class Places:
    """Where in a task's sequence the problems of given ids are.

    Tasks may make each problem when it is asked for, and most number them by place: then only that place is looked at.
    A sequence may say where its problems are (`places`, by id); others are gone through once, unless they are many.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._numbered = all(_number(prompts[place].id) == place for place in {0, len(prompts) - 1})
        listed = isinstance(prompts, (list, tuple)) or hasattr(prompts, "places")
        self.certain = self._numbered or listed or len(prompts) <= MOST_GONE_THROUGH

    def of(self, name: str) -> int | None:
        """None where there is no such problem, or, unless this is `certain`, none that could be found."""
        number = _number(name)
        if number is not None and number < len(self._prompts) and self._prompts[number].id == name:
            return number
        return None if self._numbered else self._by_id.get(name)

    @cached_property
    def _by_id(self) -> Mapping[str, int]:
        if hasattr(self._prompts, "places"):
            return self._prompts.places
        return {prompt.id: place for place, prompt in enumerate(self._prompts)} if self.certain else {}


def _number(name: str) -> int | None:
    number = name.rpartition("-")[2]
    return int(number[:18]) if number.isdecimal() else None


class OtherProblems:
    """Says of a problem that a checkpoint knows whether this task does not have it, or has another by its id.

    `digests` are those of the history; a rule that holds a problem itself gives its own. Where nobody wrote down what a
    problem was, and where it cannot be found out, it is taken for the same.
    """

    def __init__(self, prompts: Sequence[Prompt], digests: Mapping[str, int]) -> None:
        self._prompts, self._digests, self._places = prompts, dict(digests), Places(prompts)
        self._here: dict[str, int | None] = {}
        self.found: set[str] = set()

    def __call__(self, name: str, digest: int | None = None) -> bool:
        digest = self._digests.get(name) if digest is None else digest
        if digest is None:
            return False
        if name not in self._here:
            place = self._places.of(name)
            self._here[name] = None if place is None else digest_of(self._prompts[place])
        here = self._here[name]
        other = here != digest if here is not None else self._places.certain
        self.found |= {name} if other else set()
        return other
