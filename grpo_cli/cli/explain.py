"""`grpo explain`: looks a word up in `conf/`, `metrics.py` and `concepts.yaml`.

The sentences of `metrics.py` are read from its source, since importing it loads PyTorch.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

import grpo_cli
from grpo_cli.cli.help import Row, say, say_choice, say_rows
from grpo_cli.cli.mistakes import no_choice
from grpo_cli.config.choices import choices, config_dir, defaults_of, is_experimental, marked
from grpo_cli.config.comments import Setting, read_choice, read_conf
from grpo_cli.config.elsewhere import meant_by, removed
from grpo_cli.support.errors import UserError, closest, refuse


def explain(word: str) -> None:
    """Explain a word. UserError, with the nearest known one, if it is unknown."""
    name, _, choice = word.partition("=")
    known = {key.lower(): key for key in (*_metrics(), *_settings(), *_choices(), *_groups(), *concepts())}
    name = known.get(name.lower().replace("_", " "), known.get(name.lower(), name))
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
        near = closest(name, list(known.values()))
        raise UserError(f"{word} is no group, choice, setting or metric{near}")


@functools.cache
def concepts() -> Mapping[str, str]:
    """Return technical terms that are not settings, with a sentence each."""
    return dict(yaml.safe_load(Path(__file__).with_name("concepts.yaml").read_text(encoding="utf-8")))


@functools.cache
def _metrics() -> Mapping[str, str]:
    """Return names and sentences of `metrics.METRICS`."""
    source = (Path(grpo_cli.__file__).parent / "metrics.py").read_text(encoding="utf-8")
    values = {
        ast.unparse(node.target): node.value for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)
    }
    return dict(ast.literal_eval(values["METRICS"] or "{}"))


def _metrics_of(word: str) -> list[Row]:
    """Return the metric with this name (placeholders such as `<k>` filled in), or those whose names hold the word."""
    for name, sentence in _metrics().items():
        pattern = re.sub(r"<[a-z]+>", "[^/]+", re.escape(name).replace("<k>", "[1-9][0-9]*"))
        if re.fullmatch(pattern, word):
            return [(word, sentence)]
    return [row for row in _metrics().items() if word and word in (*re.split(r"[/_@]", row[0]), *row[0].split("/"))]


@functools.cache
def _groups() -> list[str]:
    """Return the groups that have choices, such as `loss` and `hydra/launcher`."""
    return sorted({file.parent.relative_to(config_dir()).as_posix() for file in config_dir().rglob("*/*.yaml")} - {"."})


def _choices() -> list[str]:
    return [choice for group in _groups() for choice in choices(group)]


@functools.cache
def _settings() -> Mapping[str, Mapping[Setting, list[str]]]:
    """Return each setting's values and comments, with the commands or choices that have them. A profile includes what a
    training has; what a named experiment sets is explained there."""
    found: dict[str, dict[Setting, list[str]]] = {}
    commands = {name: read_conf(config_dir() / f"{name}.yaml") for name in ("train", "eval", "profile")}
    files = [(f"grpo {name}", "", file) for name, file in commands.items()]
    for group in _groups():
        named = choices(group) if group != "experiment" else ()
        files += [(f"{group}={one}", f"{group.replace('/', '.')}.", read_choice(group, one)) for one in named]
    for having, prefix, file in files:
        for key, setting in file.settings.items():
            if not (having == "grpo profile" and setting.place.startswith("conf/train.yaml")):
                found.setdefault(prefix + key, {}).setdefault(setting, []).append(having)
    return found


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
    say_choice(group, choice, "  ")
    if is_experimental(group, choice):
        say("experimental: may change or go (grpo_cli/experimental/README.md)")
    builds = read_choice(group, choice).builds
    folder = "grpo_cli/experimental/conf" if is_experimental(group, choice) else "conf"
    say(f"It stands in {folder}/{group}/{choice}.yaml" + (f" and builds {builds}." if builds else "."))
