"""What a recorded run may ask for when it is evaluated or goes on. Its folder may be anybody's, its checksum no
signature.

Its settings are taken as values. What names code, reads the environment or writes elsewhere has to stand on this
command line as well, but for the parts of grpo_cli and those of modules in the current directory.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.config.choices import choices, config_dir, parts_of, shipped
from grpo_cli.support.errors import own_code, refuse
from grpo_cli.support.formatting import plain

TARGET, REWARD = "_target_", "task.reward"
_KEY = re.compile(r"[\w-]+(\.[\w-]+)*")
_CHOICE = re.compile(r"\w[\w-]*")
_RESERVED = re.compile(r"_\w+_")  # the words by which Hydra is told how to build a part
# What a sweep is told about who runs its jobs, where it is a number, true or false, and of which no sweeper makes
# overrides.
_FOLDER_OF_A_JOB = re.compile(r"([\w,=-]|\$\{\w+(\.\w+)*\})+")
_OF_A_SWEEP = re.compile(r"hydra\.(launcher|sweeper)\.(?!params\b)[\w.-]+")


@dataclass(frozen=True)
class _Here:
    """Whose code is trusted: the modules that the command line names, and what lies in the current directory, but not
    in the folder of the run."""

    named: frozenset[str]
    folder: Path

    def has(self, module: str) -> bool:
        return module in self.named or self._found(module.partition(".")[0])

    def _found(self, top: str) -> bool:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):  # no name of a module, or one that was made without a file
            return False
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            return False
        file, here = Path(spec.origin).resolve(), Path.cwd()
        run, package = self.folder.resolve(), (here / top / "__init__.py").resolve()
        if file == package:  # what has a run in it may have come with it
            return not (package.is_relative_to(run) or run.is_relative_to(package.parent))
        return file == (here / f"{top}.py").resolve() and not file.is_relative_to(run)


def taken(words: Sequence[str], typed: Sequence[str], folder: Path) -> list[str]:
    """The overrides of a recorded run that may be composed. What is `typed` on this command line counts in their place.

    UserError names all that are not taken, and the way out.
    """
    said = [_said(found) for word in typed if (found := _parsed(word)) is not None]
    here = _Here(frozenset(_modules(said)), folder)
    kept, refused = [], []
    with _path_of_own_modules():
        for word in words:
            override = _parsed(word)
            key, value = ("", None) if override is None else _said(override)
            found = [] if (key, value) in said else [*_objections(word, override, here)]
            if not found:
                kept.append(word)
            elif not {key, key.partition(".")[0]} & dict(said).keys():
                refused += [f"{plain(word)} is not taken from a recorded run: {reason}" for reason in found]
    refuse([f"{line}; if you trust it, type it on this command line as well" for line in refused])
    return kept


def not_taken(words: Sequence[str], folder: Path) -> list[str]:
    """Those of the overrides that have to be typed again when the run goes on."""
    here = _Here(frozenset(), folder)
    with _path_of_own_modules():
        return [word for word in words if any(_objections(word, _parsed(word), here))]


def resolving(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The texts in a configuration that call a resolver, such as `${oc.env:HOME}`, by their keys."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from resolving(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for item in values:
            yield from ((key, text) for _, text in resolving(item, key))
    elif isinstance(values, str) and _calls_a_resolver(values):
        yield key, values


def without_resolvers(values: Any) -> Any:
    """A configuration with nothing in the place of those texts."""
    if isinstance(values, Mapping):
        return {name: without_resolvers(value) for name, value in values.items()}
    if isinstance(values, list):
        return [without_resolvers(item) for item in values]
    return None if isinstance(values, str) and _calls_a_resolver(values) else values


def _calls_a_resolver(text: str) -> bool:
    """Also some that do not: a reference such as `${n}` before a colon."""
    return ":" in text.partition("${")[2]


def _parsed(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _said(override: Any) -> tuple[str, Any]:
    return str(override.key_or_group), override.value()


def _modules(values: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """The modules that overrides name."""
    for key, value in values:
        if key.endswith(f".{TARGET}") and isinstance(value, str):
            yield value.rpartition(".")[0]
        elif key == REWARD and isinstance(value, str):
            yield value.partition(":")[0]


def _objections(word: str, override: Any, here: _Here) -> Iterator[str]:
    """Why an override is not taken from a recorded run."""
    if override is None:
        yield "it cannot be read"
        return
    key, group = str(override.key_or_group), str(override.key_or_group).partition(".")[0]
    values = _each(override)
    by_whom = key in ("hydra/launcher", "hydra/sweeper")
    if override.package is not None or not (_KEY.fullmatch(key) or by_whom):
        yield "it is no setting of a run"
    elif by_whom or (key == group != "hydra" and (config_dir() / group).is_dir()):
        if any(value is not None and not (isinstance(value, str) and _CHOICE.fullmatch(value)) for value in values):
            yield "it is no choice of a group by its name"
    elif group == "hydra":
        in_place = key == "hydra.sweep.subdir" and all(_FOLDER_OF_A_JOB.fullmatch(str(value)) for value in values)
        built = any(_RESERVED.fullmatch(word) for word in key.split("."))
        if not in_place and (built or not (_OF_A_SWEEP.fullmatch(key) and all(map(_is_number, values)))):
            yield "it is Hydra's, which may write and import what it names"
    elif _calls_a_resolver(word):
        yield "it calls a resolver, which may read the environment"
    else:
        for value in values:
            yield from _objections_to(key, group, value, here)


def _each(override: Any) -> list[Any]:
    """The values of an override, several in a sweep. Those that are drawn from a range are numbers."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString, Sweep

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(bare(name)): bare(item) for name, item in value.items()}
        if isinstance(value, list):
            return [bare(item) for item in value]
        return value.text if isinstance(value, QuotedString) else "" if isinstance(value, Glob) else value

    value = override._value
    if isinstance(value, ChoiceSweep):
        return [bare(item) for item in value.list]
    return [0] if isinstance(value, Sweep) else ["any"] if isinstance(value, Glob) else [bare(value)]


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_number(item) for item in value)
    return value is None or isinstance(value, bool | int | float)


def _objections_to(key: str, group: str, value: Any, here: _Here) -> Iterator[str]:
    words = [*key.split("."), *_names(value)]
    if any(_RESERVED.fullmatch(word) for word in words if word != TARGET) or words.count(TARGET) > 1:
        yield "it says how a part is built, which its own file does"
    elif TARGET in words:
        if key != f"{group}.{TARGET}":
            yield "it names code inside of a part"
        else:
            yield from _against_target(group, str(value), here)
    elif key == REWARD and ":" in str(value):
        module, _, name = str(value).partition(":")
        yield from [*_against_module(module, here)] or _against_kind(REWARD, module, name, here)
    elif key == "run_dir" and Path(str(value)).resolve() != here.folder.resolve():
        yield "it writes elsewhere than into the folder of the run"
    elif key == "model.trust_remote_code" and value is not False:
        yield "it runs the code that comes with a model"
    elif key == "engine.address" and value not in (None, "auto"):
        yield "it sends the run to another machine, whose answers are believed"
    elif key.startswith("engine.options") and (odd := [*_unknown_options(key, value)]):
        yield f"it hands {', '.join(odd)} to another program"


def _names(value: Any) -> Iterator[str]:
    """The keys in a value, at any depth."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)


def _unknown_options(key: str, value: Any) -> Iterator[str]:
    """Options of an engine that are neither numbers nor settings of one of ours."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _unknown_options(f"{key}.{name}", item)
        return
    known = {name for engine in choices("engine") for name in shipped("engine", engine)} - {
        "options",
        "address",
        TARGET,
    }
    if key.rpartition(".")[2] not in known and (isinstance(value, bool) or not _is_number(value)):
        yield key


def _against_target(group: str, target: str, here: _Here) -> Iterator[str]:
    if group not in (*parts_of("train"), REWARD):
        yield f"{group} is no group of parts"
        return
    if target.startswith("grpo_cli."):
        if target not in {shipped(group, choice).get(TARGET) for choice in choices(group)}:
            yield f"{target} is none of the choices of {group}"
        return
    module, _, name = target.rpartition(".")
    yield from [*_against_module(module, here)] or _against_kind(group, module, name, here)


def _against_module(module: str, here: _Here) -> Iterator[str]:
    if not module or not here.has(module):
        yield f"the module {module or '(none)'} is neither in the current directory nor named on this command line"


def _against_kind(group: str, module: str, name: str, here: _Here) -> Iterator[str]:
    """What code of one's own is not, of what the group takes. Its module is imported."""
    with own_code(f"{group}: the module {module}"):
        try:
            found = vars(importlib.import_module(module)).get(name)
        except ImportError as error:
            yield f"{module} cannot be imported: {error}"
            return
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        yield f"{module} has no class and no function {name}"
    elif found.__module__ != module:  # it was imported there, and is judged by where it is from
        yield from _against_target(group, f"{found.__module__}.{found.__qualname__}", here)
    elif group != REWARD and not _is_of(group, found):
        yield f"{module}.{name} is not what {group} takes: {_asked_of(group)}"


def _is_of(group: str, found: Any) -> bool:
    """Whether a class or function can be a part of the group."""
    from grpo_cli.config.kinds import KINDS, is_function  # loads torch, as the part does

    if is_function(group):
        return _is_a_rule(KINDS[group].called_with, found)
    if not inspect.isclass(found):
        return False
    if group == "sparsity":
        from grpo_cli.engine.kv.eviction import Budget, Dense

        return issubclass(found, Budget | Dense)
    return group not in KINDS or all(callable(getattr(found, asked, None)) for asked in KINDS[group].methods)


def _is_a_rule(called_with: Sequence[str], found: Any) -> bool:
    if inspect.isclass(found):
        return any("__call__" in vars(base) for base in found.__mro__)
    parameters = inspect.signature(found).parameters.values()
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(by_place) >= len(called_with) or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _asked_of(group: str) -> str:
    from grpo_cli.config.kinds import KINDS, is_function

    if is_function(group):
        return f"{group}({', '.join(KINDS[group].called_with)})"
    return f"a class with {', '.join(KINDS[group].methods) if group in KINDS else 'what those of grpo_cli have'}"


@contextmanager
def _path_of_own_modules() -> Iterator[None]:
    """The current directory is looked into last, as it is when a part is built."""
    before = list(sys.path)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
