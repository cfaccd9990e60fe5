"""Finds runs, and the newest good checkpoint of one. Does not import torch, so that refusals are fast."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.runs.files import content, read_object, sha256
from grpo_cli.runs.layout import CHECKPOINTS, COMPLETE, METRICS, OUTPUTS, RUN, SUMMARY, TRAINER_STATE, run_of, step_of
from grpo_cli.runs.lock import is_held
from grpo_cli.support.errors import UserError


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest good checkpoint, if any, and why each newer one was skipped ("step_000120: ...")."""

    path: Path | None
    skipped: tuple[str, ...]


def find_checkpoint(folder: Path) -> FoundCheckpoint:
    """Return the newest checkpoint whose files are all as they were saved.

    `folder` is a run folder, its `checkpoints` folder, or one checkpoint. Every file of the result has been read and
    verified, about a second per gigabyte; older checkpoints are not checked.
    """
    skipped: list[str] = []
    for path in candidates(folder):
        reason = damage_of(path)
        if reason is None:
            return FoundCheckpoint(path, tuple(skipped))
        skipped.append(f"{path.name}: {reason}")
    return FoundCheckpoint(None, tuple(skipped))


def never_saved(run_dir: Path) -> bool:
    """True if a run ended before it had a checkpoint, possibly during its first save, that of step 0."""
    metrics = run_dir / METRICS
    rows = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    saving = [step_of(path.name) == 0 and not (path / COMPLETE).exists() for path in candidates(run_dir)]
    return all(saving) and (rows <= 1 or any(saving))  # with train.checkpoint=lazy steps go on meanwhile


def candidates(folder: Path) -> list[Path]:
    """Return checkpoint folders, newest first, a half-written one of a step after its own."""
    if run_of(folder) != folder:
        return [folder]
    root = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    steps = [(step, path.name[0] != ".", path) for path in folders if (step := step_of(path.name)) is not None]
    return [path for _, _, path in sorted(steps, reverse=True)]


def damage_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None."""
    try:
        files = json.loads(content(folder / COMPLETE))["files"]
        for name, expected in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
                return f"{name} has changed since it was saved"
        return None if TRAINER_STATE in files else f"{COMPLETE} does not list {TRAINER_STATE}"
    except FileNotFoundError:
        return f"the save was interrupted (no {COMPLETE} file)" if folder.is_dir() else "there is no such folder"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{COMPLETE} is damaged"


def resolve_run(resume: str) -> Path:
    """Resolve `resume=`: a run folder, or one checkpoint folder if one was named. `find_checkpoint` takes either.

    `auto` is the run below outputs/train that saved a checkpoint last; a finished one only if all are. UserError if
    there is none, and for a folder that is not a run.
    """
    if resume == "auto":
        return _newest_run(OUTPUTS / "train")
    path = Path(resume).expanduser().resolve()
    is_run = (path / CHECKPOINTS).is_dir() or (path / RUN).exists()
    if not path.is_dir() or not (is_run or step_of(path.name) is not None):
        raise UserError(
            f"resume={resume} is not a run folder, with {RUN} or {CHECKPOINTS}/: give one (grpo ls lists them), one of "
            "its checkpoints, or auto"
        )
    return path


def completed_steps(folder: Path) -> int | None:
    """Return the step of a completed run's last checkpoint, or of the checkpoint that is given; None if the run is not
    completed."""
    saved = [step_of(path.name) for path in candidates(folder) if (path / COMPLETE).is_file()]
    return saved[0] if saved and read_object(run_of(folder) / SUMMARY).get("status") == "completed" else None


def _newest_run(train: Path) -> Path:
    # Folders of runs that a user placed one level down count too; a sweep's do not (resume=sweep).
    saved = [path for depth in ("*", "*/*") for path in train.glob(f"{depth}/{CHECKPOINTS}/step_*/{COMPLETE}")]

    def saved_at(path: Path) -> float:
        with suppress(FileNotFoundError):  # its run has just removed it
            return path.stat().st_mtime
        return 0.0

    def is_over(run: Path) -> bool:
        with suppress(UserError):  # a damaged summary says nothing
            return completed_steps(run) is not None
        return False

    newest = sorted(saved, key=saved_at, reverse=True)
    for run in sorted({path.parents[2]: None for path in newest}, key=lambda run: (is_held(run), is_over(run))):
        if find_checkpoint(run).path is not None:
            return run.resolve()
    raise UserError(f"resume=auto found no run with a complete checkpoint in {train}. Name a folder: resume=<run>")
