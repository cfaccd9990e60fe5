"""Command lines that cannot be used are each refused in one message that names what is wrong, without a traceback.

They are made of the configuration itself (unknown keys and choices) and of the files and modules listed in
bad_commands.yaml. A test run types 24 of them; BAD_COMMANDS=5000 types them all.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from processes import Forked

from grpo_cli.config.choices import groups_of, parts_of, read_command

LISTED = yaml.safe_load(Path(__file__).with_name("bad_commands.yaml").read_text(encoding="utf-8"))
COUNT = int(os.environ.get("BAD_COMMANDS", "24"))
LIMIT_SECONDS = 60.0  # whatever runs longer was not refused
COMMANDS = ("train", "eval", "profile", "show", "export", "report", "ls", "explain", "init")
GOOD = ("task=jsonl", "task.path=good.jsonl")
SHORT = ("logger=jsonl", "train.steps=1", "eval.problems=1", "eval.k=1", "n=2", "train.prompts=1")
ROW = '{"question": "%s", "answer": "4"}\n'
FILES: dict[str, str | bytes] = {
    "good.jsonl": "".join(ROW % f"{i}+{i}" for i in range(40)),
    "latin.jsonl": b'{"question": "\xe9", "answer": "4"}',
    "deep.jsonl": 9000 * "[",
    "long.jsonl": ROW % (10_000_000 * "a") + ROW % (1000 * "b"),
    **LISTED["files"],
}

Bad = tuple[str, tuple[str, ...]]  # the word that the message has to name, and what is typed after `grpo`


@pytest.mark.study
def test_command_lines_that_cannot_be_used_are_refused_by_the_name_of_what_is_wrong(tmp_path: Path) -> None:
    commands = sorted(set([*keys_and_choices(), *listed()]))
    assert len(commands) >= 400
    random.Random(0).shuffle(commands)
    faults = [fault for i, bad in enumerate(commands[:COUNT]) if (fault := fault_of(bad, tmp_path / str(i)))]
    assert faults == []


def fault_of(bad: Bad, folder: Path) -> str:
    """What is wrong with the answer of `grpo`; nothing if it is a refusal that names the key."""
    key, words = bad
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "folder").mkdir()
    for pipe in ("pipe", "piped/model.safetensors"):
        os.mkfifo(folder / pipe)
    process = Forked(*words, cwd=folder, env={"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"})
    deadline = time.monotonic() + LIMIT_SECONDS
    while (code := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)
    said = process.communicate()[0]
    refused = code == 2 and key in said and "Traceback (most recent call last)" not in said
    return "" if refused else f"grpo {' '.join(words)[:200]} (key {key}) ended with {code}: {said.strip()[-600:]}"


def train(key: str, *words: str) -> Bad:
    return key, ("train", *SHORT, *words)


def keys_and_choices() -> Iterator[Bad]:
    """Keys that do not exist (every setting misspelt, unknown ones in each group), and choices that do not."""
    for key, setting in read_command("profile").settings.items():
        yield f"{key}x", ("profile", f"{key}x=1")
        if setting.value in ("true", "false"):
            yield key, ("profile", f"{key}=7")
    for group in (group for group in groups_of("train") if group != "experiment"):
        yield train(f"{group}.zzz", f"{group}.zzz=1")
        yield train(f"{group}.zzz" if group == "model" else "zzz", f"+{group}.zzz=1")
    for command in ("train", "eval", "profile"):
        yield from ((group, (command, f"{group}=zzz")) for group in groups_of(command))
    for group in parts_of("train"):
        yield from (train(group, words) for words in (f"~{group}", f"{group}=null"))
        modules = ("syntax_error.f", "raises.f", "exits.f", "ends.f", "works.no_such", "no_such_module.Part")
        yield from (train(group, f"{group}._target_={name}") for name in (*modules, "math.pi", "builtins.int"))


def listed() -> Iterator[Bad]:
    """Those of the YAML file."""
    broken = [name for name in FILES if name.endswith(".jsonl") and name != "good.jsonl"]
    for entry in LISTED["commands"]:
        asked = entry if isinstance(entry, dict) else {"key": entry[0], "words": entry[1:], "each": [None]}
        flat = [one for value in asked["each"] for one in (value if isinstance(value, list) else [value])]
        for one in broken if asked["each"] == ["BAD"] else flat:
            key, *words = (word if one is None else word.replace("{}", one) for word in (asked["key"], *asked["words"]))
            words = [word.replace("NINES", 400 * "9") for word in words]
            words = [word for given in words for word in (GOOD if given == "GOOD" else (given,))]
            yield (key, tuple(words)) if words[0] in COMMANDS else train(key, *words)
