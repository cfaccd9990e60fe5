"""What TRL and verl call a setting, and what it is here (`elsewhere.yaml`): for "did you mean" and `grpo explain`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def rows() -> list[dict[str, Any]]:
    """Return our settings with the names in `trl` and `verl`."""
    return list(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


def meant_by(key: str) -> str | None:
    """Return our setting for a name of TRL or verl, which may have a prefix: `actor_rollout_ref.rollout.n`."""
    parts = key.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return next((row["ours"] for tail in tails for row in rows() if tail in row["trl"] + row["verl"]), None)
