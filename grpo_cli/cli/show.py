"""`grpo show`: a step's rollouts in the terminal, prompt by prompt. A model's text is never read as markup."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rich.console import Console
from rich.text import Text

from grpo_cli.report.rollouts import Recorded, Recording, extremes, read_recording, visible
from grpo_cli.runs.layout import SAMPLES
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError, closest
from grpo_cli.support.formatting import plain


def show_rollouts(
    folder: Path, step: int | None = None, prompt: str | None = None, best: int = 0, worst: int = 0
) -> None:
    """Print the requested rollouts of a step (default: the last). UserError names what is available."""
    found, console = _found(folder, step), terminal.console()
    chosen = [row for row in found.rollouts if prompt in (None, row.prompt_id)]
    if not chosen:
        prompts = [row.prompt_id for row in found.rollouts]
        raise UserError(f"--prompt={prompt} has no rollouts; {plain(prompts[0])} has{closest(str(prompt), prompts)}")
    groups: dict[str, list[Recorded]] = {}
    for row in extremes(chosen, best, worst) if best or worst else chosen:
        groups.setdefault(row.prompt_id, []).append(row)
    where = (
        "evaluation" if found.step is None else f"step {found.step} (recorded: {found.steps[0]} to {found.steps[-1]})"
    )
    count = f"{sum(map(len, groups.values()))} of {len(found.rollouts)} recorded rollouts, of {len(groups)} prompts"
    limit = "" if found.step is None else "; record.rollouts=-1 records all of a step"
    _print(console, f"{plain(folder)}  {where}: {count}{limit}", "bold")
    for prompt_id, group in groups.items():
        _print(console, f"\nprompt {plain(prompt_id)}, answer {plain(group[0].answer)}", "bold cyan")
        _print(console, visible(group[0].prompt), "cyan", indent=2)
        for row in group:
            style = "dim" if row.step and not row.kept else "bold"
            _print(console, f"\nsample {row.sample}: {'  '.join(row.facts())}", style, indent=2)
            for theirs, text in row.turns or ((False, row.reply),):
                _print(console, visible(text), "dim" if theirs else "", indent=6 if theirs else 4)
    for note in found.notes:
        _print(console, f"\nnote: {note}", "yellow")


def _print(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    console.print(Text(textwrap.indent(text, " " * indent), style=style), soft_wrap=True)


def _found(folder: Path, step: int | None) -> Recording:
    """Return what is recorded of a step. UserError with what there is instead."""
    found = read_recording(folder, step)
    if not found.rollouts:
        if found.file.name == SAMPLES and step is not None:
            raise UserError(f"{plain(found.file)} is of an evaluation, which has no steps: leave --step out")
        there = f"steps {found.steps[0]} to {found.steps[-1]}" if found.steps else "no step (record.rollouts=0?)"
        wanted = "no rollouts" if step is None else f"no rollouts of --step={step}"
        raise UserError("\n".join([f"{plain(found.file)} holds {wanted}, but of {there}", *found.notes]))
    return found
