"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_cli"
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if ">>> " in file.read_text()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_examples_in_docstrings_hold(file: Path) -> None:
    found = doctest.testmod(importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)))
    assert found.attempted and not found.failed
