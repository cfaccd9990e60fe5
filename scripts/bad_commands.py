"""Command lines that nobody should be able to run, and what `grpo` says to each: one message that names what is wrong.

    python scripts/bad_commands.py                      all of them
    python scripts/bad_commands.py --count 40 --json bad.json

They are made of the configuration itself (every number with what is no number, unknown keys, choices that there are
not) and of files and modules that cannot be used. Each runs in a fork of a process that has loaded the program, in a
folder of its own. Ends with 1 if one ends in a traceback, is taken without a word, or is refused without its key.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.config.choices import choices, groups_of, parts_of, shipped
from grpo_cli.settings import EvalRunSettings, ProfileRunSettings

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from processes import Forked  # noqa: E402

LIMIT_SECONDS = 60.0  # whatever runs longer was not refused
NO_NUMBERS = ("nan", "inf", "-inf", "few", "[1,2]", "true", "1" + 400 * "0")
ANY_SIGN = {"record.rollouts", "eval.problems", "sparsity.threshold"}  # of which -1 means something
GOOD = ("task=jsonl", "task.path=good.jsonl")
NEEDS = {"task=jsonl": GOOD, "task=gsm8k": GOOD, "task=math": GOOD, "predictor=oracle": ("predictor.lengths=x",)}
SHORT = ("logger=jsonl", "train.steps=1", "eval.problems=1", "eval.k=1", "n=2", "train.prompts=1")


@dataclass(frozen=True)
class BadCommand:
    """What is typed after `grpo`, and the word that the message has to say."""

    arguments: tuple[str, ...]
    key: str


def bad_commands(seed: int) -> list[BadCommand]:
    """All of them, none twice, in an order of the seed's."""
    found = list(dict.fromkeys([*_numbers(), *_keys(), *_choices(), *_listed()]))
    random.Random(seed).shuffle(found)
    return found


def _train(key: str, *words: str) -> BadCommand:
    return BadCommand(("train", *SHORT, *words), key)


def _numbers() -> Iterator[BadCommand]:
    """Every setting that is a number, with what is none and, where no meaning is given to it, with -1."""
    for command, settings in (("profile", ProfileRunSettings), ("eval", EvalRunSettings)):
        keys = [key for key, kind in _typed(settings, "") if kind in (int, float)]
        for key in (key for key in keys if command == "eval" or key.startswith("profile.")):
            yield from (BadCommand((command, *few, f"{key}={value}"), key) for few, value in _values(key))
        if command == "profile":
            for key in (key for key in keys if not key.startswith("profile.")):
                yield from (_train(key, f"{key}={value}") for _, value in _values(key))
    for group in parts_of("train"):
        for choice in choices(group):
            for name in _numbers_of(group, choice):
                key = f"{group}.{name}"
                words = NEEDS.get(f"{group}={choice}", ()) or (f"{group}={choice}",)
                words = (f"{group}={choice}", *words[1:], *_together_with(choice))
                yield from (_train(key, *words, f"{key}={value}") for _, value in _values(key))
    for name in shipped("task", "_text")["weights"]:
        for value in NO_NUMBERS:
            yield _train(f"task.weights.{name}", *GOOD, f"task.weights.{name}={value}")


def _values(key: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for value in (*NO_NUMBERS, *(() if key in ANY_SIGN else ("-1",))):
        yield (), value


def _together_with(choice: str) -> tuple[str, ...]:
    """What a choice asks for besides."""
    return ("predictor=mean",) if choice == "fptas" else ("n=3",) if choice.startswith("median") else ()


def _typed(kind: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The settings below a dataclass, each with its kind."""
    for name, hint in typing.get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from _typed(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, _kind(hint)


def _numbers_of(group: str, choice: str) -> list[str]:
    import hydra.utils

    values = shipped(group, choice)
    target = hydra.utils.get_object(values["_target_"])
    constructor = isinstance(target, type) and not is_dataclass(target)
    hints = typing.get_type_hints(target.__init__ if constructor else target)
    return [name for name in values if name in hints and _kind(hints[name]) in (int, float)]


def _kind(hint: Any) -> Any:
    members = set(typing.get_args(hint)) - {types.NoneType} if isinstance(hint, types.UnionType) else {hint}
    return float if float in members else members.pop() if len(members) == 1 else None


def _keys() -> Iterator[BadCommand]:
    """Keys that there are not: every setting misspelt, and unknown ones in each group."""
    for key, _ in _typed(ProfileRunSettings, ""):
        if not key.startswith(("parts", "run_dir")):
            yield BadCommand(("profile", f"{key}x=1"), f"{key}x")
    for group in groups_of("train"):
        if group != "experiment":
            yield _train(f"{group}.zzz", f"{group}.zzz=1")
            yield _train(f"{group}.zzz" if group == "model" else "zzz", f"+{group}.zzz=1")
    for group in parts_of("train"):
        yield _train(group, f"~{group}")
        yield _train(group, f"{group}=null")


def _choices() -> Iterator[BadCommand]:
    """Choices that there are not, of groups and of settings that are one of a few words."""
    for command in ("train", "eval", "profile"):
        for group in groups_of(command):
            yield BadCommand((command, f"{group}=zzz"), group)
    for key, kind in _typed(ProfileRunSettings, ""):
        if kind is bool:
            yield BadCommand(("profile", f"{key}=7"), key)
        elif kind is str and key not in ("run_dir", "device"):
            yield BadCommand(("profile", f"{key}=7"), key)
    for group in parts_of("train"):
        yield _train(group, f"{group}._target_=no_such_module.Part")
        for name in ("math.pi", "builtins.int", "syntax_error.f", "raises.f", "exits.f", "ends.f", "works.no_such"):
            yield _train(group, f"{group}._target_={name}")


def _listed() -> Iterator[BadCommand]:
    """Those of the YAML file."""
    broken = [name for name in FILES if name.endswith(".jsonl") and name != "good.jsonl"]
    for entry in LISTED["commands"]:
        asked = entry if isinstance(entry, dict) else {"key": entry[0], "words": entry[1:], "each": [None]}
        each = broken if asked["each"] == ["BAD"] else _flat(asked["each"])
        for one in each:
            key, *words = (word if one is None else word.replace("{}", one) for word in (asked["key"], *asked["words"]))
            words = [word.replace("NINES", 400 * "9") for word in words]
            words = [word for given in words for word in (GOOD if given == "GOOD" else (given,))]
            yield BadCommand(tuple(words), key) if words[0] in COMMANDS else _train(key, *words)


def _flat(values: Sequence[Any]) -> list[str]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COMMANDS = ("train", "eval", "profile", "show", "merge", "report", "ls", "explain")
ROW = '{"question": "%s", "answer": "4"}\n'
FILES: Mapping[str, str | bytes] = {
    "good.jsonl": "".join(ROW % f"{i}+{i}" for i in range(40)),
    "latin.jsonl": b'{"question": "\xe9", "answer": "4"}',
    "deep.jsonl": 9000 * "[",
    "long.jsonl": ROW % (10_000_000 * "a") + ROW % "2+2",
    **LISTED["files"],
}


def make_files(folder: Path) -> None:
    """What the commands name, below `folder`."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder").mkdir()
    for pipe in ("pipe", "piped/model.safetensors"):
        os.mkfifo(folder / pipe)


@dataclass(frozen=True)
class Answer:
    """What came of a command; `code` is None where it had to be killed."""

    command: BadCommand
    code: int | None
    said: str

    @property
    def fault(self) -> str:
        """What is wrong with the answer; nothing if it is as it should be."""
        if "Traceback (most recent call last)" in self.said:
            return "traceback"
        if self.code in (0, None):
            return "silent"
        return "" if self.command.key in self.said and self.code == 2 else "unnamed"


def answers(commands: Sequence[BadCommand], jobs: int) -> Iterator[Answer]:
    """What `grpo` says to each; `jobs` at a time, each in a folder of its own."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda given: _answer(given[1], Path(place, str(given[0]))), enumerate(commands))


def _answer(command: BadCommand, folder: Path) -> Answer:
    folder.mkdir()
    make_files(folder)
    process = Forked(*command.arguments, cwd=folder, env={"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"})
    deadline = time.monotonic() + LIMIT_SECONDS
    while (code := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)
    said, _ = process.communicate()
    shutil.rmtree(folder)
    return Answer(command, code if code is None or code >= 0 else None, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="only so many; default: all")
    parser.add_argument("--only", default="", help="those that have this text in a word")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write every command with its answer")
    args = parser.parse_args()
    asked = [c for c in bad_commands(args.seed) if args.only in " ".join(c.arguments)][: args.count]
    found = []
    for answer in answers(asked, args.jobs):
        found.append(answer)
        if answer.fault:
            print(f"{answer.fault}: {' '.join(answer.command.arguments)[:200]} (key {answer.command.key})", flush=True)
            print(f"    {answer.said.strip()[-600:]}", flush=True)
    counts = {fault: sum(a.fault == fault for a in found) for fault in ("traceback", "silent", "unnamed")}
    print(f"{len(found)} command lines: {', '.join(f'{count} {fault}' for fault, count in counts.items())}")
    if args.json is not None:
        rows = [asdict(answer) | {"fault": answer.fault} for answer in found]
        args.json.write_text(json.dumps({"commands": len(found), **counts, "answers": rows}, indent=1) + "\n")
    raise SystemExit(any(counts.values()))


if __name__ == "__main__":
    main()
