"""The versions of the code that a process runs."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from grpo_cli import __version__

SOURCE = Path(__file__).resolve().parents[2]
GIT_SECONDS = 3.0  # timeout; git usually answers within 0.1 s


@functools.cache
def code_version() -> dict[str, str | bool | None]:
    """Return the versions at the first call: later edits of the checkout do not change what runs.

    `commit` is None unless the package runs from a git checkout and git answers; `modified` says whether a tracked
    file of the checkout differed from that commit.
    """
    try:
        transformers = version("transformers")
    except PackageNotFoundError:  # a bare source tree
        transformers = None
    commit, modified = checkout_state(SOURCE)
    code = {"grpo_cli": __version__, "commit": commit, "modified": modified, "python": platform.python_version()}
    return code | {"torch": str(torch.__version__), "transformers": transformers}


def checkout_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the git checkout at this folder, and whether it was modified; (None, None) without one.

    Neither the current directory, the environment nor a parent folder can make git report another repository.
    """
    where = [f"--git-dir={folder / '.git'}", f"--work-tree={folder}", "-c", "core.fsmonitor=false"]
    command = ["git", *where, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        found = subprocess.run(
            command, cwd=folder, env=clean | {"GIT_OPTIONAL_LOCKS": "0"}, capture_output=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    commit, _, dirty = found.stdout.decode().strip().partition("-")
    return (commit, bool(dirty)) if found.returncode == 0 else (None, None)
