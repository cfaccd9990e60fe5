"""Records to Trackio, which keeps them on this machine, by the names that they have everywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require
from grpo_cli.tracking.jsonl import Say, to_stderr
from grpo_cli.tracking.redact import without_secrets
from grpo_cli.tracking.wandb import sweep_of
from grpo_cli.types import Record


class TrackioTracker:
    """A run of Trackio's, where Trackio keeps them (`TRACKIO_DIR`, else a folder of HF_HOME), or in a Space of the hub.

    UserError without Trackio, and where it does not start; once it has, its own failures are warnings of its own. A run
    is known by its name, which is that of its folder unless it is given, so a resumed run goes on in it; rows that a
    killed one has written beyond its checkpoint stay, and the later one of a step is drawn over them.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        project: str,
        name: str | None,
        group: str | None,
        space_id: str | None,
        choices: Mapping[str, str] | None = None,
        say: Say = to_stderr,
    ) -> None:
        require("trackio", "logger=trackio")
        import trackio

        # It says where it is with lines of its own, and would measure the machine beside the run.
        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        known: dict[str, Any] = {"config": without_secrets({**config, "choices": choices or {}}), "space_id": space_id}
        run: dict[str, Any] = {"name": name or run_dir.absolute().name, "resume": "allow"}
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            try:
                self._run = trackio.init(project, group=group or sweep_of(run_dir), **run, **known, **quiet)
            except (OSError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"logger=trackio did not start: {error}. Check logger.space_id and the network, or TRACKIO_DIR, or "
                    "use logger=jsonl"
                ) from error
        self._last = 0
        say(f"Trackio: trackio show --project {project}")

    def log(self, record: Record) -> None:
        self._last = record.step
        self._run.log(dict(record.metrics), step=record.step)

    def close(self, summary: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        if numbers:
            self._run.log({f"summary/{name}": float(value) for name, value in numbers.items()}, step=self._last)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            self._run.finish()
