"""Records to TensorBoard, by the names that they have everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import json_line
from grpo_cli.runs.layout import TENSORBOARD
from grpo_cli.support.extras import require
from grpo_cli.tracking.jsonl import Say, to_stderr
from grpo_cli.tracking.redact import without_secrets
from grpo_cli.types import Record


class TensorBoardTracker:
    """Event files in `run_dir/events`. UserError without TensorBoard; a file that cannot be written later is a
    warning and ends the writing, since metrics.jsonl has everything.

    What a killed run has written beyond its checkpoint is hidden once the resumed one gets there (`purge_step`).
    """

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], *, say: Say = to_stderr, warn: Say = to_stderr
    ) -> None:
        require("tensorboard", "logger=tensorboard")
        self._folder, self._config, self._warn = run_dir / TENSORBOARD, config, warn
        self._writer: Any = None
        self._failed = False
        say(f"TensorBoard: tensorboard --logdir {run_dir.parent}")

    def log(self, record: Record) -> None:
        self._write(lambda writer: [writer.add_scalar(*value, record.step) for value in record.metrics.items()], record)

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._write(lambda writer: [writer.add_text("summary", json_line(dict(summary))), writer.close()])

    def _write(self, add: Callable[[Any], object], record: Record | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._failed:
            return
        try:
            if self._writer is None:
                step = record.step if record else None
                self._writer = SummaryWriter(str(self._folder), purge_step=step)
                self._writer.add_text("config", json_line(without_secrets(self._config)), step)
            add(self._writer)
            self._writer.flush()  # a killed process would have left this
        except OSError as error:
            self._failed = True
            self._warn(f"TensorBoard failed ({error}), and gets nothing more of this run; metrics.jsonl has it all")
