"""The kinds of parts: what each group of `conf/` has to be, of which all that handles parts follows.

A rule of the step is a field of `interfaces.Rules`, and its protocol says the rest: how it is called, and what else it
is asked. So a new kind of rule is a protocol and a field there, its module, its YAML, and the place in `step.py` that
asks it.
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
    """`members`: what is asked of a part by name; `called_with`: the arguments of a call, by place, if it is called."""

    protocol: Any
    members: tuple[str, ...]
    called_with: tuple[str, ...]
    answers: Any  # the type of what a call returns

    @classmethod
    def of(cls, protocol: Any) -> Kind:
        members = tuple(name for name in vars(protocol) if not name.startswith("_"))
        if not inspect.isfunction(call := getattr(protocol, "__call__", None)):  # noqa: B004
            return cls(protocol, members, (), None)
        parameters = tuple(inspect.signature(call).parameters)[1:]
        return cls(protocol, members, parameters, typing.get_type_hints(call).get("return"))

    @property
    def methods(self) -> list[str]:
        """What a class that is such a part defines, its call included."""
        return [name for name in (*self.members, "__call__") if inspect.isfunction(vars(self.protocol).get(name))]


RULES: Mapping[str, Kind] = {name: Kind.of(kind) for name, kind in typing.get_type_hints(interfaces.Rules).items()}
KINDS: Mapping[str, Kind] = {
    "task": Kind.of(interfaces.Task),
    "engine": Kind.of(interfaces.Engine),
    "sampler": Kind.of(Sampler),
    "scheduler": Kind.of(Scheduler),
    "predictor": Kind.of(Predictor),
    "curriculum": Kind.of(interfaces.Curriculum),
    "replay": Kind.of(interfaces.Replay),
    "logger": Kind.of(interfaces.Tracker),
    **RULES,
}
# Rules that a plain function can be although they are asked for more than a call (`instantiate.OwnLoss`).
ADAPTED = ("loss",)


def is_function(group: str) -> bool:
    """Whether a plain function can be a part of this group."""
    return group in RULES and (group in ADAPTED or not RULES[group].members)
