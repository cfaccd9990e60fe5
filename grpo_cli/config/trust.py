"""Checks what a recorded run names: no code runs that is neither a choice of grpo_cli nor in the current directory.

A run folder is untrusted input. Settings that name other code, a file or a machine whose answers are believed, or that
read the environment, have to be typed again on this command line, unless they have a value of `conf/`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException

from grpo_cli.config.choices import choices, groups_of, read_choice
from grpo_cli.config.overrides import key_of
from grpo_cli.support.errors import own_code, refuse
from grpo_cli.support.formatting import plain, shown

_GROUPS = {*groups_of("train"), *groups_of("eval")}
_OF_A_SWEEP = r"hydra[./](launcher|sweeper)(\.[a-z]\w*)?"
# What may only be a word, not a path; only a file below the current directory; only code of it; only a number.
_WORD = re.compile(rf"{'|'.join(_GROUPS)}|{_OF_A_SWEEP}")
_FILE = re.compile(r"task\.(judge\.prompt|(eval_)?path)|train\.warmup_path")
_CODE = re.compile(rf"(?!{_OF_A_SWEEP}$)hydra\W.*|.*(\._|@).*|.*\.trust_remote_code")
_NUMBER = re.compile(
    r"logger\.(?!(name|group|tags|mode)\b).*|task\.judge\.(key|base_url)|engine\.(address|options\..*)"
)
_CALLED = ("task.reward", "task.environment", "task.tools")  # module:function, or a name of ours


def taken(words: Sequence[str], typed: Sequence[str], folder: Path) -> list[str]:
    """Return a recorded sweep's overrides that may be composed. UserError for foreign ones that are not typed again."""
    settings = [(key_of(word), _value(word)) for word in words]
    foreign = refuse_foreign(settings, list(map(key_of, typed)), folder)
    return [word for word, one in zip(words, settings, strict=True) if one not in foreign or word in typed]


def refuse_foreign(
    settings: Sequence[tuple[str, Any]], typed: Sequence[str], folder: Path
) -> Sequence[tuple[str, Any]]:
    """Return the recorded settings that are foreign. UserError for those of which neither the key nor a group above it
    is typed."""
    foreign = [(key, value) for key, value in settings if is_foreign(key, value, folder)]
    refuse(
        [
            f"{key}={plain(shown(value))} is not taken from {plain(folder)}; if you trust it, type it again"
            for key, value in foreign
            if not any(f"{key}.".startswith(f"{word}.") for word in typed)
        ]
    )
    return foreign


def is_foreign(key: str, value: Any, folder: Path) -> bool:
    """Return True if a setting of the run in `folder` is dangerous, and neither a value of `conf/` nor found here."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
        return any(is_foreign(key if name is None else f"{key}.{name}", item, folder) for name, item in items)
    group, _, name = key.partition(".")
    of_conf = [read_choice(group, choice).values.get(name) for choice in choices(group)] if group in _GROUPS else []
    if value in (None, False, *of_conf):
        return False
    text = str(value)
    if _WORD.fullmatch(key):
        return not re.fullmatch(r"\w[\w-]*", text)
    if _FILE.fullmatch(key):
        return not text.startswith("hub:") and not Path(text).expanduser().resolve().is_relative_to(
            Path.cwd().resolve()
        )
    if _CODE.fullmatch(key) or (key in _CALLED and ":" in text):
        module, _, names = text.rpartition(":" if ":" in text else ".")
        return not all(_is_here(module, one.strip(), folder) for one in names.split(","))
    return isinstance(value, str) and bool(_NUMBER.fullmatch(key) or re.search(r"\$\{[^}]*:", text))


def _is_here(module: str, name: str, folder: Path) -> bool:
    """Return True if a module of the current directory that did not come with the run defines this name. Imports it,
    since a name may be imported from elsewhere."""
    top, here, run = module.partition(".")[0], Path.cwd().resolve(), folder.resolve()
    with own_code(f"the module {module}"), suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        file = Path((spec and spec.origin) or here).resolve()
        came_along = file.is_relative_to(run) or (file.parent != here and run.is_relative_to(file.parent))
        if file in (here / f"{top}.py", here / top / "__init__.py") and not came_along:
            found = getattr(importlib.import_module(module), name, None)
            return str(getattr(found, "__module__", None)).partition(".")[0] == top
    return False


def _value(word: str) -> Any:
    """Return the value of an override, the values of a sweep, or what is foreign for a word that cannot be read."""
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return {"_": word}
    return [getattr(one, "text", one) for one in value.list] if isinstance(value, ChoiceSweep) else value
