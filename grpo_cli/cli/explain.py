"""`grpo explain`: looks a word up in `conf/`, `metrics.py` and `concepts.yaml`.

The sentences of `metrics.py` are read from its source, since importing it loads PyTorch.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

import grpo_cli
from grpo_cli.cli.help import Row, rows_of, say, say_rows
from grpo_cli.cli.mistakes import no_choice
from grpo_cli.config.choices import choices, config_dir, defaults_of, is_experimental, marked
from grpo_cli.config.comments import Setting, read_choice, read_conf
from grpo_cli.config.elsewhere import meant_by, removed
from grpo_cli.support.errors import UserError, closest, refuse


def explain_each(words: Sequence[str]) -> None:
    for place, word in enumerate(words):
        if place:
            say("")
        explain(word)


def explain(word: str) -> None:
    """Explain a word. UserError, with the nearest known one, if it is unknown."""
    name, _, choice = word.partition("=")
    settings = {key: found for key, found in _settings().items() if f".{name}." in f".{key}."}
    having = [group for group in _groups() if name in choices(group)]
    metrics, ours = _metrics_of(name), meant_by(name)
    if not choice and name in concepts():
        say(f"{name}: {concepts()[name]}")
    if name in _groups():
        _say_choice(name, choice) if choice else _say_group(name)
    elif settings:
        for key, found in settings.items():
            _say_setting(key, found)
    else:
        for group in having:
            _say_choice(group, name)
        say_rows(metrics)
    if ours is not None and ours.rpartition(".")[2] != name:
        say(f"{name} of TRL or verl is {ours} here: grpo explain {ours.partition('=')[0]}")
    elif not (name in concepts() or name in _groups() or settings or having or metrics):
        refuse([*removed([word])])
        every = [choice for group in _groups() for choice in choices(group)]
        near = closest(name, [*_groups(), *_settings(), *_metrics(), *every, *concepts()])
        raise UserError(f"{word} is no group, choice, setting or metric{near}")


@functools.cache
def concepts() -> Mapping[str, str]:
    """Return technical terms that are not settings, with a sentence each."""
    return dict(yaml.safe_load(Path(__file__).with_name("concepts.yaml").read_text(encoding="utf-8")))


@functools.cache
def _metrics() -> Mapping[str, str]:
    """Return names and sentences of `metrics.METRICS`."""
    source = (Path(grpo_cli.__file__).parent / "metrics.py").read_text(encoding="utf-8")
    found = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    (value,) = (node.value for node in found if isinstance(node.target, ast.Name) and node.target.id == "METRICS")
    sentences: dict[str, str] = ast.literal_eval(value) if value is not None else {}
    return sentences


def _metrics_of(word: str) -> list[Row]:
    """Return the metric with this name (placeholders such as `<k>` filled in), or those whose names hold the word."""
    for name, sentence in _metrics().items():
        pattern = re.sub(r"<[a-z]+>", "[^/]+", re.escape(name).replace("<k>", "[1-9][0-9]*"))
        if re.fullmatch(pattern, word):
            return [(word, sentence)]
    parts = {name: {*re.split(r"[/_@]", name), *name.split("/")} - {""} for name in _metrics()}
    return [(name, text) for name, text in _metrics().items() if word in parts[name]]


@functools.cache
def _groups() -> list[str]:
    """Return the groups that have choices, such as `loss` and `hydra/launcher`."""
    folders = {file.parent.relative_to(config_dir()).as_posix() for file in config_dir().rglob("*/*.yaml")}
    return sorted(folders - {"."})


@functools.cache
def _settings() -> Mapping[str, Mapping[Setting, list[str]]]:
    """Return each setting's values and comments, with the commands or choices that have them."""
    found: dict[str, dict[Setting, list[str]]] = {}
    for key, having, setting in _all_settings():
        found.setdefault(key, {}).setdefault(setting, []).append(having)
    return found


def _all_settings() -> Iterator[tuple[str, str, Setting]]:
    """Yield those of the commands, then those of each choice. What a named experiment sets is explained there."""
    for command in ("train", "eval", "profile"):
        for key, setting in read_conf(config_dir() / f"{command}.yaml").settings.items():
            if not setting.place.startswith("conf/train.yaml") or command == "train":  # a profile includes all of these
                yield key, f"grpo {command}", setting
    for group in _groups():
        for choice in choices(group) if group != "experiment" else ():
            for key, setting in read_choice(group, choice).settings.items():
                yield f"{group.replace('/', '.')}.{key}", f"{group}={choice}", setting


def _say_setting(key: str, found: Mapping[Setting, list[str]]) -> None:
    """Print a setting once per comment, then its values, each with the choices that have it and its place."""
    for comment in dict.fromkeys(setting.comment for setting in found):
        say(f"{key}: {comment}" if comment else key)
        rows = [(one, _all_of(having)) for one, having in found.items() if one.comment == comment and one.value]
        say_rows((f"  {one.value}", f"{having}: {one.place}") for one, having in rows)


def _all_of(having: Sequence[str]) -> str:
    group = having[0].partition("=")[0]
    return f"every {group}" if 1 < len(having) == len(choices(group)) else ", ".join(having)


def _say_group(group: str) -> None:
    default = defaults_of("train").get(group)
    say(f"{group}: a group of settings, of which one choice is made")
    about = {choice: read_choice(group, choice).about for choice in choices(group)}
    rows = [(f"  {group}={marked(group, one)}", f"{'(the default) ' * (one == default)}{about[one]}") for one in about]
    say_rows(rows)
    say(f"They stand in conf/{group}/. grpo explain {group}={next(iter(about))} lists the settings of one.")


def _say_choice(group: str, choice: str) -> None:
    if choice not in choices(group):
        raise UserError(no_choice(group, choice, choices(group)))
    file = read_choice(group, choice)
    prefix = "" if group == "experiment" else f"{group.replace('/', '.')}."
    say(f"{group}={choice}: {file.about}")
    say_rows((f"  {left}", comment) for left, comment in rows_of(file.settings, prefix))
    if is_experimental(group, choice):
        say("experimental: may change or go (grpo_cli/experimental/README.md)")
    folder = "grpo_cli/experimental/conf" if is_experimental(group, choice) else "conf"
    say(f"It stands in {folder}/{group}/{choice}.yaml" + (f" and builds {file.builds}." if file.builds else "."))
