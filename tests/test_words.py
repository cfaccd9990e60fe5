"""Docstrings say what a function does or what a class is: they begin with a verb or a noun, never with a clause."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(page for of in ("grpo_cli", "conf", "scripts") for page in (ROOT / of).rglob("*.md"))]
# What begins a clause in place of a verb or a noun.
CLAUSE = re.compile(
    r"(Whether|What|Which|Who|Whose|Why|How|Where|When|If|That|Of|As|Its|Those|So|By|In|On|At|To|From|With|For|Only|Also"
    r"|Behind|Between)\b"
)
# Speech for data, and words of our own for those of the field.
WORST = re.compile(r"\b(told|mended|as soon at|cannot be had|dear|falls free|made-up|doors?|taught)\b", re.IGNORECASE)


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield the place and the node of everything in the package."""
    for file in sorted((ROOT / "grpo_cli").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def test_docstrings_begin_with_a_verb_or_a_noun():
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [(place, ast.get_docstring(node) or "") for place, node in nodes() if isinstance(node, documented)]
    texts = [(place, text) for place, text in texts if text]
    clauses = [f"{place}: {text.splitlines()[0]}" for place, text in texts if CLAUSE.match(text)]
    assert len(clauses) <= 0.02 * len(texts), "\n".join(clauses)


def test_the_worst_words_are_in_no_docstring_message_or_page():
    texts = [(place, str(node.value)) for place, node in nodes() if isinstance(node, ast.Constant)]
    texts += [(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in PAGES]
    prose = ((place, re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)) for place, text in texts)
    assert [(place, found[0]) for place, text in prose if (found := WORST.search(text))] == []
