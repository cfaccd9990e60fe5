"""The kinds of parts: the protocol of each group of `conf/`, from which everything else about parts follows.

A rule of the step is a field of `interfaces.Rules`, and its protocol says how it is called and what other members it
has. So a new kind of rule is a protocol and a field there, its module, its YAML, and its call in `step.py`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli import interfaces
from grpo_cli.engine.batching import Sampler
from grpo_cli.engine.interfaces import Predictor, Scheduler


@dataclass(frozen=True)
class Kind:
    """`members` are those of its protocol; `called_with` the positional arguments of its call, if it is called."""

    protocol: Any
    members: tuple[str, ...]
    called_with: tuple[str, ...]
    answers: Any  # the return type of a call

    @classmethod
    def of(cls, protocol: Any) -> Kind:
        members = tuple(name for name in vars(protocol) if not name.startswith("_"))
        if not inspect.isfunction(call := getattr(protocol, "__call__", None)):  # noqa: B004
            return cls(protocol, members, (), None)
        parameters = tuple(inspect.signature(call).parameters)[1:]
        return cls(protocol, members, parameters, typing.get_type_hints(call).get("return"))

    @property
    def methods(self) -> list[str]:
        """The methods that a class of this kind defines, its call included."""
        return [name for name in (*self.members, "__call__") if inspect.isfunction(vars(self.protocol).get(name))]


RULES: Mapping[str, Kind] = {name: Kind.of(kind) for name, kind in typing.get_type_hints(interfaces.Rules).items()}
KINDS: Mapping[str, Kind] = {
    "task": Kind.of(interfaces.Task),
    "engine": Kind.of(interfaces.Engine),
    "sampler": Kind.of(Sampler),
    "scheduler": Kind.of(Scheduler),
    "predictor": Kind.of(Predictor),
    "curriculum": Kind.of(interfaces.Curriculum),
    "logger": Kind.of(interfaces.Tracker),
    "search": Kind.of(interfaces.Search),
    **RULES,
}
# Rules that may be plain functions although their protocol has other members (`instantiate.OwnLoss`).
ADAPTED = ("loss",)


def is_function(group: str) -> bool:
    """Whether a plain function can be a part of this group."""
    return group in ADAPTED or (group in KINDS and bool(KINDS[group].called_with) and not KINDS[group].members)
