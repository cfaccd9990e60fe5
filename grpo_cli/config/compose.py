"""Parses Hydra's composed config into typed settings; all type errors, missing values and unknown keys at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.auto import decided, decided_model, fill
from grpo_cli.config.choices import choices, config_dir, parts_of, shipped
from grpo_cli.config.instantiate import drop_inherited
from grpo_cli.config.read import missing, read
from grpo_cli.settings import EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.processor import fast_in_bfloat16

Settings = TypeVar("Settings")


def parse(cfg: DictConfig) -> RunSettings:
    """The settings of `grpo train`. UserError names every missing value, wrong type and unknown key."""
    return _parse(cfg, RunSettings, "train")


def parse_eval(cfg: DictConfig) -> EvalRunSettings:
    """The settings of `grpo eval`; as `parse`."""
    return _parse(cfg, EvalRunSettings, "eval")


def parse_profile(cfg: DictConfig) -> ProfileRunSettings:
    """The settings of `grpo profile`; as `parse`."""
    settings = _parse(cfg, ProfileRunSettings, "profile")
    return replace(settings, device=settings.profile.device)


def settings_of(*overrides: str) -> RunSettings:
    """The settings of `grpo train` with these overrides, unchecked: for tests, scripts and notebooks."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return decided(parse(hydra.compose("train", ["run_dir=.", *overrides])), lambda line: None)


def model_of(choice: str, **changed: Any) -> ModelSettings:
    """The settings of `model=<choice>` with changes."""
    problems: list[str] = []
    settings = read(ModelSettings, shipped("model", choice) | changed, problems)
    refuse(problems)
    assert settings is not None, "without a problem there are settings"
    return decided_model(settings, fast_in_bfloat16("auto"))


def _parse(cfg: DictConfig, kind: type[Settings], command: str) -> Settings:
    values: Any
    drop_inherited(cfg, parts_of(command))
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'the configuration'}: {error.msg or error}".splitlines()[0]) from error
    assert isinstance(values, dict), "Hydra composes a mapping"
    fill(values)
    problems: list[str] = []
    groups = {name: values.pop(name, None) for name in parts_of(command)}
    values.pop("experiment", None)  # a named experiment leaves its settings in the other keys
    for name, group in groups.items():
        problems += missing(name, group)
        if not isinstance(group, dict) or "_target_" not in group:
            problems.append(f"{name} says nowhere what to build: choose one of {', '.join(choices(name))}")
        problems += _of_the_builder(name, group)
    for word in TEXTS & groups["task"].keys() if isinstance(groups["task"], dict) else ():
        if isinstance(text := groups["task"][word], str):
            groups["task"][word] = _LINE_BREAK.sub("\n", text)
    settings: Any = read(kind, values | {"parts": groups}, problems)
    stop = () if settings is None else _with_escapes_read(settings.sampling.stop, problems)
    refuse(problems)
    return replace(settings, sampling=replace(settings.sampling, stop=stop))


def _of_the_builder(key: str, value: Any, depth: int = 0) -> Iterator[str]:
    """A line for each Hydra keyword that would change how a part is built."""
    if not isinstance(value, dict):
        return
    for name, item in value.items():
        if re.fullmatch(r"_[a-z]+_", str(name)) and (depth or name != "_target_"):
            yield f"{key}.{name} is no setting of a part, which is one class or function: leave it out"
        yield from _of_the_builder(f"{key}.{name}", item, depth + 1)


TEXTS = {"template", "system_prompt"}
# \n as it is typed, but not as commands of TeX begin, which prompts may hold.
_TEX = "abla|atural|cong|earrow|e|eg|eq|ewcommand|ewline|exists|geq|gtr|i|leq|less|mid|ot|otin|u|warrow"
_LINE_BREAK = re.compile(rf"(?<!\\)\\n(?!(?:{_TEX})\b)")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


def _with_escapes_read(stop: Sequence[str], problems: list[str]) -> tuple[str, ...]:
    r"""Unescape stop strings: a line break is typed as \n, which Hydra does not interpret."""
    for i, text in enumerate(stop):
        for unknown in set(re.findall(r"\\.?", text, re.DOTALL)) - _ESCAPES.keys():
            problems.append(
                f"sampling.stop[{i}]={text} holds {unknown}, which stands for nothing: write two backslashes for one, "
                r"\n for a line break, \t for a tab"
            )
    return tuple(re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], ""), text) for text in stop)
