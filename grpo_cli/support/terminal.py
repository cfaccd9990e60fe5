"""Where the lines for a person go: no text of a file, a model or a person's code tells the terminal what to do.

rich is imported where it is needed only, so that help answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from grpo_cli.support.formatting import legible

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """A file to write to. If its terminal or pipe is closed, what is written is lost: work goes on without it.

    What is written is made legible, unless it is `obeyed`; a return to the line's beginning stays, which progress bars
    of libraries need.
    """

    def __init__(self, file: Any, obeyed: bool = False) -> None:
        self._file: Any = file._file if isinstance(file, Screen) else file
        self._obeyed = obeyed

    def write(self, text: str) -> int:
        with self._may_be_gone():
            self._file.write(text if self._obeyed else "\r".join(map(legible, text.split("\r"))))
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
    """Let what this process prints be lost, instead of failing, from when its reader has gone (`| head`), or from
    the start (`>&-`, where the next file that is opened would be printed into)."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest number that is free is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    out, err = sys.stdout or open(1, "w", closefd=False), sys.stderr or open(2, "w", closefd=False)
    sys.stdout, sys.stderr = cast(TextIO, Screen(out)), cast(TextIO, Screen(err))


def to_stderr(text: str) -> None:
    """Print a line that is no result."""
    print(text, file=sys.stderr)


def console(file: Any = None, **options: Any) -> Console:
    """One on standard output or `file`, which may be closed while it is in use. Its colours are its own: the texts that
    it is given have none."""
    from rich.console import Console
    from rich.segment import Segment

    class LegibleConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **kwargs):
                yield segment if segment.control else segment._replace(text=legible(segment.text))

    return LegibleConsole(file=cast(IO[str], Screen(file or sys.stdout, obeyed=True)), **options)
