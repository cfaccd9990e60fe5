"""Command-line words to typed settings, before torch is loaded: composed, then every wrong value and key at once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.auto import decided, decided_model, fill
from grpo_cli.config.choices import choices, config_dir, parts_of, shipped
from grpo_cli.config.overrides import is_package_target, key_of, leaves
from grpo_cli.config.read import read
from grpo_cli.config.recorded import Command, start_of
from grpo_cli.runs.record import RunRecord, digests
from grpo_cli.settings import EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings, Settings
from grpo_cli.support.errors import UserError, gathered, refuse
from grpo_cli.support.processor import fast_in_bfloat16

KINDS: Mapping[str, type[Any]] = {"train": RunSettings, "eval": EvalRunSettings, "profile": ProfileRunSettings}


def composed(name: str, typed: Sequence[str]) -> Command:
    """Return a command with its settings. UserError if the run that it names cannot be continued or evaluated; errors
    of Hydra for words that it cannot compose."""
    start = start_of(name, typed)
    new_folder_names()
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = hydra.compose(start.config, [*start.words], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)  # for ${hydra:...}
    about: Any = HydraConfig.get()
    if not str(about.run.dir).strip():
        raise UserError("hydra.run.dir is empty: name the folder that the run is to write into (. is the current one)")
    with read_write(about.runtime), open_dict(about.runtime):
        about.runtime.output_dir = os.path.abspath(os.path.expanduser(about.run.dir))
    settings = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return of_hydra(name, settings, start.record)


def of_hydra(name: str, cfg: Any, record: RunRecord | None) -> Command:
    """Return the command that Hydra has composed, also as a job of a sweep, over the settings of a recorded run."""
    if cfg.run_dir in (None, ""):
        raise UserError("run_dir has no value: leave it out, and type hydra.run.dir=<folder>")
    about, cfg.run_dir = HydraConfig.get(), str(cfg.run_dir)
    keys = {key_of(word) for word in about.overrides.task}
    is_split = name != "eval" or cfg.eval.split == "train" or keys & {"task.eval_path", "task.eval_fraction"}
    if "task.path" in keys and "eval_fraction" in cfg.task and not (is_split or "task._target_" in keys):
        # A file that is typed is evaluated whole, unless the run was trained on it.
        trained = {} if record is None else {**record.about.get("data", {}), "": record.config["task"].get("path")}
        if not {cfg.task.path, *digests([cfg.task.path]).values()} & {*trained.values()}:
            cfg.task.eval_path, cfg.task.eval_fraction = None, 1.0
    chosen = {} if record is None else dict(record.choices)
    chosen |= {str(group): str(choice) for group, choice in about.runtime.choices.items()}
    return Command(name, cfg, tuple(about.overrides.task), chosen)


def new_folder_names() -> None:
    """Let `${uid:}` be new: the same for all readers of a configuration, another one in the next."""
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(2), use_cache=True, replace=True)


def settings_from(command: Command) -> Any:
    """Return the settings of a composed command."""
    return read_settings(command.cfg, KINDS[command.name], command.typed)


def read_settings(cfg: DictConfig, kind: type[Settings], typed: Sequence[str] = ()) -> Settings:
    """Return the settings of a command. UserError lists every missing value, wrong type or range, and unknown key.

    A user's own part loses what it inherits, but for what it takes and what is `typed`."""
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'the configuration'}: {error.msg or error}".splitlines()[0]) from error
    fill(values)
    values.pop("experiment", None)  # its settings are in the other keys
    keys, parts, problems = {key_of(word) for word in typed}, dict[str, Any](), list[str]()
    for group in parts_of("eval" if kind is EvalRunSettings else "train"):
        part = values.pop(group, None)
        if not isinstance(part, dict) or "_target_" not in part:
            problems.append(f"{group} names nothing to build: choose one of {', '.join(choices(group))}")
            continue
        if not is_package_target(part["_target_"]):
            from grpo_cli.config.instantiate import without_inherited

            part = without_inherited(group, part, keys)
        parts[group] = part
    problems += [
        f"{key} has no value; give {key}=..." for key, value in leaves("", values | parts).items() if value == "???"
    ]
    with gathered(problems):
        settings: Settings = read(kind, values | {"parts": parts}, cfg)
    if problems and (typed_parts := parts.keys() & {key.partition(".")[0] for key in keys}):
        from grpo_cli.config.instantiate import Factories  # imports the parts, and so torch

        with gathered(problems):  # what is wrong with typed parts too, which `config.prepare` finds if nothing else is
            Factories.of({group: parts[group] for group in typed_parts})
    refuse(list(dict.fromkeys(problems)))
    return settings


def settings_of(*overrides: str) -> RunSettings:
    """Return the settings of `grpo train` with these overrides, unchecked: for tests, scripts and notebooks."""
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = hydra.compose("train", ["run_dir=.", *overrides])
    return decided(read_settings(cfg, RunSettings, overrides))


def model_of(choice: str, **changed: Any) -> ModelSettings:
    """Return the settings of `model=<choice>` with changes."""
    return decided_model(read(ModelSettings, shipped("model", choice) | changed), fast_in_bfloat16("auto"))
