"""One process per run folder: a lock that is released when its holder dies.

`flock` on `<folder>/.lock`, which meanwhile names the holder; the kernel releases it however the process ends. On NFS
(Linux 2.6.12 and later) it works across machines; a file system without it (Lustre mounted without `-o flock`, some
FUSE ones) gives no protection, which is reported. The package `filelock` leaves a marker file behind there instead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import content, json_line, must_be_writable, regular
from grpo_cli.runs.layout import LOCK
from grpo_cli.support.errors import UserError
from grpo_cli.support.forks import undone_in_children
from grpo_cli.support.formatting import plain

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def sole_use(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock. UserError names the process that has it.

    The folder is created if necessary; nothing in a folder that is in use is touched.
    """
    with must_be_writable(folder / LOCK):
        folder.mkdir(parents=True, exist_ok=True)
        file = regular(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    try:
        if (locked := try_lock(file)) is False:
            raise UserError(f"{folder} is in use by {holder(folder)}; wait for it, or stop it first")
        if locked is None:
            say(f"{folder} is on a file system without locks: make sure that no other process writes there")
        who = {"pid": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        _write(file, f"{json_line(who)}\n".encode())
        try:
            with undone_in_children(lambda: os.close(file)):
                yield
        finally:
            _write(file, b"")
    finally:
        os.close(file)


def try_lock(file: Any, how: int = fcntl.LOCK_EX) -> bool | None:
    """Lock an open file for as long as it, or a copy inherited by a child, is open. False if another process has the
    lock, None if the file system has no locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        return None
    return True


def _write(file: int, data: bytes) -> None:
    """Name the holder, or no one. The lock is held even if the disk is full."""
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, data, 0)


def is_held(path: Path) -> bool:
    """True if a process, on any machine that shares the file system, has a lock on the file."""
    try:
        with open(path, "rb", opener=regular) as file:
            return try_lock(file, fcntl.LOCK_SH) is False
    except OSError:  # missing or unreadable
        return False


def holder(folder: Path) -> str:
    """Return the process that has the folder's lock, or was killed holding it."""
    try:
        who = json.loads(content(folder / LOCK))
        return plain(f"process {who['pid']} on {who['host']} (since {who['since']})")
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
