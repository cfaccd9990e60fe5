"""What a part says of itself before it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Others(Protocol):
    """The parts of a run as their settings describe them, before any is made: what a part may ask of the others in its
    `goes_with`. `n`, `m` and `prompts` (of a step) are the run's."""

    n: int
    m: int
    prompts: int

    def says(self, group: str, fact: str) -> Any:
        """What the part chosen of this group says of itself (see `facts`), None where it says nothing."""

    def named(self, group: str) -> str:
        """`group=choice`, as a person types it."""

    def setting(self, group: str, key: str) -> Any:
        """A setting of the part, None where it has none of this name."""


Part = TypeVar("Part")


def facts(**said: Any) -> Callable[[Part], Part]:
    """A decorator: what a part, a function or a class, says of itself before it is made, as attributes.

    Any part may have `goes_with`, a function `(own settings, Others)` that yields why it cannot work beside the others.
    What else there is stands in the protocol of each kind, and:

    | of | fact | says |
    |---|---|---|
    | predictor | of_whole_rollouts | whether it knows nothing of a rollout that goes on |
    | sparsity | evicts | whether KV entries are dropped |
    | engine | is_policy | whether it draws from the trainer's own policy (left to `engine.inner` where there is one) |
    | engine | stops_early | whether it can stop rollouts before their end |
    | engine | any_family | whether it takes causal models of any family, not only Llama-shaped ones |
    | engine | answers_in_place | whether `generate` takes `replies`, and goes on with a row once its turn is answered |
    """

    def with_facts(part: Part) -> Part:
        for name, value in said.items():
            setattr(part, name, value)
        return part

    return with_facts


def fact(part: Any, name: str) -> Any:
    """Return a fact of a part, also of a function whose settings are bound; None if it has no such fact."""
    return getattr(getattr(part, "func", part), name, None)


def name_of(part: Any) -> str:
    """Return what a person would look for: the dotted name of a function or class."""
    target = getattr(part, "func", part)
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}.{named.__qualname__}"
