"""Values in Hydra's grammar: written so that they are parsed back exactly, and found in words that were typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def leaves(key: str, value: Any) -> dict[str, Any]:
    """Return nested settings by dotted key."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    below = {f"{key}.{name}" if key else str(name): item for name, item in value.items()}
    return {leaf: found for name, item in below.items() for leaf, found in leaves(name, item).items()}


def is_package_target(target: Any) -> bool:
    """True if a `_target_` is code of this package."""
    return str(target).startswith("grpo_cli.")


def quoted(text: str, mark: str = "'") -> str:
    """Return text in Hydra's grammar. Backslashes count only before a quote or an interpolation."""
    special = re.compile(rf"(\\*)({mark}|\$\{{|$)")
    return mark + special.sub(lambda end: 2 * end[1] + (f"\\{end[2]}" if end[2] else ""), text) + mark


def key_of(word: str) -> str:
    """Return the dotted key or the group that an override sets."""
    return word.lstrip("+~").partition("=")[0]


def value_of(key: str, words: Sequence[str]) -> str | None:
    """Return the last value of a key in these overrides, a string as Hydra reads it; None if there is none or null."""
    typed = [word for word in words if key_of(word) == key and "=" in word]
    value = parsed(typed[-1]) if typed else None
    return value if value is None or isinstance(value, str) else typed[-1].partition("=")[2]


def parsed(word: str) -> Any:
    """Return the value of an override, the values of a sweep, or the text of what Hydra cannot read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return word.partition("=")[2]
    if isinstance(value, ChoiceSweep):
        return [getattr(one, "text", one) for one in value.list]
    return value.replace("\\${", "${") if isinstance(value, str) else value
