"""Atomic checkpoints, and reading them back. Independent of model and trainer.

    <run>/checkpoints/step_000100/     the files of `save_model`, trainer_state.pt, and COMPLETE

`COMPLETE` lists every file with its size and SHA-256, so that a folder cut short by a crash, and a file truncated or
altered later, are both detected before anything is read.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from grpo_cli.runs.files import folder_written_atomically, must_be_writable, sha256, write_object
from grpo_cli.runs.find import candidates, damage_of
from grpo_cli.runs.layout import (
    CHECKPOINTS,
    COMPLETE,
    RUN,
    SUMMARY,
    TRAINER_STATE,
    UNFINISHED,
    WANDB_ID,
    step_folder,
    step_of,
)
from grpo_cli.support.errors import explained


def save_checkpoint(
    root: Path, step: int, save_model: Callable[[Path], None], state: Mapping[str, Any], keep: int
) -> None:
    """Save step `step` below `root`; remove the oldest beyond `keep`, at least 1.

    `save_model` writes the model's files into the folder it gets. `state` may hold only tensors and plain values, so
    that it can be read back without running code; TypeError otherwise. After any exception (UserError if the files
    cannot be written) nothing of this save is left and every earlier checkpoint is intact.
    """
    folder = root / step_folder(step)
    with folder_written_atomically(folder) as new:
        save_model(new)
        write_tensors(new / TRAINER_STATE, dict(state))
        if unsafe := get_unsafe_globals_in_checkpoint(new / TRAINER_STATE):
            raise TypeError(f"a checkpoint holds tensors and plain values only, and not {', '.join(sorted(unsafe))}")
        files = {path.relative_to(new).as_posix(): path for path in sorted(new.rglob("*")) if path.is_file()}
        listed = {name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for name, path in files.items()}
        write_object(new / COMPLETE, {"step": step, "files": listed})
    complete = [path for path in candidates(root) if path != folder and (path / COMPLETE).exists()]
    _remove(root, complete[keep - 1 :])


def remove_from(root: Path, step: int) -> None:
    """Remove the checkpoints of this step and later ones, whose records a run replaces that was resumed before them."""
    _remove(root, [p for p in candidates(root) if (step_of(p.name) or 0) >= step and (p / COMPLETE).exists()])


def _remove(root: Path, checkpoints: Sequence[Path]) -> None:
    with must_be_writable(root):
        for path in checkpoints:
            doomed = path.with_name(f".{path.name}{UNFINISHED}")  # what a kill leaves of it is cleared
            os.replace(path, doomed)
            (doomed / COMPLETE).unlink()
            shutil.rmtree(doomed, ignore_errors=True)  # on NFS a file that is mapped stays until it is closed


def write_tensors(path: Path, values: Mapping[str, Any]) -> None:
    """Write tensors and plain values into a new file. UserError if there is no room."""
    with must_be_writable(path), open(path, "wb") as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:  # about its zip file: a full disk or a ctrl-C is the context
            raise error.__context__ or error from error


def clear_leftovers(run_dir: Path) -> None:
    """Remove what a killed process left half written in a run's folder; finish a save of which only the renaming was
    missing."""
    with suppress(OSError):  # what stays is never mistaken for complete files
        for name in (RUN, SUMMARY, WANDB_ID):  # those that this process writes whole
            (run_dir / f".{name}{UNFINISHED}").unlink(missing_ok=True)
        for path in (run_dir / CHECKPOINTS).glob(".step_*"):
            folder = path.with_name(step_folder(step_of(path.name) or 0))
            if (path / COMPLETE).exists() and damage_of(folder):
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(path, folder)
            else:
                shutil.rmtree(path, ignore_errors=True)


def load_state(folder: Path) -> dict[str, Any]:
    """Return the trainer state of a checkpoint, its tensors on the CPU. Runs no code from the file."""
    with damaged(folder):
        return torch.load(folder / TRAINER_STATE, weights_only=True, map_location="cpu")


def damaged(folder: Path) -> AbstractContextManager[None]:
    """Turn any error of reading values from a checkpoint's state into a UserError."""
    return explained(f"{folder / TRAINER_STATE} is damaged", "; resume from an earlier checkpoint")


def rng_state() -> dict[str, Any]:
    """Return the global random states of torch (CPU and every GPU), numpy and Python, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore `rng_state`'s value, but for GPUs that this machine does not have."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    np.random.set_state(tuple(state["numpy"]))
    random.setstate(state["python"])
