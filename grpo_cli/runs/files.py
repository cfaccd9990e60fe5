"""Atomic file writes, and JSON that every parser accepts. Independent of runs."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from grpo_cli.runs.layout import REPLACED
from grpo_cli.support.errors import UserError


def json_line(value: Any, indent: int | None = None) -> str:
    """`value` as JSON, without a line break unless `indent` asks for them.

    JSON has no NaN and no infinity: they become the strings "NaN", "Infinity" and "-Infinity", all of which Python's
    `float` reads back (`null` would lose which of the three it was). Numpy scalars become numbers, paths strings. A
    lone surrogate, which UTF-8 cannot encode, is escaped. Raises TypeError for anything else that JSON cannot hold.
    """
    text = json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode("utf-8", "backslashreplace").decode()  # the same backslash escape as JSON's


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write to: after a crash, even of the machine, `path` holds its old content or all of the new.

    A kill may leave `unfinished(path)` behind.
    """
    temporary = unfinished(path)
    try:
        temporary.unlink(missing_ok=True)  # left by a kill, or a link that would be followed
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def folder_written_atomically(target: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `target` once all of it is on disk.

    After an exception (UserError if the disk refuses) `target` is as it was; what a kill leaves is cleared next time.
    """
    temporary, replaced = unfinished(target), target.with_name(f".{target.name}{REPLACED}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_folder(path)  # a file just as well
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
        os.replace(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not target.exists():
            os.replace(replaced, target)
        if (reason := disk_error(error)) is None:
            raise
        raise UserError(
            f"{target} could not be written ({reason}); what was there before is unharmed. Make room, or name a folder "
            "elsewhere"
        ) from error
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def disk_error(error: BaseException) -> str | None:
    """Why the disk refused the write, or None if the error is about something else.

    safetensors and other compiled writers raise their own errors, whose texts carry the system's error number.
    """
    if isinstance(error, UserError):
        return None
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else None


@contextmanager
def must_be_writable(path: Path) -> Iterator[None]:
    """Turns an OSError into a UserError that names the path and the ways out."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}); make room, make it writable, or choose another "
            "folder with hydra.run.dir=<folder>"
        ) from error


def unfinished(path: Path) -> Path:
    """The temporary name under which a file is written."""
    return path.with_name(f".{path.name}.tmp")


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data`, all of it or nothing: see `written_atomically`."""
    with written_atomically(path) as file:
        file.write(data)


def regular(path: str, flags: int) -> int:
    """An `opener` for `open` that raises OSError for a pipe or a device, which may block or never end, and for a link
    that would be written through; for reading, links are followed."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    # O_NONBLOCK: otherwise opening a pipe without a writer blocks
    file = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o644)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` itself refuses a folder
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is not a regular file but a pipe or a device", path)


def content(path: Path) -> bytes:
    """All of a file. OSError also for a pipe or a device."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Wait until the content of `path` is on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk: only then is a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
