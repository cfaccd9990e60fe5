"""Formats and parses values, numbers, series, sizes and durations."""

from __future__ import annotations

import math
import re
from typing import Any


def is_a(kind: Any, value: Any) -> bool:
    """True if the value has this YAML type: true is not a number, but a whole number is a float."""
    return not isinstance(value, bool) and isinstance(value, (int, float) if kind is float else kind)


def shown(value: Any) -> str:
    """Return the value as it is typed."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def short(value: float | int) -> str:
    """Return a compact number: 0.512, 38, 5.3k, 1.2M."""
    if not math.isfinite(value):
        return str(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:  # it rounds to the unit
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def duration(seconds: float | int) -> str:
    """Return seconds as 42 s, 4m07s, 3h05m, or, from 48 hours on, 2 days."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m" if whole < 48 * 3600 else f"{whole // 86400} days"


def plain(text: object) -> str:
    """Return untrusted text as one safe line: without line breaks, control or escape characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(str(text).split()))


# What a terminal interprets: escape sequences, control characters, changes of writing direction.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def legible(text: str) -> str:
    """Return text of several lines that is safe to print: without escape sequences, and with other control characters
    (except line breaks and tabs) replaced.

    >>> legible("a\\x1b[31mb\\rc")
    'ab\N{REPLACEMENT CHARACTER}c'
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _SEQUENCE.sub("", text))


def parse_bytes(text: str | int) -> int:
    """Return `512MiB`, `1.5GB` or a plain number in bytes; 0 for what is no size, or none of 1 byte to 2^63."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:(?:([kmgtp])(i?))?b?)?\s*", str(text).lower())
    found = float(match[1]) * (1024 if match[3] else 1000) ** " kmgtp".index(match[2] or " ") if match else 0
    return int(found) if found < 2**63 else 0


def gib(size: float | int) -> str:
    """Format bytes in binary units.

    >>> gib(3 * 2**20), gib(5 * 2**30 // 2)
    ('3.0 MiB', '2.50 GiB')
    """
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
