"""Reads plain values with pydantic: strictly, all errors at once, each with its dotted key."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from grpo_cli.config.overrides import leaves
from grpo_cli.settings import STRICT
from grpo_cli.support.errors import closest, refuse
from grpo_cli.support.formatting import shown


def read(kind: Any, values: Any, cfg: DictConfig | None = None, key: str = "") -> Any:
    """Return the values as this type. UserError lists all that are wrong.

    A setting that only follows a wrong one, such as `m=${n}` in `cfg`, gets no line of its own."""
    config = None if dataclasses.is_dataclass(kind) else STRICT
    try:
        return TypeAdapter(kind, config=config).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        wrong: dict[str, list[ErrorDetails]] = {}
        for one in error.errors(include_url=False):
            wrong.setdefault(_key(one["loc"], values, key), []).append(one)
    known = sorted(leaves(key, values).keys() - wrong.keys())
    found = {name: _line(name, errors, known) for name, errors in wrong.items()}
    follow = [name for name in found if cfg is not None and _follows(cfg, name)]
    refuse([line for name, line in found.items() if name not in follow or len(follow) == len(found)])


def _follows(cfg: DictConfig, key: str) -> bool:
    parent, name = OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg, key.rpartition(".")[2]
    return isinstance(parent, DictConfig) and name in parent and OmegaConf.is_interpolation(parent, name)


def _key(place: Sequence[str | int], values: Any, key: str) -> str:
    """Return the dotted key of a place in the values, without pydantic's names of the members of a union."""
    for word in place:
        if isinstance(values, dict) and (word in values or word == place[-1]):
            key, values = (f"{key}.{word}" if key else str(word)), values.get(word)
        elif isinstance(values, list) and isinstance(word, int):
            key, values = f"{key}[{word}]", values[word] if word < len(values) else None
    return key.removeprefix("parts.")


def _line(key: str, errors: Sequence[ErrorDetails], known: Sequence[str]) -> str:
    """Return one sentence about a wrong value, in pydantic's words, whatever number of types it could have."""
    value, types = errors[0]["input"], [error["type"] for error in errors]
    if "unexpected_keyword_argument" in types:
        return f"{key} is not a setting{closest(key, known)}"
    if "missing" in types:
        return f"{key} is missing from the configuration"
    if value == "???":
        return f"{key} has no value; give {key}=..."
    ranged = [error for error in errors if set(error.get("ctx", ())) & {"ge", "gt", "le", "lt"}]
    reasons = dict.fromkeys(error["msg"].partition(" should ")[2] or f"be {error['msg']}" for error in ranged or errors)
    words = [word for error in errors for word in re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", ""))]
    return f"{key}={shown(value):.200} must {' or '.join(reasons)}{closest(str(value), words)}"
