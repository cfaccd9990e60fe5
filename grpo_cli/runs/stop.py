"""Signals that ask a run to stop gracefully: to finish its step, save, and end as interrupted.

SIGTERM and SIGINT (ctrl-C), SIGHUP (the terminal is gone) and SIGUSR1 (a cluster's warning before the time limit).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
TOGETHER_SECONDS = 2.0  # within which signals count as one
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has the first two


class Stop:
    """Remembers which signal asked to stop; true once one has. A second SIGINT interrupts at once, and so does a second
    SIGTERM, unless it follows so soon that a scheduler sent it to the run and its launcher together.

    Handles signals inside a `with` on it, in the main thread only. An ignored SIGHUP (`nohup`) stays ignored.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[signal.Signals, Any] = {}
        self.asked_by: str | None = None
        self._terminated: float | None = None  # when the first SIGTERM came

    def __bool__(self) -> bool:
        return self.asked_by is not None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            heard = (n for n in SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) is not signal.SIG_IGN)
            self._before = {number: signal.signal(number, self._ask) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: Any) -> None:
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            now = time.monotonic()
            self._terminated = now if self._terminated is None else self._terminated
            if now - self._terminated > TOGETHER_SECONDS:
                raise KeyboardInterrupt
        self.asked_by = self.asked_by or signal.Signals(number).name
        with suppress(OSError, RuntimeError):  # the terminal is gone, or busy with another line
            self._say(f"{self.asked_by}: stopping after this step; a second ctrl-C or SIGTERM stops at once")
