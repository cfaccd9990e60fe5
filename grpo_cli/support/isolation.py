"""Keeps code that is not ours from changing the run: what it leaves of shared state, and its children.

Children that it forks inherit neither the signal handlers nor the locks of the run, nor its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout

_undone: list[Callable[[], None]] = []
_masks = threading.local()


@contextmanager
def left_unchanged() -> Iterator[None]:
    """Put back what the body changes of the current folder, the streams and PyTorch's modes. Only in the main thread:
    others run side by side."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(chdir("."))
            stack.enter_context(redirect_stdout(sys.stdout))
            stack.enter_context(redirect_stderr(sys.stderr))
            if torch := sys.modules.get("torch"):
                stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                for kind in ("cpu", "cuda"):
                    stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
        yield


@contextmanager
def undone_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` first in every process that is forked meanwhile."""
    _undone.append(undo)
    try:
        yield
    finally:
        _undone.remove(undo)


def _before() -> None:
    # A signal that reaches the child before its handlers are undone waits; Python would drop it.
    _masks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.mask)


def _in_child() -> None:
    while _undone:
        _undone.pop()()
    _in_parent()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


@contextmanager
def ends_children() -> Iterator[None]:
    """End a forked child where it would leave the body, as Python ends a program: it does not continue with the run."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != owner:
            error = sys.exception()
            code = error.code if isinstance(error, SystemExit) else error and 1
            try:
                if isinstance(error, Exception):
                    traceback.print_exception(error, chain=False)  # without what the run was doing
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
