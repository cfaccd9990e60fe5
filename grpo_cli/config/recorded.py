"""Finds the recorded run that `resume=` or `checkpoint=` names, and puts what is typed over its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from grpo_cli.config.choices import groups_of, read_command
from grpo_cli.config.overrides import is_package_target, key_of, leaves, value_of
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
_OF_THIS_COMMAND = {*OF_A_RESUME, "checkpoint", "experiment", "search"}


@dataclass(frozen=True)
class Command:
    """A command with its composed settings, the words that were typed, and the choice of each group."""

    name: str
    cfg: DictConfig
    typed: tuple[str, ...]
    choices: Mapping[str, str]


@dataclass(frozen=True)
class Start:
    """The configuration that Hydra composes for a command, by its name, and the overrides of it. `typed` are those of
    the command line without the run that they name, `record` is that run's."""

    config: str
    words: Sequence[str]
    typed: Sequence[str]
    record: RunRecord | None = None


def start_of(command: str, typed: Sequence[str]) -> Start:
    """Return the start of a command, from `conf/` or from the run that `resume=` or `checkpoint=` names. UserError if
    that cannot be continued or evaluated."""
    if command == "train" and value_of("resume", typed) is not None:
        return _to_resume(typed)
    if command == "eval" and value_of("checkpoint", typed) is not None:
        return _to_evaluate(typed)
    return Start(command, typed, typed)


def over(command: str, record: RunRecord | None, decided: Mapping[str, Any], typed: Sequence[str]) -> Start:
    """Return the start with a run's recorded settings and those that its place has `decided` in place of the defaults
    of `conf/`, but for groups of which another choice is typed.

    UserError for recorded settings that are incomplete or foreign (`config.trust`)."""
    file, groups, kept = read_command(command), {*groups_of(command)}, dict[str, Any]()
    if record is not None:
        named = groups & {key_of(word) for word in typed}
        replaced = {group for group in named if value_of(group, typed) != _choice(record, group)}
        kept = _kept(command, record, groups, replaced, typed)
        groups = groups - replaced
    config = OmegaConf.create(dict(file.values))
    for key, value in {**kept, **decided}.items():
        OmegaConf.update(config, key, value, merge=False)
    without = kept.keys() | ({"experiment"} if kept else set())
    chosen = {group: choice for group, choice in file.choices.items() if group not in without}
    of_hydra = [{f"override {group}": choice} for group, choice in chosen.items() if "/" in group]
    config.defaults = [{group: choice} for group, choice in chosen.items() if "/" not in group] + ["_self_", *of_hydra]
    ConfigStore.instance().store("recorded", config)
    return Start("recorded", [word for word in typed if not kept or key_of(word) not in groups], typed, record)


def _choice(record: RunRecord, group: str) -> str | None:
    """Return a run's choice of a group; None if it has a part of the user's own."""
    part = record.config.get(group)
    own = isinstance(part, dict) and not is_package_target(part.get("_target_", "grpo_cli."))
    return None if own else record.choices.get(group)


def _kept(
    command: str, record: RunRecord, groups: Set[str], replaced: Set[str], words: Sequence[str]
) -> dict[str, Any]:
    """Return the recorded settings to take: whole groups, and for an evaluation the settings that it has too."""
    assert record.source is not None, "it was read from a file"
    own, config = read_command(command).values, dict(record.config)
    has = {*own, *groups} - {"hydra"} - replaced - _OF_THIS_COMMAND
    found = config.keys() - _OF_THIS_COMMAND - replaced
    if odd := sorted(has ^ found if command == "train" else has - found):
        raise UserError(f"{record.source} does not hold the settings of a run: {', '.join(odd)} missing or unknown")
    settings = leaves("", {key: config[key] for key in has})
    refuse_foreign([*settings.items()], sorted({*map(key_of, words)} - groups), record.source.parent)
    if command == "train":
        return {key: config[key] for key in has}
    # References are replaced by their values, since an evaluation has other settings to refer to.
    values = json.loads(
        json.dumps(OmegaConf.to_container(OmegaConf.create(config), resolve=True)).replace("${", r"\\${")
    )
    rest = leaves("", {key: values[key] for key in has - groups})
    return {key: values[key] for key in has & groups} | {key: rest[key] for key in rest.keys() & leaves("", own).keys()}


def _to_resume(typed: Sequence[str]) -> Start:
    place, run_dir = value_of("resume", typed), value_of("hydra.run.dir", typed)
    if place == HERE:
        if run_dir is None:
            raise UserError("resume=here continues the run in hydra.run.dir=<folder>: name one")
        if (begun := read_record(Path(run_dir))) is None:
            typed = [word for word in typed if key_of(word) not in OF_A_RESUME]
            return Start("train", typed, typed)
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
    return over("train", record, {"resume": str(folder), "run_dir": str(run.absolute())}, others)


def _to_evaluate(typed: Sequence[str]) -> Start:
    place = f"checkpoint={value_of('checkpoint', typed)}"
    folder = Path(place.partition("=")[2]).expanduser()
    if not folder.is_dir():
        raise UserError(f"{place} is not a folder; give a run folder, a checkpoint or a Hugging Face folder")
    weights, record = weights_in(folder, place)
    if step_of(weights.name) is not None and record is None and value_of("task", typed) is None:
        raise UserError(f"{weights.parent.parent} has no {RUN} that names the task of {place}: type task=")
    decided = {"checkpoint": str(weights), **of_the_weights(weights, record)}
    return over("eval", record, decided, [word for word in typed if key_of(word) != "checkpoint"])


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

    model = {} if record is None else record.config.get("model", {})
    is_folder = Path(str(model.get("path"))).expanduser().is_dir()
    made = bool(model.get("random_init") and model.get("architecture")) and not is_folder
    return {f"model.{key}": value for key, value in checkpoint_settings(weights, made, record is None).items()}


def checkpoint_to_resume(settings: RunSettings, warn: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from; None if the run begins. UserError if its weights or steps do not fit."""
    if settings.resume is None:
        return None
    folder = resolve_run(settings.resume)
    found = find_checkpoint(folder)
    for reason in found.skipped:
        warn(f"checkpoint passed over: {reason}")
    if found.path is None:
        none = f"resume={settings.resume} holds no complete checkpoint ({'; '.join(found.skipped) or 'they are gone'})"
        if not (settings.accept_damage or never_saved(folder)):
            raise UserError(f"{none}; name another run, or begin it anew with accept_damage=true")
        warn(f"{none}: the run begins anew, as it was started")
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
