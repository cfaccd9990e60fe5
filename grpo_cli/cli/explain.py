"""`grpo train --help` and `grpo explain`: what stands in `conf/`, `metrics.py` and `concepts.yaml`, line by line.

The sentences of `metrics.py` are read from its source, since importing it loads PyTorch.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from grpo_cli.cli.mistakes import listed, meant_by, no_choice, removed
from grpo_cli.config.choices import Setting, choices, config_dir, groups_of, marked, read_choice, read_command
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError, closest, refuse

NOTHING_GIVEN: Mapping[str, str] = {}
WIDEST = 38  # columns of a setting; a longer one pushes its comment to the right


def print_help(command: str, words: Sequence[str]) -> None:
    """Print the help page of a command with the choices among these words. UserError for one that does not exist."""
    file, typed = read_command(command), dict(word.partition("=")[::2] for word in words)
    named = typed.get("experiment", "none")
    recipe = read_choice("experiment", named if named in choices("experiment") else "none")
    chosen = {group: {**file.choices, **recipe.choices, **typed}[group] for group in groups_of(command)}
    refuse([no_choice(*one) for one in chosen.items() if one[1] not in choices(one[0])])
    given = {key: one.value for key, one in recipe.settings.items() if one.value} | typed
    about = file.values["hydra"]["help"]
    say(f"grpo {command}: {about['header']}\n\n== Choices (group=choice) ==\n")
    for group in reversed(chosen):
        say(f"{group}: {', '.join(marked(group, choice) for choice in choices(group))}")
    say("\n== Settings and their values (key=value) ==\n")
    say_rows(_rows(file.settings, "", given))
    for group, choice in chosen.items():
        say("")
        _say_choice(group, choice, "", given)
    say(f"\n== Examples ==\n\n{about['footer']}\n\ngrpo {command} --cfg job prints the settings and runs nothing.")


def list_words() -> None:
    """Print the groups and the concepts that can be explained."""
    say(f"groups: {', '.join(_groups())}\n\nconcepts: {', '.join(listed('concepts'))}\n")
    say("Every choice, setting and metric too: grpo explain maxvar optim.lr policy/entropy")


def explain(word: str) -> None:
    """Explain a word. UserError, with the nearest known one, if it is unknown."""
    name, _, choice = word.partition("=")
    metrics, concepts, settings, groups = _metrics(), listed("concepts"), _settings(), _groups()
    known = [*metrics, *settings, *(choice for group in groups for choice in choices(group)), *groups, *concepts]
    typed = {key.lower(): key for key in known}
    name = typed.get(name.lower().replace("_", " "), typed.get(name.lower(), name))
    if choice and name in groups:
        if choice not in choices(name):
            raise UserError(no_choice(name, choice))
        _say_where(name, choice)
        return
    about = {name: concepts[name]} if name in concepts and not choice else {}
    found = [row for key, rows in settings.items() if f".{name}." in f".{key}." for row in rows.items()]
    having, ours = [group for group in groups if name in choices(group)], meant_by(name)
    if name in groups:
        _say_group(name)
    elif found:
        say_rows((left, f"{comment} ({', '.join(places)})") for (left, comment), places in found)
    else:
        for group in having:
            _say_where(group, name)
        about |= _metrics_of(name)
    for term, text in about.items():
        say(f"{term}: {text}")
    if ours is not None and name not in (ours, ours.rpartition(".")[2]):
        say(f"{name} of TRL or verl is {ours} here: grpo explain {ours.partition('=')[0]}")
    elif not (about or found or having or name in groups):
        refuse([*removed([word])])
        raise UserError(f"{word} is no group, choice, setting or metric{closest(name, known)}")


@functools.cache
def _metrics() -> Mapping[str, str]:
    """Return names and sentences of `metrics.METRICS`."""
    source = Path(__file__).parents[1].joinpath("metrics.py").read_text(encoding="utf-8")
    named = [node.value for node in ast.parse(source).body if isinstance(node, ast.AnnAssign) and node.value]
    return next(dict(ast.literal_eval(value)) for value in named if isinstance(value, ast.Dict))


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


@functools.cache
def _settings() -> Mapping[str, Mapping[tuple[str, str], list[str]]]:
    """Return, for each key, its settings as typed with their comments, and where each stands. A profile includes what a
    training has; what a named experiment sets is explained there."""
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    files = [("", read_command(name)) for name in ("train", "eval", "profile")]
    for group in (group for group in _groups() if group != "experiment"):
        files += [(f"{group.replace('/', '.')}.", read_choice(group, one)) for one in choices(group)]
    for prefix, file in files:
        for key, one in file.settings.items():
            for row in _rows({key: one}, prefix):
                places = found.setdefault(prefix + key, {}).setdefault(row, [])
                places += [one.place] * (one.place not in places)
    return found


def _say_group(group: str) -> None:
    say(f"{group}: a group of settings in conf/{group}/, of which one choice is made")
    default, every = read_command("train").choices.get(group), choices(group)
    about = {one: f"{'(the default) ' * (one == default)}{read_choice(group, one).about}" for one in every}
    say_rows((f"  {group}={marked(group, one)}", text) for one, text in about.items())
    say(f"grpo explain {group}={every[0]} lists the settings of one.")


def _say_where(group: str, choice: str) -> None:
    """Print a choice, its settings, and where they stand."""
    _say_choice(group, choice, "  ")
    file = read_choice(group, choice)
    if marked(group, choice) != choice:
        say("experimental: may change or go (grpo_cli/experimental/README.md)")
    builds = file.values.get("_target_")
    say(f"It stands in {file.place}" + (f" and builds {builds}." if builds else "."))


def _say_choice(group: str, choice: str, indent: str = "", given: Mapping[str, str] = NOTHING_GIVEN) -> None:
    file = read_choice(group, choice)
    prefix = "" if group == "experiment" else f"{group.replace('/', '.')}."
    say(f"{group}={choice}: {file.about}")
    say_rows(_rows(file.settings, f"{indent}{prefix}", given))


def _rows(
    settings: Mapping[str, Setting], prefix: str = "", given: Mapping[str, str] = NOTHING_GIVEN
) -> Iterator[tuple[str, str]]:
    """Yield settings as they are typed, with the values that are `given` or else their own, each with its comment."""
    for key, setting in settings.items():
        if value := given.get(f"{prefix}{key}", setting.value):
            yield f"{prefix}{key}={value}", setting.comment
        elif setting.comment:
            yield f"{prefix}{key}:", setting.comment


def say(text: str, hanging: int = 0) -> None:
    """Print lines: wrapped with a hanging indent in a terminal, unwrapped in a pipe or a file."""
    console = terminal.console()
    width = console.width if console.is_terminal else 10_000_000
    for line in text.split("\n"):
        indent = " " * min(hanging, width // 2)
        wrapped = textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
        console.print(wrapped, markup=False, highlight=False, soft_wrap=True)


def say_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print settings and their comments in two columns; a comment equal to the one above is not repeated."""
    rows, before = list(rows), ""
    width = max((len(left) for left, _ in rows if len(left) <= WIDEST), default=0)
    for left, comment in rows:
        say(f"{left:<{width}}  {comment if comment != before else ''}".rstrip(), width + 2)
        before = comment
