"""Expands a command's arguments before Hydra reads them: `resume=`, `checkpoint=` and `task.path=` imply others.

Heavy imports are local to the functions that need them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_cli.cli.mistakes import FLAGS_WITH_VALUE
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain
from grpo_cli.support.terminal import to_stderr

if TYPE_CHECKING:
    from grpo_cli.runs.record import RunRecord

HERE = "here"  # resume=here: in the folder of hydra.run.dir, if a run was begun there


def all_of_a_named_file(arguments: Sequence[str]) -> list[str]:
    """Adds `task.eval_fraction=1` where `task.path=` names a file other than the run's, so that all of it is evaluated.

    Of the file that a run was trained on, only the held-out share is evaluated. An explicit `task.eval_path` or
    `task.eval_fraction` wins.
    """
    from grpo_cli.config.overrides import unquoted

    given = [word.partition("=") for word in arguments if "=" in word]
    typed = {key: value for key, _, value in given}
    of_the_run = {key.lstrip("+"): unquoted(value) for key, _, value in given if key.startswith("++")}
    path = typed.get("task.path", "null")
    said = typed.keys() & {"task.eval_path", "task.eval_fraction", "task._target_"}
    if path == "null" or said or unquoted(path) == of_the_run.get("task.path"):
        return list(arguments)
    from grpo_cli.config.choices import choices, shipped

    task = typed.get("task", "arithmetic")
    if task not in choices("task") or "eval_fraction" not in shipped("task", task):
        return list(arguments)  # a custom task, which may not have this setting
    return [*arguments, "++task.eval_path=null", "++task.eval_fraction=1.0"]


def with_checkpoint(arguments: Sequence[str]) -> list[str]:
    """Read the folder of `grpo eval` as `checkpoint=<folder>`. UserError for more than one."""
    from grpo_cli.config.overrides import overrides, value_of

    words = list(arguments)
    for place, word in enumerate(words):
        if not (place and words[place - 1] in FLAGS_WITH_VALUE) and _is_a_place(word):
            (words[place],) = (given.lstrip("+") for given in overrides({"checkpoint": word}))
    named = [plain(value_of("checkpoint", [word])) for word in words if word.startswith("checkpoint=")]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)}: grpo eval takes one of them; evaluate each by a command of its own")
    return words


def _is_a_place(word: str) -> bool:
    """Whether a word is a folder rather than a flag or an override."""
    from grpo_cli.config.choices import config_dir, groups_of
    from grpo_cli.config.comments import read_conf

    key, equals, _ = word.lstrip("+").partition("=")
    if not word or word.startswith("-") or (word.startswith("~") and not word.startswith("~/")):
        return False
    if not equals or ("/" in key and not key.startswith("hydra/")):
        return True
    known = {*groups_of("eval"), *(name.partition(".")[0] for name in read_conf(config_dir() / "eval.yaml").settings)}
    return key.partition(".")[0] not in known and os.path.isdir(word)


def after_those_of_the_run(key: str, arguments: Sequence[str]) -> list[str]:
    """Puts the overrides of the run that `resume=` or `checkpoint=` names before the ones given."""
    from grpo_cli.config.overrides import overrides as as_overrides
    from grpo_cli.config.overrides import value_of

    flags, overrides = sorted_out(arguments)
    place = value_of(key, overrides)
    if place in (None, "null") or "--help" in flags or (key, place) == ("resume", "sweep"):
        return list(arguments)
    own = [word for word in overrides if not word.startswith(f"{key}=")]
    if key == "checkpoint":
        quoted = [word.lstrip("+") for word in as_overrides({key: place})]
        # A group whose choice changes (except the checkpoint's own model) drops the run's settings of that group.
        chosen = {word.partition("=")[0] for word in own} - {"model"}
        of_the_run = checkpoint_overrides(place, "task" in chosen, own)
        taken = [word for word in of_the_run if word.lstrip("+").partition(".")[0] not in chosen]
        return [*flags, *taken, *own, *quoted]
    if {"-m", "--multirun"} & set(flags):
        raise UserError(f"resume={place} continues one run; leave out -m, and name the folder of a sweep's job")
    return [*flags, *resumed(place, own)]


def resumed(place: str, given: Sequence[str]) -> list[str]:
    """The overrides of `grpo train resume=place`: those of the run, its folder, its checkpoint, then the `given` ones.

    With `here`, which job scripts use, the same command starts a run in the folder of `hydra.run.dir` and later resumes
    it: the overrides are returned unchanged if no run was started there. UserError if there is no run to resume.
    """
    from grpo_cli.config.overrides import is_of_a_resume, not_said_twice, overrides, overrides_to_resume, value_of
    from grpo_cli.runs.find import resolve_run
    from grpo_cli.runs.layout import RUN, step_of
    from grpo_cli.runs.record import begun_as, read_record

    run_dir, typed = value_of("hydra.run.dir", given), list(given)
    if place == HERE:
        if run_dir is None:
            raise UserError("resume=here goes on in the folder of hydra.run.dir=<folder>: name one")
        folder, begun = Path(run_dir), begun_as(Path(run_dir))
        if begun is None:
            return [word for word in given if not word.lstrip("+").startswith(("resume=", "accept_damage="))]
        typed = [word for word in given if not is_of_a_resume(word) and not word.lstrip("+").startswith("hydra")]
        _refuse_another_command(folder, begun, typed)
        given = [word for word in given if is_of_a_resume(word)]  # everything else stays as in the run's last start
    elif run_dir is not None:
        raise UserError(f"resume={place} goes on in the folder of that run: leave out hydra.run.dir={run_dir}")
    else:
        folder = resolve_run(place)
    if place == "auto":
        to_stderr(f"resume=auto goes on with {plain(folder)}")
    run = folder if step_of(folder.name) is None else folder.parent.parent
    record = read_record(run)
    if record is None:
        raise UserError(
            f"{run} has no {RUN}, so that the settings of resume={place} are not known; put the file back, or "
            "start a new run from a checkpoint of this one (model.path=<checkpoint>)"
        )
    if record.command != "train":
        raise UserError(f"resume={place} is a folder of grpo {record.command}, and only trainings are resumed")
    of_the_run = [*overrides_to_resume(record, run, typed), *overrides({"resume": str(folder)})]
    return [*of_the_run, *not_said_twice(of_the_run, given)]


def _refuse_another_command(folder: Path, begun: RunRecord, typed: Sequence[str]) -> None:
    differing = [word for word in (*typed, *begun.overrides) if (word in typed) != (word in begun.overrides)]
    if tuple(typed) != begun.overrides or begun.command != "train":
        what = ", ".join(map(plain, differing)) or "their order"
        raise UserError(
            f"{folder} holds a run that another command began (what differs: {what}). Go "
            f"on with that run by resume={folder}, or choose another folder with hydra.run.dir=<folder>."
        )


def checkpoint_overrides(place: str, task_is_named: bool = False, typed: Sequence[str] = ()) -> list[str]:
    """The overrides of `grpo eval checkpoint=place`: the settings of the checkpoint's run, and its weights.

    `typed` are the other overrides of the command line. UserError if the run's settings are unknown and no task is
    named."""
    from grpo_cli.config.overrides import overrides, overrides_of_run
    from grpo_cli.model.adapters import BASE, base_of, has_adapters
    from grpo_cli.runs.find import find_checkpoint
    from grpo_cli.runs.layout import RUN, step_of
    from grpo_cli.runs.record import read_record

    folder = Path(place).expanduser()
    if not os.path.isdir(folder):
        raise UserError(f"checkpoint={place} is not a folder; give a run folder, a checkpoint or a Hugging Face folder")
    found = find_checkpoint(folder)
    for reason in found.skipped:
        to_stderr(f"passed over {reason}")
    if found.path is None and (found.skipped or not ((folder / "config.json").is_file() or has_adapters(folder))):
        raise UserError(f"checkpoint={place} holds no complete checkpoint; give another run folder or checkpoint")
    weights = (found.path or folder).resolve()
    of_a_run = step_of(weights.name) is not None
    record = read_record(weights.parent.parent) if of_a_run else None
    if of_a_run and record is None and not task_is_named:
        raise UserError(
            f"{weights.parent.parent} has no {RUN}, so that the task of checkpoint={place} is not known: name it "
            "(task=<choice>, and what else differs from the defaults)"
        )
    of_the_run = overrides_of_run(record, typed) if record else []
    if not has_adapters(weights):
        return [*of_the_run, *overrides({"model.path": str(weights), "model.random_init": False})]
    values = {"model.adapter": str(weights), "model.random_init": False}
    if not of_the_run or (weights / BASE).is_dir():
        values |= {"model.path": base_of(weights)}
    return [*of_the_run, *overrides(values)]


def sorted_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into flags (with their values) and overrides, since Hydra's parser wants all overrides together.

    UserError for an override without a key, which Hydra would ignore."""
    for word in arguments:
        if word.startswith("="):
            raise UserError(f"{word} cannot be read: write key=value or group=choice")
    overrides = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    return [word for word in arguments if word not in overrides], overrides
