"""Compared runs in the terminal: a table with a sparkline per arm, and under it what was not averaged."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from grpo_cli.report.compare import Comparison
from grpo_cli.report.tables import REMARKS, SPARKS, Table, arm_table, footnotes, run_table, settings_lines
from grpo_cli.support import terminal

STATE_STYLES = {"completed": "green", "failed": "red", "running": "cyan", "waiting": "dim", "repeated": "dim"}
# What a narrow screen can do without, the first one first. What is written to files has it all.
DISPENSABLE = (
    *("trained tokens", "generated tokens", "last entropy", "training time", "best accuracy", "peak memory"),
    *("last accuracy", "seed", "decode steps", "slots busy", "tokens/s", "KV"),
)
ROOM_FOR_REMARKS = 24  # the column breaks anywhere


def show(comparison: Comparison, console: Console | None = None) -> None:
    """Print the report. Where nobody looks at a screen (a file, a pipe) rows are as long as they need to be."""
    console = console or terminal.console()
    ways = (False,) if comparison.numbered else (True, False)
    arms = [arm_table(comparison, settings=settings) for settings in ways]
    if not console.encoding.startswith("utf"):
        arms = [table.without(SPARKS) for table in arms]
    if print_first_fitting(console, arms) == "arm":
        for line in settings_lines(comparison):
            console.print(Text(line))
        console.print()
    for note in footnotes(comparison):
        console.print(Text(note, style="dim"))
    if comparison.left_out:
        console.print()
        console.print(Text("Not averaged:", style="bold"))
        print_first_fitting(console, [run_table(comparison, comparison.left_out, settings) for settings in ways])
    for run in (run for arm in comparison.arms for run in arm.runs if run.notes):
        console.print(Text(f"note: {run.name}: {'; '.join(run.notes)}", style="yellow"))


def print_first_fitting(console: Console, tables: Sequence[Table]) -> str:
    """Print the first of the tables that the screen has room for; returns the name of its first column.

    A table may be printed in lines, or with intervals below their means, or without columns, which are then named.
    """
    for table in tables:
        dispensable = [name for name in DISPENSABLE if name in table.columns]
        for num_hidden in range(len(dispensable) + 1):
            hidden = dispensable[:num_hidden]
            shrunk = table.without(*hidden)
            for stacked in (False, True):
                last = table is tables[-1] and len(hidden) == len(dispensable) and stacked
                if last or not console.is_terminal or _needs(console, shrunk, stacked) <= console.width:
                    _print(console, rich_table(shrunk, stacked))
                    if hidden:
                        names = ", ".join(hidden)
                        console.print(Text(f"The screen is narrow; only in the files: {names}.", style="dim"))
                    return table.columns[0]
    raise AssertionError("the last table is printed in any case")


def _needs(console: Console, table: Table, stacked: bool) -> int:
    """The columns of a screen that a table needs."""
    room = ROOM_FOR_REMARKS if REMARKS in table.columns else 0
    return _width(console, rich_table(table.without(REMARKS), stacked)) + room


def _width(console: Console, table: RichTable) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _print(console: Console, table: RichTable) -> None:
    width = _width(console, table)
    if not console.is_terminal and width > console.width:
        console = terminal.console(console.file, width=width, force_terminal=False)
    console.print(table)


def rich_table(table: Table, stacked: bool = False) -> RichTable:
    """`stacked` breaks the names of columns, and brackets and parts of a list go to lines of their own.

    Nothing in it is read as markup: it comes from files.
    """
    title = Text(table.title, style="italic") if table.title else None
    made = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in table.columns:
        head = "\n".join(name.rsplit(" ", 1)) if stacked and len(name) > 10 else name
        right = name in table.numeric
        made.add_column(Text(head), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for number, row in enumerate(table.rows):
        cells = [text.replace(" (", "\n(").replace(", ", "\n") if stacked else text for text in row]
        states = [
            STATE_STYLES.get(text, "yellow") if name == "state" else ""
            for name, text in zip(table.columns, row, strict=True)
        ]
        made.add_row(*map(Text, cells, states), style="bold" if number == table.marked else None)
    return made
