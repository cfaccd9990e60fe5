"""What a report's runs have in common, and its table as text for papers and spreadsheets."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator

from grpo_cli.report.compare import NO_DIFFERENCE, Comparison
from grpo_cli.report.recorded_settings import Setting
from grpo_cli.report.tables import Table
from grpo_cli.support.formatting import shown


def overview(comparison: Comparison) -> Iterator[str]:
    """Yield what the averaged runs share: model, task and commit, and the settings that were typed."""
    runs = [run for arm in comparison.arms for run in arm.runs]
    if not runs:
        return
    recorded, settings = [run.recorded for run in runs], runs[0].recorded.settings
    shared = {key: value for key, value in settings.items() if all(one.settings.get(key) == value for one in recorded)}
    about: dict[str, Setting] = {key: shared[key] for key in ("model", "task") if key in shared}
    paths = {f"{group}.path": group for group in ("model", "task")}
    about |= {key: shared[key] for key, group in paths.items() if shared.get(key) not in (None, about.get(group))}
    if (commit := runs[0].code.get("commit")) and all(run.code.get("commit") == commit for run in runs):
        about["commit"] = commit[:12]
    if about:
        yield ", ".join(f"{key} {shown(value)}" for key, value in about.items())
    typed = dict.fromkeys(key for one in recorded for key in one.typed if key in shared)
    words = [f"{key}={shown(shared[key])}" for key in typed if key.partition(".")[0] not in NO_DIFFERENCE]
    if words:
        yield f"all of them: grpo train {shlex.join(words)}"


def in_files(table: Table) -> dict[str, bytes]:
    """Return the table as comma-separated values, in Markdown, and in LaTeX (package booktabs), by file name."""
    separated = io.StringIO()
    csv.writer(separated, lineterminator="\n").writerows([table.columns, *table.rows])
    rule = ["---:" if name in table.numeric else "---" for name in table.columns]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (table.columns, *table.rows)]
    markdown = [f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:])]
    signs = str.maketrans({"–": "--", "\\": r"\textbackslash{}", **{sign: f"\\{sign}" for sign in "%_#&${}"}})
    head, *rows = (" & ".join(cell.translate(signs) for cell in row) + r" \\" for row in (table.columns, *table.rows))
    aligned = "".join("r" if name in table.numeric else "l" for name in table.columns)
    tex = [rf"\begin{{tabular}}{{{aligned}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    texts = {"report.md": markdown, "report.tex": tex}
    files = {name: "".join(f"{line}\n" for line in lines) for name, lines in texts.items()}
    return {name: text.encode() for name, text in {"report.csv": separated.getvalue(), **files}.items()}
