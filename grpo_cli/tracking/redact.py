"""Hides what looks like a secret by its name, value or form."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"
_SECRET_KEY = re.compile(
    r"(^|[-_])((api|access|private|secret)[-_]?key|secret|password|passwd|passphrase|credentials?|token)$", re.I
)
_SECRET_VALUE = re.compile(r"(hf_|sk-|ghp_|wandb_v1_)[A-Za-z0-9_-]{20,}|://[^/\s:@]+:[^/\s@]+@")


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with everything that looks like a secret replaced by "<hidden>".

    Hidden are strings under a key named like a secret (`api_key`, `hf_token`, `password`), strings that contain the
    value of an environment variable named like one, and strings that look like an access token or a URL with a
    password. Numbers are kept, whatever their key (`max_token=5`).
    """
    known = _known_secrets()
    return {str(key): _clean(str(key), value, known) for key, value in config.items()}


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """The same for a command line: in `key=value` the value is hidden, any other argument as a whole."""
    known, cleaned = _known_secrets(), []
    for word in arguments:
        key, equals, value = word.partition("=")
        name = key.rpartition(".")[2].lstrip("+")
        cleaned.append(f"{key}={_clean(name, value, known)}" if equals else _clean("", word, known))
    return cleaned


def _known_secrets() -> list[str]:
    return [value for name, value in os.environ.items() if _SECRET_KEY.search(name) and len(value) >= 8]


def _clean(key: str, value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _clean(str(name), item, known) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(key, item, known) for item in value]
    if isinstance(value, str) and (
        _SECRET_KEY.search(key) or _SECRET_VALUE.search(value) or any(secret in value for secret in known)
    ):
        return HIDDEN
    return value
