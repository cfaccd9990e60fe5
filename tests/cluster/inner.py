"""What workers of the tests are built with. Workers import it, so it stands in a file of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import made
from small import make_engine

from grpo_cli.config.instantiate import ready
from grpo_cli.engine.order.predict import NoPredictor, Told
from grpo_cli.engine.ray.ray_cluster import fetch
from grpo_cli.interfaces import Meter
from grpo_cli.support.errors import UserError


def _prefix() -> Any:
    return made.prefix_head({"seed": 0}, prefix_tokens=2)


class Slowed:
    """A meter under which every decode step takes some time, so that there is some to kill a worker in."""

    def __init__(self, meter: Meter, seconds: float) -> None:
        self._meter, self._seconds = meter, seconds

    def span(self, name: str) -> Any:
        time.sleep(self._seconds)
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
) -> Any:
    """The torch engine, `slots` at a time, with `seconds` for each step."""
    if fails == "refused":
        raise UserError("lower sampling.max_new_tokens")
    if fails:
        raise RuntimeError(fails)
    sampler = made.full() if slots is None else made.infinite(slots=slots)
    return make_engine(
        model,
        sampler=sampler,
        scheduler=ready("scheduler", scheduler),
        predictor=_prefix() if prefix else Told(told) if tells_lengths else NoPredictor(),
        meter=Slowed(meter, seconds),
        warn=warn,
    )


def fetch_or_die(flag: str, handle: Any) -> Any:
    """The weights; but the process that finds the flag's file takes it away and dies, having them half."""
    numbers = fetch(handle)
    try:
        Path(flag).unlink()
    except FileNotFoundError:
        return numbers
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it was killed")


def dying(flag: Path) -> Any:
    return partial(fetch_or_die, str(flag))
