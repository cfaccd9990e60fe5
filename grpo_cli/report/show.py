"""Compared runs in the terminal: a table with a sparkline per arm, and under it what was not averaged."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from grpo_cli.report.compare import Comparison
from grpo_cli.report.tables import MEANS, SPARKS, Table, arm_table, footnotes, run_table

STATE_STYLES = {"completed": "green", "failed": "red", "running": "cyan", "waiting": "dim", "repeated": "dim"}


# What a narrow screen can do without, the first one first. The page has it all.
DISPENSABLE = (*MEANS[2:0:-1], MEANS[0], "best accuracy", MEANS[3])


def show(comparison: Comparison, console: Console | None = None) -> None:
    """Print the report. Where nobody looks at a screen (a file, a pipe) rows are as long as they need to be."""
    console = console or Console()
    table = arm_table(comparison)
    if not console.encoding.startswith("utf"):
        table = table.without(SPARKS)
    hidden = _print_fitting(console, table)
    if hidden:
        console.print(Text(f"The screen is narrow; only in the page: {', '.join(hidden)}.", style="dim"))
    for note in footnotes(comparison):
        console.print(Text(note, style="dim"))
    if comparison.left_out:
        console.print()
        console.print(Text("Not averaged:", style="bold"))
        _print(console, _rich(run_table(comparison.left_out, comparison.columns)))
    for run in comparison.runs:
        if run.notes and run not in comparison.left_out:
            console.print(Text(f"note: {run.name}: {'; '.join(run.notes)}", style="yellow"))


def _print_fitting(console: Console, table: Table) -> list[str]:
    """Print the table in lines, or with its intervals below their means, or without columns, which are returned."""
    hidden: list[str] = []
    made = _rich(table)
    if console.is_terminal and _width(console, made) > console.width:
        made = _rich(table, stacked=True)
        dispensable = [name for name in DISPENSABLE if name in table.columns]
        while dispensable and _width(console, made) > console.width:
            hidden.append(dispensable.pop(0))
            table = table.without(hidden[-1])
            made = _rich(table, stacked=True)
    _print(console, made)
    return hidden


def _width(console: Console, table: RichTable) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _print(console: Console, table: RichTable) -> None:
    width = _width(console, table)
    if not console.is_terminal and width > console.width:
        console = Console(file=console.file, width=width, force_terminal=False)
    console.print(table)


def _rich(table: Table, stacked: bool = False) -> RichTable:
    """`stacked` breaks the names of columns, and brackets and parts of a list go to lines of their own."""
    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in table.columns:
        title = "\n".join(name.rsplit(" ", 1)) if stacked and len(name) > 10 else name
        right = name in table.numeric
        made.add_column(Text(title), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for number, row in enumerate(table.rows):
        cells = [_cell(name, text, stacked) for name, text in zip(table.columns, row, strict=True)]
        made.add_row(*cells, style="bold" if number == table.marked else None)
    return made


def _cell(name: str, text: str, stacked: bool) -> Text:
    """Not read as markup: it comes from a file."""
    style = STATE_STYLES.get(text, "yellow") if name == "state" else ""
    if stacked:
        text = text.replace(" (", "\n(").replace(", ", "\n")
    return Text(text, style=style)
