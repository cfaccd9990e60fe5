"""`grpo init`: a folder with an experiment of one's own, ready to run and to be changed."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from pathlib import Path

from grpo_cli.runs.files import folder_written_atomically, place_of_new


def init(folder: Path) -> list[str]:
    """Write it; returns the commands of its README.md. UserError if something is there already."""
    place = place_of_new(folder)
    with folder_written_atomically(place) as written:
        template = str(files("grpo_cli.cli") / "template")
        shutil.copytree(template, written, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return re.findall(r"^    (.*)$", (place / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
