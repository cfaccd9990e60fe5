"""Sends records to Weights & Biases.

A tracker that was asked for must start. Once training runs its failures are only warnings.
"""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from grpo_cli.runs import layout
from grpo_cli.runs.files import content, json_line, write_atomically
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import OneOf, Range
from grpo_cli.support.terminal import to_stderr
from grpo_cli.tracking.jsonl import Say
from grpo_cli.tracking.redact import arguments_without_secrets, without_secrets
from grpo_cli.types import FOR_RUNS, Example, Record

FINISH_SECONDS = 60.0  # how long a finished run may keep sending
MODES = ("auto", "online", "offline", "disabled")


class WandbTracker:
    """Sends records to Weights & Biases, its files below `run_dir`.

    `mode=auto` is WANDB_MODE if set, else online if W&B finds an API key and offline if not; offline, it says how to
    send the run later. UserError if W&B does not start within its own `WANDB_INIT_TIMEOUT`. After that its first
    failure is a warning, and nothing more is sent; metrics.jsonl has everything.

    The run's id is stored in `run_dir/wandb_id.txt`, so that a resumed run continues the same W&B run; under `wandb
    agent` it is the agent's. A sweep's job is in the group of the sweep's name, unless one is given. `choices` (group
    to choice) go into the config and the tags. Steps are a metric (`step`) and the x axis of all others, because W&B's
    internal counter cannot go back to a checkpoint. Examples are collected in a table `rollouts`, sent every
    `table_every` records and at the end.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        project: str | None,
        entity: str | None,
        name: str | None,
        group: str | None,
        tags: Sequence[str],
        mode: Annotated[str, OneOf(MODES)],
        table_every: Annotated[int, Range(0)],
        job_type: str | None = None,
        choices: Mapping[str, str] | None = None,
        say: Say = to_stderr,
        warn: Say = to_stderr,
    ) -> None:
        environment_mode = os.environ.get("WANDB_MODE", "")
        self._mode = environment_mode if mode == "auto" and environment_mode in MODES else mode
        self._run_dir, self._table_every = run_dir, table_every
        self._say, self._warn = say, warn
        self._rows: list[list[Any]] = []
        self._records = 0
        self._run: Any = None
        self._online = False
        if self._mode == "disabled":
            return
        choices = choices or {}
        found_by = [f"{group}={choice}" for group, choice in choices.items() if group != "logger" and choice != "none"]
        arguments = {
            "project": project,
            "entity": entity,
            "name": name,
            "group": group or sweep_of(run_dir),
            "job_type": job_type,
            "tags": [*tags, *(tag[:64] for tag in found_by)],  # W&B takes up to 64 characters
            "config": without_secrets({**config, "choices": choices}),
        }
        with self._wandb(self._not_started):
            self._start(arguments)

    def log(self, record: Record) -> None:
        if self._run is None:
            return
        self._rows += [_table_row(record.step, example) for example in record.examples]
        self._records += 1
        send_table = self._table_every > 0 and self._records % self._table_every == 0
        with self._wandb(self._given_up):
            self._run.log({"step": record.step, **record.metrics, **(self._take_table() if send_table else {})})

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        with self._wandb(self._given_up):
            if self._table_every > 0 and (table := self._take_table()):
                self._run.log(table)
            scalar = (str, int, float, bool, type(None))
            self._run.summary.update({k: v if isinstance(v, scalar) else json_line(v) for k, v in summary.items()})
            self._run.finish(exit_code=1 if summary.get("status") == "failed" else 0)
        self._run = None

    def _start(self, arguments: Mapping[str, Any]) -> None:
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))
        self._online = self._mode in ("auto", "online") and bool(wandb.login(prompt=False, verify=False))
        if self._mode == "online" and not self._online:
            raise UserError(
                "logger.mode=online, but W&B is not logged in, or WANDB_MODE says offline. Run `wandb login`, or take "
                "logger.mode=offline."
            )
        settings = wandb.Settings(
            silent=True,
            console="off",  # it would record every frame of the live view
            disable_code=True,
            finish_timeout=FINISH_SECONDS,  # what was not sent by then stays on disk
            finish_timeout_raises=True,
        )
        self._run = wandb.init(
            dir=str(self._run_dir),
            mode="online" if self._online else "offline",
            id=_run_id(self._run_dir),
            resume="allow",
            reinit="create_new",
            settings=settings,
            **arguments,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._say(f"W&B: {self._run.url if self._online else f'offline; send this run later with: {self._sync()}'}")

    def _take_table(self) -> dict[str, Any]:
        import wandb

        if not self._rows:
            return {}
        rows, self._rows = self._rows, []
        return {"rollouts": wandb.Table(columns=["step", *_COLUMNS], data=rows, allow_mixed_types=True)}

    def _sync(self) -> str:
        folders = shlex.quote(str(self._run_dir / layout.WANDB))
        return f"wandb sync {folders}/{'' if self._online else 'offline-'}run-*"

    def _not_started(self, reason: str) -> None:
        raise UserError(
            f"logger.mode={self._mode}, but W&B did not start: {reason}. Check the key and the network, or choose "
            "logger.mode=offline or logger=jsonl."
        )

    def _given_up(self, reason: str) -> None:
        self._warn(
            f"W&B failed ({reason}) and is not used any more in this run; metrics.jsonl has everything. Send what W&B "
            f"has on disk with: {self._sync()}"
        )

    @contextmanager
    def _wandb(self, failed: Callable[[str], None]) -> Iterator[None]:
        """Wraps calls of W&B. `failed` is told why W&B or its connection failed; our own errors propagate.

        W&B stages tables and writes its service's logs in the home directory unless these variables name another, and
        records the command line, which may hold a secret.
        """
        folder, argv = self._run_dir / layout.WANDB, sys.argv
        ours = {"WANDB_DATA_DIR": str(folder), "WANDB_CACHE_DIR": str(folder / "cache")}
        missing = ours.keys() - os.environ.keys()
        os.environ.update({name: ours[name] for name in missing})
        sys.argv = arguments_without_secrets(argv)
        try:
            yield
        except Exception as error:
            # W&B's errors have no common base class.
            if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "wandb":
                raise
            import wandb

            self._run = None
            with suppress(Exception):  # exit would wait for its process; a dead one cannot be told
                wandb.teardown(1)
            failed((str(error).splitlines() or [type(error).__name__])[0].rstrip("."))
        finally:
            sys.argv = argv
            for name in missing:
                del os.environ[name]


_COLUMNS = [field.name for field in fields(Example) if field.name not in FOR_RUNS]


def _table_row(step: int, example: Example) -> list[Any]:
    values = (getattr(example, name) for name in _COLUMNS)
    return [step, *(json_line(value) if isinstance(value, Mapping) else value for value in values)]


def _run_id(run_dir: Path) -> str:
    """The run's W&B id, created (or given by `wandb agent`) on first use and stored."""
    path = run_dir / layout.WANDB_ID
    known = content(path).decode().strip() if path.exists() else ""
    if known:
        return known
    given = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    new = given or uuid.uuid4().hex[:12]
    write_atomically(path, f"{new}\n".encode())
    return new


def sweep_of(run_dir: Path) -> str | None:
    """The name of the sweep that a run is a job of: its folder's, if Hydra or our launcher has marked it."""
    folder = run_dir.absolute().parent
    return folder.name if any((folder / mark).exists() for mark in (layout.SWEEP, layout.HYDRAS_SWEEP)) else None
