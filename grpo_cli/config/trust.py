"""Checks what a recorded run names: no code runs that is neither a choice of grpo_cli nor in the current directory.

A run folder is untrusted input. Settings that name other code, or a machine whose answers are believed, have to be
typed again on this command line.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from grpo_cli.config.choices import choices, config_dir, shipped
from grpo_cli.config.overrides import key_of
from grpo_cli.support.errors import own_code, refuse
from grpo_cli.support.formatting import plain, shown

OWN = ("task.reward", "task.environment", "task.tools")  # settings that name a user's own code as module:name
_CHOICE = re.compile(r"\w[\w-]*|")  # a path would be another file's
_OF_A_SWEEP = re.compile(r"hydra[./](launcher|sweeper)(\.[a-z]\w*)?")
# Where a run writes, whose answers it believes, and what it reveals of the environment.
_TYPED_AGAIN = re.compile(r"run_dir|engine\.address|engine\.options\..*|task\.judge\.(key|base_url)")
# Files that are read, whose content reaches prompts, records and judges.
_READ = ("task.judge.prompt", "train.warmup_path", "task.path", "task.eval_path")
_HERE = re.compile(r"https?://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?(/|$)")  # a server on this machine
_OF_A_RUN = ("name", "group", "tags", "mode")  # settings of a logger that say nothing of where records are sent


def taken(words: Sequence[str], typed: Sequence[str], folder: Path) -> list[str]:
    """Return a recorded sweep's overrides that may be composed. UserError for foreign ones that are not typed again."""
    foreign = {word: _value(word) for word in words if is_foreign(key_of(word), _value(word), folder)}
    refuse_foreign({key_of(word): value for word, value in foreign.items()}, list(map(key_of, typed)), folder)
    return [word for word in words if word not in foreign or word in typed]


def refuse_foreign(values: Mapping[str, Any], typed: Sequence[str], folder: Path) -> None:
    """UserError for each recorded setting that is foreign, unless its key or a group above it is typed."""
    refuse(
        [
            f"{key}={plain(shown(value))} is not taken from {plain(folder)}; if you trust it, type it again"
            for key, value in values.items()
            if not any(f"{key}.".startswith(f"{word}.") for word in typed) and is_foreign(key, value, folder)
        ]
    )


def _value(word: str) -> Any:
    """Return the value of an override, the list of values of a sweep, or {"_": word} for what cannot be read."""
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(word)
        if override.package is not None or not override.is_sweep_override():
            return {"_": word} if override.package is not None else override.value()
        each = override.sweep_string_iterator() if override.is_choice_sweep() else ()
        return [parser.parse_override(f"key={value}").value() for value in each]
    except HydraException:
        return {"_": word}


def is_foreign(key: str, value: Any, folder: Path) -> bool:
    """Return True if a setting of the run in `folder` names code of others, a file elsewhere or a place to send records
    or replies to, or calls a resolver."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
        return any(is_foreign(key if name is None else f"{key}.{name}", item, folder) for name, item in items)
    (group, *inner), text = key.lstrip(".").split("."), str(value)
    name = inner[-1] if inner else group
    if group.startswith("hydra"):
        return not (_OF_A_SWEEP.fullmatch(key) and _CHOICE.fullmatch(text))
    if (config_dir() / key).is_dir():
        return not _CHOICE.fullmatch(text)
    if name == "_target_" or (key in OWN and ":" in text):
        module, _, names = text.rpartition(".") if name == "_target_" else text.partition(":")
        ours = len(inner) == 1 and text in _shipped(group, name)
        return not (ours or all(_is_here(module, one.strip(), folder) for one in names.split(",")))
    if any(part.startswith("_") for part in inner) or ":" in text.partition("${")[2]:
        return True
    if value in (None, "auto") or isinstance(value, int | float):
        return name == "trust_remote_code" and bool(value)
    if key in _READ:
        return not (text.startswith("hub:") or Path(text).expanduser().resolve().is_relative_to(Path.cwd().resolve()))
    if group == "logger":
        return name not in _OF_A_RUN and value not in _shipped(group, name)
    if name == "base_url" and _HERE.match(text):
        return False
    return name == "trust_remote_code" or bool(_TYPED_AGAIN.fullmatch(key))


def _shipped(group: str, name: str) -> list[Any]:
    return [shipped(group, choice).get(name) for choice in choices(group)]


def _is_here(module: str, name: str, folder: Path) -> bool:
    """Return True if a module of the current directory that did not come with the run defines this name. Imports it."""
    top, here, run = module.partition(".")[0], Path.cwd().resolve(), folder.resolve()
    with own_code(f"the module {module}"), suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        file = Path((spec and spec.origin) or here).resolve()
        came_along = file.is_relative_to(run) or (file.parent != here and run.is_relative_to(file.parent))
        if file in (here / f"{top}.py", here / top / "__init__.py") and not came_along:
            found = getattr(importlib.import_module(module), name, None)
            return str(getattr(found, "__module__", None)).partition(".")[0] == top
    return False
