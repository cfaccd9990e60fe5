"""A screen that is closed while a program writes to it."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys

from grpo_cli.support import terminal
from grpo_cli.support.formatting import legible

WRITES = """
import sys
from grpo_cli.support import terminal
console = terminal.console()
for line in range(20_000):
    console.print(line)
print("went on", file=sys.stderr)
"""


def test_a_program_goes_on_and_ends_well_without_a_reader() -> None:
    command = f"{sys.executable} -c {shlex.quote(WRITES)} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "went on\n")


def test_a_screen_that_is_closed_from_the_start_costs_nothing() -> None:
    program = "from grpo_cli.support.terminal import outlive_the_reader as o; o(); print(1); print(2, file=sys.stderr)"
    assert subprocess.run(f'{sys.executable} -c "import sys; {program}" <&- >&- 2>&-', shell=True).returncode == 0


HOSTILE = "a\x1b[31mred\x1b[0m \x1b]0;title\x07b\x1b[2Jc\x9bd\u202ee\rf\x00"


def test_no_text_tells_the_terminal_what_to_do() -> None:
    """A reply that a message quotes, a setting's name, a field of a file and a library's report may hold such texts."""
    assert legible(HOSTILE + "\n\t") == "ared bc\ufffdd\ufffde\ufffdf\ufffd\n\t"
    printed, shown = io.StringIO(), io.StringIO()
    print(HOSTILE, file=terminal.Screen(printed))
    assert printed.getvalue() == "ared bc\ufffdd\ufffde\rf\ufffd\n"  # progress bars return to the line's beginning
    console = terminal.console(shown, force_terminal=True, width=60)
    console.print(f"[bold]{HOSTILE}", highlight=False)
    # rich itself takes the bell and the return out of a text, before it comes to us
    assert shown.getvalue() == "\x1b[1mared \ufffd]0;titlebc\ufffdd\ufffdef\ufffd\x1b[0m\n"
