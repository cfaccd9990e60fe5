"""What workers of the tests are built with. Workers import it, so it stands in a file of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import made
from small import make_engine

from grpo_cli.config.instantiate import ready
from grpo_cli.engine.order.predict import NoPredictor, Told
from grpo_cli.interfaces import Meter
from grpo_cli.support.errors import UserError


class Slowed:
    """A meter under which every decode step takes some time, so that there is some to kill a worker in. The first
    process that finds the file `hang` removes it and hangs."""

    def __init__(self, meter: Meter, seconds: float, hang: str) -> None:
        self._meter, self._seconds, self._hang = meter, seconds, hang

    def span(self, name: str) -> Any:
        time.sleep(3600 if self._hang and removed(Path(self._hang)) else self._seconds)
        return self._meter.span(name)

    def take(self) -> Mapping[str, float]:
        return {}


def build(
    model: Any,
    *,
    kv_share: int,
    tells_lengths: bool,
    told: Mapping[tuple[str, int, int], float],
    meter: Meter,
    warn: Any,
    slots: int | None = None,
    seconds: float = 0.0,
    scheduler: str = "fifo",
    prefix: bool = False,
    fails: str = "",
    die: str = "",
    hang: str = "",
) -> Any:
    """The torch engine, `slots` at a time, with `seconds` for each step. The first process that takes up new weights
    while the file `die` is there removes it and dies."""
    if fails == "refused":
        raise UserError("lower sampling.max_new_tokens")
    if fails:
        raise RuntimeError(fails)
    learning = made.prefix_head({"seed": 0}, prefix_tokens=2) if prefix else NoPredictor()
    engine = make_engine(
        model,
        sampler=made.full() if slots is None else made.infinite(slots=slots),
        scheduler=ready("scheduler", scheduler),
        predictor=Told(told) if tells_lengths and not prefix else learning,
        meter=Slowed(meter, seconds, hang),
        warn=warn,
    )
    if die:
        update = engine.update_weights
        engine.update_weights = lambda: os.kill(os.getpid(), signal.SIGKILL) if removed(Path(die)) else update()
    return engine


def removed(flag: Path) -> bool:
    """Whether this process is the one that removed it."""
    with suppress(FileNotFoundError):
        flag.unlink()
        return True
    return False
