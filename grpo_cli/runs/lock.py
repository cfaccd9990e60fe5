"""One process per run folder: a lock that is released when its holder dies.

`flock` on `<folder>/.lock`, which meanwhile names the holder; the kernel releases it however the process ends. On NFS
it works across machines; a file system without it (Lustre mounted without `-o flock`) gives no protection: a warning.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from grpo_cli.runs.files import content, must_be_writable, regular
from grpo_cli.runs.layout import LOCK
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain
from grpo_cli.support.isolation import undone_in_children

TRIES, WAIT = 3, 0.03  # seconds


@contextmanager
def sole_use(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock. UserError names the process that has it.

    The folder is created if necessary; nothing in a folder that is in use is touched.
    """
    with must_be_writable(folder / LOCK):
        folder.mkdir(parents=True, exist_ok=True)
        file = regular(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    try:
        try:
            _lock(file)
        except BlockingIOError as error:
            raise UserError(f"{folder} is in use by {holder(folder)}; wait for it, or stop it first") from error
        except OSError as error:
            say(f"{folder} cannot be locked ({error.strerror}): make sure that no other process writes there")
        _write(file, f"process {os.getpid()} on {platform.node()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")
        try:
            with undone_in_children(lambda: os.close(file)):
                yield
        finally:
            _write(file, "")
    finally:
        os.close(file)


def _lock(file: int) -> None:
    """Lock a file. BlockingIOError if another process keeps it: one that only looks (`is_held`) has it for a moment."""
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(WAIT)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write(file: int, holder: str) -> None:
    with suppress(OSError):  # the lock is held even if the disk is full
        os.ftruncate(file, 0)
        os.pwrite(file, holder.encode(), 0)


def is_held(folder: Path) -> bool:
    """True if a process, on any machine that shares the file system, has the folder's lock."""
    try:
        with open(folder / LOCK, "rb", opener=regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # any other: it is missing, or cannot be locked here
        return isinstance(error, BlockingIOError)
    return False


def holder(folder: Path) -> str:
    """Return the process that has the folder's lock, or was killed holding it."""
    with suppress(OSError):
        return plain(content(folder / LOCK).decode("utf-8", "replace")) or "another process"
    return "another process"
