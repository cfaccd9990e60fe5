"""`grpo train --help` and `grpo explain`: the lines of `conf/`, `metric_names.py` and `concepts.yaml`."""

from __future__ import annotations

import functools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from grpo_cli.cli.mistakes import listed, meant_by, no_choice
from grpo_cli.config.choices import (
    Setting,
    choices,
    chosen,
    config_dir,
    marked,
    prefix_of,
    read_choice,
    read_command,
)
from grpo_cli.metric_names import METRICS
from grpo_cli.support.errors import UserError, closest, refuse

Rows = Iterator[tuple[str, str]]
WIDEST = 38  # columns of a setting; a longer one pushes its comment to the right


def print_help(command: str, words: Sequence[str]) -> None:
    """Print the help page of a command with the choices among these words. UserError for one that does not exist."""
    file, typed = read_command(command), dict(word.partition("=")[::2] for word in words)
    parts = chosen(command, typed)
    refuse([no_choice(group, choice) for group, choice in parts.items() if choice not in choices(group)])
    recipe = read_choice("experiment", parts.get("experiment", "none"))
    given = {key: one.value for key, one in recipe.settings.items() if one.value} | typed
    about = file.values["hydra"]["help"]
    say(f"grpo {command}: {about['header']}\n\n== Choices (group=choice) ==\n")
    for group in reversed(parts):
        say(f"{group}: {', '.join(marked(group, choice) for choice in choices(group))}")
    say("\n== Settings and their values (key=value) ==\n")
    say_rows(_rows(file.settings, "", given))
    for group, choice in parts.items():
        say("")
        say_rows(_choice(group, choice, given))
    say(f"\n== Examples ==\n\n{about['footer']}\n\ngrpo {command} --cfg job prints the settings and runs nothing.")


def explain(word: str) -> None:
    """Explain a word. UserError, with the nearest known one, if it is unknown."""
    group, _, choice = word.partition("=")
    if choice and group in _groups():
        refuse([no_choice(group, choice)] * (choice not in choices(group)))
        say_rows(_choice(group, choice))
        return
    known = [*METRICS, *_settings(), *(choice for group in _groups() for choice in choices(group))]
    known += [*_groups(), *listed("concepts")]
    names, typed = {key.lower().replace(" ", "_"): key for key in known}, group.lower().replace(" ", "_")
    name = names.get(typed) or names.get(typed.removesuffix("s"), group)
    if not (rows := [*_meanings(name)]):
        raise UserError(f"{word} is no group, choice, setting or metric{closest(name, known)}")
    say_rows(rows)


def _meanings(name: str) -> Rows:
    """Yield what a word stands for, each with its explanation: a group, or settings, or choices and metrics; a concept;
    and what TRL and verl mean by it."""
    found = [row for key, rows in _settings().items() if f".{name}." in f".{key}." for row in rows.items()]
    if name in _groups():
        default = {**read_command("eval").choices, **read_command("train").choices}.get(name)
        yield f"{name}:", f"a group of settings; grpo explain {name}=<choice> lists those of one (conf/{name}/)"
        for one in choices(name):
            yield f"{name}={marked(name, one)}", "(the default) " * (one == default) + read_choice(name, one).about
    elif found:
        yield from ((left, f"{comment} ({', '.join(places)})") for (left, comment), places in found)
    else:
        for group in (group for group in _groups() if name in choices(group)):
            yield from _choice(group, name)
        yield from _metrics_of(name)
    if name in listed("concepts"):
        yield f"{name}:", listed("concepts")[name]
    if name not in _settings() and (ours := meant_by(name)) and name != ours.rpartition(".")[2]:
        yield f"{name} (TRL, verl)", f"{ours} here: grpo explain {ours.partition('=')[0]}"


def _metrics_of(word: str) -> Rows:
    """Yield the metric with this name (placeholders such as `<k>` filled in), or those whose names hold the word."""
    for name, sentence in METRICS.items():
        pattern = re.sub(r"<[a-z]+>", "[^/]+", re.escape(name).replace("<k>", "[1-9][0-9]*"))
        pattern = re.sub("^eval/", "(eval/)?", pattern)  # tables leave it out
        if re.fullmatch(pattern, word) or word in {name, *re.split(r"[/_@]", name), *name.split("/")}:
            yield f"{name}:", sentence


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
        files += [(prefix_of(group), read_choice(group, one)) for one in choices(group)]
    for prefix, file in files:
        for key, one in file.settings.items():
            for row in _rows({key: one}, prefix):
                places = found.setdefault(prefix + key, {}).setdefault(row, [])
                places += [one.place] * (one.place not in places)
    return found


def _choice(group: str, choice: str, given: Mapping[str, str] | None = None) -> Rows:
    """Yield a choice with its explanation and the place of its file, and its settings."""
    file = read_choice(group, choice)
    yield f"{group}={choice}:", f"{file.about} ({file.place})"
    yield from _rows(file.settings, prefix_of(group), given)


def _rows(settings: Mapping[str, Setting], prefix: str = "", given: Mapping[str, str] | None = None) -> Rows:
    """Yield settings as they are typed, with the values that are `given` or else their own, each with its comment."""
    for key, setting in settings.items():
        value = (given or {}).get(f"{prefix}{key}", setting.value)
        if value or setting.comment:
            yield f"{prefix}{key}{f'={value}' if value else ':'}", setting.comment


def say(text: str, hanging: int = 0) -> None:
    """Print lines: wrapped with a hanging indent in a terminal, unwrapped in a pipe or a file."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000_000
    for line in text.split("\n"):
        indent = " " * min(hanging, width // 2)
        print(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))


def say_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print settings and their comments in two columns; a comment equal to the one above is not repeated."""
    rows, before = list(rows), ""
    width = max((len(left) for left, _ in rows if len(left) <= WIDEST), default=0)
    for left, comment in rows:
        say(f"{left:<{width}}  {comment if comment != before else ''}".rstrip(), width + 2)
        before = comment
