"""Finds the recorded run that `resume=` or `checkpoint=` names, and lays what is typed over its settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.choices import choices, groups_of
from grpo_cli.config.overrides import key_of, leaves, value_of
from grpo_cli.config.trust import refuse_foreign
from grpo_cli.runs.find import find_checkpoint, never_saved, resolve_run
from grpo_cli.runs.layout import RUN, step_of
from grpo_cli.runs.record import RunRecord, begun_as, read_record
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain
from grpo_cli.support.terminal import to_stderr

HERE = "here"  # resume=here: in the folder of hydra.run.dir, if a run was begun there
OF_A_RESUME = ("resume", "accept_damage", "run_dir")  # settings of a start, not of the run
_OF_THIS_COMMAND = (*OF_A_RESUME, "checkpoint", "experiment", "search")


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
        if (begun := begun_as(Path(run_dir))) is None:
            return RecordedRun([word for word in typed if key_of(word) not in OF_A_RESUME])
        place = run_dir  # what the run began with may have been changed since, for more steps
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
    from grpo_cli.model.adapters import has_adapters

    place = value_of("checkpoint", typed)
    folder = Path(str(place)).expanduser()
    if not folder.is_dir():
        raise UserError(f"checkpoint={place} is not a folder; give a run folder, a checkpoint or a Hugging Face folder")
    found = find_checkpoint(folder)
    for reason in found.skipped:
        to_stderr(f"passed over {reason}")
    if found.path is None and (found.skipped or not ((folder / "config.json").is_file() or has_adapters(folder))):
        raise UserError(f"checkpoint={place} holds no complete checkpoint; give another run folder or checkpoint")
    weights = (found.path or folder).resolve()
    run = None if step_of(weights.name) is None else weights.parent.parent
    record = None if run is None else read_record(run)
    if run is not None and record is None and value_of("task", typed) is None:
        raise UserError(f"{run} has no {RUN} that names the task of checkpoint={weights}: type task=")
    decided = {"checkpoint": str(weights), **of_the_weights(weights, record)}
    return RecordedRun([word for word in typed if key_of(word) != "checkpoint"], record, decided)


def of_the_weights(weights: Path, record: RunRecord | None) -> dict[str, Any]:
    """Return the settings that name a checkpoint's weights."""
    from grpo_cli.model.adapters import checkpoint_settings

    model: Any = {} if record is None else record.config["model"]
    made = model.get("random_init") and model.get("architecture") and not Path(model["path"]).expanduser().is_dir()
    return {f"model.{key}": value for key, value in checkpoint_settings(weights, bool(made), record is None).items()}


def choices_of(record: RunRecord, command: str) -> list[str]:
    """Return a record's choices as words, those of users' own folders left out."""
    recorded = {group: record.choices.get(group) for group in groups_of(command)}
    return [f"{group}={one}" for group, one in recorded.items() if one in choices(group)]


def over_recorded(command: Command, run: RecordedRun) -> Command:
    """Return a composed command with the settings of the run that it names, over them what the run's place decides, and
    over them what is typed. UserError for recorded settings that are incomplete or foreign (`config.trust`)."""
    cfg, keys, made = command.cfg, {key_of(word) for word in run.typed}, command.choices
    if run.record is not None:
        groups = groups_of(command.name)
        replaced = {group for group in groups if group in keys and made.get(group) != run.record.choices.get(group)}
        if "experiment" in replaced:
            raise UserError(f"experiment={made['experiment']} is not what the run began with: type its settings")
        for key, value in _recorded(command, run.record, replaced, keys - {*groups}).items():
            OmegaConf.update(cfg, key, value, merge=False)
        cfg.sampling.stop = [str(text).replace("\\", "\\\\") for text in cfg.sampling.stop]  # escapes are read again
        made = {**made, **{group: one for group, one in run.record.choices.items() if group not in replaced}}
    for key, value in run.decided.items():
        OmegaConf.update(cfg, key, value, merge=False)
    for override in OverridesParser.create().parse_overrides([*run.typed]):
        key = override.key_or_group
        if key in groups_of(command.name) or key.startswith("hydra"):
            continue  # Hydra has composed it
        if override.is_sweep_override():
            raise UserError(f"{override.input_line} is a sweep: add -m")
        if override.is_delete():
            parent = OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg
            if not OmegaConf.is_dict(parent):
                raise UserError(f"{key} is no setting, so that there is nothing to delete")
            parent.pop(key.rpartition(".")[2], None)
        else:
            OmegaConf.update(cfg, key, override.value(), merge=True)
    if command.name == "eval":
        _evaluate_whole_file(cfg, run.record, keys)
    return replace(command, choices=made, typed=tuple(run.typed))


def _recorded(command: Command, record: RunRecord, replaced: set[str], typed: set[str]) -> dict[str, Any]:
    """Return the recorded settings to take: whole groups, and for an evaluation the settings that it has too."""
    assert record.source is not None, "it was read from a file"
    wanted = {str(key) for key in command.cfg} - replaced - {*_OF_THIS_COMMAND}
    try:
        if lacking := sorted(wanted - record.config.keys()):
            raise ValueError(f"{', '.join(lacking)} missing")
        config: Any = OmegaConf.create(dict(record.config))
        plain_values = {key: value for key, value in record.config.items() if key in wanted}
        refuse_foreign(leaves("", plain_values), sorted(typed), record.source.parent)
        if command.name == "train":
            others = record.config.keys() - replaced - {*_OF_THIS_COMMAND}
            return {key: value for key, value in record.config.items() if key in others}
        values = {key: _followed(value, config, key) for key, value in plain_values.items()}
        known = leaves("", OmegaConf.to_container(command.cfg, resolve=False))
        groups = {key: value for key, value in values.items() if key in groups_of("eval")}
        rest = leaves("", {key: value for key, value in values.items() if key not in groups})
        return groups | {key: value for key, value in rest.items() if key in known}
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise UserError(f"{record.source} does not hold the settings of a run ({plain(error)})") from error


def _followed(value: Any, config: Any, key: str) -> Any:
    """Return a recorded value with its references replaced: an evaluation has other settings to refer to."""
    if isinstance(value, Mapping):
        return {name: _followed(item, config[key], name) for name, item in value.items()}
    return config[key] if isinstance(value, str) and re.search(r"(?<!\\)\$\{", value) else value


def _evaluate_whole_file(cfg: Any, record: RunRecord | None, typed: set[str]) -> None:
    """Evaluate on all of a file that is typed, unless the run was trained on it."""
    of_the_run = None if record is None else leaves("", dict(record.config)).get("task.path")
    chosen = typed & {"task.eval_path", "task.eval_fraction", "task._target_"}
    if "task.path" in typed and not chosen and "eval_fraction" in cfg.task and cfg.task.path not in (None, of_the_run):
        cfg.task.eval_path, cfg.task.eval_fraction = None, 1.0


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
            raise UserError(
                f"resume={settings.resume} holds no complete checkpoint ({reasons}); name another run, or begin it "
                "anew with accept_damage=true"
            )
        warn(f"{folder} holds no complete checkpoint: the run begins anew, as it was started")
        return None
    done, steps = step_of(found.path.name), settings.train.steps
    if done is not None and done > steps:
        raise UserError(f"train.steps={steps} is less than the {done} steps that {found.path} has done: ask for more")
    record = read_record(Path(settings.run_dir))
    path = settings.model.path if record is None else record.config.get("model", {}).get("path")
    if path != settings.model.path and not settings.model.adapted:  # the base of adapters may have been moved
        raise UserError(
            f"model.path={settings.model.path} is not the model of {found.path}, whose weights the run has: leave "
            "model= and model.path= out"
        )
    return found.path
