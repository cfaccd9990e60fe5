"""What workers of the tests are built with. Workers import it, so it stands in a file of its own."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from typing import Any

import made
from small import make_engine

from grpo_cli.config.instantiate import ready
from grpo_cli.support.errors import UserError


def build(
    model: Any, *, warn: Any, scheduler: str, predictor: Any, seconds: float = 0.0, fails: str = "", dies: bool = False
) -> Any:
    """The torch engine, two slots, with `seconds` for each step; or one whose process dies with each call."""
    if fails:
        raise UserError(fails) if fails.startswith("lower") else RuntimeError(fails)
    parts = {"scheduler": ready("scheduler", scheduler), "predictor": predictor()}
    span = lambda name: time.sleep(seconds) or nullcontext()  # noqa: E731  # of a decode step: to kill a worker in
    engine = make_engine(model, sampler=made.infinite(slots=2), span=span, warn=warn, **parts)
    if dies:
        engine.generate = lambda requests: os.kill(os.getpid(), signal.SIGKILL)
    return engine
