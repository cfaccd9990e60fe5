"""A sweep of profiles: one for each combination of values, each in a process of its own, so that no peak leaks into the
next one."""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

Job = tuple[str, Path]  # what its overrides are in the sweep, and its folder


def combinations(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Every combination of the swept values: its name, and all its overrides.

    >>> combinations(["seed=1", "n=4,8"])
    [('n=4', ['seed=1', 'n=4']), ('n=8', ['seed=1', 'n=8'])]
    """
    parsed = OverridesParser.create().parse_overrides(list(words))
    values = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [str(override.input_line)]
        for override in parsed
    ]
    swept = [override.is_sweep_override() for override in parsed]
    jobs = []
    for job in itertools.product(*values):
        name = " ".join(word for word, varies in zip(job, swept, strict=True) if varies)
        jobs.append((name, list(job)))
    return jobs


def run_each(words: Sequence[str], flags: Sequence[str], say: Callable[[str], None]) -> tuple[Path, list[Job], int]:
    """The sweep's folder, the jobs that finished, and how many did not."""
    root = Path("outputs/multirun") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"
    jobs, failed = [], 0
    for number, (name, overrides) in enumerate(combinations(words)):
        say(f"job {number}: {name}")
        folder = root / str(number)
        command = [sys.executable, "-m", "grpo_cli", "profile", *flags, *overrides, f"hydra.run.dir={folder}"]
        if subprocess.run(command, check=False).returncode == 0:
            jobs.append((name, folder))
        else:
            failed += 1
            say(f"job {number} failed")
    return root, jobs, failed
