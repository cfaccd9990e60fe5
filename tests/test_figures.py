"""Figures of the Markdown pages are what their source says.

A figure is a link to its source: `[2.03 ± 0.67](baselines/pods.json#results.default.maxvar.ratios)`. The fragment has
the keys of the JSON, joined by dots, lists by index; `*` takes every item, of which the figure is the mean, with half
of Student's 95 % interval after "±". A unit may follow the number.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import pytest
from test_readme import PAGES, ROOT

from grpo_cli.support.intervals import student_95

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+\.json)#([^)\s]+)\)")
NUMBER = re.compile(r"([+-]?)(\d[\d,]*(?:\.(\d+))?)(?: ± (\d[\d.]*))?\s*(%|k\b|MiB|GiB|min)?")
UNITS = {"%": 100.0, "k": 1e-3, "MiB": 2.0**-20, "GiB": 2.0**-30, "min": 1 / 60}


def found_at(value: Any, keys: Sequence[str]) -> Iterator[float]:
    """Yield the numbers at a path. A key that has dots itself stands in several parts; the longest one wins."""
    if not keys:
        yield from map(float, value) if isinstance(value, list) else [float(value)]
    elif keys[0] == "*":
        for item in value.values() if isinstance(value, dict) else value:
            yield from found_at(item, keys[1:])
    elif isinstance(value, list):
        yield from found_at(value[int(keys[0])], keys[1:])
    else:
        ends = [end for end in range(len(keys), 0, -1) if ".".join(keys[:end]) in value]
        yield from found_at(value[".".join(keys[: ends[0]])], keys[ends[0] :])


def backs(text: str, numbers: Sequence[float]) -> bool:
    """True if the first figure in `text` is the mean of these numbers, and its interval theirs, rounded as written."""
    if (figure := NUMBER.search(text)) is None or not numbers:
        return False
    sign, number, decimals, half, unit = figure.groups()
    scaled = [value * UNITS.get(unit, 1.0) for value in numbers]
    places = len(decimals or "")
    right = f"{statistics.fmean(scaled):{'+' if sign == '+' else ''},.{places}f}".replace(",", "")
    if half and len(scaled) > 1:
        width = student_95(len(scaled) - 1) * statistics.stdev(scaled) / len(scaled) ** 0.5
        right += f" ± {width:.{places}f}"
    return right == sign + number.replace(",", "") + (f" ± {half}" if half else "")


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_figures_of_a_page_are_those_of_their_source(page):
    found = LINK.findall(page.read_text(encoding="utf-8"))
    assert found or page.name != "studies.md"
    for text, file, keys in found:
        source = json.loads((page.parent / file).read_text(encoding="utf-8"))
        assert backs(text, list(found_at(source, unquote(keys).split(".")))), f"[{text}]({file}#{keys})"
