"""Sends records to Weights & Biases, or to Trackio, which has its interface and keeps runs on this machine."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_cli.runs import layout
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require
from grpo_cli.support.ranges import OneOf
from grpo_cli.support.terminal import to_stderr
from grpo_cli.tracking.jsonl import Say
from grpo_cli.tracking.redact import arguments_without_secrets, without_secrets
from grpo_cli.types import FOR_RUNS, Example, Record

FINISH_SECONDS = 60.0  # how long a finished run may keep sending
_COLUMNS = [field.name for field in fields(Example) if field.name not in FOR_RUNS]


class WandbTracker:
    """A run of `module`, wandb or trackio. UserError if it does not start; after that its first failure is a warning,
    and nothing more is sent: metrics.jsonl has everything.

    W&B: `mode=auto` is WANDB_MODE if set, else online with an API key and offline without. The run's id is stored in
    `run_dir/wandb_id.txt`, so that a resumed run continues the same W&B run. Steps are a metric and the x axis of all
    others, because W&B's own counter cannot go back to a checkpoint. Examples are collected in a table `rollouts`, sent
    every `table_every` records and at the end. Trackio: a run is known by its name, that of its folder unless given;
    `space_id` is a Space of the hub that gets everything.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        project: str | None,
        name: str | None,
        group: str | None,
        module: Annotated[str, OneOf(("wandb", "trackio"))] = "wandb",
        entity: str | None = None,
        tags: Sequence[str] = (),
        mode: Annotated[str, OneOf(("auto", "online", "offline", "disabled"))] = "auto",
        table_every: Annotated[int, Field(ge=0)] = 0,
        space_id: str | None = None,
        job_type: str | None = None,
        choices: Mapping[str, str] | None = None,
        say: Say = to_stderr,
        warn: Say = to_stderr,
    ) -> None:
        self._mode = os.environ.get("WANDB_MODE", mode) if mode == "auto" else mode
        self._run_dir, self._table_every, self._module, self._warn = run_dir, table_every, module, warn
        self._rows: list[list[Any]] = []
        self._records = self._step = 0
        self._run: Any = None
        self._later = ""  # how what is on disk is sent
        if module == "wandb" and self._mode == "disabled":
            return
        require(module, f"logger={module}")
        known = without_secrets({**config, "choices": choices or {}})
        about = {"project": project, "name": name, "group": group or sweep_of(run_dir), "config": known}
        with self._calls():
            if module == "trackio":
                # It would measure the machine beside the run.
                quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
                about |= {"name": name or run_dir.absolute().name, "space_id": space_id, **quiet}
                self._run = importlib.import_module("trackio").init(**about, resume="allow")
                where = f"Trackio: trackio show --project {project}"
            else:
                found_by = [f"{k}={v}" for k, v in (choices or {}).items() if k != "logger" and v != "none"]
                labels = [*tags, *(tag[:64] for tag in found_by)]  # W&B takes up to 64 characters
                where = self._start_wandb(about | {"entity": entity, "job_type": job_type, "tags": labels})
        say(where)

    def _start_wandb(self, about: Mapping[str, Any]) -> str:
        folder = self._run_dir / layout.WANDB
        # Unless set, it stages tables and writes its service's logs in the home directory.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder))
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        wandb = importlib.import_module("wandb")
        wandb.setup(settings=wandb.Settings(silent=True))
        online = self._mode in ("auto", "online") and bool(wandb.login(prompt=False, verify=False))
        if self._mode == "online" and not online:
            raise UserError("logger.mode=online needs a key: run `wandb login`, or take logger.mode=offline")
        # The console would record every frame of the live view; what was not sent in time stays on disk.
        quiet = {"silent": True, "console": "off", "disable_code": True}
        settings = wandb.Settings(**quiet, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True)
        self._later = f"wandb sync {shlex.quote(str(folder))}/{'' if online else 'offline-'}run-*"
        where = {"dir": str(self._run_dir), "mode": "online" if online else "offline", "id": _run_id(self._run_dir)}
        argv, sys.argv = sys.argv, arguments_without_secrets(sys.argv)  # which it records
        try:
            self._run = wandb.init(**about, **where, resume="allow", reinit="create_new", settings=settings)
        finally:
            sys.argv = argv
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return f"W&B: {self._run.url if online else f'offline; send this run later with: {self._later}'}"

    def log(self, record: Record) -> None:
        """Send a record's metrics, and now and then the table of examples."""
        self._step = record.step
        self._rows += [_table_row(record.step, example) for example in record.examples] if self._table_every else []
        self._records += 1
        table = self._table_every > 0 and self._records % self._table_every == 0
        with self._calls():
            self._send({**record.metrics, **(self._take_table() if table else {})})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send what is left and the summary, and end the run."""
        if self._run is None:
            return
        with self._calls():
            if rest := self._take_table():
                self._send(rest)
            if self._module == "trackio":
                self._send({f"summary/{k}": float(v) for k, v in summary.items() if isinstance(v, int | float)})
                self._run.finish()
            else:
                scalar = (str, int, float, bool, type(None))
                self._run.summary.update({k: v if isinstance(v, scalar) else json_line(v) for k, v in summary.items()})
                self._run.finish(exit_code=1 if summary.get("status") == "failed" else 0)

    def _send(self, values: Mapping[str, Any]) -> None:
        if self._run is not None and self._module == "trackio":
            self._run.log(dict(values), step=self._step)
        elif self._run is not None:
            self._run.log({"step": self._step, **values})

    def _take_table(self) -> dict[str, Any]:
        if not self._rows:
            return {}
        rows, self._rows = self._rows, []
        table = importlib.import_module("wandb").Table
        return {"rollouts": table(columns=["step", *_COLUMNS], data=rows, allow_mixed_types=True)}

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Answer a failure of the library or its connection: a UserError at the start, a warning afterwards. Our own
        errors propagate. Trackio prints lines of its own."""
        try:
            with redirect_stdout(StringIO()) if self._module == "trackio" else nullcontext():
                yield
        except Exception as error:
            # W&B's errors have no common base class.
            theirs = type(error).__module__.partition(".")[0] == self._module
            if not (theirs or isinstance(error, OSError | ValueError | RuntimeError)):
                raise
            if self._module == "wandb":
                with suppress(Exception):  # exit would wait for its process, which may be dead
                    importlib.import_module("wandb").teardown(1)
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            if self._run is None:
                raise UserError(
                    f"logger={self._module} did not start ({reason}); check the key and the network, or choose "
                    "logger.mode=offline or logger=jsonl"
                ) from error
            self._run = None
            later = self._later and f"; send what is on disk with: {self._later}"
            self._warn(f"{self._module} failed ({reason}) and gets nothing more; metrics.jsonl has everything{later}")


def _table_row(step: int, example: Example) -> list[Any]:
    values = (getattr(example, name) for name in _COLUMNS)
    return [step, *(json_line(value) if isinstance(value, Mapping) else value for value in values)]


def _run_id(run_dir: Path) -> str:
    """Return the run's W&B id, created (or given by `wandb agent`) on first use and stored."""
    path = run_dir / layout.WANDB_ID
    if path.exists() and (known := path.read_text().strip()):
        return known
    given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    new = given or uuid.uuid4().hex[:12]
    write_atomically(path, f"{new}\n".encode())
    return new


def sweep_of(run_dir: Path) -> str | None:
    """Return the name of the sweep that a run is a job of: its folder's, if Hydra or our launcher has marked it."""
    folder = run_dir.absolute().parent
    return folder.name if any((folder / mark).exists() for mark in (layout.SWEEP, layout.HYDRAS_SWEEP)) else None
