"""What is added to the arguments of a command before Hydra reads them: what a run, a file or a setting brings along.

What most command lines do not need is imported where they do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_cli.errors import UserError


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


def with_slots(arguments: Sequence[str]) -> list[str]:
    """The arguments, and `sampler=infinite` if slots are asked for and nothing says whose: `sampler=full` has none."""
    typed = {word.partition("=")[0] for word in arguments if "=" in word}
    slots = sorted(typed & {"sampler.slots", "sampler.kv_budget"})
    if not slots or typed & {"sampler", "resume", "experiment"}:
        return list(arguments)
    print(f"sampler=infinite, since {' and '.join(slots)} cannot be set for sampler=full", file=sys.stderr)
    flags, overrides = sorted_out(arguments)
    return [*flags, "sampler=infinite", *overrides]


def after_those_of_the_run(key: str, arguments: Sequence[str]) -> list[str]:
    """The arguments, and before them those of the run that `resume=` or `checkpoint=` names."""
    from grpo_cli.config.overrides import unquoted

    flags, overrides = sorted_out(arguments)
    named = [unquoted(word.partition("=")[2]) for word in overrides if word.startswith(f"{key}=")]
    if not named or named[-1] == "null" or "--help" in flags or (key, named[-1]) == ("resume", "sweep"):
        return list(arguments)
    if key == "checkpoint":
        # A group that is chosen anew (but for the checkpoint's own model) leaves the run's settings of it behind.
        chosen = {word.partition("=")[0] for word in overrides} - {"model"}
        of_the_run = checkpoint_overrides(named[-1])
        taken = [word for word in of_the_run if word.lstrip("+").partition(".")[0] not in chosen]
        return [*flags, *taken, *overrides]
    if {"-m", "--multirun"} & set(flags):
        raise UserError(f"resume={named[-1]} continues one run; leave out -m, and name the folder of a sweep's job")
    own = [word for word in overrides if not word.startswith("resume=")]
    return [*flags, *resume_overrides(named[-1]), *own]


def checkpoint_overrides(place: str) -> list[str]:
    """For `grpo eval checkpoint=place`: the settings of the run that it belongs to, and its weights."""
    from grpo_cli.config.overrides import overrides, overrides_of_run
    from grpo_cli.model.adapters import BASE, base_of, has_adapters
    from grpo_cli.runs.find import find_checkpoint
    from grpo_cli.runs.layout import CONFIG

    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise UserError(f"checkpoint={place} is no folder; give a run folder, a checkpoint or a Hugging Face folder")
    found = find_checkpoint(folder)
    for reason in found.skipped:
        print(f"passed over {reason}", file=sys.stderr)
    if found.path is None and (found.skipped or not ((folder / "config.json").is_file() or has_adapters(folder))):
        raise UserError(f"checkpoint={place} holds no complete checkpoint; give another run folder or checkpoint")
    weights = (found.path or folder).resolve()
    run_dir = weights.parent.parent
    of_the_run = overrides_of_run(run_dir) if (run_dir / CONFIG).is_file() else []
    if not has_adapters(weights):
        return [*of_the_run, *overrides({"model.path": str(weights), "model.random_init": False})]
    values = {"model.adapter": str(weights), "model.random_init": False}
    if not of_the_run or (weights / BASE).is_dir():
        values |= {"model.path": base_of(weights)}
    return [*of_the_run, *overrides(values)]


def resume_overrides(place: str) -> list[str]:
    """For `grpo train resume=place`: what the run was started with, its folder and where it goes on from."""
    from grpo_cli.config.overrides import overrides, overrides_to_resume
    from grpo_cli.runs.find import resolve_run
    from grpo_cli.runs.layout import CHECKPOINTS

    folder = resolve_run(place)
    run_dir = folder if (folder / CHECKPOINTS).is_dir() else folder.parent.parent
    return [*overrides_to_resume(run_dir), *overrides({"resume": str(folder)})]


def sorted_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags (with their values) and overrides, each in their order. Hydra's parser wants all overrides in one place.

    UserError for an override without a key, which Hydra does not see."""
    for word in arguments:
        if word.startswith("="):
            raise UserError(f"{word} cannot be read: write key=value or group=choice")
    overrides = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    return [word for word in arguments if word not in overrides], overrides
