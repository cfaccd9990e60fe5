"""Records to TensorBoard, by the names that they have everywhere."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_cli.runs.files import json_line, must_be_writable
from grpo_cli.runs.layout import TENSORBOARD
from grpo_cli.support.extras import require
from grpo_cli.support.terminal import to_stderr
from grpo_cli.tracking.jsonl import Say
from grpo_cli.tracking.redact import without_secrets
from grpo_cli.types import Record


class TensorBoardTracker:
    """Event files in `run_dir/events`. UserError without TensorBoard, or if a file cannot be written.

    What a killed run has written beyond its checkpoint is hidden once the resumed one gets there (`purge_step`).
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], *, say: Say = to_stderr) -> None:
        require("tensorboard", "logger=tensorboard")
        self._folder, self._config = run_dir / TENSORBOARD, config
        self._writer: Any = None
        say(f"TensorBoard: tensorboard --logdir {shlex.quote(str(run_dir.parent))}")

    def log(self, record: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with must_be_writable(self._folder):
            if self._writer is None:
                self._writer = SummaryWriter(str(self._folder), purge_step=record.step)
                self._writer.add_text("config", json_line(without_secrets(self._config)), record.step)
            for name, value in record.metrics.items():
                self._writer.add_scalar(name, value, record.step)
            self._writer.flush()  # a killed process would have left this

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._writer is not None:
            with must_be_writable(self._folder):
                self._writer.add_text("summary", json_line(without_secrets(summary)))
                self._writer.close()
