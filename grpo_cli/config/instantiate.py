"""Builds the parts of a configuration.

A part gets the arguments of its YAML and those offered objects (model, tokenizer, seed, ...) that its signature names.
The protocol of each group says what else a part must have: a new kind of rule is a protocol and a field of
`interfaces.Rules`, its module, its YAML, and its call in `step.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

from omegaconf import DictConfig, open_dict

from grpo_cli import interfaces
from grpo_cli.config.choices import ENGINE_PARTS, choice_of, choices, shipped
from grpo_cli.config.overrides import is_ours
from grpo_cli.config.read import read_argument
from grpo_cli.engine.length_predictor import NoPredictor, Predictor
from grpo_cli.engine.samplers import Sampler
from grpo_cli.engine.scheduling import Scheduler
from grpo_cli.interfaces import Rules
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


def make(name: str, part: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Build the part of group `name`. UserError if an argument is missing or unknown, or if it lacks members of its
    protocol."""
    factory = _factory(name, part, offered)
    missing, given = _fits(factory, offered)
    if missing:
        raise UserError(f"{name}: {part['_target_']} cannot be made: {missing}; give it as +{name}.<argument>=...")
    with own_code_unless_ours(f"{name}._target_={part['_target_']}", factory.func):
        made = factory(**given)
    if lacking := [] if is_function(name) else [word for word in _members(name) if not hasattr(made, word)]:
        kind = PROTOCOLS[name]
        raise UserError(f"{name}: {part['_target_']} lacks {', '.join(lacking)} of {kind.__module__}.{kind.__name__}")
    return made


def _members(name: str) -> list[str]:
    return [word for word in vars(PROTOCOLS.get(name, object)) if not word.startswith("_")]


def is_function(name: str) -> bool:
    """True if a plain function can be a part of this group."""
    called = inspect.isfunction(getattr(PROTOCOLS.get(name), "__call__", None))  # noqa: B004
    return called and (name == "loss" or not _members(name))


def ready(name: str, choice: str, offered: Mapping[str, Any] | None = None, /, **changed: Any) -> Any:
    """Build `name=choice` with changed settings: for tests, scripts and notebooks."""
    return make(name, shipped(name, choice) | changed, offered or {})


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


def settings_problems(parts: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the settings of each part, before any is built."""
    problems: list[str] = []
    for name, part in parts.items():
        if isinstance(part, dict) and "_target_" in part:
            with gathered(problems):
                _factory(name, part)
    return problems


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
            raise UserError(
                f"{name}._target_={target} cannot be imported: {reason}; "
                "write it as module.name, with the module in the current folder or installed"
            ) from error
    return code


def _factory(name: str, part: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> partial[Any]:
    """Return the class or function with its settings bound. UserError if it takes others."""
    target = str(part["_target_"])
    code = _code(name, target)
    kwargs = {key: value for key, value in part.items() if key not in _NO_ARGUMENTS}
    takes, problems = _takes(code), list[str]()
    hints = _hints(code) if is_ours(code.__module__) else {}  # others may annotate as they like
    known = [word for word in (*inspect.signature(code).parameters, *hints) if word not in (offered or ())]
    for word, value in kwargs.items():
        if takes is not None and word not in takes:
            problems.append(f"{name}.{word}: {target} takes no {word}{closest(word, known)}")
        elif word in hints:
            kwargs[word] = read_argument(hints[word], value, f"{name}.{word}", problems)
    refuse(problems)
    return partial(code, **kwargs)


def _fits(factory: Any, offered: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return Python's message about missing arguments, and the offered objects that it takes."""
    signature = inspect.signature(factory.func)
    given = {key: offered[key] for key in signature.parameters if key in offered and key not in factory.keywords}
    try:
        signature.bind(**factory.keywords, **given)
    except TypeError as error:
        return str(error), given
    return "", given


def function(name: str, part: Mapping[str, Any]) -> Any:
    """Return a callable rule: an instance, or a function with its settings bound. UserError if it does not take the
    arguments of its kind."""
    factory = _factory(name, part)
    rule: Any = make(name, part, {}) if isinstance(factory.func, type) else factory
    called_with = [*inspect.signature(PROTOCOLS[name].__call__).parameters][1:]
    try:
        inspect.signature(rule).bind(*called_with)
    except TypeError as error:
        called = f"{name}._target_={part['_target_']} cannot be called as {name}({', '.join(called_with)})"
        raise UserError(f"{called}: {error}; give what else it needs as +{name}.<argument>=...") from error
    if name == "loss" and not hasattr(rule, "needs_reference"):
        rule.needs_reference = bool(getattr(factory.func, "needs_reference", False))
    return rule


def fact_of(name: str, part: Mapping[str, Any], fact: str) -> Any:
    """Return a fact of a part's class or function (`facts.facts`); None if it has no such fact."""
    return getattr(_code(name, str(part["_target_"])), fact, None)


def engine_parts(parts: Mapping[str, Any], offered: Mapping[str, Any], early: bool = False) -> dict[str, Any]:
    """Build sampler, scheduler, predictor and sparsity. UserError if they do not work together or with the engine.

    `early`: before a model is loaded; parts that need an object that is not offered yet are left out.
    """
    built: dict[str, Any] = {}
    problems: list[str] = []
    for name in ENGINE_PARTS[1:]:
        with gathered(problems):
            if not (early and _fits(_factory(name, parts[name], offered), offered)[0]):
                built[name] = make(name, parts[name], offered)
    with gathered(problems):
        problems += _not_together(parts, built)
    refuse(problems)
    return built


def _not_together(parts: Mapping[str, Any], built: Mapping[str, Any]) -> Iterator[str]:
    """Yield conflicts among the parts that could be built."""
    if isinstance(built.get("predictor"), NoPredictor) and "scheduler" in built and built["scheduler"].needs_lengths:
        scheduler, predictor = (f"{name}={choice_of(name, parts[name])}" for name in ("scheduler", "predictor"))
        yield f"{scheduler} orders by predicted length, which {predictor} has not: use predictor=prefix or mean"
    inner = [inner_engine(parts["engine"])] if INNER in parts["engine"] else []
    for engine in (parts["engine"], *inner):
        refuses = fact_of("engine", engine, "refuses")
        taken = inspect.signature(refuses).parameters if callable(refuses) else {"none": None}
        if taken.keys() <= built.keys():
            with own_code_unless_ours(f"engine._target_={engine['_target_']}: refuses", refuses):
                found = [*refuses(**{word: built[word] for word in taken})]
            yield from found


def inner_engine(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the engine of an engine's workers. UserError for an unknown one."""
    inner, known = part[INNER], [name for name in choices("engine") if INNER not in shipped("engine", name)]
    if inner not in known:
        raise UserError(f"engine.{INNER}={inner} must be one of {', '.join(known)}{closest(str(inner), known)}")
    return shipped("engine", inner) | dict(part.get("options") or {})


def says(parts: Mapping[str, Mapping[str, Any]], group: str, fact: str) -> Any:
    """Return a fact as `facts.Others.says`; of an engine of workers what these say where it says nothing."""
    part = parts[group]
    said = fact_of(group, part, fact)
    return fact_of(group, inner_engine(part), fact) if said is None and INNER in part else said


def rules_of(parts: Mapping[str, Mapping[str, Any]]) -> Rules:
    """Return the rules of a run, untried. UserError lists all that cannot be made."""
    made: dict[str, Any] = {}
    problems: list[str] = []
    for name in RULES:
        with gathered(problems):
            made[name] = rule_of(name, parts[name])
    refuse(problems)
    return Rules(**made)


def rule_of(name: str, part: Mapping[str, Any]) -> Any:
    """Return a rule, untried. UserError if it cannot be made."""
    return function(name, part) if is_function(name) else make(name, part, {})
