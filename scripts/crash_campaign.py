"""Kills runs at random moments, damages their files, starts them twice, and asks whether anything was lost.

    python scripts/crash_campaign.py kills --count 500     runs killed and stopped, then continued to their end
    python scripts/crash_campaign.py damage --count 100    one file of a killed run damaged, then continued
    python scripts/crash_campaign.py doubles --count 20    two commands that continue one run at the same time

Every trial is drawn from --seed and its number alone. What a trial came to is a line of <--out>/<campaign>.jsonl: the
same command again goes on where it was stopped, and with a larger --count adds to what is there. Compared with a run
left alone are the weights, metrics.jsonl without times and memory, rollouts.jsonl, and the summary's counts.

Most processes are forked from one that has loaded the libraries (tests/processes.py); some are started anew (--anew, a
share), so that moments of loading are among those at which they are killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

from common import document, lasting, write  # noqa: E402
from processes import Forked  # noqa: E402

SHORT = ("n=4", "train.prompts=2", "train.steps=5", "train.checkpoint_every=2", "sampling.max_new_tokens=8")
EXAM = ("eval.every=2", "eval.problems=3", "eval.k=1")
COMMON = ("logger=jsonl", *SHORT, *EXAM)
CONFIGS: Mapping[str, tuple[str, ...]] = {
    "default": COMMON,
    "maxvar": (*COMMON, "m=2", "downsample=maxvar"),
    "predictor": (*COMMON, "sampler=infinite", "sampler.slots=4", "scheduler=lpt", "predictor=prefix"),
    "sparse": (*COMMON, "sparsity=rkv", "sparsity.budget=12", "sparsity.buffer=4", "correction=sparse_rl"),
    "lora": (*COMMON, "model.lora.rank=2", "loss.kl_coef=0.04"),
    "offload": (*COMMON, "optim.offload=true", "model.lora.rank=2", "model.lora.dropout=0.1"),
    "minibatches": (*COMMON, "loss=dapo", "train.epochs=2", "train.minibatches=2", "optim.schedule=cosine"),
    "every step": (*COMMON, "train.checkpoint_every=1", "train.keep_checkpoints=1", "record.rollouts=-1"),
    "no exam": (*COMMON, "eval.every=0", "correction=tis"),
    "wandb": ("logger=wandb", "logger.mode=offline", *SHORT, *EXAM),
    "sweep": (*COMMON, "-m", "seed=1,2", "hydra.launcher.jobs=2"),
}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOPS = 0.15  # the share of moments at which a process is asked to stop rather than killed
COUNTED = ("status", "step", "updates", "final_accuracy", "best_accuracy", "generated_tokens", "trained_tokens")
LIMIT_SECONDS = 300.0


@dataclass
class Came:
    """What a trial came to. `faults` is empty if all is as it has to be."""

    number: int
    config: str
    kills: int = 0
    stops: int = 0
    outcome: str = "same"
    about: str = ""
    faults: list[str] = field(default_factory=list)


class Process:
    """A command of grpo in a process of its own, forked from one that has loaded the libraries or started anew."""

    def __init__(self, words: Sequence[str], place: Path, anew: bool) -> None:
        self._file, environment = tempfile.TemporaryFile(), {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._forked = None if anew else Forked(*words, cwd=place, env=environment)
        self._said = ""
        self._process: Any = self._forked or subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_cli", *words],
            cwd=place,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """The exit code, or minus the signal; None if it goes on for so long."""
        end = time.monotonic() + seconds
        while (code := self._process.poll()) is None and time.monotonic() < end:
            time.sleep(0.002)
        return code

    def said(self) -> str:
        """What an ended process has printed."""
        if self._forked and not self._said:
            self._said = self._forked.communicate()[0]
        elif not self._said:
            self._file.seek(0)
            self._said = self._file.read().decode(errors="replace")
        return self._said


class Campaign:
    """Trials in a folder, and the runs left alone that they are compared with."""

    def __init__(self, out: Path, seed: int, anew: float, also: Sequence[str]) -> None:
        self.out, self._seed, self._anew, self._also = out, seed, anew, tuple(also)
        self._alone: dict[tuple[str, ...], tuple[list[Any], float]] = {}

    def rng(self, campaign: str, number: int) -> random.Random:
        return random.Random(f"{self._seed}/{campaign}/{number}")

    def start(self, words: Sequence[str], rng: random.Random) -> Process:
        return Process(words, self.out, rng.random() < self._anew)

    def alone(self, words: tuple[str, ...]) -> tuple[list[Any], float]:
        """What the command comes to when nothing disturbs it, and how many seconds it takes."""
        if words not in self._alone:
            folder = self.out / "alone" / hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            process = self.start(first_of(words, folder), random.Random(0))
            if process.wait(LIMIT_SECONDS) != 0:
                raise SystemExit(f"a run left alone failed: {' '.join(words)}\n{process.said()}")
            self._alone[words] = come_to(folder), time.monotonic() - began
        return self._alone[words]

    def fresh(self, campaign: str, number: int) -> Path:
        folder = self.out / campaign / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def kills(self, number: int) -> Came:
        """A run that is killed one to three times, each time continued, and at last left to its end."""
        rng, name = self.rng("kills", number), list(CONFIGS)[number % len(CONFIGS)]
        words, folder = (*CONFIGS[name], *self._also), self.fresh("kills", number)
        expected, seconds = self.alone(words)
        came = Came(number, name)
        for _ in range(rng.choice((1, 1, 2, 3))):
            process = self.start(next_of(words, folder, rng), rng)
            code = process.wait(rng.uniform(0, 1.05 * seconds))
            if code is None:
                stop = rng.choice(SIGNALS) if rng.random() < STOPS else signal.SIGKILL
                process.send(stop)
                code = process.wait(LIMIT_SECONDS)
                came.kills += stop == signal.SIGKILL
                came.stops += stop != signal.SIGKILL
            _look(process, code, came, (0, -signal.SIGKILL, 130, *(-number for number in SIGNALS)))
            _wait_for_jobs(folder)
        process = self.start(next_of(words, folder, rng), rng)
        _look(process, process.wait(LIMIT_SECONDS), came, (0,))
        came.faults += [*_differences(expected, come_to(folder)), *_leftovers(folder)]
        return self._kept(came, folder)

    def damage(self, number: int) -> Came:
        """A run killed between checkpoints, of which one file is damaged: what is not as it was has to be said."""
        rng, name = self.rng("damage", number), ("default", "lora", "predictor")[number % 3]
        words, folder = (*CONFIGS[name], "train.steps=7", *self._also), self.fresh("damage", number)
        expected, _ = self.alone(words)
        shutil.copytree(self._killed(words), folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        file = rng.choice(files)
        came = Came(number, name, about=f"{rng.choice(tuple(DAMAGES))} {file.relative_to(folder)}")
        left = DAMAGES[came.about.partition(" ")[0]](file.read_bytes(), rng)
        file.unlink() if left is None else file.write_bytes(left)
        process = self.start(["train", f"resume={folder}"], rng)
        code = process.wait(LIMIT_SECONDS)
        _look(process, code, came, (0, 2))
        named = file.name in process.said() or any(
            part.startswith("step_") and part in process.said() for part in file.parts
        )
        if code == 2:
            came.outcome = "refused"
            came.faults += [] if named else [f"refused without naming {file.name}: {_last(process)}"]
        elif _differences(expected, come_to(folder)):
            came.outcome = "differs, said" if named else "SILENT"
            came.faults += [] if named else _differences(expected, come_to(folder))
        else:
            came.outcome = "passed over, said" if named else "made no difference"
        return self._kept(came, folder)

    def _killed(self, words: tuple[str, ...]) -> Path:
        """A run killed when it had two checkpoints, and records beyond the last of them."""
        folder = self.out / "killed" / hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
        if (folder / "checkpoints").exists():
            return folder
        folder.parent.mkdir(exist_ok=True)
        for _ in range(5):  # on a busy machine it may have ended before it is seen to be so far
            shutil.rmtree(folder, ignore_errors=True)
            process = self.start(first_of(words, folder), random.Random(0))
            while process.wait(0.001) is None:
                rows = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
                if '"step": 5' in rows:
                    process.send(signal.SIGKILL)
                    process.wait(LIMIT_SECONDS)
            if not (folder / "summary.json").exists():
                return folder
        raise SystemExit("the run always ended before it could be killed")

    def doubles(self, number: int) -> Came:
        """One run continued by two processes that start within 1.5 seconds of each other."""
        rng, every = self.rng("doubles", number), ("train.steps=90", "train.checkpoint_every=30")
        words = (*CONFIGS["default"], *every, *self._also)
        folder = self.fresh("doubles", number)
        expected, _ = self.alone(words)
        first = self.start(first_of(words, folder), rng)
        while first.wait(0.01) is None and not list(folder.glob("checkpoints/*/COMPLETE")):
            pass
        first.send(signal.SIGKILL)
        first.wait(LIMIT_SECONDS)
        came = Came(number, "default", kills=1)
        pair = [self.start(["train", f"resume={folder}"], rng)]
        time.sleep(rng.uniform(0, 1.5))
        pair.append(self.start(["train", f"resume={folder}"], rng))
        codes = [process.wait(LIMIT_SECONDS) for process in pair]
        for process, code in zip(pair, codes, strict=True):
            _look(process, code, came, (0, 2))
        refused = [process for process, code in zip(pair, codes, strict=True) if code == 2]
        other = next((process.pid for process in pair if process not in refused), None)
        came.outcome = "refused" if len(refused) == 1 else f"exit codes {codes}"
        if len(refused) != 1 or f"in use by process {other} on {os.uname().nodename} " not in refused[0].said():
            came.faults.append(f"exit codes {codes}: {[_last(process) for process in pair]}")
        came.faults += _differences(expected, come_to(folder))
        return self._kept(came, folder)

    def _kept(self, came: Came, folder: Path) -> Came:
        """The folder of a trial stays only if something is wrong there."""
        if not came.faults:
            shutil.rmtree(folder)
        return came


def first_of(words: Sequence[str], folder: Path) -> list[str]:
    return ["train", *words, f"hydra.{'sweep' if '-m' in words else 'run'}.dir={folder}"]


def next_of(words: Sequence[str], folder: Path, rng: random.Random) -> list[str]:
    """The command that begins the run or goes on with it, in one of the ways in which a person may."""
    if "-m" in words:
        begun = (folder / "sweep.json").exists()
        return ["train", "-m", "resume=sweep", f"hydra.sweep.dir={folder}"] if begun else first_of(words, folder)
    if rng.random() < 0.5 and (folder / "run.json").exists():
        return ["train", f"resume={folder}"]
    return [*first_of(words, folder), "resume=here"]


def come_to(folder: Path) -> list[Any]:
    """All that a run has left but times and memory; of a sweep, of each job."""
    jobs = sorted(path.parent for path in folder.glob("[0-9]*/run.json")) or [folder]
    return [_come_to(job) for job in jobs]


def _come_to(folder: Path) -> dict[str, Any]:
    try:
        found, summary = lasting(folder), json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError) as error:
        return {"missing": str(error)}
    rollouts = hashlib.sha256((folder / "rollouts.jsonl").read_bytes()).hexdigest()
    return {**found, "rollouts": rollouts, "summary": {key: summary.get(key) for key in COUNTED}}


def _differences(expected: Sequence[Any], found: Sequence[Any]) -> list[str]:
    if len(expected) != len(found):
        return [f"{len(found)} runs instead of {len(expected)}"]
    told = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        told += [f"run {number}: {key} differs" for key in one if one.get(key) != other.get(key)]
        told += [f"run {number}: {other['missing']}"] if "missing" in other else []
    return told


def _leftovers(folder: Path) -> list[str]:
    return [f"{path.relative_to(folder)} is left" for path in folder.rglob("*") if path.suffix in (".tmp", ".replaced")]


def _look(process: Process, code: int | None, came: Came, allowed: Sequence[int]) -> None:
    said = process.said()
    # A ctrl-C that comes while the interpreter starts is answered by Python, before a line of ours has run.
    in_python_itself = said.rstrip().endswith("KeyboardInterrupt") and "grpo_cli" not in said
    if "Traceback (most recent call last)" in said and not in_python_itself:
        came.faults.append(f"a traceback: {_last(process)}")
    elif code not in allowed:
        came.faults.append(f"exit code {code}: {_last(process)}")


def _last(process: Process) -> str:
    return (process.said().strip().splitlines() or [""])[-1][:300]


def _wait_for_jobs(folder: Path) -> None:
    """Until no job of a sweep that was killed goes on by itself: its lock says so."""
    import fcntl

    for lock in folder.glob("[0-9]*/log.txt"):
        with open(lock, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def _flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content or b"x")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _lines(content: bytes, rng: random.Random, double: bool) -> bytes:
    """Without one of its lines, or with one of them a second time."""
    lines = content.splitlines(keepends=True) or [b"x"]
    one = rng.randrange(len(lines))
    return b"".join([lines[one], *lines] if double else [*lines[:one], *lines[one + 1 :]])


# What becomes of a file's content; None: it is deleted.
DAMAGES: Mapping[str, Callable[[bytes, random.Random], bytes | None]] = {
    "deleted": lambda content, rng: None,
    "emptied": lambda content, rng: b"",
    "cut": lambda content, rng: content[: rng.randrange(max(1, len(content)))],
    "flipped": _flipped,
    "line-cut": lambda content, rng: _lines(content, rng, double=False),
    "line-doubled": lambda content, rng: _lines(content, rng, double=True),
}


def carried_out(campaign: Campaign, name: str, count: int) -> Iterator[Came]:
    """Every trial up to `count`, those that were made before as they were written down."""
    kept = campaign.out / f"{name}.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    before = {came.number: came for came in (Came(**json.loads(line)) for line in lines)}
    for number in range(count):
        if number not in before:
            came = getattr(campaign, name)(number)
            with open(kept, "a") as file:
                file.write(json.dumps(asdict(came)) + "\n")
            before[number] = came
        yield before[number]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=("kills", "damage", "doubles"))
    parser.add_argument("--count", type=int, default=20, help="trials; of kills, each has one to three")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/crash_campaign"))
    parser.add_argument("--anew", type=float, default=0.1, help="share of processes that are started, not forked")
    parser.add_argument("--also", nargs="*", default=[], help="settings of every run: train.checkpoint=lazy")
    parser.add_argument("--json", type=Path, help="where all that it came to goes, with settings and environment")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    campaign, found = Campaign(args.out.resolve(), args.seed, args.anew, args.also), []
    for came in carried_out(campaign, args.campaign, args.count):
        found.append(came)
        for fault in came.faults:
            print(f"trial {came.number} ({came.config} {came.about}): {fault}", flush=True)
    print(f"{len(found)} trials: {dict(Counter(came.outcome for came in found))}")
    if args.json:
        write(args.json, {**document(args), "trials": [asdict(came) for came in found]})
    return int(any(came.faults for came in found))


if __name__ == "__main__":
    sys.exit(main())
