"""`grpo train --help`: the choices, and every setting with its value and its comment from `conf/` in one line.

The page's template is Hydra's own (`hydra.help.template`); the settings are those composed from the arguments.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from grpo_cli.cli.mistakes import explained
from grpo_cli.config.choices import choices, config_dir, is_experimental
from grpo_cli.config.comments import Setting, flow, read_choice, read_conf
from grpo_cli.support import terminal

WIDEST = 38  # columns of a setting; a longer one pushes its comment to the right

Row = tuple[str, str]  # a setting as typed, and its comment


def print_help(command: str, overrides: Sequence[str]) -> None:
    """Print the help page of a command. UserError if the overrides cannot be composed."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from grpo_cli.config.auto import fill
    from grpo_cli.config.compose import by_hydra

    with explained(command, overrides):
        made = by_hydra(command, overrides)
    template, values = str(HydraConfig.get().help.template), cast(dict[str, Any], OmegaConf.to_container(made.cfg))
    fill(values)
    chosen = {group: choice for group, choice in made.choices.items() if not group.startswith("hydra/")}
    said = dict(read_conf(config_dir() / f"{command}.yaml").settings)
    groups = "\n".join(line for group in reversed(chosen) for line in _lines(group))
    before, _, after = template.replace("$APP_CONFIG_GROUPS", f"{groups}\n").partition("$CONFIG")
    say(before.rstrip("\n") + "\n")
    say_rows(_rows({key: value for key, value in values.items() if not isinstance(value, dict)}, said))
    for group, below in values.items():
        if not isinstance(below, dict):
            continue
        about = ""
        if chosen.get(group) in choices(group):  # otherwise it comes from the user's own folder
            choice = read_choice(group, chosen[group])
            said |= {f"{group}.{key}": setting for key, setting in choice.settings.items()}
            about = f"{group}={chosen[group]}: {choice.about}"
        say(f"\n{about}".rstrip(" "))
        say_rows(_rows(below, said, f"{group}."))
    say(after.rstrip("\n"))


def _lines(group: str) -> Iterator[str]:
    """The choices of a group, experimental ones in a line of their own."""
    apart: dict[bool, list[str]] = {False: [], True: []}
    for choice in choices(group):
        apart[is_experimental(group, choice)].append(choice)
    yield f"{group}: {', '.join(apart[False])}"
    if apart[True]:
        yield f"  experimental: {', '.join(apart[True])}"


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


def _rows(values: Mapping[str, Any], said: Mapping[str, Setting], prefix: str = "") -> Iterator[Row]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        comment = said[key].comment if key in said else ""
        if isinstance(value, dict) and value:
            yield from [(f"{key}:", comment)] if comment else []
            yield from _rows(value, said, f"{key}.")
        elif name not in ("_target_", "_partial_"):
            yield f"{key}={flow(value)}", comment
