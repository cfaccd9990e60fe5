"""Signals that ask a run to stop gracefully: to finish its step, save, and end as interrupted. After a SIGTERM a user's
own code that hangs is interrupted.

SIGTERM and SIGINT (ctrl-C), SIGHUP (the terminal is gone) and SIGUSR1 (a cluster's warning before the time limit).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from grpo_cli.support.errors import seconds_in_own_code
from grpo_cli.support.forks import undone_in_children

NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
TOGETHER_SECONDS = 2.0  # within which signals count as one
PATIENCE_SECONDS = 20.0  # for own code after a SIGTERM; clusters kill after 30 s
INTERRUPTS = 2  # before own code that survives them is killed, with the run
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has the first two


class Stop:
    """Remembers which signal asked to stop; true once one has. A second SIGINT interrupts at once, and so does a second
    SIGTERM, unless it follows so soon that a scheduler sent it to the run and its launcher together.

    Handles signals inside a `with` on it, in the main thread only. An ignored SIGHUP (`nohup`) stays ignored.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[signal.Signals, Any] = {}
        self._in_children = ExitStack()
        self._over = threading.Event()
        self.asked_by: str | None = None
        self._terminated: float | None = None  # when the first SIGTERM came

    def __bool__(self) -> bool:
        return self.asked_by is not None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            heard = (n for n in SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) is not signal.SIG_IGN)
            self._before = {number: signal.signal(number, self._ask) for number in heard}
            self._in_children.enter_context(undone_in_children(self._put_back))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._in_children.close()
        self._put_back()
        if self:
            for child in multiprocessing.active_children():  # at its exit, Python would wait for them
                child.kill()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: Any) -> None:
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self._terminated is None:
                threading.Thread(target=self._interrupt_own_code, name="stop", daemon=True).start()
            self._terminated = now if self._terminated is None else self._terminated
            if now - self._terminated > TOGETHER_SECONDS:
                raise KeyboardInterrupt
        self.asked_by = self.asked_by or signal.Signals(number).name
        with suppress(OSError, RuntimeError):  # the terminal is gone, or busy with another line
            self._say(f"{self.asked_by}: stopping after this step; a second ctrl-C or SIGTERM stops at once")

    def _interrupt_own_code(self) -> None:
        """Interrupt own code that runs for too long; kill the run if that does not help."""
        for number in (*[signal.SIGINT] * INTERRUPTS, signal.SIGKILL):
            while not self._over.wait(PATIENCE_SECONDS) and seconds_in_own_code() < PATIENCE_SECONDS:
                pass
            if self._over.is_set():
                return
            os.kill(os.getpid(), number)
