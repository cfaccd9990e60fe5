"""Every figure of README.md and scripts/README.md, and the tables of the studies' pages, from the JSON they come from.

    python scripts/claims.py             # each claim: its figure and interval, of how many seeds, the command, the JSON
    python scripts/claims.py --write     # rewrites what stands between `<!-- from NAME -->` and `<!-- end -->`

`claims.jinja` says how: after `=== NAME` comes the text of that name. Below `=== index/STUDY` each line is a claim, in
cells divided by ` | `: what is claimed, its figure, of what it is a sample, the command, the records in `baselines/`.
A line that begins with `@` holds the last three for the claims after it. Templates read records as `record.NAME`
and format numbers with the functions below. What is not generated may hold no figure in the two README files (`ALLOWED`
is let through); `tests/test_claims.py` sees to it, and that text and JSON agree.

`a ± b` is a mean over seeds and half of its 95 % interval (Student's t). Arms are compared seed by seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from grpo_cli.support.intervals import student_95

ROOT = Path(__file__).resolve().parents[1]
GUARDED = (ROOT / "README.md", ROOT / "scripts" / "README.md")
TEMPLATE = ROOT / "scripts" / "claims.jinja"
WIDTH = 120
NO_DIFFERENCE = "no difference seen"
Runs = Mapping[str, Mapping[str, Any]]  # what an arm's run of each seed came to

GENERATED = re.compile(r"(?P<open><!-- from (?P<name>\S+) -->)(?P<text>.*?)(?P<close><!-- end -->)", re.DOTALL)
# What is no claim: code, targets of links, comments.
NO_PROSE = re.compile(r"(?ms)^```.*?^```|(?<=\n\n)(?: {4}[^\n]*\n|\n)+|`[^`]*`|\]\([^)]*\)|<!--.*?-->")
# Names, versions, publications and sizes that are definitions.
ALLOWED = re.compile(
    r"arXiv \d{4}\.\d{5}|Python 3\.\d+|TRL \d\.\d+|Apache-2\.0|SmolLM2(?:-135M(?:-Instruct)?)?|\bQwen[23]\b|\bGSM8K\b"
    r"|\bfloat32\b|\bH100\b|\b(?:half of its )?95 % intervals?\b|pass@1\b|\bvLLM-CPU 0\.\d+"
    r"|\b(?:0\.36|50|135) M parameters\b|\b64 -> 16\b|\b64 rollouts\b"
)
FIGURE = re.compile(
    r"\d|\b(?:twice|thrice|half|third|quarter|doubles?|halves|(?:two|three|four|five|six|ten|several|many) times)\b"
)


@dataclass(frozen=True)
class Records:
    """The JSON files that figures come from, by name; `others` are in other folders."""

    folder: Path
    others: Mapping[str, Path] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.others.get(name, self.folder / f"{name}.json")

    def link(self, name: str) -> str:
        """As scripts/README.md has it."""
        return f"[{name}]({self.path(name).parent.name}/{name}.json)"

    def __getitem__(self, name: str) -> Any:
        return json.loads(self.path(name).read_text(encoding="utf-8"))


class Claim(NamedTuple):
    """One row of the index. `figure` holds the number with its interval, `of` what it is a sample of."""

    what: str
    figure: str
    of: str
    command: str
    files: str


RECORDS = Records(ROOT / "scripts" / "baselines", {"learning": ROOT / "scripts" / "figures" / "learning.json"})


# What templates call


def pick(value: Any, *path: Any, scale: float = 1) -> list[Any]:
    """What is found along `path`: a key, several keys, or `*` for every item; items that lack a key are passed over.

    >>> pick({"a": {"x": 1}, "b": {"x": 2}, "c": {}}, "*", "x", scale=10)
    [10, 20]
    """
    found = [value]
    for step in path:
        found = [item for one in found for item in _items(one, step)]
    return found if scale == 1 else [scale * one for one in found]


def _items(value: Any, step: Any) -> Iterable[Any]:
    if step == "*":
        return value.values() if isinstance(value, Mapping) else value
    keys = [step] if isinstance(step, str) else step
    return [value[key] for key in keys if isinstance(value, Records) or key in value]


def matching(named: Mapping[str, Any], part: str) -> list[str]:
    return [name for name in named if part in name]


def counted_of(runs: Mapping[str, Any], arm: str) -> list[str]:
    """The runs of an arm of `time_to_accuracy`, but for those by which a learning rate was chosen."""
    return [name for name in runs if name.startswith(f"{arm}, ") and not name.endswith("seed 100")]


def counted(words: Sequence[str], in_order: bool = False) -> dict[str, int]:
    """How often each occurs, the most frequent first, or each at the place where it first occurs."""
    found = Counter(words)
    return dict(found) if in_order else dict(found.most_common())


def values(runs: Runs, key: str, unit: float = 1) -> list[float]:
    return [runs[seed][key] / unit for seed in sorted(runs)]


def ratios(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    """Seed by seed, or round by round."""
    return [a / b for a, b in zip(mine, base, strict=True)]


def differences(mine: Sequence[float], base: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(mine, base, strict=True)]


def half_width(numbers: Sequence[float]) -> float:
    """Of the 95 % interval of a mean of at least two numbers."""
    return student_95(len(numbers) - 1) * statistics.stdev(numbers) / len(numbers) ** 0.5


def seeds(runs: Any) -> str:
    count = runs if isinstance(runs, int) else len(runs)
    return "1 seed, no interval" if count == 1 else f"{count} seeds{', so a wide interval' * (count == 2)}"


def rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds"


def interval(numbers: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """`mean ± half-width`; the number alone where there is one."""
    shown = format(round(statistics.fmean(numbers), digits) + 0.0, f"{sign}.{digits}f")  # + 0.0: there is no -0.000
    return shown if len(numbers) == 1 else f"{shown} ± {half_width(numbers):.{digits}f}"


def over_seeds(runs: Runs, key: str) -> str:
    return interval(values(runs, key))


def difference(arm: Runs, base: Runs, key: str) -> str:
    """Of an arm and another one, seed by seed; NO_DIFFERENCE where the interval holds 0."""
    return paired([arm[seed][key] - base[seed][key] for seed in sorted(arm.keys() & base.keys())])


def paired(pairs: Sequence[float]) -> str:
    """The same of differences, one of each seed."""
    shown = interval(pairs, sign="+")
    if len(pairs) == 1:
        return f"{shown} (1 seed, no interval)"
    holds_zero = abs(statistics.fmean(pairs)) <= half_width(pairs)
    return f"{shown}, {NO_DIFFERENCE}" if holds_zero else shown


def by_tens(runs: Runs, name: str) -> list[float]:
    """The mean over seeds of a metric in each ten steps that have it; a seed that ended before is left out."""
    rows = itertools.zip_longest(*(runs[seed]["series"][name] for seed in sorted(runs)))
    return [statistics.fmean(there) for row in rows if (there := [one for one in row if one is not None])]


def against(arm: Runs, base: Runs, key: str) -> str:
    """`difference`; nothing for an arm beside itself."""
    return "" if arm == base else difference(arm, base, key)


def times(found: Sequence[float], digits: int = 2) -> str:
    """A mean ratio with its interval; NO_DIFFERENCE where that holds 1."""
    shown = interval(found, digits)
    alike = len(found) > 1 and abs(statistics.fmean(found) - 1) <= half_width(found)
    return f"{shown}, {NO_DIFFERENCE}" if alike else shown


def sooner(found: Mapping[str, Any]) -> str:
    """How many times sooner than another arm, with the interval over seeds where all of them come there."""
    if not found["ratios"]:
        return "never"
    if not found["never"]:
        return times(found["ratios"])
    return f"{listed(found['ratios'])}; {found['never']} of {len(found['ratios']) + found['never']} never"


def spread(found: Sequence[float], digits: int = 2) -> str:
    """The median of what some rounds came to, with the lowest and the highest."""
    shown = f"{statistics.median(found):.{digits}f}"
    return shown if len(found) == 1 else f"{shown} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def between(numbers: Iterable[float], digits: int = 2) -> str:
    """`lowest to highest`, or the one number where they are the same when rounded."""
    low, *_, high = sorted(found := list(numbers)) * (2 if len(found) == 1 else 1)
    shown = [format(round(end, digits) + 0.0, f".{digits}f") for end in (low, high)]
    return " to ".join(dict.fromkeys(shown))


def in_every_seed(found: Sequence[float]) -> str:
    """Whether ratios of tokens or seconds are on one side of 1."""
    if all(ratio < 1 for ratio in found):
        return "earlier in every seed"
    return "later in every seed" if all(ratio > 1 for ratio in found) else "earlier in some seeds, later in others"


def listed(numbers: Iterable[float], more: Sequence[str] = (), digits: int = 2, sep: str = ", ") -> str:
    return sep.join([*(f"{number:.{digits}f}" for number in numbers), *more])


def each(runs: Runs, key: str, digits: int = 2) -> str:
    """The value of every seed."""
    return listed(values(runs, key), digits=digits)


def reached(runs: Runs, key: str) -> str:
    """A share that some seeds never come to."""
    there = [runs[seed][key] for seed in sorted(runs) if runs[seed][key] is not None]
    return listed(there, [f"{len(runs) - len(there)} of {len(runs)} never"] if len(there) < len(runs) else [])


def minutes_to(runs: Iterable[Mapping[str, Any]], wanted: float) -> list[tuple[float, bool]]:
    """Of each run that tried, the minutes at the first evaluation that found so many right, True; or at the last."""
    curves = [run["curve"] for run in runs]
    found = [next((minutes for minutes, accuracy in curve if accuracy >= wanted), None) for curve in curves]
    return [(curve[-1][0], False) if at is None else (at, True) for at, curve in zip(found, curves, strict=True)]


def formatted(value: float, form: int | str) -> str:
    """With so many digits, or in a form of Python's; there is no -0."""
    return format(round(value, form) + 0.0, f".{form}f") if isinstance(form, int) else format(value, form)


def mean(runs: Runs, key: str, form: str = ",.0f") -> str:
    shown = format(statistics.fmean(values(runs, key)), form)
    return shown.lstrip("-") if not float(shown.replace(",", "")) else shown


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def share(runs: Runs, key: str, digits: int = 0) -> str:
    return percent(statistics.fmean(values(runs, key)), digits)


def rule(columns: int) -> str:
    return f"|{' --- |' * columns}"


def arms(record: Mapping[str, Any], comparison: int = 0) -> dict[str, Any]:
    """What every arm of a comparison of `bench/rollout.py` measured, round by round; the first of each name."""
    rows = record["comparisons"][comparison]["rows"]
    return {row["arm"]: row["rounds"] for row in reversed(rows) if row["rounds"]}


def cases(record: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Of `bench/real.py`, by what they are measured on: arms with their rounds."""
    return {name.removeprefix(f"{part}: "): of for name, of in record["rounds"].items() if name.startswith(f"{part}: ")}


def policies(found: Mapping[str, Any], arm: str, cache: str) -> Runs:
    """What an arm's policies came to under a cache, by seed."""
    place = f"{arm.replace(' ', '/')}/"
    return {key.removeprefix(place): found[key][cache] for key in sorted(found) if key.startswith(place)}


def evaluated(found: Mapping[str, Any], arm: str, cache: str) -> list[float]:
    """Accuracy of an arm's policies under a cache, over seeds."""
    return values(policies(found, arm, cache), "eval/pass@1")


def texts_of(records: Records) -> dict[str, str]:
    """What stands at each place of a page, by the name of the place."""
    made = rendered(records)
    return made | {name: index(list(_rows(text)), records) for name, text in made.items() if name.startswith("index/")}


def claims_of(records: Records) -> dict[str, list[Claim]]:
    """By study."""
    made = rendered(records)
    return {name.removeprefix("index/"): list(_rows(t)) for name, t in made.items() if name.startswith("index/")}


def rendered(records: Records) -> dict[str, str]:
    """The texts of the template, by name."""
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {name: of for name, of in globals().items() if isfunction(of)} | {
        "median": statistics.median,
        "max": max,
    }
    made.filters |= {"f": formatted, "pct": percent}
    made.tests["contains"] = lambda value, part: part in value
    whole = made.from_string(TEMPLATE.read_text(encoding="utf-8")).render(record=records)
    _, *parts = re.split(r"(?m)^=== (\S+)\n", whole)
    lines = ([line.strip() for line in text.splitlines() if line.strip()] for text in parts[1::2])
    return dict(zip(parts[::2], map("\n".join, lines), strict=True))


def _rows(text: str) -> Iterable[Claim]:
    usual: list[str] = []
    for line in text.splitlines():
        cells = line.removeprefix("@ ").split(" | ")
        if line.startswith("@ "):
            usual = cells
        else:
            yield Claim(*cells, *usual[len(cells) - 2 :])


def index(claims: Sequence[Claim], records: Records) -> str:
    """The table of one study."""
    head = ["| claim | figure | of | command | JSON |", rule(5)]
    for c in claims:
        links = ", ".join(map(records.link, c.files.split()))
        head.append(f"| {c.what} | {c.figure} | {c.of} | `{c.command}` | {links} |")
    return "\n".join(head)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "scripts").rglob("*.md"))]


def rewritten(page: str, texts: Mapping[str, str]) -> str:
    """The page with every generated text as it has to be. KeyError for a name that nothing makes."""

    def fresh(found: re.Match[str]) -> str:
        text = texts[found["name"]]
        if not found["text"].startswith("\n"):
            text = _wrapped(text, page[page.rfind("\n", 0, found.start()) + 1 : found.start()])
            return f"{found['open']}{text}{found['close']}"
        return f"{found['open']}\n{text}\n{found['close']}"

    return GENERATED.sub(fresh, page)


def _wrapped(text: str, before: str) -> str:
    """`text` after the words `before` of its line, indented as they are."""
    begin = re.sub(r"<!--.*?-->", "", before)
    indent = " " * (len(before) - len(before.lstrip(" -")))
    text = re.sub(r" (?=[%±])|(?<=±) ", "\0", text)  # a number stays with its unit
    unbroken = dict(break_long_words=False, break_on_hyphens=False)
    filled = textwrap.fill(text, WIDTH, initial_indent="x" * len(begin), subsequent_indent=indent, **unbroken)
    return filled[len(begin) :].replace("\0", " ")


def unbacked(page: str) -> list[str]:
    """The lines that hold a figure which nothing generated, as they are without what is let through."""
    prose = ALLOWED.sub(" ", NO_PROSE.sub(" ", GENERATED.sub(" ", page)))
    return [line.strip() for line in prose.splitlines() if FIGURE.search(line)]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="bring the pages up to date with the JSON")
    args = parser.parse_args(words)
    if args.write:
        texts = texts_of(RECORDS)
        for page in pages():
            page.write_text(rewritten(page.read_text(encoding="utf-8"), texts), encoding="utf-8")
        return 0
    for study, claims in claims_of(RECORDS).items():
        print(f"\n{study}")
        for claim in claims:
            print(f"  {claim.what}: {claim.figure} [{claim.of}]\n      {claim.command} ({claim.files})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
