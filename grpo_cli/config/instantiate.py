"""Instantiates the parts of a configuration.

A part gets the arguments of its YAML and those offered objects (model, tokenizer, seed, ...) that its signature names.
A misspelt argument is a UserError. Parts declare themselves what they refuse; rules are tried in `config.trial`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import hydra.utils
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from grpo_cli.config.choices import ENGINE_PARTS, choice_of, choices, shipped
from grpo_cli.config.kinds import KINDS, RULES, is_function
from grpo_cli.config.read import named_words, read_kwargs
from grpo_cli.engine.order.predict import NoPredictor
from grpo_cli.interfaces import Loss, Rules
from grpo_cli.support.errors import UserError, closest, gathered, hidden, own_code, own_code_unless_ours, refuse
from grpo_cli.types import Batch, LossOutput, Totals

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
    members = () if name not in KINDS or is_function(name) else KINDS[name].members
    if lacking := [asked for asked in members if not hasattr(made, asked)]:
        protocol = f"{KINDS[name].protocol.__module__}.{KINDS[name].protocol.__name__}"
        raise UserError(f"{name}: {part['_target_']} has no {', '.join(lacking)}; see {protocol}")
    return made


def ready(name: str, choice: str, offered: Mapping[str, Any] | None = None, /, **changed: Any) -> Any:
    """Build `name=choice` with changed settings: for tests, scripts and notebooks."""
    return make(name, shipped(name, choice) | changed, offered or {})


def drop_inherited(cfg: DictConfig, groups: Sequence[str]) -> None:
    """Remove the settings that a part's own `_target_` does not take, and that it has from the choice it replaces.

    Beside a typed `_target_` these are all that were not typed; else those with the value of a shipped choice.
    """
    words: Any = OmegaConf.to_container(HydraConfig.get().overrides.task) if HydraConfig.initialized() else ()
    typed = {".".join(word.lstrip("+").partition("=")[0].split(".")[:2]) for word in words}
    for name in groups:
        part, files = cfg.get(name), [shipped(name, choice) for choice in choices(name)]
        own = f"{name}._target_" in typed
        if not isinstance(part, DictConfig) or not (
            own or part.get("_target_") not in (None, *(file.get("_target_") for file in files))
        ):
            continue
        takes: Container[str] = ()
        with suppress(UserError):  # what cannot be had is refused where it is made
            takes = _takes(_code(name, str(part["_target_"])))
        values: Any = OmegaConf.to_container(part)
        for word in [word for word in values if word not in takes and word not in _NO_ARGUMENTS]:
            known = [file[word] for file in files if word in file]
            if known and (f"{name}.{word}" not in typed if own else values[word] in known):
                with open_dict(part):
                    del part[word]


class _Anything(frozenset[str]):
    """The names that `**kwargs` take."""

    def __contains__(self, name: object) -> bool:
        return True


def _takes(code: Any) -> frozenset[str]:
    """Return the names of the settings that a class or function takes."""
    parameters = inspect.signature(code).parameters
    named = named_words(code) if _is_ours(code) else set()  # others may annotate as they like
    if not named and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return _Anything(parameters)
    return frozenset([*parameters, *named])


def _is_ours(code: Any) -> bool:
    return str(code.__module__).startswith("grpo_cli.")


def _code(name: str, target: str) -> Any:
    """Return the class or function that a part's `_target_` names. UserError if it cannot be had."""
    with own_code(f"{name}._target_={target}"):
        try:
            code: Any = hydra.utils.get_object(target)
            inspect.signature(code)
            if reason := hidden(target):
                raise ImportError(reason)
        except (ImportError, TypeError, ValueError) as error:
            reason = hidden(target) or " ".join(str(error.__cause__ or error).splitlines()[:2])
            raise UserError(
                f"{name}._target_={target} cannot be had: {reason}; "
                "write it as module.name, with the module in the current folder or installed"
            ) from error
    return code


def _factory(name: str, part: Mapping[str, Any], offered: Mapping[str, Any]) -> partial[Any]:
    """The class or function with its settings bound, after checking that it takes them."""
    target = str(part["_target_"])
    code = _code(name, target)
    kwargs = {key: value for key, value in part.items() if key not in _NO_ARGUMENTS}
    takes = _takes(code)
    known = [key for key in takes if key not in offered]
    problems = [
        f"{name}.{word}: {target} takes no {word}{closest(word, known)}" for word in kwargs if word not in takes
    ]
    if _is_ours(code):
        kwargs = read_kwargs(code, name, kwargs, problems)
    refuse(problems)
    return partial(code, **kwargs)


def _fits(factory: Any, offered: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Python's message about missing arguments, and the offered objects that it takes."""
    signature = inspect.signature(factory.func)
    given = {key: offered[key] for key in signature.parameters if key in offered and key not in factory.keywords}
    try:
        signature.bind(**factory.keywords, **given)
    except TypeError as error:
        return str(error), given
    return "", given


def function(name: str, part: Mapping[str, Any]) -> Any:
    """A callable rule: an instance, or a function with its settings bound. UserError if it does not take the arguments
    of its kind."""
    called_with, factory = KINDS[name].called_with, _factory(name, part, {})
    rule = make(name, part, {}) if isinstance(factory.func, type) else factory
    signature = inspect.signature(rule)
    try:
        signature.bind(*called_with)
    except TypeError as error:
        raise UserError(
            f"{name}._target_={part['_target_']} cannot be called as {name}({', '.join(called_with)}): {error}; "
            f"what else it needs is given as +{name}.<argument>=..."
        ) from error
    return rule


def fact_of(name: str, part: Mapping[str, Any], fact: str) -> Any:
    """A fact of a part's class or function (`facts.facts`). None if it has no such fact or cannot be made, which
    is refused elsewhere."""
    with suppress(UserError):
        return getattr(_factory(name, part, {}).func, fact, None)
    return None


def engine_parts(parts: Mapping[str, Any], offered: Mapping[str, Any], early: bool = False) -> dict[str, Any]:
    """Sampler, scheduler, predictor and sparsity. UserError if they do not work together or with the engine.

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
    """Conflicts among the parts that could be built."""
    if isinstance(built.get("predictor"), NoPredictor) and "scheduler" in built and built["scheduler"].needs_lengths:
        scheduler, predictor = (choice_of(name, parts[name]) for name in ("scheduler", "predictor"))
        others = ", ".join(name for name in choices("predictor") if name != predictor)
        yield (
            f"scheduler={scheduler} orders by predicted length, but predictor={predictor}; choose predictor={others}"
        )
    yield from refused_by("engine", parts["engine"], built)
    if INNER in parts["engine"]:
        yield from refused_by("engine", inner_engine(parts["engine"]), built)


def refused_by(name: str, part: Mapping[str, Any], built: Mapping[str, Any]) -> Iterator[str]:
    """Problems that a part's own `refuses`, if it has one, finds in its settings before it is made."""
    factory = _factory(name, part, {})
    if hasattr(factory.func, "refuses"):
        asked = inspect.signature(factory.func.refuses).parameters
        known = {**factory.keywords, **built}
        if asked.keys() <= known.keys():
            with own_code_unless_ours(f"{name}._target_={part['_target_']}: refuses", factory.func):
                found = [*factory.func.refuses(**{word: known[word] for word in asked})]
            yield from found


def inner_engine(part: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the engine of an engine's workers. UserError for an unknown one."""
    inner, known = part[INNER], [name for name in choices("engine") if INNER not in shipped("engine", name)]
    if inner not in known:
        raise UserError(f"engine.{INNER}={inner} must be one of {', '.join(known)}{closest(str(inner), known)}")
    return shipped("engine", inner) | dict(part.get("options") or {})


def says(parts: Mapping[str, Mapping[str, Any]], group: str, fact: str) -> Any:
    """As `facts.Others.says`; of an engine of workers what these say where it says nothing."""
    part = parts[group]
    said = fact_of(group, part, fact)
    return fact_of(group, inner_engine(part), fact) if said is None and INNER in part else said


@dataclass(frozen=True)
class OwnLoss:
    """Makes a plain function a `Loss`: whether it needs a reference is an attribute of the function or class, by
    default False."""

    inner: Callable[..., LossOutput]

    @property
    def needs_reference(self) -> bool:
        said = self.inner.func if isinstance(self.inner, partial) else self.inner
        return bool(getattr(said, "needs_reference", False))

    def __call__(self, logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        return self.inner(logprobs, batch, totals)


def rules_of(parts: Mapping[str, Mapping[str, Any]]) -> Rules:
    """The rules of a run, untried. UserError lists all that cannot be made."""
    made: dict[str, Any] = {}
    problems: list[str] = []
    for name in RULES:
        with gathered(problems):
            made[name] = rule_of(name, parts[name])
    refuse(problems)
    return Rules(**made)


def rule_of(name: str, part: Mapping[str, Any]) -> Any:
    """A rule, untried. UserError if it cannot be made."""
    if not is_function(name):
        return make(name, part, {})
    rule = function(name, part)
    return OwnLoss(rule) if KINDS[name].protocol is Loss and not isinstance(rule, Loss) else rule
