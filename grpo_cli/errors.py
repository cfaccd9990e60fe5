"""The one error that means: a person asked for something that cannot be had, and here is what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """Says what was asked, what was found and what to do. The command line prints it alone and exits with 2."""


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def refuse(problems: Sequence[str]) -> None:
    """Raises UserError with all of the problems, if there are any."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError("\n".join([f"{len(problems)} settings cannot be used:", *(f"  - {line}" for line in problems)]))
