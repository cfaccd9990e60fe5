"""Children that a user's code forks: they inherit neither the signal handlers nor the locks of the run, nor its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_undone: list[Callable[[], None]] = []
_masks = threading.local()


@contextmanager
def undone_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` first in every process that is forked meanwhile."""
    _undone.append(undo)
    try:
        yield
    finally:
        _undone.remove(undo)


@contextmanager
def ends_children() -> Iterator[None]:
    """End a forked child where it would leave the body, as Python ends a program: it does not continue with the run."""
    owner, failure = os.getpid(), None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        if os.getpid() != owner:
            _end(failure)


def _end(failure: BaseException | None) -> None:
    code = failure.code if isinstance(failure, SystemExit) else failure and 1
    try:
        if isinstance(failure, Exception):
            traceback.print_exception(failure, chain=False)  # without what the run was doing
        elif code and not isinstance(code, int):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _before() -> None:
    # A signal that reaches the child before its handlers are undone waits; Python would drop it.
    _masks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.mask)


def _in_child() -> None:
    while _undone:
        _undone.pop()()
    _in_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
