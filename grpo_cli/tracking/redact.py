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
_SECRET_VALUE = re.compile(r"(?<![A-Za-z0-9_])(hf_|sk-|ghp_|wandb_v1_)[A-Za-z0-9_-]{20,}|://[^/\s:@]+:[^/\s@]+@")


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a copy of a config with "<hidden>" in place of strings under a key named like a secret (`hf_token`), that
    contain the value of an environment variable named like one, or that look like a token or a URL with a password."""
    if isinstance(value, Mapping):
        return {str(name): without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, key) for item in value]
    if not isinstance(value, str):
        return value
    known = (text for name, text in os.environ.items() if _SECRET_KEY.search(name) and len(text) >= 8)
    secret = _SECRET_KEY.search(key) or _SECRET_VALUE.search(value) or any(text in value for text in known)
    return HIDDEN if secret else value


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a command line likewise: in `key=value` the value is hidden, any other argument as a whole."""
    pairs = [word.partition("=") for word in arguments]
    return [
        f"{key}={without_secrets(value, key.rpartition('.')[2].lstrip('+'))}" if equals else without_secrets(key)
        for key, equals, value in pairs
    ]
