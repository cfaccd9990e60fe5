"""Atomic checkpoints, and reading them back. Independent of model and trainer.

    <run>/checkpoints/step_000100/     the files of `save_model`, trainer_state.pt, and COMPLETE

`COMPLETE` is written last, after everything else is on disk. It lists every file with its size and SHA-256, so that a
folder cut short by a crash, and a file truncated or altered later, are both detected before anything is read.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_cli.runs.files import disk_error, json_line, sha256, sync_file, sync_folder, unfinished, write_atomically
from grpo_cli.runs.find import candidates, find_checkpoint
from grpo_cli.runs.layout import (
    CHECKPOINTS,
    COMPLETE,
    EVERY_RESUMED,
    METRICS,
    REPLACED,
    ROLLOUTS,
    RUN,
    SUMMARY,
    TRAINER_STATE,
    UNFINISHED,
    WANDB_ID,
    step_folder,
    step_of,
)
from grpo_cli.support.errors import UserError


class CheckpointError(UserError):
    """A checkpoint could not be saved. Those saved before are untouched."""


def save_checkpoint(
    root: Path, step: int, save_model: Callable[[Path], None], state: Mapping[str, Any], keep: int
) -> Path:
    """Save step `step` below `root` and remove the oldest checkpoints beyond `keep` (at least this one stays).

    `save_model` writes the model's files into the folder it is given. `state` may hold only tensors and plain values,
    so that it can be read back without running code; anything else raises TypeError before a file is written.

    Raises CheckpointError if the files cannot be written, usually because the disk is full. Then, and after any other
    exception, nothing of this save is left and every earlier checkpoint is intact.
    """
    _refuse_unplain(state, "state")
    folder = root / step_folder(step)
    temporary, replaced = folder.with_suffix(UNFINISHED), folder.with_suffix(REPLACED)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        temporary.mkdir()
        save_model(temporary)
        _save_state(temporary / TRAINER_STATE, state)
        manifest = _sync_all(temporary)
        if folder.exists():
            _set_aside(folder, replaced)
        os.replace(temporary, folder)
        sync_folder(root)
        marker = {"step": step, "saved_at": time.time(), "files": manifest}
        write_atomically(folder / COMPLETE, json_line(marker, indent=1).encode())
    except BaseException as error:
        _undo(folder, temporary, replaced)
        reason = disk_error(error)
        if reason is None:
            raise
        raise CheckpointError(_save_message(root, step, reason)) from error
    try:
        _remove(replaced)
        _prune(root, folder, keep)
    except OSError as error:
        raise UserError(f"{folder} is saved, but an older checkpoint could not be removed ({error}).") from error
    return folder


def _save_state(path: Path, state: Mapping[str, Any]) -> None:
    # Given a path, torch turns a full disk into a RuntimeError about its zip file. Given a file, the OSError (or a
    # second ctrl-C) is at least the context of that error.
    try:
        with open(path, "wb") as file:
            torch.save(dict(state), file)
    except RuntimeError as error:
        cause = error.__context__
        while cause is not None and not isinstance(cause, OSError | KeyboardInterrupt):
            cause = cause.__context__
        raise cause or error from error


def _sync_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Sync every file of `folder` to disk. Returns its manifest."""
    manifest = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sync_file(path)
        manifest[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)
    return manifest


def _set_aside(folder: Path, replaced: Path) -> None:
    """The step was saved before: keep a complete folder until its successor is, remove an incomplete one."""
    if (folder / COMPLETE).exists():
        os.replace(folder, replaced)
    else:
        shutil.rmtree(folder)


def _undo(folder: Path, temporary: Path, replaced: Path) -> None:
    # Errors are ignored: what cannot be removed is incomplete, or older, and never mistaken for a good checkpoint.
    shutil.rmtree(temporary, ignore_errors=True)
    if folder.exists() and not (folder / COMPLETE).exists():
        shutil.rmtree(folder, ignore_errors=True)
    if replaced.exists() and not folder.exists():
        os.replace(replaced, folder)


def _save_message(root: Path, step: int, reason: str) -> str:
    last = find_checkpoint(root).path
    survivor = f"The last good checkpoint is {last}." if last else "There is no earlier checkpoint."
    return (
        f"step {step} could not be saved in {root} ({reason}). {survivor} Make room or make the folder writable, or "
        "keep fewer checkpoints (train.keep_checkpoints), then continue with resume=auto."
    )


def clear_leftovers(run_dir: Path) -> None:
    """Remove the half-written files and checkpoints that a killed process left in a run's folder.

    A replaced checkpoint whose successor is not complete is restored.
    """
    for name in (METRICS, ROLLOUTS, SUMMARY, RUN, WANDB_ID):
        unfinished(run_dir / name).unlink(missing_ok=True)
    for path in run_dir.glob(unfinished(Path(EVERY_RESUMED)).name):
        path.unlink(missing_ok=True)
    if (run_dir / CHECKPOINTS).is_dir():
        _remove_leftovers(run_dir / CHECKPOINTS)


def _remove_leftovers(root: Path) -> None:
    """Remove what a killed save left; restore a replaced checkpoint unless its successor is complete."""
    for path in root.iterdir():
        if step_of(path.name) is None or not path.suffix:
            continue
        folder = path.with_suffix("")
        if path.suffix == REPLACED and not (folder / COMPLETE).exists():
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(path, folder)
        elif path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def _prune(root: Path, newest: Path, keep: int) -> None:
    complete = [path for path in candidates(root) if path != newest and (path / COMPLETE).exists()]
    for path in complete[max(keep, 1) - 1 :]:
        _remove(path)


def _remove(folder: Path) -> None:
    """Renamed to an unfinished folder first, so that the next save cleans up if this removal is interrupted."""
    if folder.exists():
        doomed = folder.with_suffix(UNFINISHED)
        os.replace(folder, doomed)
        shutil.rmtree(doomed)


def load_state(folder: Path) -> dict[str, Any]:
    """Return the trainer state of a checkpoint, its tensors on the CPU. Runs no code from the file."""
    with damaged(folder):
        state = torch.load(folder / TRAINER_STATE, weights_only=True, map_location="cpu")
        if not isinstance(state, dict):
            raise TypeError("it does not hold named values")
        return state


@contextmanager
def damaged(folder: Path) -> Iterator[None]:
    """Turn the errors of reading a checkpoint's state, or of taking values from it, into a UserError."""
    try:
        yield
    except (OSError, EOFError, pickle.UnpicklingError, ArithmeticError, *_UNFIT) as error:
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        raise UserError(f"{folder / TRAINER_STATE} is damaged ({reason}); choose another checkpoint") from error


_UNFIT = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError)


def require_alike(saved: Any, fresh: Any, name: str) -> None:
    """Raise TypeError unless saved values have the types that a new run has for them; None stands for any."""
    if saved is None or fresh is None:
        return
    if not isinstance(saved, (int, float) if type(fresh) is float else type(fresh)) or isinstance(
        saved, bool
    ) > isinstance(fresh, bool):
        raise TypeError(f"{name} is a {type(saved).__name__}")
    if isinstance(fresh, Mapping) and isinstance(saved, Mapping):
        for key in fresh.keys() & saved.keys():
            require_alike(saved[key], fresh[key], f"{name}.{key}")


def rng_state() -> dict[str, Any]:
    """The global random states of torch (CPU and every GPU), numpy and Python, as tensors and plain values."""
    numpy_state = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    kind, keys, position, has_gauss, gauss = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore `rng_state`'s value. GPUs that this machine does not have are ignored: a run that moves to other devices
    cannot continue bit for bit anyway."""
    torch.set_rng_state(state["torch"])
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))


_PLAIN = (type(None), bool, int, float, str, bytes)


def _refuse_unplain(value: Any, where: str) -> None:
    # The exact type matters: a numpy float is a float too, but safe loading refuses it.
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            _refuse_unplain(item, f"{where}[{index}]")
    elif type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _refuse_unplain(key, f"a key of {where}")
            _refuse_unplain(item, f"{where}[{key!r}]")
    else:
        raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint holds tensors and plain values only")
