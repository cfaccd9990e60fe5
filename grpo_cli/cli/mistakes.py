"""Messages about unusable command lines: what was typed, and what it should have been. Imports no Hydra."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from grpo_cli.config.choices import choices, chosen, groups_of, marked, prefix_of, read_choice, read_command
from grpo_cli.config.overrides import quoted, value_of
from grpo_cli.support.errors import closest
from grpo_cli.support.extras import EXTRAS, absent, installed
from grpo_cli.support.formatting import shown

_SWITCHES = {  # the value that switches something off, and the settings of what it is
    "correction.importance": (
        "none",
        [f"correction.{one}" for one in ("is_mode", "is_threshold", "is_threshold_low", "batch_normalise")],
    ),
    "correction.rejection": ("none", ["correction.veto"]),
    "train.warmup": ("none", [f"train.warmup_{one}" for one in ("steps", "path", "field", "lr")]),
    "optim.ess": ("none", ["optim.ess_reference"]),
    "model.lora.rank": (0, [f"model.lora.{one}" for one in ("alpha", "dropout", "targets")]),
    "resume": (None, ["accept_damage"]),
}


def unusable(words: Sequence[str], is_sweep: bool) -> Iterator[str]:
    """Yield what is wrong with words that Hydra would misunderstand."""
    for word in words:
        key, _, value = word.partition("=")
        if key == "--config":
            yield "a file of settings is an experiment: --config-dir=<folder> experiment=<name> (grpo init writes one)"
        elif word.startswith("-"):
            name = key.lstrip("-").replace("-", "_")
            ours = meant_by(name) or name
            yield f"{key} is no option; settings are typed without dashes: {ours if '=' in ours else f'{ours}=...'}"
        elif key == "resume" and value != "null" and (value == "sweep") != is_sweep:
            yield f"{word}: a sweep continues with -m resume=sweep, one run with resume=<folder> and without -m"
        elif key == "hydra.run.dir" and is_sweep:
            yield f"{word} is of one run: a sweep writes to hydra.sweep.dir=<folder>"
        elif key.lstrip("+") == "hydra.sweep.dir" and value.strip("\"'").startswith("~"):
            yield f"{word}: write the home folder in full, or the sweep goes below a folder named ~"
        elif not is_sweep and key.lstrip("+").startswith(("hydra.sweep.", "hydra.mode")):
            yield f"{word} is of a sweep: add -m"
        elif key == "hydra.job.chdir" and value != "false":
            yield f"{word} moves a run from the folder to which its paths refer: leave it out"


def as_text(word: str) -> str:
    """Return how to type a setting whose value is text; empty for a word that sets nothing."""
    key, equals, value = word.partition("=")
    is_list = value[:1] + value[-1:] == "[]"
    texts = [quoted(one.strip(" "), '"') for one in (value[1:-1].split(",") if is_list else [value])]
    text = (f"[{','.join(texts)}]".replace("\n", "\\n") if is_list else texts[0]).replace("\\${", "${")
    known = equals and re.fullmatch(r"[+]{0,2}[\w.@/-]+", key) and len(word) <= 500
    return f"as text it is typed {shlex.quote(f'{key}={text}')}" if known else ""


def unknown(command: str, words: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with each key and choice that is not known."""
    known = _known_keys(command, words)
    for key, _, value in (word.partition("=") for word in words if re.match(r"[^-+~={\s][^={\s]*=", word)):
        plugin = f"hydra_plugins.hydra_{value.partition('_')[0]}_{key.removeprefix('hydra/')}"
        if key in groups_of(command):
            named = [one for one in value.split(",") if re.fullmatch(r"[\w./\\-]*", one)]
            yield from (no_choice(key, one) for one in named if one not in choices(key))
        elif plugin in EXTRAS and not installed(plugin):
            yield absent(plugin, f"{key}={value}")
        elif key not in known and not key.startswith(("hydra.", "hydra/")) and "@" not in key:
            asked = () if key.partition(".")[0] in groups_of(command) else ("train", "eval", "profile")
            theirs = [one for one in asked if key in _known_keys(one, ())]
            yield f"{key} is a setting of grpo {theirs[0]}" if theirs else _no_setting(key, known)


def no_choice(group: str, choice: str) -> str:
    """Return that a group has no such choice, with those that it has."""
    options = choices(group)
    hint, example = closest(choice, options, partial(marked, group)), {"model": "hf", "task": "jsonl"}.get(group)
    if example and re.search(r"[/.\\]", choice):
        hint = f"; a path is given as {group}={example} {group}.path={choice}"
    elif Path("conf", group, f"{choice}.yaml").is_file():
        hint = "; conf/ has it: add --config-dir=conf"
    return f"{group}={choice} is not one of the choices {', '.join(marked(group, one) for one in options)}{hint}"


def _no_setting(key: str, known: Mapping[str, str]) -> str:
    """Return what an unknown key may have meant: a setting of another choice of its group, a name of TRL or verl, a
    misspelling."""
    group, _, word = key.partition(".")
    parent = key.rpartition(".")[0]
    if known.get(parent) == "{}" or parent == "task.weights":  # it takes any key
        hint = closest(key, [one for one in known if one.startswith(f"{parent}.")])
        return f"{key} is new to {group}: type +{key}=...{hint}"
    ours = meant_by(key)
    if having := [f"{group}={one}" for one in choices(group) if group and word in read_choice(group, one).settings]:
        others = f"but of {', '.join(having)}{f'; did you mean {ours}?' if ours else ''}"
        return f"{key} is not a setting of this {group}, {others}"
    near = [one for one in known if "." not in key or "." in one]
    return f"{key} is not a setting{f'; did you mean {ours}?' if ours else closest(key, near)}"


def without_effect(settings: Mapping[str, Any], typed: Sequence[str]) -> Iterator[str]:
    """Yield a line for each typed key that another of the settings, given by dotted key, switches off."""
    for switch, (off, keys) in _SWITCHES.items():
        if settings.get(switch) == off:
            yield from (f"{key} has no effect with {switch}={shown(off)}" for key in keys if key in typed)


def _known_keys(command: str, words: Sequence[str]) -> dict[str, str]:
    """Return every key of the configuration with the choices among these words, and its value in its file."""
    typed = {group: (value_of(group, words) or "").split(",") for group in groups_of(command)}  # several of a sweep
    known_ones = {group: [one for one in ones if one in choices(group)] for group, ones in typed.items()}
    parts = chosen(command, {group: ones[0] for group, ones in known_ones.items() if ones})
    known = {key: one.value for key, one in read_command(command).settings.items()} | parts
    for group, choice in parts.items():
        for one in {choice: None, **dict.fromkeys(known_ones.get(group, ()))}:
            settings = read_choice(group, one).settings
            known = {f"{prefix_of(group)}{key}": it.value for key, it in settings.items()} | known
    return known


@functools.cache
def listed(name: str) -> Any:
    """Return the content of a file beside this one: `concepts`, or `elsewhere`, what TRL and verl call a setting."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))


def meant_by(key: str) -> str | None:
    """Return our setting for a name of TRL or verl, which may have a prefix: `actor_rollout_ref.rollout.n`."""
    parts, rows = key.split("."), listed("elsewhere")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return next((row["ours"] for tail in tails for row in rows if tail in row["trl"] + row["verl"]), None)
