"""Parts and settings as `conf/` has them, but for what a test changes: no default is said again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grpo_cli.config.auto import decided
from grpo_cli.config.choices import config_dir, shipped
from grpo_cli.config.compose import KINDS, model_of, read_settings, settings_of
from grpo_cli.config.instantiate import ready
from grpo_cli.runs.record import RunRecord, read_record, write_record
from grpo_cli.settings import LoraSettings, ModelSettings, OptimSettings, RunSettings, Sampling, TrainSettings
from grpo_cli.types import Finish, Prompt, Request, Rollout


def part(group: str, choice: str, **changed: Any) -> dict[str, Any]:
    """What YAML says of a part."""
    return shipped(group, choice) | changed


OFFERED = {"n": 8, "m": 8, "prompts": 8}  # to rules
full, micro, infinite = (partial(ready, "sampler", choice) for choice in ("full", "micro", "infinite"))
fptas = partial(ready, "scheduler", "fptas")
mean_length, prefix_head = partial(ready, "predictor", "mean"), partial(ready, "predictor", "prefix")


def loss(choice: str = "grpo", **changed: Any) -> Any:
    return ready("loss", choice, **changed)


def correction(choice: str = "none", **changed: Any) -> Any:
    return ready("correction", choice, **changed)


def advantage(choice: str, **changed: Any) -> Any:
    return ready("advantage", choice, OFFERED, **changed)


def downsample(choice: str) -> Any:
    return ready("downsample", choice)


def unexpected(text: str) -> None:
    raise AssertionError(f"a warning that nobody expected: {text}")


def task(
    choice: str, tokenizer: Any, seed: int = 0, *, warn: Any = unexpected, max_prompt_tokens: Any = None, **changed: Any
) -> Any:
    offered = {"tokenizer": tokenizer, "seed": seed, "warn": warn, "max_prompt_tokens": max_prompt_tokens}
    return ready("task", choice, offered, **changed)


def rollout_of(prompt: Prompt, reply: str, tokenizer: Any, sample: int = 0) -> Rollout:
    """A rollout that says `reply` and ends by itself."""
    token_ids = (*tokenizer(reply)["input_ids"], tokenizer.eos_token_id)
    return Rollout(Request(prompt, sample, 0, Sampling.plain(128)), token_ids, (0.0,) * len(token_ids), Finish.EOS)


@functools.cache
def _composed(command: str, *groups: str) -> DictConfig:
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return hydra.compose(command, [*groups, "run_dir=outputs/x"])


def configuration(*overrides: str, command: str = "train") -> DictConfig:
    """What Hydra makes of the overrides, in a moment: what it makes of a choice is what `shipped` reads
    (test_config.py). A named experiment lies over choices, so that those beside one are composed by Hydra itself."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = [o for o in parsed if (config_dir() / o.key_or_group).is_dir() and isinstance(o.value(), str)]
    by_hydra = groups if any(o.key_or_group == "experiment" for o in groups) else []
    cfg = copy.deepcopy(_composed(command, *(str(o.input_line) for o in by_hydra)))
    OmegaConf.set_struct(cfg, False)
    for override in groups if not by_hydra else []:
        OmegaConf.update(cfg, override.key_or_group, shipped(override.key_or_group, override.value()), merge=False)
    for override in (o for o in parsed if o not in groups):
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=False)
    return cfg


def composed(*overrides: str, command: str = "train") -> Any:
    """As `settings_of`, of any command, in a moment."""
    return decided(read_settings(configuration(*overrides, command=command), KINDS[command]))


_defaults = functools.cache(settings_of)


def settings(**changed: Any) -> RunSettings:
    """Those of `grpo train`."""
    return replace(_defaults(), **changed)


def train(**changed: Any) -> TrainSettings:
    return replace(_defaults().train, **{"threads": torch.get_num_threads()} | changed)


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
