"""Compared runs in the terminal: a table with a sparkline per arm, then the runs that were not averaged."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from grpo_cli.report.compare import Comparison
from grpo_cli.report.tables import Table, arm_table, footnotes, run_table
from grpo_cli.support import terminal

STATE_STYLES = {"completed": "green", "failed": "red", "running": "cyan", "waiting": "dim", "repeated": "dim"}


def show(comparison: Comparison, console: Console) -> None:
    """Print the report."""
    if comparison.arms:
        print_table(console, arm_table(comparison, sparks=console.encoding.startswith("utf")))
    for note in footnotes(comparison):
        console.print(Text(note, style="dim"))
    if comparison.left_out:
        console.print(Text("\nNot averaged:", style="bold"))
        print_table(console, run_table(comparison))
    for run in (run for arm in comparison.arms for run in arm.runs if run.notes):
        console.print(Text(f"note: {run.name}: {'; '.join(run.notes)}", style="yellow"))


def print_table(console: Console, table: Table) -> None:
    """Print a table, in which nothing is read as markup: it comes from files. In a file or a pipe rows are as long as
    they need to be."""
    title = Text(table.title, style="italic") if table.title else None
    made = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name, *cells in zip(table.columns, *table.rows, strict=True):
        longest = max((len(word) for cell in cells for word in cell.split()), default=0)
        if name in table.numeric:
            made.add_column(Text(name), justify="right", min_width=longest, overflow="fold")  # numbers are not wrapped
        else:
            made.add_column(Text(name), overflow="fold")
    for number, row in enumerate(table.rows):
        styles = [
            STATE_STYLES.get(text, "yellow") if name == "state" else ""
            for name, text in zip(table.columns, row, strict=True)
        ]
        made.add_row(*map(Text, row, styles), style="bold" if number == table.marked else None)
    width = Measurement.get(console, console.options.update(max_width=10_000), made).maximum
    if not console.is_terminal and width > console.width:
        console = terminal.console(console.file, width=width, force_terminal=False)
    console.print(made)
