"""Sends records to Weights & Biases, or to Trackio, which has its interface and keeps runs on this machine."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
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
    `run_dir/wandb_id.txt`, so that a resumed run continues the same W&B run, unless the folder is a copy. Steps are a
    metric and the x axis of all others, because W&B's own counter cannot go back to a checkpoint. Every `table_every`
    steps the examples are sent as a table `rollouts`. Trackio: a run is known by its name, unless given that of its
    sweep and folder; `space_id` is a Space of the hub that gets everything.
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
        self._mode = (mode == "auto" and os.environ.get("WANDB_MODE")) or mode
        self._run_dir, self._table_every, self._module, self._warn = run_dir, table_every, module, warn
        self._run: Any = None
        self._later = ""  # how what is on disk is sent
        if module == "wandb" and self._mode == "disabled":
            return
        require(module, f"logger={module}")
        known = without_secrets({**config, "choices": choices or {}})
        about = {"project": project, "group": group or sweep_of(run_dir), "config": known, "resume": "allow"}
        with self._calls():
            if module == "wandb":
                about |= {"name": name, "entity": entity, "job_type": job_type, "tags": [*tags]}
                where = self._start_wandb(about)
            else:
                # It would measure the machine beside the run.
                quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
                place = "-".join(filter(None, (sweep_of(run_dir), run_dir.absolute().name)))
                about |= {"name": name or place, "space_id": space_id, **quiet}
                self._run = importlib.import_module("trackio").init(**about)
                where = f"Trackio: trackio show --project {project}"
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
        which = ("--include-online ", "") if online else ("", "offline-")
        self._later = f"wandb sync {which[0]}{shlex.quote(str(folder))}/{which[1]}run-*"
        kept, here = self._run_dir / layout.WANDB_ID, str(self._run_dir.resolve())
        known, home = [*kept.read_text().split("\n"), ""][:2] if kept.exists() else (None, "")
        if home not in ("", here) and (Path(home) / layout.WANDB_ID).exists():
            known = None  # a copy, whose original is there: W&B makes a new id, or its sweep's agent does
        where = {"dir": str(self._run_dir), "mode": "online" if online else "offline", "id": known}
        argv, sys.argv = sys.argv, arguments_without_secrets(sys.argv)  # which it records
        try:
            self._run = wandb.init(**about, **where, reinit="create_new", settings=settings)
        finally:
            sys.argv = argv
        write_atomically(kept, f"{self._run.id}\n{here}\n".encode())
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return f"W&B: {self._run.url if online else f'offline; send this run later with: {self._later}'}"

    def log(self, record: Record) -> None:
        """Send a record's metrics, and now and then its examples."""
        if self._run is None:
            return
        with self._calls():
            if self._module == "trackio":
                self._run.log(dict(record.metrics), step=record.step)
            else:
                self._run.log({"step": record.step, **record.metrics, **self._table(record)})

    def _table(self, record: Record) -> dict[str, Any]:
        if not (self._table_every and record.examples and record.step % self._table_every == 0):
            return {}
        rows = [[vars(example)[name] for name in _COLUMNS] for example in record.examples]
        rows = [[json_line(value) if isinstance(value, Mapping) else value for value in row] for row in rows]
        table = importlib.import_module("wandb").Table
        return {"rollouts": table(columns=_COLUMNS, data=rows, allow_mixed_types=True)}

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send the summary, and end the run."""
        if self._run is None:
            return
        with self._calls():
            if self._module == "trackio":
                self._run.finish()
                return
            plain, scalar = without_secrets(summary), (str, int, float, bool, type(None))
            self._run.summary.update({k: v if isinstance(v, scalar) else json_line(v) for k, v in plain.items()})
            self._run.finish(exit_code=1 if summary.get("status") == "failed" else 0)

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Answer a failure of the library or its connection: a UserError at the start, a warning afterwards. Trackio
        prints lines of its own."""
        try:
            with redirect_stdout(StringIO()) if self._module == "trackio" else nullcontext():
                yield
        except UserError:
            raise
        except Exception as error:  # W&B's errors have no common base class
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


def sweep_of(run_dir: Path) -> str | None:
    """Return the name of the sweep that a run is a job of: its folder's, if Hydra or our launcher has marked it."""
    folder = run_dir.absolute().parent
    return folder.name if any((folder / mark).exists() for mark in (layout.SWEEP, layout.HYDRAS_SWEEP)) else None
