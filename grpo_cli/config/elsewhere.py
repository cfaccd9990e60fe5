"""Names that are no settings here: what TRL and verl call one (`elsewhere.yaml`), and what is gone (`removed.yaml`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

LAST = "3d24e82"  # the last commit that has what is gone


@functools.cache
def _read(name: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def rows() -> list[dict[str, Any]]:
    """Return our settings with the names in `trl` and `verl`."""
    return list(_read("elsewhere.yaml"))


def meant_by(key: str) -> str | None:
    """Return our setting for a name of TRL or verl, which may have a prefix: `actor_rollout_ref.rollout.n`."""
    parts = key.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return next((row["ours"] for tail in tails for row in rows() if tail in row["trl"] + row["verl"]), None)


def removed(words: Sequence[str]) -> Iterator[str]:
    """Yield, for each word that sets something removed, one sentence on why."""
    reasons = _read("removed.yaml")
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        for name in (*(f"{key}={choice}" for choice in value.split(",")), key, key.partition(".")[0]):
            if name in reasons:
                yield f"{name} was removed: {reasons[name]}; the last commit that has it is {LAST}"
                break
