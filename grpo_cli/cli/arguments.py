"""What is added to the arguments of a command before Hydra reads them: what a run, a file or a setting brings along.

What most command lines do not need is imported where they do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo_cli.config.overrides import unquoted
from grpo_cli.errors import UserError


def all_of_a_named_file(arguments: Sequence[str]) -> list[str]:
    """The arguments, and that all of a file is evaluated if `task.path=` names it here, and nothing else is said.

    Training holds a share of its file out; that share alone is evaluated as long as the file is that of the run.
    """
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
    flags, overrides = sorted_out(arguments)
    named = [unquoted(word.partition("=")[2]) for word in overrides if word.startswith(f"{key}=")]
    if not named or named[-1] == "null" or "--help" in flags or (key, named[-1]) == ("resume", "sweep"):
        return list(arguments)
    from grpo_cli import experiment

    if key == "checkpoint":
        # A group that is chosen anew (but for the checkpoint's own model) leaves the run's settings of it behind.
        chosen = {word.partition("=")[0] for word in overrides} - {"model"}
        of_the_run = experiment.checkpoint_overrides(named[-1])
        taken = [word for word in of_the_run if word.lstrip("+").partition(".")[0] not in chosen]
        return [*flags, *taken, *overrides]
    if {"-m", "--multirun"} & set(flags):
        raise UserError(f"resume={named[-1]} continues one run; leave out -m, and name the folder of a sweep's job")
    own = [word for word in overrides if not word.startswith("resume=")]
    return [*flags, *experiment.resume_overrides(named[-1]), *own]


def sorted_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags (with their values) and overrides, each in their order. Hydra's parser wants all overrides in one place."""
    overrides = [word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    return [word for word in arguments if word not in overrides], overrides
