"""Every figure of README.md and scripts/README.md, and the tables of the studies' pages, from the JSON they come from.

    python scripts/claims.py             # each claim: its figure and interval, of how many seeds, the command, the JSON
    python scripts/claims.py --write     # rewrites what stands between `<!-- from NAME -->` and `<!-- end -->`

Claims and tables are made by the modules of `claimed/`. What is not generated may hold no figure in these two files
(`ALLOWED` is let through); `tests/test_claims.py` sees to it, and that text and JSON agree.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from claimed import evicted, front, pods, rollouts, systems, training
from claimed.words import Claim, Records, table

ROOT = Path(__file__).resolve().parents[1]
TOPICS = (training, pods, evicted, rollouts, systems)  # in the order of the index
GUARDED = (ROOT / "README.md", ROOT / "scripts" / "README.md")
RECORDS = Records(ROOT / "scripts" / "baselines", {"learning": ROOT / "scripts" / "figures" / "learning.json"})
WIDTH = 120

GENERATED = re.compile(r"(?P<open><!-- from (?P<name>\S+) -->)(?P<text>.*?)(?P<close><!-- end -->)", re.DOTALL)
# What is no claim: code, targets of links, comments.
NO_PROSE = re.compile(r"(?ms)^```.*?^```|(?<=\n\n)(?: {4}[^\n]*\n|\n)+|`[^`]*`|\]\([^)]*\)|<!--.*?-->")
# Names, versions, publications and sizes that are definitions.
ALLOWED = (
    *(r"arXiv \d{4}\.\d{5}", r"Python 3\.\d+", r"TRL \d\.\d+", r"Apache-2\.0", r"SmolLM2(?:-135M(?:-Instruct)?)?"),
    *(
        r"\bQwen[23]\b",
        r"\bGSM8K\b",
        r"\bfloat32\b",
        r"\b(?:half of its )?95 % intervals?\b",
        r"pass@1\b",
        r"\bvLLM-CPU 0\.\d+",
    ),
    *(r"\b(?:0\.36|50|135) M parameters\b", r"\b64 -> 16\b", r"\b64 rollouts\b"),
)
FIGURE = re.compile(
    r"\d|\b(?:twice|thrice|half|third|quarter|doubles?|halves|(?:two|three|four|five|six|ten|several|many) times)\b"
)


def index(claims: Sequence[Claim], records: Records) -> str:
    """The rows of one study."""

    rows = [[c.what, c.figure, c.of, f"`{c.command}`", ", ".join(map(records.link, c.files))] for c in claims]
    return table(["claim", "figure", "of", "command", "JSON"], rows)


def claims_of(records: Records) -> dict[str, list[Claim]]:
    return {study: claims for topic in TOPICS for study, claims in topic.claims(records).items()}


def texts_of(records: Records) -> dict[str, str]:
    """What stands at each place of a page, by the name of the place."""
    indexed = {f"index/{study}": index(claims, records) for study, claims in claims_of(records).items()}
    return indexed | {name: text for part in (*TOPICS, front) for name, text in part.texts(records).items()}


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
    filled = textwrap.fill(
        re.sub(r" (?=[%±])|(?<=±) ", "\0", text),  # a number stays with its unit
        WIDTH,
        initial_indent="x" * len(begin),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled[len(begin) :].replace("\0", " ")


def unbacked(page: str) -> list[str]:
    """The lines that hold a figure which nothing generated, as they are without what is let through."""
    prose = NO_PROSE.sub(" ", GENERATED.sub(" ", page))
    for allowed in ALLOWED:
        prose = re.sub(allowed, " ", prose)
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
            print(f"  {claim.what}: {claim.figure} [{claim.of}]")
            print(f"      {claim.command} ({', '.join(f'{name}.json' for name in claim.files)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
