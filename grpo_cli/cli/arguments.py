"""What is added to the arguments of a command before Hydra reads them: what a run, a file or a setting brings along.

What most command lines do not need is imported where they do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain

HERE = "here"  # resume=here: in the folder of hydra.run.dir, if a run was begun there


def all_of_a_named_file(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `task.eval_fraction=1` where `task.path=` names another file than the run's: all of it.

    Of the file that a run was trained on, only the share is evaluated that was held out. What the arguments say of
    `task.eval_path` or `task.eval_fraction` counts.
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
        return list(arguments)  # a task of one's own, which may know nothing of shares
    return [*arguments, "++task.eval_path=null", "++task.eval_fraction=1.0"]


_SECONDS = {"s": 1, "min": 60, "h": 3600}


def in_seconds(arguments: Sequence[str]) -> list[str]:
    """The arguments, `resume_wait=5min` as the seconds that it stands for."""
    pattern = re.compile(rf"(resume_wait=)(\d+(?:\.\d+)?)({'|'.join(_SECONDS)})")
    found = [(word, pattern.fullmatch(word)) for word in arguments]
    return [f"{match[1]}{float(match[2]) * _SECONDS[match[3]]}" if match else word for word, match in found]


def with_slots(arguments: Sequence[str]) -> list[str]:
    """The arguments, and `sampler=infinite` if slots are asked for and nothing says whose: `sampler=full` has none."""
    typed = {word.partition("=")[0] for word in arguments if "=" in word}
    slots = sorted(typed & {"sampler.slots", "sampler.kv_budget"})
    resumed = "resume" in typed and f"resume={HERE}" not in arguments  # the run has said whose they are
    if not slots or resumed or typed & {"sampler", "experiment"}:
        return list(arguments)
    print(f"sampler=infinite, since {' and '.join(slots)} cannot be set for sampler=full", file=sys.stderr)
    flags, overrides = sorted_out(arguments)
    return [*flags, "sampler=infinite", *overrides]


def with_checkpoint(arguments: Sequence[str]) -> list[str]:
    """The arguments of `grpo eval`, a bare word as `checkpoint=<word>`; what follows a flag is the flag's."""
    from grpo_cli.config.overrides import overrides

    words = list(arguments)
    for place, word in enumerate(words):
        if word and "=" not in word and word[0] not in "-~" and not (place and words[place - 1].startswith("-")):
            (words[place],) = (given.lstrip("+") for given in overrides({"checkpoint": word}))
    return words


def after_those_of_the_run(key: str, arguments: Sequence[str]) -> list[str]:
    """The arguments, and before them those of the run that `resume=` or `checkpoint=` names."""
    from grpo_cli.config.overrides import not_said_twice, unquoted

    flags, overrides = sorted_out(arguments)
    named = [unquoted(word.partition("=")[2]) for word in overrides if word.startswith(f"{key}=")]
    if not named or named[-1] == "null" or "--help" in flags or (key, named[-1]) == ("resume", "sweep"):
        return list(arguments)
    own = [word for word in overrides if not word.startswith(f"{key}=")]
    if key == "checkpoint":
        # A group that is chosen anew (but for the checkpoint's own model) leaves the run's settings of it behind.
        chosen = {word.partition("=")[0] for word in own} - {"model"}
        of_the_run = checkpoint_overrides(named[-1], "task" in chosen, own)
        taken = [word for word in of_the_run if word.lstrip("+").partition(".")[0] not in chosen]
        return [*flags, *taken, *overrides]
    if {"-m", "--multirun"} & set(flags):
        raise UserError(f"resume={named[-1]} continues one run; leave out -m, and name the folder of a sweep's job")
    if named[-1] == HERE:
        return [*flags, *begun_or_resumed(own)]
    elsewhere = [word for word in own if word.lstrip("+").startswith("hydra.run.dir=")]
    if elsewhere:
        raise UserError(f"resume={named[-1]} goes on in the folder of that run: leave out {elsewhere[-1]}")
    of_the_run = resume_overrides(named[-1], own)
    return [*flags, *of_the_run, *not_said_twice(of_the_run, own)]


def begun_or_resumed(given: Sequence[str]) -> list[str]:
    """For `resume=here`: the overrides as they are where nothing was begun, else those with which the run goes on.

    Job scripts say it: the same command begins the run, and goes on with it after its machine was taken away. UserError
    if the folder holds a run that another command began.
    """
    from grpo_cli.config.overrides import is_of_a_resume, overrides, overrides_to_resume, unquoted
    from grpo_cli.runs.record import begun_as, read_record

    named = [unquoted(word.partition("=")[2]) for word in given if word.lstrip("+").startswith("hydra.run.dir=")]
    if not named:
        raise UserError("resume=here goes on in the folder of hydra.run.dir=<folder>: name one")
    folder = Path(named[-1])
    first, last = begun_as(folder), read_record(folder)
    if first is None or last is None:
        return [word for word in given if not word.lstrip("+").startswith(("resume=", "accept_damage="))]
    typed = [
        word for word in given if not is_of_a_resume(word) and not word.lstrip("+").startswith(("hydra.", "hydra/"))
    ]
    differing = [word for word in (*typed, *first.overrides) if (word in typed) != (word in first.overrides)]
    if tuple(typed) != first.overrides or first.command != "train":
        what = ", ".join(map(plain, differing)) or "their order"
        raise UserError(
            f"{folder} holds a run that another command began (what differs: {what}). Go "
            f"on with that run by resume={folder}, or choose another folder with hydra.run.dir=<folder>."
        )
    of_this_time = [word for word in given if is_of_a_resume(word)]
    return [*overrides_to_resume(last, folder, typed), *overrides({"resume": str(folder)}), *of_this_time]


def checkpoint_overrides(place: str, task_is_named: bool = False, typed: Sequence[str] = ()) -> list[str]:
    """For `grpo eval checkpoint=place`: the settings of the run that it belongs to, and its weights.

    `typed` is what the command line says besides. UserError where the checkpoint's run does not say its settings,
    unless at least its task is named.
    """
    from grpo_cli.config.overrides import overrides, overrides_of_run
    from grpo_cli.model.adapters import BASE, base_of, has_adapters
    from grpo_cli.runs.find import find_checkpoint
    from grpo_cli.runs.layout import RUN, step_of
    from grpo_cli.runs.record import check_chain, read_record

    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise UserError(f"checkpoint={place} is no folder; give a run folder, a checkpoint or a Hugging Face folder")
    found = find_checkpoint(folder)
    for reason in found.skipped:
        print(f"passed over {reason}", file=sys.stderr)
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
    if record is not None:
        check_chain(weights)
    of_the_run = overrides_of_run(record, typed) if record else []
    if not has_adapters(weights):
        return [*of_the_run, *overrides({"model.path": str(weights), "model.random_init": False})]
    values = {"model.adapter": str(weights), "model.random_init": False}
    if not of_the_run or (weights / BASE).is_dir():
        values |= {"model.path": base_of(weights)}
    return [*of_the_run, *overrides(values)]


def resume_overrides(place: str, typed: Sequence[str]) -> list[str]:
    """For `grpo train resume=place`: what the run was started with, its folder and where it goes on from. `typed` is
    what the command line says besides."""
    from grpo_cli.config.overrides import overrides, overrides_to_resume
    from grpo_cli.runs.find import resolve_run
    from grpo_cli.runs.layout import RUN, step_of
    from grpo_cli.runs.record import read_record

    folder = resolve_run(place)
    if place == "auto":
        print(f"resume=auto goes on with {plain(folder)}", file=sys.stderr)
    run_dir = folder if step_of(folder.name) is None else folder.parent.parent
    record = read_record(run_dir)
    if record is None:
        raise UserError(
            f"{run_dir} has no {RUN}, so that the settings of resume={place} are not known; put the file back, or "
            "start a new run from a checkpoint of this one (model.path=<checkpoint>)"
        )
    if record.command != "train":
        raise UserError(f"resume={place} is a folder of grpo {record.command}, and only trainings are resumed")
    return [*overrides_to_resume(record, run_dir, typed), *overrides({"resume": str(folder)})]


def sorted_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags (with their values) and overrides, each in their order. Hydra's parser wants all overrides in one place.

    UserError for an override without a key, which Hydra does not see."""
    for word in arguments:
        if word.startswith("="):
            raise UserError(f"{word} cannot be read: write key=value or group=choice")
    overrides = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    return [word for word in arguments if word not in overrides], overrides
