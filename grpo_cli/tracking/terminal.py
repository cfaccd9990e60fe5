"""Where the lines for a person go. rich is imported where it is needed only, so that help answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """A file to write to. If its terminal or pipe is closed, what is written is lost: work goes on without it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with self._may_be_gone():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._may_be_gone():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @contextmanager
    def _may_be_gone(self) -> Iterator[None]:
        """From the first failure on, the file leads nowhere: else what is still buffered would fail at the very end."""
        try:
            yield
        except OSError:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._file.fileno())
                os.close(nowhere)


def outlive_the_reader() -> None:
    """Let what this process prints be lost, instead of failing, from when nobody reads it any more (`| head`)."""
    sys.stdout, sys.stderr = cast(TextIO, Screen(sys.stdout)), cast(TextIO, Screen(sys.stderr))


def console() -> Console:
    """One on standard output, which may be closed while it is in use."""
    from rich.console import Console

    return Console(file=cast(IO[str], Screen(sys.stdout)))
