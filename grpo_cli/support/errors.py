"""The error for requests that cannot be satisfied; its message has the fix."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from grpo_cli.support.isolation import ends_children, left_unchanged
from grpo_cli.support.terminal import to_stderr


class UserError(Exception):
    """An error of the user's: what is wrong, where, and what to do. The command line prints only this and exits with 2.

    `problems` are its single messages.
    """

    def __init__(self, text: str, problems: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.problems = tuple(problems) or (text,)


def closest(word: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """Return `; did you mean x?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)
    return f"; did you mean {show(near[0])}?" if near else ""


def refuse(problems: Sequence[str]) -> None:
    """Raise UserError with all of the problems, if there are any."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        lines = [f"{len(problems)} settings cannot be used:", *(f"  - {line}" for line in problems)]
        raise UserError("\n".join(lines), problems)


@contextmanager
def own_code(what: str, about: Callable[[], str] = str) -> Iterator[None]:
    """Wrap a user's own code: whatever it raises, even an exit, becomes a UserError that names the line."""
    try:
        with ends_children(), left_unchanged():
            yield
    except UserError:
        raise
    except KeyboardInterrupt as error:
        if type(error) is KeyboardInterrupt:  # not a run that a signal stops: the code may never return
            to_stderr(f"interrupted in {what}")
        raise
    except BaseException as error:
        raise UserError(f"{what} {raised(error)}{about()}") from error


def own_code_unless_ours(what: str, code: Any) -> AbstractContextManager[Any]:
    """Return `own_code` for a user's own code; errors of our code propagate."""
    return nullcontext() if str(getattr(code, "__module__", "")).startswith("grpo_cli.") else own_code(what)


def raised(error: BaseException) -> str:
    """Return what a user's own code raised, and where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    # a syntax error has no executed line, and names its own
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    reason = f": {text}" if (text := text_of(error)) else ""
    return f"raised {type(error).__name__}{reason}{place}"


@contextmanager
def explained(what: str, instead: str = "") -> Iterator[None]:
    """Turn any error of a library into a UserError: what cannot be done, why, and what to do instead. A malformed file
    alone gives KeyError, TypeError or AttributeError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {reason_of(error)}{instead}") from error


def reason_of(error: BaseException) -> str:
    """Return the kind of a library's error, and its first sentence: some have paragraphs."""
    first = next(iter(text_of(error).strip().splitlines()), "").partition(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {first[:400] or 'no reason given'}"


def text_of(error: BaseException) -> str:
    """Return the text of an error; empty if even that fails."""
    try:
        return str(error)
    except Exception:
        return ""


@contextmanager
def gathered(problems: list[str]) -> Iterator[None]:
    """Add the messages of a UserError raised inside to `problems`, to refuse them all at once."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)
