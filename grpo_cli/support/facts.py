"""The capabilities of a part, known before it is made: attributes of its function or class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack


class Facts(TypedDict, total=False):
    """The attributes of parts; one that is left out is not known, which is as good as False."""

    keeps_fewer: bool  # a down-sample rule may keep fewer than `keep`
    stops: bool  # a collector stops rollouts before their end (`enough`)
    resumes: bool  # a collector or a search continues partial rollouts, or given tokens
    one_turn: bool  # a collector or a search can do so only where a reply is one turn
    evicts: bool  # a sparsity drops KV entries
    is_policy: bool  # an engine draws from the trainer's own policy (left to `engine.inner` where there is one)
    any_family: bool  # an engine takes causal models of any family, not only Llama-shaped ones
    answers_in_place: bool  # an engine's `generate` takes `answers`, and continues with a row once its turn is answered


Part = TypeVar("Part")


def facts(**attributes: Unpack[Facts]) -> Callable[[Part], Part]:
    """Return a decorator that sets the attributes of a function or class."""

    def with_facts(part: Part) -> Part:
        for name, value in attributes.items():
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
