"""One process to a run folder: a lock that dies with whoever holds it.

`flock` on `<folder>/.lock`, whose content says who holds it. The file stays behind; it is the lock on it that counts,
and the kernel takes that back however the process ends. On NFS (Linux 2.6.12 and later) it holds between machines; a
file system that knows no such lock (Lustre mounted without `-o flock`, some FUSE ones) keeps nobody out, which is said.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import content, json_line, regular
from grpo_cli.runs.layout import LOCK
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain

POLL_SECONDS = 0.5
_MOST_BYTES = 4096
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def sole_use(folder: Path, wait: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock, which is waited for up to `wait` seconds. UserError names who has it.

    The folder is made if it is not there; nothing in one that is refused is touched. Who holds the lock stands in it
    for as long.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = regular(str(folder / LOCK), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be written ({LOCK}: {error.strerror}). Choose another with "
            "hydra.run.dir=<folder>, or make it writable."
        ) from error
    try:
        if _taken(descriptor, folder, wait, say):
            before = os.pread(descriptor, _MOST_BYTES, 0)
            _write(descriptor, f"{json_line(_who())}\n".encode())
            try:
                yield
            finally:
                _write(descriptor, before)
        else:
            yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int, folder: Path, wait: float, say: Callable[[str], None]) -> bool:
    """Whether the lock is held; False if there are none on this file system."""
    deadline, told = time.monotonic() + wait, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{folder} is in use by {holder(folder)}; wait for it (resume_wait=60s waits up to that long), or "
                    "stop it first"
                ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise
            say(f"{folder} is on a file system without locks: see to it yourself that no other process writes there")
            return False
        if not told:
            say(f"waiting up to {wait:g} s for {folder}, which is in use by {holder(folder)}")
        told = True
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def _who() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat(timespec="seconds")}


def _write(descriptor: int, content: bytes) -> None:
    """Say who holds the lock, or what was there before. A full disk is no reason not to hold it."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)


def is_held(path: Path) -> bool:
    """Whether a process, on whatever machine the file system knows of, has a lock on the file."""
    try:
        with open(path, "rb", opener=regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is not there, cannot be read, or knows no locks
        return False
    return False


def holder(folder: Path) -> str:
    """Who has, or last had, the folder's lock."""
    try:
        who = json.loads(content(folder / LOCK))
        return plain(f"process {who['pid']} on {who['host']} (since {who['since']})")
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
