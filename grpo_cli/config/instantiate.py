"""Builds the parts of a configuration: `factory` reads a part's settings, once, and `Factory.make` calls what it names.

A part gets the arguments of its YAML and those offered objects (model, tokenizer, seed, ...) that its signature names.
A new kind of rule is a protocol and a field of `interfaces.Rules`, its module, its YAML, and its call in `step.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import Any

from grpo_cli import interfaces
from grpo_cli.config.choices import ENGINE_PARTS, choice_of, choices, shipped
from grpo_cli.config.overrides import is_package_target
from grpo_cli.config.read import read
from grpo_cli.engine.length_predictor import NoPredictor, Predictor
from grpo_cli.engine.samplers import Sampler
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.interfaces import Rules
from grpo_cli.settings import Strict
from grpo_cli.support.errors import UserError, gathered, own_code, own_code_unless_ours, refuse
from grpo_cli.support.facts import name_of

RULES: Mapping[str, Any] = typing.get_type_hints(Rules)
PROTOCOLS: Mapping[str, Any] = {
    **{"task": interfaces.Task, "engine": interfaces.Engine, "sampler": Sampler, "scheduler": Scheduler},
    **{"predictor": Predictor, "curriculum": interfaces.Curriculum, "logger": interfaces.Tracker},
    **{"search": interfaces.Search, **RULES},
}
RECIPE = "recipe"  # a task's values for other groups (`config.auto`)
_NO_ARGUMENTS = ("_target_", "_partial_", RECIPE)


@dataclasses.dataclass(frozen=True)
class Factory:
    """A part's class or function with its settings, as the types of its arguments."""

    group: str
    part: Mapping[str, Any]  # as it is configured
    code: Any
    settings: Mapping[str, Any]

    def make(self, offered: Mapping[str, Any] | None = None) -> Any:
        """Build the part; a function whose protocol is a call gets its settings bound. UserError if an argument is
        missing, or if the part lacks what its protocol has."""
        protocol = PROTOCOLS.get(self.group, object)
        call, target = vars(protocol).get("__call__"), self.part["_target_"]
        if call and not isinstance(self.code, type):
            made: Any = partial(self.code, **self.settings)
            needs = {
                name: bool(needed)
                for name, needed in getattr(self.code, "__dict__", {}).items()
                if name.startswith("needs_")
            }
            vars(made).update({"needs_reference": False} | needs)  # of a loss
        else:
            takes = inspect.signature(self.code).parameters
            arguments = {word: value for word, value in (offered or {}).items() if word in takes} | dict(self.settings)
            self._check_call(self.code, "cannot be made", **arguments)
            with own_code_unless_ours(f"{self.group}._target_={target}", self.code):
                made = self.code(**arguments)
        has = {word for kind in protocol.__mro__ for word in (*vars(kind), *vars(kind).get("__annotations__", ()))}
        if lacking := sorted(word for word in has if not word.startswith("_") and not hasattr(made, word)):
            raise UserError(f"{self.group}: {target} lacks {', '.join(lacking)} of {name_of(protocol)}")
        if call:
            names = list(inspect.signature(call).parameters)[1:]
            self._check_call(made, f"cannot be called as {self.group}({', '.join(names)})", *names)
        return made

    def _check_call(self, code: Any, fault: str, *arguments: Any, **words: Any) -> None:
        try:
            inspect.signature(code).bind(*arguments, **words)
        except TypeError as error:
            what = f"{self.group}._target_={self.part['_target_']} {fault}: {error}"
            give = f"give what it needs as +{self.group}.<argument>=..."
            raise UserError(f"{what}; {'take all of these' if 'too many' in str(error) else give}") from error


class Factories(dict[str, Factory]):
    """The factories of a configuration's parts, by group."""

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Factories:
        """Build the factory of each part. UserError lists everything that is wrong with their settings."""
        return cls(_each(parts, lambda group: factory(group, parts[group])))

    def named(self, group: str) -> str:
        """Return `group=choice` as a person types it."""
        return f"{group}={choice_of(group, self[group].part)}"

    def fact(self, group: str, name: str) -> Any:
        """Return a fact of a group's part (`support.facts`); None if it has none. Of engines, the one that samples."""
        part = self.sampling_engine if group == "engine" else self.get(group)
        return getattr(part and part.code, name, None)

    @property
    def sampling_engine(self) -> Factory:
        """The engine, or that of its workers where it has some."""
        engine = self["engine"]
        if (inner := engine.settings.get("inner")) is None:
            return engine
        return factory("engine", shipped("engine", inner) | dict(engine.settings.get("options") or {}))

    def engine_parts(self, seed: int) -> dict[str, Any]:
        """Build sampler, scheduler, predictor and sparsity, which are offered the seed only. UserError if they do not
        work together or with the engine."""
        built = _each(ENGINE_PARTS[1:], lambda group: self[group].make({"seed": seed}))
        problems = list[str]()
        if isinstance(built["predictor"], NoPredictor) and built["scheduler"].needs_lengths:
            problems.append(f"{self.named('predictor')} predicts no lengths for {self.named('scheduler')}: use prefix")
        if (refuses := self.fact("engine", "refuses")) is not None:
            problems += refuses(**built)
        refuse(problems)
        return built

    def rules(self, offered: Mapping[str, Any] | None = None) -> Rules:
        """Build the rules of a run, untried. UserError lists all that cannot be built."""
        return Rules(**_each(RULES, lambda group: self[group].make(offered)))


def factory(group: str, part: Mapping[str, Any]) -> Factory:
    """Return the factory of a part. UserError if its class or function takes other settings."""
    code = _code(group, str(part["_target_"]))
    settings, takes = {word: value for word, value in part.items() if word not in _NO_ARGUMENTS}, _takes(code)
    hints = {word: hint for word, hint in (takes or {}).items() if word in settings}
    kind = dataclasses.make_dataclass("PartSettings", hints.items(), bases=(Strict,), kw_only=True)
    checked = {} if takes is None else settings
    return Factory(group, part, code, settings | vars(read(kind, checked, key=group)))


def make(group: str, part: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> Any:
    """Build a part of plain settings."""
    return factory(group, part).make(offered)


def ready(group: str, choice: str, offered: Mapping[str, Any] | None = None, /, **changed: Any) -> Any:
    """Build `group=choice` with changed settings: for tests, scripts and notebooks."""
    return make(group, shipped(group, choice) | changed, offered)


def without_inherited(group: str, part: Mapping[str, Any], typed: Set[str]) -> dict[str, Any]:
    """Return a user's own part without the settings of the choices that it replaces, unless typed or taken."""
    inherited = {word for choice in choices(group) for word in shipped(group, choice)} - {*_NO_ARGUMENTS}
    with suppress(UserError):  # a target that cannot be imported is refused where it is built
        takes = _takes(_code(group, str(part["_target_"])))
        inherited -= inherited if takes is None else takes.keys()
    return {word: value for word, value in part.items() if word not in inherited or f"{group}.{word}" in typed}


def _takes(code: Any) -> dict[str, Any] | None:
    """Return the settings that code takes with their types; None where it takes any. A user's types are not read."""
    constructor = isinstance(code, type) and not dataclasses.is_dataclass(code)
    typed = code.__init__ if constructor else code
    hints = typing.get_type_hints(typed, include_extras=True) if is_package_target(code.__module__) else {}
    takes = dict[str, Any]()
    for name, parameter in inspect.signature(code).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            takes[name] = hints.get(name, Any)
        elif typing.get_origin(hints.get(name)) is typing.Unpack:
            takes |= typing.get_type_hints(typing.get_args(hints[name])[0], include_extras=True)
        else:
            return None
    return takes


def _code(group: str, target: str) -> Any:
    """Return the class or function that a part's `_target_` names. UserError if it cannot be imported."""
    with own_code(f"{group}._target_={target}"):
        try:
            code: Any = pkgutil.resolve_name(target)
            inspect.signature(code)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            why = " ".join(str(error.__cause__ or error).splitlines()[:2])
            raise UserError(f"{group}._target_={target} cannot be imported as module.name: {why}") from error
    return code


def _each(groups: Iterable[str], build: Callable[[str], Any]) -> dict[str, Any]:
    """Build the part of each group. UserError lists all that is wrong."""
    built, problems = dict[str, Any](), list[str]()
    for group in groups:
        with gathered(problems):
            built[group] = build(group)
    refuse(problems)
    return built
