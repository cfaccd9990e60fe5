"""What is accepted from a recorded run that is evaluated or resumed: its folder is untrusted, a checksum no signature.

Its settings are taken as values. What names code, reads the environment or writes elsewhere has to be typed on this
command line too, except for the parts of grpo_cli and those of modules in the current directory.
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
from urllib.parse import urlsplit

from grpo_cli.config.choices import choices, config_dir, parts_of, shipped
from grpo_cli.support.errors import own_code, refuse
from grpo_cli.support.formatting import plain

TARGET = "_target_"
# Settings that name a user's own code as module:name, some of them several names.
OWN = ("task.reward", "task.environment", "task.tools")
# Files that are read, whose content reaches prompts, records and judges.
_READ = (
    *(f"task.{name}path" for name in ("", "eval_", "default_", "default_eval_", "few_shot_")),
    *("task.judge.prompt", "train.warmup_path", "train.history"),
)
_KEY = re.compile(r"[\w-]+(\.[\w-]+)*")
_CHOICE = re.compile(r"\w[\w-]*")
_RESERVED = re.compile(r"_\w+_")  # Hydra's keywords for building a part
_FOLDER_OF_A_JOB = re.compile(r"([\w,=-]|\$\{\w+(\.\w+)*\})+")
# Numeric and boolean settings of a sweep's launcher and sweeper, but not `params`, which become overrides.
_OF_A_SWEEP = re.compile(r"hydra\.(launcher|sweeper)\.(?!params\b)[\w.-]+")


@dataclass(frozen=True)
class _Trusted:
    """Modules whose code may run: those named on the command line, or in the current directory but not in the run's
    `folder`."""

    named: frozenset[str]
    folder: Path

    def has(self, module: str) -> bool:
        top = module.partition(".")[0]
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):  # not a module name, or a module without a spec
            spec = None
        if module in self.named or spec is None or spec.origin is None or not Path(spec.origin).is_file():
            return module in self.named
        file, here, run = Path(spec.origin).resolve(), Path.cwd().resolve(), self.folder.resolve()
        if file == (here / top / "__init__.py").resolve():  # a package that contains a run may have come with it
            return not (file.is_relative_to(run) or run.is_relative_to(file.parent))
        return file == (here / f"{top}.py").resolve() and not file.is_relative_to(run)


def taken(words: Sequence[str], typed: Sequence[str], folder: Path) -> list[str]:
    """The overrides of a recorded run that may be composed; those `typed` on this command line replace them. UserError
    lists all that are refused, and the way out.
    """
    said = [(str(found.key_or_group), found.value()) for word in typed if (found := _parsed(word)) is not None]
    here, keys = _Trusted(frozenset(_modules(said)), folder), {key for key, _ in said}
    kept, refused = [], []
    with _path_of_own_modules():
        for word in words:
            override = _parsed(word)
            key = "" if override is None else str(override.key_or_group)
            again = override is not None and (key, override.value()) in said
            reasons = [] if again else [*_objections(word, override, here)]
            if not reasons:
                kept.append(word)
            elif not {key, key.partition(".")[0]} & keys:
                refused += [f"{plain(word)} is not taken from a recorded run: {reason}" for reason in reasons]
    refuse([f"{line}; if you trust it, type it on this command line as well" for line in refused])
    return kept


def not_taken(words: Sequence[str], folder: Path) -> list[str]:
    """The overrides that have to be typed again to resume the run."""
    here = _Trusted(frozenset(), folder)
    with _path_of_own_modules():
        return [word for word in words if any(_objections(word, _parsed(word), here))]


def without_resolvers(values: Any, found: dict[str, str], key: str = "") -> Any:
    """A configuration with null in place of strings that call a resolver, such as `${oc.env:HOME}`, which are added to
    `found` by key."""
    if isinstance(values, Mapping):
        return {k: without_resolvers(value, found, f"{key}.{k}" if key else str(k)) for k, value in values.items()}
    if isinstance(values, list):
        return [without_resolvers(item, found, key) for item in values]
    if not (isinstance(values, str) and _calls_a_resolver(values)):
        return values
    found[key] = values
    return None


def _calls_a_resolver(text: str) -> bool:
    """Conservative: also true for a reference such as `${n}` before a colon."""
    return ":" in text.partition("${")[2]


def _parsed(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _modules(said: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """The modules that overrides name."""
    for key, value in said:
        if key.endswith(f".{TARGET}") and isinstance(value, str):
            yield value.rpartition(".")[0]
        elif key in OWN and isinstance(value, str):
            yield value.partition(":")[0]


def _objections(word: str, override: Any, here: _Trusted) -> Iterator[str]:
    """Why an override is not taken from a recorded run."""
    if override is None:
        yield "it cannot be read"
        return
    key = str(override.key_or_group)
    group, values = key.partition(".")[0], _values(override)
    of_a_group = key in ("hydra/launcher", "hydra/sweeper") or (group != "hydra" and (config_dir() / key).is_dir())
    if override.package is not None or not (_KEY.fullmatch(key) or of_a_group):
        yield "it is no setting of a run"
    elif of_a_group:
        if any(value is not None and not (isinstance(value, str) and _CHOICE.fullmatch(value)) for value in values):
            yield "it is no choice of a group by its name"
    elif group == "hydra":
        if key == "hydra.sweep.subdir":
            harmless = all(_FOLDER_OF_A_JOB.fullmatch(str(value)) for value in values)
        else:
            built = any(_RESERVED.fullmatch(part) for part in key.split("."))
            harmless = not built and _OF_A_SWEEP.fullmatch(key) is not None and all(map(_is_number, values))
        if not harmless:
            yield "it is Hydra's, which may write and import what it names"
    elif _calls_a_resolver(word):
        yield "it calls a resolver, which may read the environment"
    else:
        for value in values:
            yield from _objections_to(key, group, value, here)


def _values(override: Any) -> list[Any]:
    """The values of an override, several in a sweep. A range sweep stands for numbers."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob

    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [override._convert_value(item) for item in value.list]
    return ["any"] if isinstance(value, Glob) else [0] if override.is_sweep_override() else [value]


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_number(item) for item in value)
    return value is None or isinstance(value, bool | int | float)


def _objections_to(key: str, group: str, value: Any, here: _Trusted) -> Iterator[str]:
    words = [*key.split("."), *_names(value)]
    if any(_RESERVED.fullmatch(word) for word in words if word != TARGET) or words.count(TARGET) > 1:
        yield "it says how a part is built, which its own file does"
    elif TARGET in words:
        if key != f"{group}.{TARGET}":
            yield "it names code inside of a part"
        else:
            yield from _against_code(group, *str(value).rpartition(".")[::2], here)
    elif key in OWN and ":" in str(value):
        module, _, names = str(value).partition(":")
        for name in names.split(","):
            yield from _against_code(key, module, name.strip(), here)
    elif key == "run_dir" and Path(str(value)).resolve() != here.folder.resolve():
        yield "it writes elsewhere than into the folder of the run"
    elif key == "model.trust_remote_code" and value is not False:
        yield "it runs the code that comes with a model"
    elif key == "engine.address" and value not in (None, "auto"):
        yield "it sends the run to another machine, whose answers are believed"
    elif key == "task.judge" or (key == "task.judge.base_url" and not _is_here(value)):
        yield "it sends replies to another machine, whose answers are believed"
    elif key == "task.judge.key" and value is not None:
        yield "it reads the environment"
    elif group == "logger" and not (_is_number(value) or _of_a_logger(key.partition(".")[2], value)):
        yield "it says where the run's records are sent"
    elif key in _READ and value is not None and not _is_below_here(str(value)):
        yield "it reads a file outside of the current directory"
    elif isinstance(value, Mapping) and not key.startswith("engine.options"):
        for name, item in value.items():
            yield from _objections_to(f"{key}.{name}", group, item, here)
    elif key.startswith("engine.options") and (odd := [*_unknown_options(key, value)]):
        yield f"it hands {', '.join(odd)} to another program"


def _of_a_logger(name: str, value: Any) -> bool:
    """Whether a logger's setting names the run, or is as shipped, and so no place of a stranger's."""
    return name in ("name", "group", "tags", "mode") or value in [
        shipped("logger", one).get(name) for one in choices("logger")
    ]


def _is_below_here(path: str) -> bool:
    """Whether a path, its links followed, is below the current directory, or names a data set of the hub."""
    return path.startswith("hub:") or Path(path).expanduser().resolve().is_relative_to(Path.cwd().resolve())


def _is_here(address: Any) -> bool:
    """Whether a server has an address of this machine only."""
    try:
        return address is None or urlsplit(str(address)).hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False


def _names(value: Any) -> Iterator[str]:
    """All keys in a nested value."""
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _names(item)
    yield from map(str, value if isinstance(value, Mapping) else ())


def _unknown_options(key: str, value: Any) -> Iterator[str]:
    """Options of an engine that are neither numbers nor settings of one of ours."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _unknown_options(f"{key}.{name}", item)
        return
    ours = {name for engine in choices("engine") for name in shipped("engine", engine)}
    if key.rpartition(".")[2] not in ours - {"options", "address", TARGET}:
        if isinstance(value, bool) or not _is_number(value):
            yield key


def _against_code(group: str, module: str, name: str, here: _Trusted) -> Iterator[str]:
    """Why a class or function is not accepted as a part of the group. Imports the user's own module."""
    if group not in (*parts_of("train"), *parts_of("eval"), *OWN):
        yield f"{group} is no group of parts"
    elif module.startswith("grpo_cli."):
        if group in OWN or f"{module}.{name}" not in {shipped(group, one).get(TARGET) for one in choices(group)}:
            yield f"{module}.{name} is none of the choices of {group}"
    elif not module or not here.has(module):
        yield f"the module {module or '(none)'} is neither in the current directory nor named on this command line"
    else:
        with own_code(f"{group}: the module {module}"):
            try:
                found = vars(importlib.import_module(module)).get(name)
            except ImportError as error:
                yield f"{module} cannot be imported: {error}"
                return
        if not (inspect.isclass(found) or inspect.isfunction(found)):
            yield f"{module} has no class and no function {name}"
        elif found.__module__ != module:  # imported there: judge it by its origin
            yield from _against_code(group, found.__module__, found.__qualname__, here)
        elif group not in OWN and (asked := _lacking(group, found)):
            yield f"{module}.{name} is not what {group} takes: {asked}"


def _lacking(group: str, found: Any) -> str:
    """What the group requires of a class or function, if this one does not satisfy it."""
    from grpo_cli.config.kinds import KINDS, is_function  # loads torch, as the part does
    from grpo_cli.engine.kv.eviction import Budget, Dense

    if group == "sparsity":
        return "" if inspect.isclass(found) and issubclass(found, Budget | Dense) else "a subclass of Budget"
    if inspect.isfunction(found) and is_function(group):  # its signature is checked before it is called
        return ""
    kind = KINDS[group]
    defined = {name for base in found.__mro__[:-1] for name in vars(base)} if inspect.isclass(found) else set()
    return "" if defined >= {*kind.methods} else f"a class with {', '.join(kind.methods)}"


@contextmanager
def _path_of_own_modules() -> Iterator[None]:
    """Appends the current directory to the path, as when a part is built."""
    before = list(sys.path)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
