"""Breaks the code in one place at a time and asks its tests: what no test notices, nobody would.

    python scripts/mutate.py                              # all of scripts/mutations/*.json
    python scripts/mutate.py --only step.py --jobs 2 --json out.json
    python scripts/mutate.py --operators downsample       # another operator or number, place by place (cosmic-ray)
    python scripts/mutate.py --operators --every 20       # every 20th of those, in all of CORE

The lists hold what operators cannot make: a piece of a file that occurs once, what stands there instead, the tests that
must fail, and in a sentence what is then wrong. Every breakage is made in a copy of the tree, never in the tree itself.
Ends with 1 if one of a list survives, or no longer fits the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
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
# The files in which every operator and number is tried, each with its tests.
CORE = {
    "grpo_cli/rules/advantage.py": "tests/test_advantage.py",
    "grpo_cli/rules/correction.py": "tests/test_correction.py",
    "grpo_cli/methods/pods.py": "tests/test_downsample.py",
    "grpo_cli/rules/loss.py": "tests/test_loss.py",
    "grpo_cli/learner/batch.py": "tests/test_batch.py",
    "grpo_cli/learner/logprobs.py": "tests/test_logprobs.py",
    "grpo_cli/learner/learner.py": "tests/test_learner.py",
    "grpo_cli/engine/step/sample.py": "tests/test_sample.py",
    "grpo_cli/select.py": "tests/test_select.py",
    "grpo_cli/step.py": "tests/test_train.py tests/test_off_policy.py",
}


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


def operators(file: str, every: int, root: Path) -> Counter[str]:
    """What became of every `every`th of cosmic-ray's mutants of a file, in the copy `root`; survivors are shown."""
    tests = f"{sys.executable} -B -m pytest -x -q -p no:cacheprovider {CORE[file]}"
    config, session = root / "operators.toml", root / "operators.sqlite"
    lines = [
        f'module-path = "{file}"',
        f"timeout = {LIMIT_SECONDS}",
        "excluded-modules = []",
        f'test-command = "{tests}"',
    ]
    config.write_text("\n".join(["[cosmic-ray]", *lines, "[cosmic-ray.distributor]", 'name = "local"', ""]))
    session.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}

    def cosmic_ray(*words: str) -> str:
        command = [sys.executable, "-m", "cosmic_ray.cli", *words]
        return subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout

    cosmic_ray("init", config.name, session.name)
    with sqlite3.connect(session) as opened:
        for table in ("mutation_specs", "work_items"):
            opened.execute(f"DELETE FROM {table} WHERE rowid % ? != 0", (every,))
    cosmic_ray("exec", config.name, session.name)
    found: Counter[str] = Counter()
    for line in cosmic_ray("dump", session.name).splitlines():
        item, result = json.loads(line)
        became = "unfinished" if result is None else str(result["test_outcome"]).rpartition(".")[2].lower()
        found[became] += 1
        if became == "survived":
            print(f"{file}: survived\n{result['diff']}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="?", const="", metavar="FILE", help="part of the name of a file of CORE")
    parser.add_argument("--every", type=int, default=1, help="of the operators' mutants, only every Nth")
    parser.add_argument("--only", default="", help="part of a file's name, or of a breakage's sentence")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write what became of each")
    args = parser.parse_args()
    if args.operators is not None:
        with copies(1) as free:
            root = free.get()
            for file in (file for file in CORE if args.operators in file):
                print(f"{file}: {dict(operators(file, args.every, root))}", flush=True)
        return
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
