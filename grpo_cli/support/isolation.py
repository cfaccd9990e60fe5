"""Keeps code that is not ours from changing the run: what it leaves of shared state, its children, its time and memory.

Children that it forks inherit neither the signal handlers nor the locks of the run, nor its end.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

_SIZE = Path("/proc/self/statm")  # of this process, in pages
_undone: list[Callable[[], None]] = []
_masks = threading.local()


@contextmanager
def left_unchanged() -> Iterator[list[str]]:
    """Put back what the body has changed, and list it at the end. Only in the main thread: others run side by side."""
    changed: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield changed
        return
    before = [(name, read(), read, put_back) for name, (read, put_back) in _states().items()]
    try:
        yield changed
    finally:
        for name, value, read, put_back in before:
            if read() != value:
                put_back(value)
                changed.append(name)


def _states() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return how each state is read, and how it is put back."""
    states: dict[str, Any] = {"os.chdir": (os.getcwd, os.chdir)}
    for name in ("stdout", "stderr"):
        states[f"sys.{name}"] = partial(getattr, sys, name), partial(setattr, sys, name)
    for stop in (signal.SIGTERM, signal.SIGINT):
        states[f"the handler of {stop.name}"] = partial(signal.getsignal, stop), partial(signal.signal, stop)
    if torch := sys.modules.get("torch"):
        for kind in ("cpu", "cuda"):
            pair = partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
            states[f"torch.autocast({kind})"] = pair
        states["torch.set_grad_enabled"] = torch.is_grad_enabled, torch.set_grad_enabled
        for name in ("default_dtype", "default_device", "num_threads"):
            states[f"torch.set_{name}"] = getattr(torch, f"get_{name}"), getattr(torch, f"set_{name}")
    return states


@contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds, and MemoryError for so many bytes more.

    On the main thread alone, which is the one that signals interrupt; other threads meet the limit on memory too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if _SIZE.exists():
            most = int(_SIZE.read_text().split()[0]) * resource.getpagesize() + memory
            resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(soft, most), hard))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
