"""What a report's runs have in common, and its table as text for papers and spreadsheets."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Iterator
from typing import Any

from grpo_cli.report.compare import NO_DIFFERENCE, Comparison
from grpo_cli.report.recorded_settings import Setting
from grpo_cli.report.tables import arm_table, figures, footnotes
from grpo_cli.support.formatting import shown


def overview(comparison: Comparison) -> Iterator[str]:
    """Yield what the averaged runs share: model, task and commit, and the settings that were typed."""
    runs = [run for arm in comparison.arms for run in arm.runs]
    if not runs:
        return
    recorded, settings = [run.recorded for run in runs], runs[0].recorded.settings
    shared = {key: value for key, value in settings.items() if all(one.settings.get(key) == value for one in recorded)}
    about: dict[str, Setting] = {key: shared[key] for key in ("model", "task") if key in shared}
    for group, named in [*about.items()]:
        about |= {key: shared[key] for key in [f"{group}.path"] if shared.get(key) not in (None, named)}
    if (commit := runs[0].code.get("commit")) and all(run.code.get("commit") == commit for run in runs):
        about["commit"] = commit[:12] + "-dirty" * commit.endswith("-dirty")
    if about:
        yield ", ".join(f"{key} {shown(value)}" for key, value in about.items())
    typed = {key: word for one in recorded for key, word in one.typed.items()}
    same = {key for key, word in typed.items() if key in shared or all(one.typed.get(key) == word for one in recorded)}
    words = [word for key, word in typed.items() if key in same and key.partition(".")[0] not in NO_DIFFERENCE]
    if words:
        yield f"every run: grpo train {shlex.join(words)}"


def in_files(comparison: Comparison) -> dict[str, bytes]:
    """Return the table as numbers separated by commas, in Markdown, and in LaTeX (package booktabs), by file name."""
    table, about = arm_table(comparison, by_setting=True), [*overview(comparison)]
    notes = [*footnotes(comparison), *([f"{table.title}."] if table.title else [])]
    rule = ["---:" if name in table.numeric else "---" for name in table.columns]
    escaped = [[*map(_md, row)] for row in (table.columns, *table.rows)]
    markdown = [f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:])]
    markdown = ["\n\n".join(map(_md, about)), "", *markdown, "", "\n\n".join(map(_md, notes))]
    head, *body = (" & ".join(map(_tex, row)) + r" \\" for row in (table.columns, *table.rows))
    aligned = "".join("r" if name in table.numeric else "l" for name in table.columns)
    tex = [*(f"% {line}" for line in about), r"\begin{table}", r"\centering", rf"\caption{{{_tex(' '.join(notes))}}}"]
    tex += [rf"\begin{{tabular}}{{{aligned}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    texts = {"report.csv": _in_numbers(comparison), "report.md": markdown}
    texts["report.tex"] = [*tex, r"\end{tabular}", r"\end{table}"]
    return {name: "".join(f"{line}\n" for line in lines).encode() for name, lines in texts.items()}


def _md(text: str) -> str:
    """Return text in Markdown."""
    return re.sub(r"([\\`|*<$~])|(?<!\w)_|_(?!\w)", lambda sign: f"\\{sign[0]}", text)


def _tex(text: str) -> str:
    """Return text in LaTeX, minus signs and dashes as such; a row's end would take a bracket after it for a length."""
    signs: dict[str, Any] = {sign: f"\\{sign}" for sign in "%_#&${}"}
    signs |= {"–": "--", "\\": r"\textbackslash{}", "~": r"\~{}", "^": r"\^{}"}
    return re.sub(r"^\[", "{[}", re.sub(r"(?<![\w-])-(?=\d)", "$-$", text.translate(str.maketrans(signs))))


def _in_numbers(comparison: Comparison) -> list[str]:
    """Return a row per arm under the names of report.json: every number in its unit there, and each seed's accuracy."""
    rows = []
    for arm, of_arm in zip(comparison.arms, figures(comparison), strict=True):
        row: dict[str, Any] = {"arm": arm.label, **arm.settings, "runs": len(arm.runs)}
        for name, found in of_arm.items():
            low, high = (found.low, found.high) if found and found.over else (None, None)
            row |= {name: found and found.mean, f"{name}_low": low, f"{name}_high": high}
        of_seeds = {f"final_accuracy_seed_{shown(run.recorded.seed)}": run.final_accuracy for run in arm.runs}
        rows.append(row | {"intervals_over": arm.final_accuracy and arm.final_accuracy.over} | of_seeds)
    written = io.StringIO()
    table = csv.DictWriter(written, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue().splitlines()
