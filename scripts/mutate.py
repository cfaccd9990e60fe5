"""Breaks the code in one place at a time and asks its tests: what no test notices, nobody would.

    python scripts/mutate.py                              # all of scripts/mutations/*.json
    python scripts/mutate.py --only step.py --jobs 2 --json out.json

Another operator or number in every place of the core files is cosmic-ray's work, in a checkout of its own, since it
writes to the files:

    cosmic-ray init scripts/cosmic-ray.toml session.sqlite && cosmic-ray exec scripts/cosmic-ray.toml session.sqlite
    cr-report session.sqlite

The lists hold what operators cannot make: a piece of a file that occurs once, what stands there instead, the tests that
must fail, and in a sentence what is then wrong. Every breakage is made in a copy of the tree, never in the tree itself.
Ends with 1 if one of a list survives, or no longer fits the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
COPIED = (".ci", "grpo_cli", "hydra_plugins", "conf", "scripts", "tests", "outputs")
FILES = ("LICENSE", "README.md", "pyproject.toml")
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Mutation:
    """A breakage. `old` occurs once in `file`; at least one of `tests` fails when `new` stands there."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    what: str


def mutations(folder: Path) -> Iterator[Mutation]:
    for path in sorted(folder.glob("*.json")):
        for entry in json.loads(path.read_text(encoding="utf-8")):
            yield Mutation(**entry | {"tests": tuple(entry["tests"])})


def misfit(mutation: Mutation, root: Path) -> str | None:
    """Why a breakage cannot be made any more, None if it can."""
    found = (root / mutation.file).read_text(encoding="utf-8").count(mutation.old)
    return None if found == 1 else f"its piece of code occurs {found} times in {mutation.file}"


@contextmanager
def copies(count: int) -> Iterator[Queue[Path]]:
    with tempfile.TemporaryDirectory() as folder:
        free: Queue[Path] = Queue()
        for number in range(count):
            copy = Path(folder) / str(number)
            copy.mkdir()
            for name in (*COPIED, *FILES):
                source = ROOT / name
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, copy / name, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
            free.put(copy)
        yield free


def outcome(mutation: Mutation, root: Path) -> str:
    """`killed`, `survived` or `too slow` (an endless loop is noticed as well)."""
    file = root / mutation.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "too slow"
    finally:
        file.write_text(whole, encoding="utf-8")
    if ended.returncode not in (0, 1, 2):  # 2: the breakage does not even import
        raise SystemExit(f"pytest could not run for {mutation.what}:\n{ended.stdout}{ended.stderr}")
    return "survived" if ended.returncode == 0 else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a file's name, or of a breakage's sentence")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write what became of each")
    args = parser.parse_args()
    asked = [m for m in mutations(ROOT / "scripts/mutations") if args.only in m.file or args.only in m.what]
    done: list[dict[str, object]] = []

    def tried(mutation: Mutation) -> str:
        root = free.get()
        start = time.monotonic()
        why = misfit(mutation, root)
        became = f"misfit: {why}" if why else outcome(mutation, root)
        free.put(root)
        done.append(asdict(mutation) | {"outcome": became})
        seconds = time.monotonic() - start
        print(f"{len(done):3}/{len(asked)} {became:8} {seconds:4.0f} s  {mutation.file}: {mutation.what}", flush=True)
        return became

    with copies(args.jobs) as free, ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(tried, asked))
    killed = sum(became in ("killed", "too slow") for became in found)
    print(f"{killed} of {len(found)} killed")
    if args.json is not None:
        args.json.write_text(json.dumps({"killed": killed, "of": len(found), "mutations": done}, indent=1) + "\n")
    raise SystemExit(killed < len(found))


if __name__ == "__main__":
    main()
