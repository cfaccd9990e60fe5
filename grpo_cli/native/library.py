"""Compile a C file with the machine's own compiler when it is first needed, which takes seconds.

The library is kept in the user's cache under a name made from source, compiler and processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from grpo_cli.support.terminal import to_stderr
from grpo_cli.support.threads import computing_with

SOURCES = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
THREADS = "-fopenmp"
COMPILE_SECONDS = 120.0
WRONG = "the C compiler's code computes something else than PyTorch"


class NoNative(Exception):
    """The reason for using PyTorch's operations; `is_fault`: although there is a C compiler."""

    def __init__(self, reason: str, is_fault: bool = True) -> None:
        super().__init__(reason)
        self.is_fault = is_fault


def tried(is_exact: Callable[[], bool], slower: str, warn: Callable[[str], None]) -> bool | str:
    """Return True if C computes what PyTorch does, else why it is not used; the fault of a compiler is a warning."""
    try:
        if is_exact():
            return True
        raise NoNative(WRONG)
    except NoNative as error:
        if error.is_fault:
            warn(slower.format(error))
        return str(error)


@cache
def library(name: str) -> ctypes.CDLL:
    """Return the functions of a C file, from the first compiler that works. A compiler without OpenMP, or with another
    than PyTorch's, makes them for one thread. Raises NoNative if none works."""
    reason = NoNative("there is no C compiler", is_fault=False)
    compilers = [*filter(None, map(shutil.which, COMPILERS))] if os.name == "posix" else []
    for threads, compiler in product((True, False), compilers):
        try:
            return _compiled(compiler, threads, SOURCES / f"{name}.c")
        except NoNative as error:
            reason = error
            if isinstance(error.__cause__, subprocess.TimeoutExpired):  # the next would take as long
                break
    raise reason


def _compiled(compiler: str, threads: bool, source: Path) -> ctypes.CDLL:
    flags = (*FLAGS, *([THREADS] * threads))
    texts = [file.read_text(encoding="utf-8") for file in (source, SOURCES / "vectors.h")]
    # The compiler's predefined macros identify it, and the instructions of this processor.
    defined = _run(compiler, *FLAGS[:2], "-dM", "-E", "-x", "c", os.devnull)
    made_from = hashlib.sha256("\0".join([*texts, *flags, defined]).encode()).hexdigest()
    folder, name = _cache(), f"{source.stem}-{made_from[:32]}.so"
    try:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = (folder or Path(place)) / name
            if not _is_ours(path):
                to_stderr(f"compiling {source.name} for this processor, once: some seconds")
                new = Path(place) / "new.so"
                _run(compiler, *flags, "-I", str(SOURCES), "-o", str(new), str(source), "-lm")
                new.chmod(0o700)
                new.replace(path)  # written whole or not at all
            made = ctypes.CDLL(str(path))
    except OSError as error:  # also of a folder from which nothing may be executed
        raise NoNative(f"the library made by {compiler} cannot be loaded: {error}") from error
    if threads and not _has_our_threads(made):
        raise NoNative(f"the OpenMP of {compiler} is not PyTorch's, whose number of threads would not hold")
    kinds = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
    for name, arguments in re.findall(r"^void (\w+)\(([^)]*)\) \{", texts[0], re.MULTILINE):
        function, words = getattr(made, name), [argument.split() for argument in arguments.split(",")]
        function.argtypes = [ctypes.c_void_p if "*" in " ".join(word) else kinds[word[0]] for word in words]
        function.restype = None
    return made


def _has_our_threads(made: ctypes.CDLL) -> bool:
    threads = torch.get_num_threads() + 1
    with computing_with(threads):
        return bool(made.omp_get_max_threads() == threads)


def _cache() -> Path | None:
    """Return the folder of libraries, of the user's and writable by nobody else; None if there can be none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "grpo-cli"
    if not folder.is_absolute():  # there is no home
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return folder if _is_ours(folder) and os.access(folder, os.W_OK) else None


def _is_ours(path: Path) -> bool:
    """True if the path exists and nobody else could have written it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _run(*command: str) -> str:
    try:
        words: dict[str, Any] = {"text": True, "errors": "replace", "timeout": COMPILE_SECONDS}
        return subprocess.run(command, check=True, capture_output=True, **words).stdout
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])
        raise NoNative(f"{command[0]} cannot compile it: {reason}") from error
