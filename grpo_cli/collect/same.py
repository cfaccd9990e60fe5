"""Whether problems known by id, from a checkpoint or a record, are in this run's task, and are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from grpo_cli.history import digest_of
from grpo_cli.types import Prompt

MOST_GONE_THROUGH = 100_000  # problems: generating more to find one would delay every resume


class Places:
    """Indices of problems in a task's sequence by id.

    Tasks may compute problems on access, and most number them by index: then only that index is read. A sequence may
    have an index itself (`places`, by id); others are searched once, unless they are long.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._numbered = all(_number(prompts[place].id) == place for place in {0, len(prompts) - 1})
        listed = isinstance(prompts, (list, tuple)) or hasattr(prompts, "places")
        self.certain = self._numbered or listed or len(prompts) <= MOST_GONE_THROUGH

    def of(self, name: str) -> int | None:
        """None if there is no such problem or, unless this is `certain`, if it was not found."""
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
    """Whether this task lacks a problem of a checkpoint, or has a different one with its id.

    `digests` are the history's; a rule that stores a problem itself passes its own. Without a digest, or if the problem
    cannot be found, it is assumed to be the same.
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
