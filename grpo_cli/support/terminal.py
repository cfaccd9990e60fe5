"""Terminal output, made safe: no text of a file, a model or a user's code reaches the terminal as control sequences.

rich is imported only where needed, so that help is fast.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from grpo_cli.support.formatting import legible

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """A stream that outlives its terminal or pipe: after that is closed, output is dropped.

    Output is made `legible`, unless `obeyed`; carriage returns are kept for the progress bars of libraries.
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
        """Redirect the file to nowhere after its first failure, or buffered output would fail at exit."""
        try:
            yield
        except (OSError, ValueError):  # ValueError: it is closed
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._file.fileno())
                os.close(nowhere)


def outlive_the_reader() -> None:
    """Drop output instead of failing once its reader is gone (`| head`), or from the start (`>&-`)."""
    out, err = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = cast(TextIO, Screen(out)), cast(TextIO, Screen(err))


def to_stderr(text: str) -> None:
    """Print a line that is not a result."""
    print(text, file=sys.stderr)


def console(file: Any = None, **options: Any) -> Console:
    """Return a console on standard output or `file`, which may be closed while it is in use. Control sequences in
    texts are removed. A dumb terminal is as wide as COLUMNS, where rich takes it for 80 columns wide."""
    from rich.console import Console
    from rich.segment import Segment

    class LegibleConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **kwargs):
                yield segment if segment.control else segment._replace(text=legible(segment.text))

    if os.environ.get("TERM") == "dumb":
        options = {"width": shutil.get_terminal_size().columns, "height": 25} | options
    return LegibleConsole(file=cast(IO[str], Screen(file or sys.stdout, obeyed=True)), **options)
