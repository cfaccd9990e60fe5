"""Limits on code that a file brings along."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SIZE = Path("/proc/self/statm")  # of this process, in pages


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
