"""Atomic writes, JSON that every parser accepts, and reading it. Independent of runs."""

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
from typing import Any

from grpo_cli.runs.layout import UNFINISHED
from grpo_cli.support.errors import UserError


def json_line(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON, without a line break unless `indent` is given.

    NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity", which Python's `float` reads back.
    Numpy scalars become numbers, paths strings; a lone surrogate is escaped. TypeError for anything else.
    """
    text = json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode("utf-8", "backslashreplace").decode()  # the same backslash escape as JSON's


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy":  # which refusals do without
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file: after a crash, even of the machine, it holds its old content or all of the new. UserError if the
    disk refuses."""
    temporary = path.with_name(f".{path.name}{UNFINISHED}")
    with must_be_writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)  # left by a kill, or a link that would be followed
            with open(temporary, "xb") as file:
                file.write(data)
            sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file of one JSON object atomically, for `read_object`."""
    write_atomically(path, f"{json_line(value, indent=2)}\n".encode())


def place_of_new(folder: Path) -> Path:
    """Return where a new folder will be. UserError if something is there, or an empty folder that nothing replaces."""
    place = folder.expanduser().resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name a new one")
    if place.is_mount() or place == Path.cwd():
        raise UserError(f"{folder} is mounted or the current folder, and cannot be replaced; name a new one in it")
    return place


@contextmanager
def folder_written_atomically(target: Path) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces `target` once all of it is on disk.

    After an exception (UserError if the disk refuses) `target` is as it was. A kill may leave the new folder, all of it
    once `target` is not whole, under a hidden name.
    """
    new = target.with_name(f".{target.name}{UNFINISHED}")
    with must_be_writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir()
            yield new
            for path in (*new.rglob("*"), new):
                sync(path)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        os.replace(new, target)
        sync(target.parent)


@contextmanager
def must_be_writable(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a UserError that names the path and the ways out."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # compiled writers such as safetensors raise their own errors, with the system's number in the text
        number = re.search(r"\(os error (\d+)\)", str(error))
        if not (number or isinstance(error, OSError)):
            raise
        reason = os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be written ({reason}); make room, or choose another folder") from error


def regular(path: str, flags: int) -> int:
    """Open a regular file, as an `opener` of `open`. OSError for a pipe or a device, which may block, and for a link
    that would be written through."""
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    file = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o644)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` itself refuses a folder
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is not a regular file but a pipe or a device", path)


def content(path: Path) -> bytes:
    """Return all of a file. OSError also for a pipe or a device."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if there is no file. UserError if it holds something else."""
    try:
        value = json.loads(content(path).decode())
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
        return value
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); repair or remove it") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems have none for folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
