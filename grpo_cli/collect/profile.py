"""Reads what is known of problems before training from a file of answers (sGPO, arXiv 2606.08854)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_cli.history import PROFILED, History, Visit, digest_of
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.types import Prompt

MOST_PROFILED = 100_000  # problems; a pass over more would take longer than any training here
WRITE_IT = "grpo eval eval.split=train eval.problems=-1 eval.k=8"
_READ = {"prompt_id": str, "sample": int, "reason": str, "solved": bool}


def read_history(file: str | None, prompts: Sequence[Prompt]) -> History:
    """The history of these problems in an evaluation's `samples.jsonl`, empty without a file. UserError if it is
    another file, or of another task. Stops iterating over problems once all those of the file are found."""
    if file is None:
        return History()
    visits = _visits_in(file)
    wanted, known, digests = dict(visits), dict[str, Sequence[Visit]](), dict[str, int]()
    for prompt in prompts:
        if prompt.id in wanted:
            known[prompt.id], digests[prompt.id] = [wanted.pop(prompt.id)], digest_of(prompt)
            if not wanted:
                break
    if not known:
        raise UserError(
            f"train.history={file} knows 0 of the {len(prompts)} problems of this task (its ids are such as "
            f"{next(iter(visits))}, the task's such as {prompts[0].id}); write it with {WRITE_IT} on this task"
        )
    return History(known, digests)


def no_history(file: str | None) -> Iterator[str]:
    """Problems with the path, before anything is read."""
    if file is not None and not Path(file).expanduser().is_file():
        found = "a folder: name the samples.jsonl in it" if Path(file).expanduser().is_dir() else "not there"
        yield (
            f"train.history={file} is {found}; {WRITE_IT} writes one, and a run that goes on has in its checkpoint "
            "what it said: train.history=null"
        )


def _visits_in(file: str) -> dict[str, Visit]:
    """The sampled answers of a file, by problem."""
    refuse([*no_history(file)])
    found: dict[str, dict[int, bool]] = {}
    for number, row in _rows_of(file):
        if row["reason"] != "sampled":
            continue
        of = found.setdefault(row["prompt_id"], {})
        if row["sample"] in of:
            raise UserError(
                f"line {number} of train.history={file} holds sample {row['sample']} of problem {row['prompt_id']!r} a "
                f"second time: one file is of one evaluation, so write it again with {WRITE_IT}"
            )
        of[row["sample"]] = row["solved"]
    if not found:
        raise UserError(
            f"train.history={file} holds no sampled answers (eval.k=0, or it is of training); write it with {WRITE_IT}"
        )
    return {problem: Visit(PROFILED, sum(of.values()), len(of)) for problem, of in found.items()}


def _rows_of(file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows with their line numbers. UserError for one that an evaluation would not write, or if there is none."""
    number = 0
    with open(Path(file).expanduser(), encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"line {number} of train.history={file} is no JSON: name the samples.jsonl that {WRITE_IT} writes"
                ) from error
            lacking = [key for key, kind in _READ.items() if not (isinstance(row, dict) and type(row.get(key)) is kind)]
            if lacking:
                raise UserError(
                    f"line {number} of train.history={file} does not say {', '.join(lacking)}: it is no samples.jsonl, "
                    f"or was written by an older version; write it again with {WRITE_IT}"
                )
            yield number, row
    if not number:
        raise UserError(f"train.history={file} is empty; write it with {WRITE_IT}")
