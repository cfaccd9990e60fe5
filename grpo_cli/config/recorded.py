"""Continues or evaluates a recorded run with its own settings, then those that are typed: `resume=`, `checkpoint=`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config.choices import choices, groups_of
from grpo_cli.config.overrides import key_of, leaves, overrides, value_of
from grpo_cli.config.trust import is_foreign
from grpo_cli.runs.find import find_checkpoint, never_saved, resolve_run
from grpo_cli.runs.layout import RUN, step_of
from grpo_cli.runs.record import RunRecord, begun_as, read_record
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.formatting import plain, shown
from grpo_cli.support.terminal import to_stderr

HERE = "here"  # resume=here: in the folder of hydra.run.dir, if a run was begun there
OF_A_RESUME = ("resume", "resume_wait", "accept_damage")  # settings of a resumption, not of the run
_OF_THIS_COMMAND = (*OF_A_RESUME, "run_dir", "checkpoint", "experiment")


def words_to_resume(typed: Sequence[str], multirun: bool) -> list[str]:
    """Return the words of `grpo train resume=...` with the run's folder and choices. UserError without such a run."""
    place, run_dir = value_of("resume", typed), value_of("hydra.run.dir", typed)
    if place in (None, "null", "sweep"):
        return list(typed)
    if multirun:
        raise UserError(f"resume={place} continues one run: leave out -m, and name the folder of a sweep's job")
    if place == HERE:
        if run_dir is None:
            raise UserError("resume=here continues the run in hydra.run.dir=<folder>: name one")
        if (begun := begun_as(Path(run_dir))) is None:
            return [word for word in typed if key_of(word) not in OF_A_RESUME]
        place = run_dir  # what the run began with may have been changed since, for more steps
        typed = [word for word in typed if word not in begun.overrides]
    elif run_dir is not None:
        raise UserError(f"resume={place} continues in the folder of that run: leave out hydra.run.dir={run_dir}")
    folder = resolve_run(place)
    if place == "auto":
        to_stderr(f"resume=auto continues {plain(folder)}")
    run = folder if step_of(folder.name) is None else folder.parent.parent
    record = read_record(run)
    if record is None or record.command != "train":
        found = f"no {RUN}" if record is None else f"a run of grpo {record.command}"
        raise UserError(f"resume={place} needs a training's folder, and {run} has {found}: name another one")
    others = [word for word in typed if key_of(word) not in ("resume", "hydra.run.dir")]
    place_words = [word.lstrip("+") for word in overrides({"resume": str(folder), "hydra.run.dir": str(run)})]
    return [*_choices(record, typed, "train"), *_added(record, others), *place_words]


def words_to_evaluate(words: Sequence[str]) -> list[str]:
    """Return the words of `grpo eval checkpoint=...` with its newest good weights, and the choices of their run."""
    place = value_of("checkpoint", words)
    if place in (None, "null"):
        return list(words)
    weights = _weights(str(place))
    record = _record_of(weights)
    others = [word for word in words if key_of(word) != "checkpoint"]
    last = [word.lstrip("+") for word in overrides({"checkpoint": str(weights)})]
    return [*others, *last] if record is None else [*_choices(record, words, "eval"), *_added(record, others), *last]


def _choices(record: RunRecord, typed: Sequence[str], command: str) -> list[str]:
    """Return the recorded choices as words, but for those that are typed or are no choices of ours."""
    recorded = {group: record.choices.get(group) for group in groups_of(command)}
    keys = {key_of(word) for word in typed}
    return [f"{group}={one}" for group, one in recorded.items() if group not in keys and one in choices(group)]


def _added(record: RunRecord, typed: Sequence[str]) -> list[str]:
    """Return the typed words so that Hydra takes keys which only the run has."""
    known = leaves("", dict(record.config))
    return [f"++{word}" if key_of(word) in known and word[0] not in "+~" else word for word in typed]


def _weights(place: str) -> Path:
    from grpo_cli.model.adapters import has_adapters

    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise UserError(f"checkpoint={place} is not a folder; give a run folder, a checkpoint or a Hugging Face folder")
    found = find_checkpoint(folder)
    for reason in found.skipped:
        to_stderr(f"passed over {reason}")
    if found.path is None and (found.skipped or not ((folder / "config.json").is_file() or has_adapters(folder))):
        raise UserError(f"checkpoint={place} holds no complete checkpoint; give another run folder or checkpoint")
    return (found.path or folder).resolve()


def _record_of(weights: Path) -> RunRecord | None:
    return None if step_of(weights.name) is None else read_record(weights.parent.parent)


def with_recorded(command: str, cfg: DictConfig) -> DictConfig:
    """Return the composed settings of a command, with those of the run that it names below the typed ones. UserError if
    there are none, or if they name code of others (`config.trust`)."""
    typed = list(HydraConfig.get().overrides.task)
    if command == "train" and cfg.resume is not None:
        record = read_record(Path(cfg.run_dir))
        return cfg if record is None else merged(command, cfg, record, typed)
    if command != "eval":
        return cfg
    keys = {key_of(word) for word in typed}
    if cfg.checkpoint is None:
        _evaluate_whole_file(cfg, None, keys)
        return cfg
    weights = Path(str(cfg.checkpoint))
    record = _record_of(weights)
    if record is None and step_of(weights.name) is not None and value_of("task", typed) is None:
        raise UserError(f"{weights.parent.parent} has no {RUN} that names the task of checkpoint={weights}: type task=")
    cfg = merged(command, cfg, record, typed, _of_the_weights(weights, record))
    _evaluate_whole_file(cfg, record, keys)
    return cfg


def _of_the_weights(weights: Path, record: RunRecord | None) -> dict[str, Any]:
    """Return the settings that name a checkpoint's weights."""
    from grpo_cli.model.adapters import BASE, base_of, has_adapters

    if has_adapters(weights):
        base = {"model.path": base_of(weights)} if record is None or (weights / BASE).is_dir() else {}
        return {"model.adapter": str(weights), "model.random_init": False, **base}
    model: Any = {} if record is None else record.config["model"]
    made = model.get("random_init") and model.get("architecture") and not Path(model["path"]).expanduser().is_dir()
    ends: dict[str, Any] = {"model.eos_tokens": []} if made else {}  # they would be of a tokenizer that was not loaded
    return {"model.path": str(weights), "model.random_init": False, **ends}


def merged(
    command: str, cfg: DictConfig, record: RunRecord | None, typed: Sequence[str], last: Mapping[str, Any] = {}
) -> DictConfig:
    """Return recorded settings for which `cfg` has a place, over them `last`, over them the `typed` ones of `cfg`."""
    result, composed = copy.deepcopy(cfg), leaves("", OmegaConf.to_container(cfg, resolve=False))
    OmegaConf.set_struct(result, False)
    groups, keys = groups_of(command), [key_of(word) for word in typed]
    if record is not None:
        chosen = {word.partition("=")[0]: word.partition("=")[2] for word in typed}
        other = {group for group in groups if chosen.get(group) not in (None, record.choices.get(group))}
        if "experiment" in other:
            raise UserError(f"experiment={chosen['experiment']} is not what the run began with: type its settings")
        try:
            wanted = {str(key) for key in cfg} - other - {*_OF_THIS_COMMAND, "search"}
            if lacking := sorted(wanted - record.config.keys()):
                raise ValueError(f"{', '.join(lacking)} missing")
            values = _taken(record, wanted, [key for key in keys if key not in groups], command)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            raise UserError(f"{record.source} does not hold the settings of a run ({plain(error)})") from error
        for key, value in values.items():
            if command == "train" or key in groups or key in composed:
                OmegaConf.update(result, key, value, merge=False)
    for key, value in last.items():
        OmegaConf.update(result, key, value, merge=False)
    for word, key in zip(typed, keys, strict=True):
        if key in groups or key.startswith("hydra"):
            continue
        below = {name: value for name, value in composed.items() if f"{name}.".startswith(f"{key}.")}
        OmegaConf.update(result, key, None, merge=False)
        for name, value in below.items():
            OmegaConf.update(result, name, value, merge=False)
        if word.startswith("~"):
            parent = OmegaConf.select(result, key.rpartition(".")[0]) if "." in key else result
            del parent[key.rpartition(".")[2]]
    return result


def _taken(record: RunRecord, wanted: set[str], typed: Sequence[str], command: str) -> dict[str, Any]:
    """Return a run's groups of parts, and its other settings by dotted key. UserError for what is foreign."""
    assert record.source is not None, "it was read from a file"
    folder = record.source.parent
    values = {key: value for key, value in record.config.items() if key in wanted}
    again = "if you trust it, type it on this command line"
    refuse(
        [
            f"{key}={shown(value)} is not taken from {plain(folder)}; {again}"
            for key, value in leaves("", values).items()
            if not any(f"{key}.".startswith(f"{word}.") for word in typed) and is_foreign(key, value, folder)
        ]
    )
    if command == "eval":  # has other settings to refer to
        config: Any = OmegaConf.create(dict(record.config))
        values = {key: _followed(value, config, key) for key, value in values.items()}
    flat = [{key: value} if key in record.choices else leaves(key, value) for key, value in values.items()]
    return {key: value for part in flat for key, value in part.items()}


def _followed(value: Any, config: Any, key: str) -> Any:
    """Return a recorded value with its references replaced by what they refer to."""
    if isinstance(value, Mapping):
        return {name: _followed(item, config[key], name) for name, item in value.items()}
    return config[key] if isinstance(value, str) and re.search(r"(?<!\\)\$\{", value) else value


def _evaluate_whole_file(cfg: DictConfig, record: RunRecord | None, typed: set[str]) -> None:
    """Evaluate on all of a file that is typed, unless the run was trained on it."""
    of_the_run = None if record is None else leaves("", dict(record.config)).get("task.path")
    chosen = typed & {"task.eval_path", "task.eval_fraction", "task._target_"}
    if "task.path" in typed and not chosen and "eval_fraction" in cfg.task and cfg.task.path not in (None, of_the_run):
        OmegaConf.update(cfg, "task.eval_path", None)
        OmegaConf.update(cfg, "task.eval_fraction", 1.0)


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
