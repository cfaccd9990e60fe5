"""Finds the recorded run that `resume=` or `checkpoint=` names, and lays what is typed over its settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.choices import defaults_of, groups_of, values_of
from grpo_cli.config.overrides import key_of, leaves, value_of
from grpo_cli.config.trust import refuse_foreign
from grpo_cli.runs.find import find_checkpoint, never_saved, resolve_run
from grpo_cli.runs.layout import RUN, step_of
from grpo_cli.runs.record import RunRecord, read_record
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain
from grpo_cli.support.terminal import to_stderr

HERE = "here"  # resume=here: in the folder of hydra.run.dir, if a run was begun there
OF_A_RESUME = ("resume", "accept_damage", "run_dir")  # settings of a start, not of the run
_OF_THIS_COMMAND = {*OF_A_RESUME, "checkpoint", "experiment", "search", "defaults", "hydra"}


@dataclass(frozen=True)
class Command:
    """A command with its composed settings, the words that were typed, and the choice of each group."""

    name: str
    cfg: DictConfig
    typed: tuple[str, ...]
    choices: Mapping[str, str]


@dataclass(frozen=True)
class RecordedRun:
    """The run that a command names: its record, what is typed besides, and the settings that its place decides."""

    typed: Sequence[str]
    record: RunRecord | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)


def recorded_run(command: str, typed: Sequence[str]) -> RecordedRun:
    """Return the run that `resume=` or `checkpoint=` names, without a record if there is none. UserError if it cannot
    be continued or evaluated."""
    if command == "train" and value_of("resume", typed) not in (None, "null"):
        return _to_resume(typed)
    if command == "eval" and value_of("checkpoint", typed) not in (None, "null"):
        return _to_evaluate(typed)
    return RecordedRun(typed)


def _to_resume(typed: Sequence[str]) -> RecordedRun:
    place, run_dir = value_of("resume", typed), value_of("hydra.run.dir", typed)
    if place == HERE:
        if run_dir is None:
            raise UserError("resume=here continues the run in hydra.run.dir=<folder>: name one")
        if (begun := read_record(Path(run_dir))) is None:
            return RecordedRun([word for word in typed if key_of(word) not in OF_A_RESUME])
        place = run_dir
        typed = [word for word in typed if word not in begun.overrides]
    elif run_dir is not None:
        raise UserError(f"resume={place} continues in the folder of that run: leave out hydra.run.dir={run_dir}")
    folder = resolve_run(str(place))
    if place == "auto":
        to_stderr(f"resume=auto continues {plain(folder)}")
    run = folder if step_of(folder.name) is None else folder.parent.parent
    record = read_record(run)
    if record is None or record.command != "train":
        found = f"no {RUN}" if record is None else f"a run of grpo {record.command}"
        raise UserError(f"resume={place} needs a training's folder, and {run} has {found}: name another one")
    others = [word for word in typed if key_of(word) not in ("resume", "hydra.run.dir")]
    return RecordedRun(others, record, {"resume": str(folder), "run_dir": str(run.absolute())})


def _to_evaluate(typed: Sequence[str]) -> RecordedRun:
    place = f"checkpoint={value_of('checkpoint', typed)}"
    folder = Path(place.partition("=")[2]).expanduser()
    if not folder.is_dir():
        raise UserError(f"{place} is not a folder; give a run folder, a checkpoint or a Hugging Face folder")
    weights, record = weights_in(folder, place)
    if step_of(weights.name) is not None and record is None and value_of("task", typed) is None:
        raise UserError(f"{weights.parent.parent} has no {RUN} that names the task of {place}: type task=")
    decided = {"checkpoint": str(weights), **of_the_weights(weights, record)}
    return RecordedRun([word for word in typed if key_of(word) != "checkpoint"], record, decided)


def weights_in(folder: Path, named: str) -> tuple[Path, RunRecord | None]:
    """Return the newest complete checkpoint with its run's record, or a folder of a model or adapters. UserError if
    there is neither."""
    from grpo_cli.model.adapters import has_adapters

    found = find_checkpoint(folder)
    for reason in found.skipped:
        to_stderr(f"passed over {reason}")
    if found.path is None and (found.skipped or not ((folder / "config.json").is_file() or has_adapters(folder))):
        raise UserError(f"{named} holds no complete checkpoint; name a run (grpo ls lists them) or a checkpoint")
    weights = (found.path or folder).resolve()
    return weights, None if step_of(weights.name) is None else read_record(weights.parent.parent)


def of_the_weights(weights: Path, record: RunRecord | None) -> dict[str, Any]:
    """Return the settings that name a checkpoint's weights."""
    from grpo_cli.model.adapters import checkpoint_settings

    found = None if record is None else record.config.get("model")
    model = found if isinstance(found, Mapping) else {}
    made = model.get("random_init") and model.get("architecture")
    made = made and not Path(str(model.get("path"))).expanduser().is_dir()
    return {f"model.{key}": value for key, value in checkpoint_settings(weights, bool(made), record is None).items()}


def primary(command: str, run: RecordedRun, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the configuration that Hydra is to compose, and the words to lay over it: that of `conf/`, or
    one with the recorded settings in place of its defaults, but for groups of which another choice is typed.

    UserError for recorded settings that are incomplete or foreign (`config.trust`)."""
    if run.record is None and not run.decided:
        return command, [*words]
    groups, recorded = groups_of(command), {} if run.record is None else _recorded(command, run.record, words)
    without = [group for group in groups if group in recorded or (group == "experiment" and recorded)]
    defaults = {group: choice for group, choice in defaults_of(command).items() if group not in without}
    config = OmegaConf.create(values_of(command))
    for key, value in {**recorded, **run.decided}.items():
        OmegaConf.update(config, key, value, merge=False)
    config.defaults = [{group: choice} for group, choice in defaults.items() if group in groups] + ["_self_"]
    config.defaults += [{f"override {group}": choice} for group, choice in defaults.items() if group not in groups]
    ConfigStore.instance().store("recorded", config)
    return "recorded", [word for word in words if key_of(word) not in without]


def _recorded(command: str, record: RunRecord, words: Sequence[str]) -> dict[str, Any]:
    """Return the recorded settings to take: whole groups, and for an evaluation the settings that it has too."""
    assert record.source is not None, "it was read from a file"
    groups, values, typed = {*groups_of(command)}, values_of(command), {key_of(word) for word in words}
    replaced = {group for group in groups & typed if value_of(group, words) != record.choices.get(group)}
    if "experiment" in replaced:
        choice = value_of("experiment", words)
        raise UserError(f"experiment={choice} is not what the run began with: type its settings")
    others = replaced | _OF_THIS_COMMAND
    try:
        if lacking := sorted({*values, *groups} - others - record.config.keys()):
            raise ValueError(f"{', '.join(lacking)} missing")
        if odd := sorted({"defaults", "hydra"} & record.config.keys()):
            raise ValueError(f"{', '.join(odd)} would be taken by Hydra")
        config: Any = OmegaConf.create(dict(record.config))
        config.sampling.stop = [text.replace("\\", "\\\\") for text in config.sampling.stop]  # escapes are read again
        raw: Any = OmegaConf.to_container(config, resolve=False)
        has = raw.keys() if command == "train" else {*values, *groups}
        kept = {key: value for key, value in raw.items() if key in has and key not in others}
        refuse_foreign(leaves("", kept), sorted(typed - groups), record.source.parent)
        if command == "train":
            return kept
        kept = {key: _followed(value, config, key) for key, value in kept.items()}
        rest, known = leaves("", {key: value for key, value in kept.items() if key not in groups}), leaves("", values)
        return {key: value for key, value in {**kept, **rest}.items() if key in groups or key in known}
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{record.source} does not hold the settings of a run ({plain(error)})") from error


def _followed(value: Any, config: Any, key: str) -> Any:
    """Return a recorded value with its references replaced: an evaluation has other settings to refer to."""
    if isinstance(value, Mapping):
        return {name: _followed(item, config[key], name) for name, item in value.items()}
    return config[key] if isinstance(value, str) and re.search(r"(?<!\\)\$\{", value) else value


def checkpoint_to_resume(settings: RunSettings, warn: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from; None if the run begins. UserError if its weights or steps do not fit."""
    if settings.resume is None:
        return None
    folder = resolve_run(settings.resume)
    found = find_checkpoint(folder)
    for reason in found.skipped:
        warn(f"checkpoint passed over: {reason}")
    if found.path is None:
        if not (settings.accept_damage or never_saved(folder)):
            reasons = "; ".join(found.skipped) or "they are gone"
            none = f"resume={settings.resume} holds no complete checkpoint ({reasons})"
            raise UserError(f"{none}; name another run, or begin it anew with accept_damage=true")
        warn(f"{folder} holds no complete checkpoint: the run begins anew, as it was started")
        return None
    done, steps = step_of(found.path.name), settings.train.steps
    if done is not None and done > steps:
        raise UserError(f"train.steps={steps} is less than the {done} steps that {found.path} has done: ask for more")
    record = read_record(Path(settings.run_dir))
    path = settings.model.path if record is None else record.config.get("model", {}).get("path")
    if path != settings.model.path and not settings.model.adapted:  # the base of adapters may have been moved
        other = f"model.path={settings.model.path} is not the model of {found.path}"
        raise UserError(f"{other}, whose weights the run has: leave model= and model.path= out")
    return found.path
