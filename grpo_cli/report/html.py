"""Compared runs as one HTML file that needs nothing else: pictures are inside, scripts and addresses are forbidden."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from grpo_cli import __version__
from grpo_cli.report.compare import Comparison
from grpo_cli.report.plots import DPI
from grpo_cli.report.rollouts import Recording, extremes, facts, visible
from grpo_cli.report.tables import REMARKS, SET_APART, SPARKS, Table, arm_table, footnotes, run_table, settings_table
from grpo_cli.support.formatting import plain

# What a browser may load on behalf of the page: the pictures in it and its own style, and nothing from anywhere.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1e; background: #fff; max-width: 1400px; margin: 2.5rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p.small, li { color: #55555a; font-size: .88rem; } ul { padding-left: 1.2rem; margin: .6rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th { text-align: left; border-bottom: 2px solid #1c1c1e; padding: .35rem .7rem; vertical-align: bottom; }
td { border-bottom: 1px solid #e3e3e6; padding: .35rem .7rem; vertical-align: top; white-space: nowrap; }
td.words { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
small { color: #55555a; font-weight: 400; }
th.number, td.number { text-align: right; } tr.best td { background: #eef6ee; font-weight: 600; }
td.spark { color: #0072b2; letter-spacing: 0; font-family: monospace; }
.state { border-radius: .6rem; padding: .05rem .55rem; background: #ececef; }
.completed { background: #dff1e3; } .failed { background: #f9dcd8; } .running { background: #dcebf8; }
.skipped, .interrupted, .unfinished { background: #fbeecd; }
figure { margin: 1rem 0 0; } img { max-width: 100%; height: auto; }
figcaption { color: #55555a; font-size: .88rem; }
pre { background: #f5f5f7; padding: .5rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""
SHOWN = 2  # rollouts of each run with the highest rewards, and as many with the lowest
LONGEST = 4000  # characters of a text that are shown
PIXELS_PER_INCH = 115  # of the browser: letters in pictures are then about as large as those beside them
CAPTIONS = {
    "accuracy.png": (
        "Accuracy along the runs",
        "Held-out accuracy against training seconds (evaluation left out), generated tokens and steps: mean "
        "over seeds, and a band of one standard deviation where there are several. Dotted: runs that are not averaged.",
    ),
    "memory.png": ("Peak memory", "Mean over seeds; dots are single runs."),
    "step_time.png": ("Where a step's time goes", "Mean seconds per step by phase, over all steps and seeds."),
}


def page(
    comparison: Comparison,
    pictures: Mapping[str, bytes],
    notes: Sequence[str],
    made: str,
    recorded: Sequence[tuple[str, Recording]],
) -> str:
    """The whole report. `made` says when; `notes` what it lacks; `recorded` has rollouts, with their runs' names."""
    runs, settings = comparison.runs, not comparison.numbered
    parts = [
        "<h1>Training runs, compared</h1>",
        f'<p class="small">{len(runs)} runs in {len(comparison.arms)} arms; made {escape(made)} by grpo '
        f"{escape(__version__)}</p>",
        *(f"<p><b>{escape(note)}</b></p>" for note in notes),
        _table(arm_table(comparison, intervals=True, settings=settings)),
        f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in footnotes(comparison))}</ul>",
    ]
    if comparison.numbered:
        parts.append(f"<h2>Settings of the arms</h2>{_table(settings_table(comparison))}")
    for name, data in pictures.items():
        title, caption = CAPTIONS[name]
        parts.append(f"<h2>{title}</h2><figure>{_image(title, data)}<figcaption>{caption}</figcaption></figure>")
    if comparison.left_out:
        parts.append(
            f"<h2>Runs that are not averaged</h2>{_table(run_table(comparison, comparison.left_out, settings))}"
        )
    parts.append(f"<h2>All runs</h2>{_table(run_table(comparison, runs, settings))}")
    parts += ["<h2>Rollouts</h2>"] * bool(recorded) + [_rollouts(name, told) for name, told in recorded]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Training runs, compared</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _rollouts(name: str, told: Recording) -> str:
    """A run's best and worst rollouts of its last recorded step, folded away until they are asked for."""
    rows = [
        f"<p>prompt {escape(plain(row.prompt_id))}, sample {row.sample}: {escape('; '.join(facts(row)))}; "
        f"answer {escape(plain(row.answer))}</p><pre>{_text(row.prompt)}</pre><pre>{_text(row.reply)}</pre>"
        for row in extremes(told.rollouts, SHOWN, SHOWN)
    ]
    notes = "".join(f"<p>{escape(note)}</p>" for note in told.notes)
    title = f"{escape(name)}: {len(rows)} of the {len(told.rollouts)} recorded of step {told.step}"
    return f"<details><summary>{title}</summary>{''.join(rows)}{notes}</details>"


def _text(text: str) -> str:
    more = f" [and {len(text) - LONGEST} more characters]" if len(text) > LONGEST else ""
    return escape(visible(text[:LONGEST]) + more)


def _image(title: str, data: bytes) -> str:
    """A PNG in the page, as wide as it was meant to be (its header has the pixels) and no wider than the page."""
    width = round(int.from_bytes(data[16:20]) / DPI * PIXELS_PER_INCH)
    return f'<img alt="{title}" width="{width}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def _table(table: Table) -> str:
    head = "".join(f"<th{_class(table, name)}>{escape(name)}</th>" for name in table.columns)
    body = "".join(
        ('<tr class="best">' if number == table.marked else "<tr>")
        + "".join(_cell(table, name, text) for name, text in zip(table.columns, row, strict=True))
        + "</tr>\n"
        for number, row in enumerate(table.rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _class(table: Table, name: str) -> str:
    special = {REMARKS: "words", SET_APART: "words", SPARKS: "spark"}
    kind = "number" if name in table.numeric else special.get(name, "")
    return f' class="{kind}"' if kind else ""


def _cell(table: Table, name: str, text: str) -> str:
    shown = escape(text)
    if name == "state":  # one of our own words
        shown = f'<span class="state {shown}">{shown}</span>'
    elif name in table.numeric:  # what stands in brackets, such as an interval, below its number
        number, bracket, rest = shown.partition(" (")
        shown = f"{number}<br><small>({rest}</small>" if bracket else shown
    return f"<td{_class(table, name)}>{shown}</td>"
