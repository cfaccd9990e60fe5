"""`grpo explain`: looks a word up in `conf/`, `metrics.py` and `concepts.yaml`.

The sentences of `metrics.py` are read from its source, since importing it loads PyTorch.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from pathlib import Path

from grpo_cli.cli.help import say, say_choice, say_rows
from grpo_cli.cli.mistakes import listed, meant_by, no_choice, removed
from grpo_cli.config.choices import Setting, choices, config_dir, is_experimental, marked, read_choice, read_command
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
        say_rows(metrics.items())
    if ours is not None and ours.rpartition(".")[2] != name:
        say(f"{name} of TRL or verl is {ours} here: grpo explain {ours.partition('=')[0]}")
    elif not (name in concepts() or name in _groups() or settings or having or metrics):
        refuse([*removed([word])])
        near = closest(name, list(known.values()))
        raise UserError(f"{word} is no group, choice, setting or metric{near}")


def concepts() -> Mapping[str, str]:
    """Return technical terms that are not settings, with a sentence each."""
    found: Mapping[str, str] = listed("concepts")
    return found


@functools.cache
def _metrics() -> Mapping[str, str]:
    """Return names and sentences of `metrics.METRICS`."""
    source = Path(__file__).parents[1].joinpath("metrics.py").read_text(encoding="utf-8")
    values = [node for node in ast.parse(source).body if isinstance(node, ast.AnnAssign)]
    return dict(
        next(ast.literal_eval(one.value) for one in values if one.value and ast.unparse(one.target) == "METRICS")
    )


def _metrics_of(word: str) -> dict[str, str]:
    """Return the metric with this name (placeholders such as `<k>` filled in), or those whose names hold the word."""
    for name, sentence in _metrics().items():
        pattern = re.sub(r"<[a-z]+>", "[^/]+", re.escape(name).replace("<k>", "[1-9][0-9]*"))
        if re.fullmatch(pattern, word):
            return {word: sentence}
    return {name: text for name, text in _metrics().items() if word in {*re.split(r"[/_@]", name), *name.split("/")}}


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
    files = [(f"grpo {name}", "", read_command(name)) for name in ("train", "eval", "profile")]
    for group in (group for group in _groups() if group != "experiment"):
        prefix = f"{group.replace('/', '.')}."
        files += [(f"{group}={one}", prefix, read_choice(group, one)) for one in choices(group)]
    for having, prefix, file in files:
        for key, setting in file.settings.items():
            if not (having == "grpo profile" and setting.place.startswith("conf/train.yaml")):
                found.setdefault(prefix + key, {}).setdefault(setting, []).append(having)
    return found


def _say_setting(key: str, found: Mapping[Setting, list[str]]) -> None:
    """Print a setting once per comment, then its values, each with the choices that have it and its place."""
    for comment in dict.fromkeys(setting.comment for setting in found):
        say(f"{key}: {comment}" if comment else key)
        rows = []
        for one, having in found.items():
            group = having[0].partition("=")[0]
            every = 1 < len(having) == len(choices(group))
            if one.comment == comment and one.value:
                rows.append((f"  {one.value}", f"{f'every {group}' if every else ', '.join(having)}: {one.place}"))
        say_rows(rows)


def _say_group(group: str) -> None:
    default = read_command("train").choices.get(group)
    say(f"{group}: a group of settings, of which one choice is made")
    about = {choice: read_choice(group, choice).about for choice in choices(group)}
    say_rows(
        (f"  {group}={marked(group, one)}", f"{'(the default) ' * (one == default)}{text}")
        for one, text in about.items()
    )
    say(f"They stand in conf/{group}/. grpo explain {group}={next(iter(about))} lists the settings of one.")


def _say_choice(group: str, choice: str) -> None:
    if choice not in choices(group):
        raise UserError(no_choice(group, choice))
    say_choice(group, choice, "  ")
    folder, builds = "conf", read_choice(group, choice).values.get("_target_")
    if is_experimental(group, choice):
        say("experimental: may change or go (grpo_cli/experimental/README.md)")
        folder = "grpo_cli/experimental/conf"
    say(f"It stands in {folder}/{group}/{choice}.yaml" + (f" and builds {builds}." if builds else "."))
