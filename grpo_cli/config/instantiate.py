"""Builds the parts of a configuration: `factory` reads a part's settings, once, and `Factory.make` calls what it names.

A part gets the arguments of its YAML and those offered objects (model, tokenizer, seed, ...) that its signature names.
The protocol of each group says what else a part must have: a new kind of rule is a protocol and a field of
`interfaces.Rules`, its module, its YAML, and its call in `step.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

from omegaconf import DictConfig, open_dict

from grpo_cli import interfaces
from grpo_cli.config.choices import ENGINE_PARTS, choice_of, choices, shipped
from grpo_cli.config.overrides import is_ours
from grpo_cli.config.read import read
from grpo_cli.engine.length_predictor import NoPredictor, Predictor
from grpo_cli.engine.samplers import Sampler
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.interfaces import Rules
from grpo_cli.settings import Strict
from grpo_cli.support.errors import UserError, closest, gathered, hidden, own_code, own_code_unless_ours, refuse

RULES: Mapping[str, Any] = typing.get_type_hints(Rules)
PROTOCOLS: Mapping[str, Any] = {
    **{"task": interfaces.Task, "engine": interfaces.Engine, "sampler": Sampler, "scheduler": Scheduler},
    **{"predictor": Predictor, "curriculum": interfaces.Curriculum, "logger": interfaces.Tracker},
    **{"search": interfaces.Search, **RULES},
}
RECIPE = "recipe"  # a task's values for other groups (`config.auto`)
_NO_ARGUMENTS = ("_target_", "_partial_", RECIPE)
INNER = "inner"  # the key by which an engine names its workers' engine


class MissingArgument(UserError):
    """A part that needs an argument that is neither among its settings nor offered."""


@dataclasses.dataclass(frozen=True)
class Factory:
    """A part's class or function with its settings, as the types of its arguments."""

    group: str
    part: Mapping[str, Any]  # as it is configured
    code: Any
    settings: Mapping[str, Any]

    @property
    def target(self) -> str:
        return str(self.part["_target_"])

    def make(self, offered: Mapping[str, Any] | None = None) -> Any:
        """Build the part; a rule may also be a function with its settings bound. UserError if an argument is missing,
        or if the part lacks what its protocol has."""
        protocol, signature = PROTOCOLS.get(self.group, object), inspect.signature(self.code)
        members = [word for word in vars(protocol) if not word.startswith("_")]
        is_called = inspect.isfunction(getattr(protocol, "__call__", None))  # noqa: B004
        may_be_function = is_called and (self.group == "loss" or not members)
        if may_be_function and not isinstance(self.code, type):
            made: Any = partial(self.code, **self.settings)
        else:
            given = {word: value for word, value in (offered or {}).items() if word in signature.parameters}
            arguments = {**given, **self.settings}
            try:
                signature.bind(**arguments)
            except TypeError as error:
                raise MissingArgument(
                    f"{self.group}: {self.target} cannot be made: {error}; give it as +{self.group}.<argument>=..."
                ) from error
            with own_code_unless_ours(f"{self.group}._target_={self.target}", self.code):
                made = self.code(**arguments)
        if may_be_function:
            self._check_call(made, [*inspect.signature(protocol.__call__).parameters][1:])
        elif lacking := [word for word in members if not hasattr(made, word)]:
            kind = f"{protocol.__module__}.{protocol.__name__}"
            raise UserError(f"{self.group}: {self.target} lacks {', '.join(lacking)} of {kind}")
        if self.group == "loss" and not hasattr(made, "needs_reference"):
            made.needs_reference = bool(getattr(self.code, "needs_reference", False))
        return made

    def _check_call(self, made: Any, arguments: Sequence[str]) -> None:
        """UserError if a rule does not take the arguments of its kind."""
        try:
            inspect.signature(made).bind(*arguments)
        except TypeError as error:
            called = f"{self.group}._target_={self.target} cannot be called as {self.group}({', '.join(arguments)})"
            raise UserError(f"{called}: {error}; give what else it needs as +{self.group}.<argument>=...") from error


def factory(group: str, part: Mapping[str, Any]) -> Factory:
    """Return the factory of a part. UserError if its class or function takes other settings."""
    target = str(part["_target_"])
    code, problems = _code(group, target), list[str]()
    settings = {key: value for key, value in part.items() if key not in _NO_ARGUMENTS}
    takes = _takes(code)
    hints = _hints(code) if is_ours(code.__module__) else {}  # others may annotate as they like
    for word in settings.keys() - (settings if takes is None else takes):
        problems.append(f"{group}.{word}: {target} takes no {word}{closest(word, takes or ())}")
    hints = {word: hint for word, hint in hints.items() if word in settings}
    kind = dataclasses.make_dataclass("PartSettings", hints.items(), bases=(Strict,), kw_only=True)
    with gathered(problems):
        settings |= vars(read(kind, {word: settings[word] for word in hints}, key=group))
    refuse(problems)
    return Factory(group, part, code, settings)


def factories(parts: Mapping[str, Any]) -> dict[str, Factory]:
    """Return the factories of all parts. UserError lists everything that is wrong with their settings."""
    return _each(parts, lambda group: factory(group, parts[group]))


def _each(groups: Iterable[str], build: Callable[[str], Any], *left_out: type[UserError]) -> dict[str, Any]:
    """Build each group's part, but for those that raise what may be left out. UserError lists all that is wrong."""
    built, problems = dict[str, Any](), list[str]()
    for group in groups:
        with gathered(problems), suppress(*left_out):
            built[group] = build(group)
    refuse(problems)
    return built


def make(group: str, part: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> Any:
    """Build a part of plain settings."""
    return factory(group, part).make(offered)


def ready(group: str, choice: str, offered: Mapping[str, Any] | None = None, /, **changed: Any) -> Any:
    """Build `group=choice` with changed settings: for tests, scripts and notebooks."""
    return make(group, shipped(group, choice) | changed, offered)


def drop_inherited(cfg: DictConfig, groups: Sequence[str], typed: Set[str]) -> None:
    """Remove from a user's own parts the settings of the choices that they replace, unless typed or taken."""
    for name in groups:
        part = cfg.get(name)
        if not isinstance(part, DictConfig) or not isinstance(part.get("_target_"), str):
            continue
        known = {word for choice in choices(name) for word in shipped(name, choice)} - {*_NO_ARGUMENTS}
        takes: Set[str] | None = set()
        with suppress(UserError):  # a target that cannot be imported is refused where it is built
            takes = _takes(_code(name, str(part["_target_"])))
        with open_dict(part):
            for word in known & part.keys() - (known if takes is None else takes):
                if f"{name}.{word}" not in typed:
                    del part[word]


def _takes(code: Any) -> Set[str] | None:
    """Return the names of the settings that a class or function takes; None where it takes any."""
    parameters = inspect.signature(code).parameters
    unpacked = {*_hints(code)} if is_ours(code.__module__) else set()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and unpacked <= {*parameters}
    return None if takes_any else {*parameters, *unpacked}


def _hints(code: Any) -> dict[str, Any]:
    """Return the types of the arguments of a class or function, those of `**words: Unpack[...]` included."""
    constructor = isinstance(code, type) and not dataclasses.is_dataclass(code)
    hints = typing.get_type_hints(code.__init__ if constructor else code, include_extras=True)
    for name in [name for name, hint in hints.items() if typing.get_origin(hint) is typing.Unpack]:
        hints |= typing.get_type_hints(typing.get_args(hints.pop(name))[0], include_extras=True)
    hints.pop("return", None)
    return hints


def _code(name: str, target: str) -> Any:
    """Return the class or function that a part's `_target_` names. UserError if it cannot be imported."""
    with own_code(f"{name}._target_={target}"):
        try:
            code: Any = pkgutil.resolve_name(target)
            inspect.signature(code)
            if reason := hidden(target):
                raise ImportError(reason)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            reason = hidden(target) or " ".join(str(error.__cause__ or error).splitlines()[:2])
            way_out = "write it as module.name, with the module in the current folder or installed"
            raise UserError(f"{name}._target_={target} cannot be imported: {reason}; {way_out}") from error
    return code


def engine_parts(parts: Mapping[str, Factory], offered: Mapping[str, Any], early: bool = False) -> dict[str, Any]:
    """Build sampler, scheduler, predictor and sparsity. UserError if they do not work together or with the engine.

    `early`: before a model is loaded; parts that need an object that is not offered yet are left out.
    """
    built = _each(ENGINE_PARTS[1:], lambda group: parts[group].make(offered), *[MissingArgument] * early)
    refuse([*_not_together(parts, built)])
    return built


def _not_together(parts: Mapping[str, Factory], built: Mapping[str, Any]) -> Iterator[str]:
    """Yield conflicts among the parts that could be built."""
    if isinstance(built.get("predictor"), NoPredictor) and "scheduler" in built and built["scheduler"].needs_lengths:
        orders = f"{named(parts, 'scheduler')} orders by predicted length"
        yield f"{orders}, which {named(parts, 'predictor')} has not: use predictor=prefix or mean"
    for engine in engines(parts["engine"]):
        refuses: Any = getattr(engine.code, "refuses", None)
        words = inspect.signature(refuses).parameters if callable(refuses) else {"none": None}
        if words.keys() <= built.keys():
            with own_code_unless_ours(f"engine._target_={engine.target}: refuses", refuses):
                found = [*refuses(**{word: built[word] for word in words})]
            yield from found


def engines(engine: Factory) -> list[Factory]:
    """Return an engine and, where it has workers, that of its workers. UserError if that is unknown."""
    if INNER not in engine.settings:
        return [engine]
    inner, known = engine.settings[INNER], [one for one in choices("engine") if INNER not in shipped("engine", one)]
    if inner not in known:
        raise UserError(f"engine.{INNER}={inner} must be one of {', '.join(known)}{closest(str(inner), known)}")
    return [engine, factory("engine", shipped("engine", inner) | dict(engine.settings.get("options") or {}))]


def fact(parts: Mapping[str, Factory], group: str, name: str) -> Any:
    """Return a fact of the part of a group (`support.facts`), None if it has none; of an engine of workers what theirs
    states where it states nothing."""
    if group not in parts:
        return None
    found = [getattr(one.code, name, None) for one in (engines(parts[group]) if group == "engine" else [parts[group]])]
    return next((one for one in found if one is not None), None)


def named(parts: Mapping[str, Factory], group: str) -> str:
    """Return `group=choice` as a person types it."""
    return f"{group}={choice_of(group, parts[group].part)}"


def rules_of(parts: Mapping[str, Factory], offered: Mapping[str, Any] | None = None) -> Rules:
    """Return the rules of a run, untried. UserError lists all that cannot be made."""
    return Rules(**_each(RULES, lambda group: parts[group].make(offered)))
