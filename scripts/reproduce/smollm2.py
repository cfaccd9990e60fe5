"""What the studies of a real pretrained model share: its folder, room on the disk, and the time to expect."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from common import ROOT, in_a_process, write

GIB = 2**30
# Weights in float32 with AdamW's two moments and the tokenizer: what training goes on from.
CHECKPOINT = 1.65e9


def add_model(made: argparse.ArgumentParser) -> None:
    made.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", help="made by scripts/get_smollm2.sh")


def check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise SystemExit(
            f"{folder} holds no model: scripts/get_smollm2.sh {folder} makes it, or say where with --model"
        )


def check_disk(out: Path, runs: int, at_once: int) -> None:
    """Room for the last checkpoint of so many runs that are missing below `out`; one gives way to the next by lying
    beside it."""
    there = next(folder for folder in (out, *out.parents) if folder.is_dir())
    needed, free = (runs + min(runs, at_once)) * CHECKPOINT, shutil.disk_usage(there).free
    if needed > free:
        raise SystemExit(
            f"{runs} runs leave a checkpoint of {CHECKPOINT / GIB:.1f} GiB each, with those in the making "
            f"{needed / GIB:.0f} GiB, and {there} has {free / GIB:.0f} GiB free: give another --out, or fewer runs"
        )


def say(count: int, seconds: float) -> None:
    print(f"{count} to be done, about {max(1, round(seconds / 60))} minutes", flush=True)


def measured(script: str, file: Path, asked: Mapping[str, Any], *words: str) -> None:
    """What `script --child <words>` measures in a process of its own, with one thread, goes into `file` with what it
    was asked with; unless it is there. SystemExit where that was asked with something else, or nothing comes of it."""
    if file.is_file():
        if json.loads(file.read_text(encoding="utf-8"))["asked"] != asked:
            raise SystemExit(f"{file} was measured with other settings: give another --out, or remove it")
        return
    print(f"measuring {file.parent.name}/{file.stem}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        found, reason = in_a_process(script, *words, threads=1, folder=Path(scratch))
    if found is None:
        raise SystemExit(f"{file.stem}: {reason}; go on with the same command")
    write(file, {"asked": asked, **found})


def check_data(file: Path) -> None:
    if not file.is_file():
        raise SystemExit(f"{file} is no file: give --data, GSM8K's train.jsonl (openai/grade-school-math)")
