"""A screen that is closed while a program writes to it."""

from __future__ import annotations

import subprocess
import sys

import pytest

WRITES = """
import sys
from grpo_cli.tracking import terminal
console = terminal.console()
for line in range({lines}):
    console.print(line)
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize("lines", [1, 20_000], ids=["in the buffer", "beyond it"])
def test_a_program_goes_on_and_ends_well_without_a_reader(lines: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES.format(lines=lines)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (0, "went on\n")
