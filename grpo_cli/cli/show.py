"""`grpo show`: a step's rollouts in the terminal, prompt by prompt. A model's text is never read as markup."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rich.console import Console
from rich.text import Text

from grpo_cli.report.read import jobs_of
from grpo_cli.report.rollouts import Recorded, Recording, extremes, read_recording, visible
from grpo_cli.support import terminal
from grpo_cli.support.errors import UserError, closest
from grpo_cli.support.formatting import plain

MOST_NAMED = 8  # prompts, in a message


def show_rollouts(
    folder: Path,
    step: int | None = None,
    prompt: str | None = None,
    kept: bool | None = None,
    best: int = 0,
    worst: int = 0,
) -> None:
    """Print the requested rollouts of a step (default: the last). UserError says what is available instead."""
    found, console = _found(folder, step), terminal.console()
    chosen = _chosen(found.rollouts, prompt, kept)
    groups: dict[str, list[Recorded]] = {}
    for row in extremes(chosen, best, worst) if best or worst else chosen:
        groups.setdefault(row.prompt_id, []).append(row)
    where = "evaluation" if found.step is None else f"step {found.step} of {found.steps[0]} to {found.steps[-1]}"
    count = f"{sum(map(len, groups.values()))} of {len(found.rollouts)} recorded rollouts, {len(groups)} prompts"
    _print(console, f"{plain(folder)}  {where}: {count}", "bold")
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
    if not folder.is_dir():
        raise UserError(f"{plain(folder)} is not a folder: name one of a run or an evaluation (grpo ls lists them)")
    found = read_recording(folder, step)
    if found is None:
        jobs = [plain(job) for job in jobs_of(folder)]
        named = [f"{plain(folder)} is a sweep; name one of its jobs:", *jobs]
        raise UserError("\n".join(named) if jobs else f"{plain(folder)} holds no rollouts; grpo ls lists runs")
    if not found.rollouts:
        there = f"there are steps {found.steps[0]} to {found.steps[-1]}" if found.steps else "no step is recorded"
        asked = "no step has ended yet, or record.rollouts=0" if step is None else f"--step={step}: {there}"
        raise UserError("\n".join([f"{plain(found.file)} holds no such rollouts: {asked}", *found.notes]))
    return found


def _chosen(rows: tuple[Recorded, ...], prompt: str | None, kept: bool | None) -> list[Recorded]:
    prompts = list(dict.fromkeys(row.prompt_id for row in rows))
    if prompt not in (None, *prompts):
        named = ", ".join(map(plain, prompts[:MOST_NAMED])) + (", ..." if len(prompts) > MOST_NAMED else "")
        near = closest(str(prompt), prompts)
        raise UserError(f"--prompt={plain(prompt)} has no rollouts here; recorded are those of {named}{near}")
    chosen = [row for row in rows if prompt in (None, row.prompt_id) and kept in (None, row.kept)]
    if not chosen:
        asked = "kept" if kept else "dropped"
        raise UserError(f"none of the {len(rows)} rollouts was {asked}: leave out --{asked}")
    return chosen
