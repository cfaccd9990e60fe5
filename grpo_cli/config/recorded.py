"""Finds the recorded run that `resume=` or `checkpoint=` names, and puts command-line values over its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from grpo_cli.config.auto import AUTO, MAY_BE_AUTO, OF_TASK
from grpo_cli.config.choices import groups_of, read_command
from grpo_cli.config.overrides import is_package_target, key_of, leaves, parsed, value_of
from grpo_cli.config.trust import refuse_foreign
from grpo_cli.runs.find import find_checkpoint, never_saved, resolve_run
from grpo_cli.runs.layout import RUN, run_of, step_of
from grpo_cli.runs.record import RunRecord, read_record
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain
from grpo_cli.support.terminal import to_stderr

OF_A_RESUME = ("resume", "accept_damage", "run_dir")  # settings of a start, not of the run
_OF_THIS_COMMAND = {*OF_A_RESUME, "checkpoint", "experiment", "search"}


@dataclass(frozen=True)
class Command:
    """A command with its composed settings, the words that were typed, and the choice of each group."""

    name: str
    cfg: DictConfig
    typed: tuple[str, ...]
    choices: dict[str, str]


@dataclass(frozen=True)
class Start:
    """The name of the configuration that Hydra composes for a command, its overrides, and the record of its run."""

    config: str
    words: Sequence[str]
    record: RunRecord | None = None


def start_of(command: str, typed: Sequence[str]) -> Start:
    """Return the start of a command, from `conf/` or from the run that `resume=` or `checkpoint=` names."""
    if command == "train" and (place := value_of("resume", typed)) is not None:
        return _to_resume(place, typed)
    if command == "eval" and (place := value_of("checkpoint", typed)) is not None:
        if any(key_of(word) == "checkpoint" and isinstance(parsed(word), list) for word in typed):
            raise UserError(f"checkpoint={place} names several: evaluate one at a time; grpo report compares them")
        return _to_evaluate(place, [word for word in typed if key_of(word) != "checkpoint"])
    return Start(command, typed)


def start_of_record(command: str, record: RunRecord | None, decided: Mapping[str, Any], typed: Sequence[str]) -> Start:
    """Return the start with a run's recorded settings, but for groups of which another choice is typed, and those that
    its place has `decided`. UserError for recorded settings that are incomplete or foreign (`config.trust`)."""
    file, groups, kept = read_command(command), {*groups_of(command)}, dict[str, Any]()
    if record is not None:
        assert record.source is not None, "it was read from a file"
        keys, recorded = {*map(key_of, typed)}, leaves("", record.config)
        own = {group for group in groups if not is_package_target(recorded.get(f"{group}._target_", "grpo_cli."))}
        if "experiment" in keys and value_of("experiment", typed) != record.choices.get("experiment"):
            raise UserError("experiment= is for a new run: type the settings that are to change")
        same = {group for group in groups & keys - own if value_of(group, typed) == record.choices.get(group)}
        kept = _kept(command, record, groups & keys - same)
        refuse_foreign(leaves("", kept).items(), keys - groups, record.source.parent)
        typed = [again for word in typed if key_of(word) not in same for again in _as_override(kept, word)]
    config = OmegaConf.create(dict(file.values))
    for key, value in {**kept, **decided}.items():
        OmegaConf.update(config, key, value, merge=False)
    left_out = {*kept, "experiment"} if kept else set()
    chosen = {group: choice for group, choice in file.choices.items() if group not in left_out}
    of_hydra = [{f"override {group}": choice} for group, choice in chosen.items() if "/" in group]
    config.defaults = [{group: choice} for group, choice in chosen.items() if "/" not in group] + ["_self_", *of_hydra]
    ConfigStore.instance().store("recorded", config)
    return Start("recorded", typed, record)


def _kept(command: str, record: RunRecord, replaced: Set[str]) -> dict[str, Any]:
    """Return the recorded settings to take: whole groups, and for an evaluation the settings that it has too."""
    own, config, groups = read_command(command).values, record.config, {*groups_of(command)}
    has, found = ({*keys} - replaced - _OF_THIS_COMMAND for keys in (own.keys() - {"hydra"} | groups, config))
    if odd := sorted(has ^ found if command == "train" else has - found):
        raise UserError(f"{record.source} does not hold the settings of a run: {', '.join(odd)} missing or unknown")
    if command == "train":
        return {key: config[key] for key in has}
    settings = leaves("", {key: config[key] for key in has - groups})
    of_that_task = OF_TASK - {*map(key_of, record.overrides)} if "task" in replaced else set()
    shared = (settings.keys() & leaves("", own).keys()) - of_that_task
    return {key: config[key] for key in has & groups} | {key: settings[key] for key in shared}


def _as_override(kept: Mapping[str, Any], word: str) -> list[str]:
    """Return an override as recorded settings take it: `+key=` may find its key there, and `~key` nothing."""
    key = key_of(word)
    if not word.startswith(("+", "~")) or key.partition(".")[0] not in kept:
        return [word]
    if word[0] == "+":
        return [f"++{word.lstrip('+')}"]
    return [word for leaf in leaves("", kept) if f"{leaf}.".startswith(f"{key}.")][:1]


def _to_resume(place: str, typed: Sequence[str]) -> Start:
    run_dir = value_of("hydra.run.dir", typed)
    if (place == "here") is (run_dir is None):
        raise UserError(f"resume={place}: hydra.run.dir=<folder> goes with resume=here and nothing else: name one")
    if run_dir is not None and read_record(Path(run_dir).expanduser()) is None:  # the run begins
        return Start("train", [word for word in typed if key_of(word) not in OF_A_RESUME])
    folder = resolve_run(run_dir or place)
    if place == "auto":
        to_stderr(f"resume=auto continues {plain(folder)}")
    record = read_record(run := run_of(folder))
    if record is None or record.command != "train":
        found = f"no {RUN}" if record is None else f"a run of grpo {record.command}"
        raise UserError(f"resume={place} needs a training's folder, and {run} has {found}: name another one")
    was_chosen = {f"{key}={AUTO}" for key in MAY_BE_AUTO}  # a resumed run computes as it began
    others = [word for word in typed if key_of(word) not in ("resume", "hydra.run.dir") and word not in was_chosen]
    return start_of_record("train", record, {"resume": str(folder), "run_dir": str(run.absolute())}, others)


def _to_evaluate(place: str, typed: Sequence[str]) -> Start:
    weights, record = weights_in(Path(place).expanduser(), f"checkpoint={place}")
    if step_of(weights.name) is not None and record is None and value_of("task", typed) is None:
        raise UserError(f"{run_of(weights)} has no {RUN} that names the task of checkpoint={place}: type task=")
    typed = typed if record or value_of("model", typed) else [*typed, "model=hf"]
    return start_of_record("eval", record, {"checkpoint": str(weights), **of_the_weights(weights, record)}, typed)


def weights_in(folder: Path, named: str) -> tuple[Path, RunRecord | None]:
    """Return the newest complete checkpoint with its run's record, or a model's or adapters' folder; else UserError."""
    from grpo_cli.model.adapters import has_adapters

    found = find_checkpoint(folder)
    for reason in found.skipped:
        to_stderr(f"passed over {reason}")
    if found.path is None and (found.skipped or not ((folder / "config.json").is_file() or has_adapters(folder))):
        raise UserError(f"{named} holds no complete checkpoint; name a run (grpo ls lists them) or a checkpoint")
    weights = (found.path or folder).resolve()
    return weights, None if step_of(weights.name) is None else read_record(run_of(weights))


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
        if (run := run_of(folder)) != folder and find_checkpoint(run).path is not None:
            raise UserError(f"{none}; resume={run} takes the newest good one")
        if not (settings.accept_damage or never_saved(run)):
            raise UserError(f"{none}; name another run, or begin it anew with accept_damage=true")
        warn(f"{none}: the run begins anew, as it was started")
        return None
    if (done := step_of(found.path.name) or 0) > settings.train.steps:
        raise UserError(f"train.steps={settings.train.steps} is less than the {done} of {found.path}: ask for more")
    begun, path = read_record(Path(settings.run_dir)), settings.model.path
    was = begun.config["model"] if begun else {}
    gone = was and "/" in was["path"] and not Path(was["path"]).expanduser().is_dir()
    moved = gone and (was["path"].startswith(("/", ".", "~")) or Path(path).expanduser().is_dir())
    if was and not settings.model.adapted and was["path"] != path and not moved:  # a base may lie elsewhere
        raise UserError(f"model.path={path} is not the model of {found.path}: leave model= and model.path= out")
    if moved and was["path"] != path:
        warn(f"model.path={path} is taken for {was['path']}, with which the run began")
    for key, now in {**vars(settings.model.lora), "targets": [*settings.model.lora.targets]}.items():
        if was and key != "dropout" and was["lora"].get(key, now) != now:
            raise UserError(f"model.lora.{key} is not that of the run in {found.path}: leave it out")
    return found.path
