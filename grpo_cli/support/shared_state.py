"""The state that a user's own code shares with the whole run, and has to leave as it was."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

State = tuple[str, Callable[[], Any], Callable[[Any], Any]]  # its name, how it is read, how it is put back


@contextmanager
def left_unchanged() -> Iterator[list[str]]:
    """Put back what the body has changed, and list it at the end. Only in the main thread: others run side by side."""
    changed: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield changed
        return
    before = [(state, state[1]()) for state in _states()]
    output = [os.dup(number) for number in (1, 2)]
    try:
        yield changed
    finally:
        for number, kept in enumerate(output, start=1):
            if _place(number) != _place(kept):
                os.dup2(kept, number)
                changed.append(f"file descriptor {number}")
            os.close(kept)
        for (name, read, put_back), value in before:
            if read() != value:
                put_back(value)
                changed.append(name)


def _states() -> Iterator[State]:
    known = dict(os.environ)  # new variables are free to be set
    yield "os.chdir", _folder, os.chdir
    yield "os.environ", lambda: {name: os.environ.get(name) for name in known}, os.environ.update
    for name, number in (("stdout", 1), ("stderr", 2)):
        yield f"sys.{name}", partial(_stream, name), partial(_put_back_stream, name, number)
    for stop in (signal.SIGTERM, signal.SIGINT):
        yield f"the handler of {stop.name}", partial(signal.getsignal, stop), partial(signal.signal, stop)
    if torch := sys.modules.get("torch"):
        for kind in ("cpu", "cuda"):
            yield "torch.autocast", partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        algorithms = torch.are_deterministic_algorithms_enabled
        yield "torch.use_deterministic_algorithms", algorithms, torch.use_deterministic_algorithms
        yield "torch.inference_mode", torch.is_inference_mode_enabled, lambda value: None
        yield "torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled
        for name in ("default_dtype", "default_device", "num_threads", "float32_matmul_precision"):
            yield f"torch.set_{name}", getattr(torch, f"get_{name}"), getattr(torch, f"set_{name}")


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _place(number: int) -> tuple[int, int] | None:
    """The file that a descriptor is open for."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _stream(name: str) -> tuple[Any, bool]:
    stream = getattr(sys, name)
    return stream, getattr(stream, "closed", False)


def _put_back_stream(name: str, number: int, value: tuple[Any, bool]) -> None:
    setattr(sys, name, open(number, "w", closefd=False) if getattr(value[0], "closed", False) else value[0])
