"""Checks what a recorded run names, since a run folder is untrusted input.

A user must type some settings again, unless they have a value of `conf/`: those that name code or files outside the
current directory, or configure Hydra, a tracker, a judge's server or an engine's library.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_cli.config.choices import choices, groups_of, read_choice
from grpo_cli.config.overrides import key_of, parsed
from grpo_cli.support.errors import own_code, refuse
from grpo_cli.support.formatting import plain, shown

_GROUPS = {*groups_of("train"), *groups_of("eval")}
# What may only name code of the current directory, what may only lead to below it, and what is always typed again:
# references that Hydra resolves by code are.
_CODE = re.compile(r"[^=]*(\._|@).*|task\.(reward|environment|tools)=.*:.*", re.S)
_FILE = re.compile(
    r"(task\.((eval_)?path|judge\.prompt)|train\.warmup_path|collector\.path|predictor\.lengths|advantage\.answers)=.*",
    re.S,
)
_TYPED = re.compile(
    r"(?!hydra(\.launcher\.(jobs|gpus)|/(launcher|sweeper))=[\w-]+\Z)hydra[./].*|engine\.(address|options).*"
    r"|logger\.(?!(name|group|tags|mode)=).*|task\.judge\.(key|base_url)=.*|.*\.trust_remote_code=.*"
    rf"|({'|'.join(_GROUPS)})=(?![\w-]+\Z).*|.*=.*(\$\{{[^}}]*:|\0).*",
    re.S,
)


def taken(words: Sequence[str], typed: Sequence[str], folder: Path) -> list[str]:
    """Return a recorded sweep's overrides that may be composed. UserError for foreign ones that are not typed again."""
    foreign = refuse_foreign([(key_of(word), parsed(word)) for word in words], map(key_of, typed), folder)
    return [word for word in words if key_of(word) not in foreign or word in typed]


def refuse_foreign(settings: Iterable[tuple[str, Any]], typed: Iterable[str], folder: Path) -> Sequence[str]:
    """Return the keys of foreign settings. UserError for those of which neither the key nor a group above is typed."""
    foreign, groups = [one for one in settings if is_foreign(*one, folder)], tuple(f"{key}." for key in typed)
    text = f"is not taken from {plain(folder)}; if you trust it, type it again"
    refuse([f"{key}={plain(shown(value))} {text}" for key, value in foreign if not f"{key}.".startswith(groups)])
    return [key for key, _ in foreign]


def is_foreign(key: str, value: Any, folder: Path) -> bool:
    """True if a setting of the run in `folder` is dangerous, and neither a value of `conf/` nor found here."""
    if isinstance(value, list):
        return any(is_foreign(key, item, folder) for item in value)
    if isinstance(value, Mapping):
        return any(is_foreign(f"{key}.{name}", item, folder) for name, item in value.items())
    group, _, name = key.partition(".")
    of_conf = [read_choice(group, choice).values.get(name) for choice in choices(group)] if group in _GROUPS else []
    word, text = f"{key}={value}", str(value)
    if value in (None, False, *of_conf):
        return False
    if _CODE.fullmatch(word):
        module, _, names = text.rpartition(":" if ":" in text else ".")
        return not all(_is_here(module, one.strip(), folder) for one in names.split(","))
    if _FILE.fullmatch(word) and not _TYPED.fullmatch(word):
        return not Path(os.path.realpath(os.path.expanduser(text))).is_relative_to(Path.cwd())
    return bool(_TYPED.fullmatch(word))


def _is_here(module: str, name: str, folder: Path) -> bool:
    """True if a module of the current directory that did not come with the run defines this name. Imports it."""
    top, here, run = module.partition(".")[0], Path.cwd(), folder.resolve()
    came_along = here.is_relative_to(run) or run.is_relative_to(here / top)
    with own_code(f"the module {module}"), suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
        file = Path((spec and spec.origin) or "").resolve()
        if file in (here / f"{top}.py", here / top / "__init__.py") and not came_along:
            found = getattr(importlib.import_module(module), name, None)
            return str(getattr(found, "__module__", None)).partition(".")[0] == top
    return False
