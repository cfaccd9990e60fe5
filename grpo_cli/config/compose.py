"""Composed settings as typed ones, before torch is loaded: every wrong value, missing one and unknown key at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.auto import decided, decided_model, fill
from grpo_cli.config.choices import choices, config_dir, parts_of, shipped
from grpo_cli.config.overrides import is_ours, key_of, leaves
from grpo_cli.config.read import read
from grpo_cli.settings import EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.processor import fast_in_bfloat16

Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)

COMMANDS: Mapping[type[Any], str] = {RunSettings: "train", EvalRunSettings: "eval", ProfileRunSettings: "profile"}


def read_settings(cfg: DictConfig, kind: type[Settings]) -> Settings:
    """Return the settings of a command. UserError lists every missing value, wrong type or range, and unknown key."""
    command = COMMANDS[kind]
    own = [group for group in parts_of(command) if not is_ours(OmegaConf.select(cfg, f"{group}._target_"))]
    if own:
        from grpo_cli.config.instantiate import drop_inherited

        drop_inherited(cfg, own)
    values = _plain(cfg)
    fill(values)
    parts = {group: values.pop(group, None) for group in parts_of(command)}
    values.pop("experiment", None)  # its settings are in the other keys
    problems = [line for group, part in parts.items() for line in _part_problems(group, part)]
    _read_escapes(values.get("sampling"), parts["task"])
    settings = read(kind, values | {"parts": parts}, problems, cfg)
    if not problems or _are_typed(parts):
        from grpo_cli.config.instantiate import settings_problems  # imports the parts, and so torch

        problems += settings_problems(parts)
    refuse(list(dict.fromkeys(problems)))
    assert settings is not None, "without a problem there are settings"
    return settings


def settings_of(*overrides: str) -> RunSettings:
    """Return the settings of `grpo train` with these overrides, unchecked: for tests, scripts and notebooks."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = hydra.compose("train", ["run_dir=.", *overrides])
    return decided(read_settings(cfg, RunSettings), lambda line: None)


def model_of(choice: str, **changed: Any) -> ModelSettings:
    """Return the settings of `model=<choice>` with changes."""
    problems: list[str] = []
    settings = read(ModelSettings, shipped("model", choice) | changed, problems)
    refuse(problems)
    assert settings is not None, "without a problem there are settings"
    return decided_model(settings, fast_in_bfloat16("auto"))


def _plain(cfg: DictConfig) -> dict[str, Any]:
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'the configuration'}: {error.msg or error}".splitlines()[0]) from error
    return dict(values)


# \n as it is typed, but not as commands of TeX begin, which prompts may hold.
_TEX = "abla|atural|cong|earrow|e|eg|eq|ewcommand|ewline|exists|geq|gtr|i|leq|less|mid|ot|otin|u|warrow"
_LINE_BREAK = re.compile(rf"(?<!\\)\\n(?!(?:{_TEX})\b)")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


def _read_escapes(sampling: Any, task: Any) -> None:
    """Put line breaks where backslash and n are typed: Hydra has no other way to type them."""
    if isinstance(sampling, dict) and isinstance(stop := sampling.get("stop"), list):
        sampling["stop"] = [
            re.sub(r"\\[ntr\\]", lambda found: _ESCAPES[found[0]], text) if isinstance(text, str) else text
            for text in stop
        ]
    for word in ("template", "system_prompt") if isinstance(task, dict) else ():
        if isinstance(text := task.get(word), str):
            task[word] = _LINE_BREAK.sub("\n", text)


def _part_problems(group: str, part: Any) -> Iterator[str]:
    """Yield what no part may have: no `_target_`, a value that is missing, a keyword of Hydra."""
    if not isinstance(part, dict) or "_target_" not in part:
        yield f"{group} names nothing to build: choose one of {', '.join(choices(group))}"
        return
    for key, value in leaves(group, part).items():
        if value == "???":
            yield f"{key} has no value; give {key}=..."
        for word in key.split(".")[1:]:
            if re.fullmatch(r"_[a-z]+_", word) and key != f"{group}._target_":
                yield f"{key} is no setting of a part, which is one class or function: leave {word} out"


def _are_typed(parts: Mapping[str, Any]) -> bool:
    """True if settings of parts may have been typed, and so may be wrong too."""
    if not HydraConfig.initialized():
        return True
    return any("." in key and key.partition(".")[0] in parts for key in map(key_of, HydraConfig.get().overrides.task))
