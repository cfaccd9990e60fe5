"""Reads plain values with pydantic: strictly, all errors at once, each with its dotted key."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from grpo_cli.config.overrides import leaves
from grpo_cli.settings import STRICT
from grpo_cli.support.errors import closest, refuse
from grpo_cli.support.formatting import shown

_LARGEST = {int: 2**64, float: 3.4e38}  # the largest seed and float32
_KINDS = {
    **{"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text"},
    **{"dict_type": "a group of settings", "dataclass_type": "a group of settings", "tuple_type": "a list"},
    **{"list_type": "a list", "is_sequence_of": "a list", "none_required": "null", "finite_number": "finite"},
    **{"greater_than_equal": "at least {ge}", "greater_than": "more than {gt}"},
    **{"less_than_equal": "at most {le}", "less_than": "less than {lt}", "string_too_short": "other than empty"},
    **{"literal_error": "one of {expected}", "one_of": "{listed}", "too_short": "longer", "too_long": "shorter"},
}


def read(kind: Any, values: Any, cfg: DictConfig | None = None, key: str = "") -> Any:
    """Return the values as this type. UserError lists all that are wrong.

    A setting that only follows a wrong one, such as `m=${n}` in `cfg`, gets no line of its own."""
    found = dict(_too_large(values, key))
    try:
        result = TypeAdapter(kind, config=None if dataclasses.is_dataclass(kind) else STRICT).validate_json(
            json.dumps(values, default=str)
        )
    except ValidationError as error:
        wrong: dict[str, list[ErrorDetails]] = {}
        for one in error.errors(include_url=False):
            wrong.setdefault(_key(one["loc"], values, key), []).append(one)
        known = sorted(leaves(key, values).keys() - wrong.keys())
        found = {name: _line(name, errors, known) for name, errors in wrong.items()} | found
    follow = [name for name in found if cfg is not None and _follows(cfg, name)]
    refuse([line for name, line in found.items() if name not in follow or len(follow) == len(found)])
    return result


def _follows(cfg: DictConfig, key: str) -> bool:
    parent, name = OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg, key.rpartition(".")[2]
    return isinstance(parent, DictConfig) and name in parent and OmegaConf.is_interpolation(parent, name)


def _too_large(values: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and a line for each number that neither a seed nor float32 can be."""
    for name, value in leaves(key, values).items():
        for one in value if isinstance(value, list) else [value]:
            most = _LARGEST.get(type(one))
            if most is not None and abs(one) > most and abs(one) != float("inf"):
                digits = f"a number of {len(str(abs(one)))} digits" if isinstance(one, int) else str(one)
                yield name, f"{name}={digits} must be at most {most:.3g}"


def _key(place: Sequence[str | int], values: Any, key: str) -> str:
    """Return the dotted key of a place in the values, without pydantic's names of the members of a union."""
    for word in place:
        if isinstance(values, dict) and (word in values or word == place[-1]):
            key, values = (f"{key}.{word}" if key else str(word)), values.get(word)
        elif isinstance(values, list) and isinstance(word, int):
            key, values = f"{key}[{word}]", values[word] if word < len(values) else None
    return key.removeprefix("parts.")


def _line(key: str, errors: Sequence[ErrorDetails], known: Sequence[str]) -> str:
    """Return one sentence about a wrong value, whatever number of types it could have."""
    value, types = errors[0]["input"], [error["type"] for error in errors]
    if "unexpected_keyword_argument" in types:
        return f"{key} is not a setting{closest(key, known)}"
    if "missing" in types:
        return f"{key} is missing from the configuration"
    if value == "???":
        return f"{key} has no value; give {key}=..."
    ranged = [error for error in errors if set(error.get("ctx", ())) & {"ge", "gt", "le", "lt"}]
    kinds = []
    for error in ranged or errors:
        context = {word: f"{end:.12g}" if isinstance(end, float) else end for word, end in error.get("ctx", {}).items()}
        if error["type"] == "literal_error":
            words = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
            context["expected"] = f"{', '.join(words)}{closest(str(value), words)}"
        kinds.append(_KINDS.get(error["type"], error["msg"]).format(**context))
    return f"{key}={shown(value)} must be {' or '.join(dict.fromkeys(kinds))}"
