"""Signals that end a run: it leaves a step that has changed no weights, finishes any other, saves, and ends.

SIGTERM and SIGINT (ctrl-C), SIGHUP (the terminal is gone) and SIGUSR1 (a cluster's warning before the time limit).
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from grpo_cli.support.isolation import undone_in_children

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """A signal in a part of a run that may be left at any place."""


class Stop:
    """The first signal that came, `stopped_by`; None before. A SIGINT after another signal interrupts at once.

    Handles signals inside a `with` on it, in the main thread only. An ignored SIGHUP (`nohup`) stays ignored.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[signal.Signals, Any] = {}
        self._in_children = ExitStack()
        self.stopped_by: str | None = None
        self.may_leave = False  # if True, the next signal raises `Stopped`

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS if number not in ignored}
            self._in_children.enter_context(undone_in_children(self._put_back))
        return self

    def __exit__(self, *_: object) -> None:
        self._in_children.close()
        self._put_back()
        if self.stopped_by:
            for child in multiprocessing.active_children():  # at its exit, Python would wait for them
                child.kill()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: Any) -> None:
        if self.stopped_by and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stopped_by = self.stopped_by or signal.Signals(number).name
        with suppress(OSError, RuntimeError):  # the terminal is gone, or busy with another line
            self._say(f"{self.stopped_by}: stopping, and saving what is finished; a second ctrl-C stops at once")
        if self.may_leave:
            self.may_leave = False
            raise Stopped
