"""`grpo train --help`: the choices, and every setting with its value and its comment from `conf/` in one line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from grpo_cli.cli.mistakes import no_choice
from grpo_cli.config.choices import Setting, choices, groups_of, marked, read_choice, read_command
from grpo_cli.support import terminal
from grpo_cli.support.errors import refuse

WIDEST = 38  # columns of a setting; a longer one pushes its comment to the right

Row = tuple[str, str]  # a setting as typed, and its comment


def print_help(command: str, words: Sequence[str]) -> None:
    """Print the help page of a command with the choices among these words. UserError for one that does not exist."""
    file, typed = read_command(command), dict(word.partition("=")[::2] for word in words)
    chosen = {group: typed.get(group, file.choices[group]) for group in groups_of(command)}
    refuse([no_choice(*one) for one in chosen.items() if one[1] not in choices(one[0])])
    about = file.values["hydra"]["help"]
    say(f"grpo {command}: {about['header']}\n\n== Choices (group=choice) ==\n")
    for group in reversed(chosen):
        say(f"{group}: {', '.join(marked(group, choice) for choice in choices(group))}")
    say("\n== Settings and their values (key=value) ==\n")
    say_rows(rows_of(file.settings))
    for group, choice in chosen.items():
        say("")
        say_choice(group, choice)
    say(f"\n== Examples ==\n\n{about['footer']}\n\ngrpo {command} --cfg job prints the settings and runs nothing.")


def say_choice(group: str, choice: str, indent: str = "") -> None:
    """Print what a choice is, and its settings."""
    file = read_choice(group, choice)
    prefix = "" if group == "experiment" else f"{group.replace('/', '.')}."
    say(f"{group}={choice}: {file.about}")
    say_rows(rows_of(file.settings, f"{indent}{prefix}"))


def rows_of(settings: Mapping[str, Setting], prefix: str = "") -> Iterator[Row]:
    """Yield settings as they are typed, each with its comment."""
    for key, setting in settings.items():
        if setting.value or setting.comment:
            yield f"{prefix}{key}{f'={setting.value}' if setting.value else ':'}", setting.comment


def say(text: str, hanging: int = 0) -> None:
    """Print lines: wrapped with a hanging indent in a terminal, unwrapped in a pipe or a file."""
    console = terminal.console()
    width = console.width if console.is_terminal else 10_000_000
    for line in text.split("\n"):
        indent = " " * min(hanging, width // 2)
        wrapped = textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
        console.print(wrapped, markup=False, highlight=False, soft_wrap=True)


def say_rows(rows: Iterable[Row]) -> None:
    """Print settings and their comments in two columns; a comment equal to the one above is not repeated."""
    rows, before = list(rows), ""
    width = max((len(left) for left, _ in rows if len(left) <= WIDEST), default=0)
    for left, comment in rows:
        say(f"{left:<{width}}  {comment if comment != before else ''}".rstrip(), width + 2)
        before = comment
