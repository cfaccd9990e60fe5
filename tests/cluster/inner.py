"""What workers of the tests are built with. Workers import it, so it stands in a file of its own."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import made
from small import make_engine

from grpo_cli.config.instantiate import ready
from grpo_cli.engine.length_predictor import NoPredictor
from grpo_cli.support.errors import UserError


def slowed(seconds: float, name: str) -> AbstractContextManager[None]:
    """Let every decode step take some time, so that there is some to kill a worker in."""
    time.sleep(seconds)
    return nullcontext()


def build(
    model: Any,
    *,
    warn: Any,
    slots: int,
    seconds: float = 0.0,
    scheduler: str = "fifo",
    predicts: str = "nothing",
    fails: str = "",
    dies: str = "",
) -> Any:
    """The torch engine, `slots` at a time, with `seconds` for each step. While the file `dies` is there, the process
    dies with each call."""
    if fails == "refused":
        raise UserError("lower sampling.max_new_tokens")
    if fails:
        raise RuntimeError(fails)
    predictors = {
        "nothing": NoPredictor,
        "means": made.mean_length,
        "prefix": partial(made.prefix_head, {"seed": 0}, prefix_tokens=2),
    }
    engine = make_engine(
        model,
        sampler=made.infinite(slots=slots),
        scheduler=ready("scheduler", scheduler),
        predictor=predictors[predicts](),
        span=partial(slowed, seconds),
        warn=warn,
    )
    generate = engine.generate

    def generate_or_die(requests: Any) -> Any:
        return os.kill(os.getpid(), signal.SIGKILL) if dies and Path(dies).exists() else generate(requests)

    engine.generate = generate_or_die
    return engine
