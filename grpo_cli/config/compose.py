"""From what Hydra composed to typed settings: wrong types, missing values and unknown keys, all said at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.choices import EVAL_PARTS, TRAIN_PARTS, choices
from grpo_cli.config.read import missing, read
from grpo_cli.errors import UserError, refuse
from grpo_cli.settings import (
    EvalRunSettings,
    ProfileRunSettings,
    RunSettings,
)

Settings = TypeVar("Settings")


def parse(cfg: DictConfig) -> RunSettings:
    """The settings of `grpo train`. UserError names every missing value, wrong type and unknown key."""
    return _parse(cfg, RunSettings, TRAIN_PARTS)


def parse_eval(cfg: DictConfig) -> EvalRunSettings:
    """The settings of `grpo eval`; as `parse`."""
    return _parse(cfg, EvalRunSettings, EVAL_PARTS)


def parse_profile(cfg: DictConfig) -> ProfileRunSettings:
    """The settings of `grpo profile`; as `parse`."""
    settings = _parse(cfg, ProfileRunSettings, TRAIN_PARTS)
    return replace(settings, device=settings.profile.device)


def _parse(cfg: DictConfig, kind: type[Settings], parts: Sequence[str]) -> Settings:
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'the configuration'}: {error.msg or error}".splitlines()[0]) from error
    assert isinstance(values, dict), "Hydra composes a mapping"
    problems: list[str] = []
    groups = {name: values.pop(name) for name in parts if name in values}
    values.pop("experiment", None)  # a named experiment leaves its settings in the other keys
    for name, group in groups.items():
        problems += missing(name, group)
        if not isinstance(group, dict) or "_target_" not in group:
            problems.append(f"{name} says nowhere what to build: choose one of {', '.join(choices(name))}")
    settings = read(kind, values | {"parts": groups}, problems)
    refuse(problems)
    assert settings is not None, "without a problem there are settings"
    return settings
