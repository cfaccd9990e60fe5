"""Parts and settings as `conf/` has them, but for what a test changes: no default is said again."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.config.choices import shipped
from grpo_cli.config.compose import model_of, settings_of
from grpo_cli.config.instantiate import function, ready
from grpo_cli.runs.record import RunRecord, read_record, write_record
from grpo_cli.settings import LoraSettings, ModelSettings, OptimSettings, RunSettings, TrainSettings


def part(group: str, choice: str, **changed: Any) -> dict[str, Any]:
    """What YAML says of a part."""
    return shipped(group, choice) | changed


full, micro, infinite = (partial(ready, "sampler", choice) for choice in ("full", "micro", "infinite"))
fptas = partial(ready, "scheduler", "fptas")
mean_length, prefix_head = partial(ready, "predictor", "mean"), partial(ready, "predictor", "prefix")


def loss(choice: str = "grpo", **changed: Any) -> Any:
    return ready("loss", choice, **changed)


def correction(choice: str = "none", **changed: Any) -> Any:
    return ready("correction", choice, **changed)


def advantage(choice: str, **changed: Any) -> Any:
    return function("advantage", part("advantage", choice, **changed))


def downsample(choice: str) -> Any:
    return function("downsample", part("downsample", choice))


def task(choice: str, tokenizer: Any, seed: int = 0, **changed: Any) -> Any:
    return ready("task", choice, {"tokenizer": tokenizer, "seed": seed, "warn": unexpected}, **changed)


def unexpected(text: str) -> None:
    raise AssertionError(f"a warning that nobody expected: {text}")


_defaults = functools.cache(settings_of)


def settings(**changed: Any) -> RunSettings:
    """Those of `grpo train`."""
    return replace(_defaults(), **changed)


def train(**changed: Any) -> TrainSettings:
    return replace(_defaults().train, **changed)


def optim(**changed: Any) -> OptimSettings:
    return replace(_defaults().optim, **changed)


def model(path: str = "tiny", **changed: Any) -> ModelSettings:
    return model_of("tiny", path=path, **changed)


def lora(**changed: Any) -> LoraSettings:
    return replace(_defaults().model.lora, **changed)


def record(
    folder: Path,
    config: Mapping[str, Any],
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
    command: str = "train",
) -> RunRecord:
    """The `run.json` that a run in this folder would have left."""
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder, RunRecord(command, tuple(overrides), choices or {}, config, {}))
    made = read_record(folder)
    assert made is not None, "it was written a line ago"
    return made
