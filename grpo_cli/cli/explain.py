"""`grpo explain`: what any word is that a user meets, in the words of `conf/`, of `metrics.py` and of `concepts`.

Answers at once: the sentences of `metrics.py` are read from its source, since importing it loads PyTorch.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import grpo_cli
from grpo_cli.cli.concepts import CONCEPTS
from grpo_cli.cli.help import Row, say, say_rows
from grpo_cli.config.choices import choices, config_dir, defaults_of
from grpo_cli.config.comments import Setting, read_choice, read_conf
from grpo_cli.config.elsewhere import meant_by
from grpo_cli.support.errors import UserError, closest

COMMANDS = ("train", "eval", "profile")


class Known(NamedTuple):
    """A setting, and with what it is there: `grpo train`, or a choice such as `loss=grpo`."""

    key: str
    having: str
    said: Setting


def explain_each(words: Sequence[str]) -> None:
    for place, word in enumerate(words):
        if place:
            say("")
        explain(word)


def explain(word: str) -> None:
    """Say what a word is. UserError, with the nearest one, if it is none that is known."""
    name, _, choice = word.partition("=")
    groups, known = _groups(), _known()
    keys = [one.key for one in known]
    named = {key for key in keys if key == name} or {key for key in keys if key.endswith(f".{name}")} or {name}
    settings = [one for one in known if any(one.key == key or one.key.startswith(f"{key}.") for key in named)]
    found = True
    if name in CONCEPTS and not choice:
        say(f"{name}: {CONCEPTS[name]}")
    if name in groups and choice:
        _say_choice(name, choice, known)
    elif name in groups:
        _say_group(name)
    elif settings:
        _say_settings(settings)
        _say_mentions(named, known)
    elif not _say_others(name, known):
        found = name in CONCEPTS
    if not _say_elsewhere(name) and not found:
        raise UserError(f"{word} is no group, choice, setting or metric{_nearest(name, [*groups, *keys])}")


def _say_others(name: str, known: Sequence[Known]) -> bool:
    """Say of a word what it is as a choice of any group, and as a metric or a part of one, if it is any."""
    having = [group for group in _groups() if name in choices(group)]
    for group in having:
        _say_choice(group, name, known)
    rows = _metrics_of(name)
    if rows:
        say_rows(rows)
        say("They stand in grpo_cli/metrics.py." if len(rows) > 1 else "It stands in grpo_cli/metrics.py.")
    return bool(having or rows)


def _say_elsewhere(name: str) -> bool:
    """Say what is called so by TRL or verl, if anything is that is not called so here."""
    row = meant_by(name)
    if row is None or row.ours.rpartition(".")[2] == name:
        return False
    of = " and ".join(label for label, words in (("TRL", row.trl), ("verl", row.verl)) if name in words) or "verl"
    say(f"{name} of {of} is {row.ours} here: grpo explain {row.ours.partition('=')[0]}")
    return True


def _nearest(name: str, known: Sequence[str]) -> str:
    every = [choice for group in _groups() for choice in choices(group)]
    return closest(name, [*known, *_metrics(), *every, *CONCEPTS])


@functools.cache
def _metrics() -> Mapping[str, str]:
    """Names and sentences of `metrics.METRICS`."""
    source = (Path(grpo_cli.__file__).parent / "metrics.py").read_text(encoding="utf-8")
    found = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    (value,) = (node.value for node in found if isinstance(node.target, ast.Name) and node.target.id == "METRICS")
    told: dict[str, str] = ast.literal_eval(value) if value is not None else {}
    return told


def _metrics_of(word: str) -> list[Row]:
    """The metric of this name (also of one that runs invent), else the family, else those that have the word in it."""
    told = _metrics()
    if word in told:
        return [(word, told[word])]
    if family := [name for name in told if name.startswith(f"{word.rstrip('/')}/")] if word else []:
        return [(name, told[name]) for name in family]
    for name, sentence in told.items():
        pattern = re.sub(r"<[a-z]+>", "[^/]+", re.escape(name).replace("<k>", "[1-9][0-9]*"))
        if "<" in name and re.fullmatch(pattern, word):
            return [(word, sentence)]
    return [(name, told[name]) for name in told if word in re.split(r"[/_@]", name) + name.split("/")] if word else []


@functools.cache
def _groups() -> list[str]:
    """The groups that have choices, such as `loss` and `hydra/launcher`."""
    folders = {file.parent.relative_to(config_dir()).as_posix() for file in config_dir().rglob("*/*.yaml")}
    return sorted(folders - {"."})


@functools.cache
def _known() -> tuple[Known, ...]:
    """All settings of the commands, then those of each choice. What a named experiment sets is explained there."""
    return tuple(_all_known())


def _all_known() -> Iterator[Known]:
    for command in COMMANDS:
        for key, said in read_conf(config_dir() / f"{command}.yaml").settings.items():
            if not said.place.startswith("conf/train.yaml") or command == "train":  # which a profile takes over whole
                yield Known(key, f"grpo {command}", said)
    for group in _groups():
        for choice in choices(group) if group != "experiment" else ():
            for key, said in read_choice(group, choice).settings.items():
                yield Known(f"{group.replace('/', '.')}.{key}", f"{group}={choice}", said)


def _say_settings(settings: Sequence[Known]) -> None:
    """Each setting once per comment, then its values, with what has them and where they stand."""
    told: dict[tuple[str, str], dict[Setting, list[str]]] = {}
    for one in settings:
        told.setdefault((one.key, one.said.comment), {}).setdefault(one.said, []).append(one.having)
    defaults = _default_choices()
    for (key, comment), values in told.items():
        say(f"{key}: {comment}" if comment else key)
        rows: list[Row] = []
        for said, having in values.items():
            group = having[0].partition("=")[0]
            every = len(having) > 1 and len(having) == len(choices(group))
            each = [f"every {group}"] if every else [word + " (the default)" * (word in defaults) for word in having]
            rows += [(f"  {said.value}", f"{', '.join(each)}: {said.place}")] if said.value else []
        say_rows(rows)


def _default_choices() -> set[str]:
    """What `grpo train` is composed of if nothing is said."""
    return {f"{group}={choice}" for group, choice in defaults_of("train").items()}


def _say_group(group: str) -> None:
    defaults = _default_choices()
    say(f"{group}: a group of settings, of which one choice is made")
    named = [f"{group}={choice}" for choice in choices(group)]
    about = [read_choice(group, choice).about for choice in choices(group)]
    rows = zip(named, about, strict=True)
    say_rows((f"  {word}", f"{'(the default) ' if word in defaults else ''}{text}") for word, text in rows)
    say(f"They stand in conf/{group}/. grpo explain {named[0]} lists the settings of one.")


def _say_choice(group: str, choice: str, known: Sequence[Known]) -> None:
    if choice not in choices(group):
        offered = ", ".join(choices(group))
        raise UserError(f"{group}={choice} is not one of the choices {offered}{closest(choice, choices(group))}")
    told = read_choice(group, choice)
    prefix = "" if group == "experiment" else f"{group.replace('/', '.')}."
    say(f"{group}={choice}: {told.about}")
    rows = {
        f"  {prefix}{key}={said.value}" if said.value else f"  {prefix}{key}:": said
        for key, said in told.settings.items()
    }
    say_rows((left, said.comment) for left, said in rows.items() if said.value or said.comment)
    say(f"It stands in conf/{group}/{choice}.yaml" + (f" and builds {told.builds}." if told.builds else "."))
    _say_mentions({f"{group}={choice}"}, known)


def _say_mentions(names: Collection[str], known: Sequence[Known]) -> None:
    """Whose comments name it: what it has to do with. Within a group the last part of a name is enough."""
    naming: dict[str, None] = {}  # in their order
    for name in names:
        group, _, last = name.rpartition(".")
        whole, short = (re.compile(rf"(?<![\w.=\\]){re.escape(word)}(?![\w=])") for word in (name, last))
        for key, _, said in known:
            if whole.search(said.comment) or (key.rpartition(".")[0] == group and short.search(said.comment)):
                naming[key] = None
    others = [key for key in naming if key not in names]
    if others:
        say(f"Named by: {', '.join(others)}", hanging=10)
