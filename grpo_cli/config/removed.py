"""Answers whoever types a setting or choice that is gone (`removed.yaml`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

LAST = "3d24e82"
OFF = ("none", "null", "false", "0", "0.0", "[]")  # a recorded run that has one of these goes on without it


@functools.cache
def _reasons() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


def removed(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word that sets something removed, with one sentence on why."""
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        for name in (*(f"{key}={choice}" for choice in value.split(",")), key, key.partition(".")[0]):
            if name in _reasons():
                yield word, f"{name} was removed: {_reasons()[name]}; the last commit that has it is {LAST}"
                break
