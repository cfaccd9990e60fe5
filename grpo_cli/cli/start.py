"""Starts a command in its run folder: takes the lock, refuses a folder in use, and writes `run.json`."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from omegaconf import OmegaConf

from grpo_cli.config.auto import MAY_BE_AUTO
from grpo_cli.config.overrides import is_ours, key_of, leaves
from grpo_cli.config.recorded import OF_A_RESUME, Command
from grpo_cli.runs.files import json_line, read_object
from grpo_cli.runs.layout import CHECKPOINTS, METRICS, PROFILE, ROLLOUTS, RUN, SAMPLES, SUMMARY
from grpo_cli.runs.lock import sole_use
from grpo_cli.runs.record import (
    RunRecord,
    check_data,
    code_version,
    digests,
    emptied_if_refused,
    read_record,
    write_record,
)
from grpo_cli.settings import EvalRunSettings, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain, shown
from grpo_cli.support.terminal import to_stderr

_LEFT_BY_A_RUN = (METRICS, ROLLOUTS, SAMPLES, PROFILE, SUMMARY)


@contextmanager
def started(
    command: Command, settings: RunSettings | EvalRunSettings, chosen: Sequence[str] = ()
) -> Iterator[Callable[[], None]]:
    """Lock the command's folder, which a refusal in the body leaves as it was.

    `auto` is recorded as in `settings`; `chosen` are the words that `fit` has added. Yields a function to call when a
    resumed run is about to continue: it records and prints the settings that changed. UserError if another process or
    another run has the folder; then nothing in it is touched.
    """
    folder = Path(settings.run_dir)
    is_resumed = command.name == "train" and isinstance(settings, RunSettings) and settings.resume is not None
    _before(command.name, folder, is_resumed)  # once before the lock: a refusal leaves the folder untouched
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with sole_use(folder, to_stderr):
            before = _before(command.name, folder, is_resumed)
            record = _record(command, settings, chosen, before if is_resumed else None)
            if before is None:
                write_record(folder, record)
            elif is_resumed:
                check_data(folder, before, record)
            elif before.overrides != record.overrides:
                raise _taken(folder, before)
            with emptied_if_refused(folder) if before is None else nullcontext():
                yield lambda: None if before is None else _go_on(folder, before, record)
    finally:
        for path in new:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _record(
    command: Command, settings: RunSettings | EvalRunSettings, chosen: Sequence[str], resumed: RunRecord | None
) -> RunRecord:
    # As it was typed, since it is read again: escapes and references are kept.
    config = json.loads(json_line(OmegaConf.to_container(command.cfg, resolve=False)))
    for group, _, name in (key.partition(".") for key in leaves("", config).keys() & MAY_BE_AUTO):
        config[group][name] = getattr(getattr(settings, group), name)
    typed = [word for word in command.typed if key_of(word) not in OF_A_RESUME]
    if resumed is not None:
        typed = [*resumed.overrides, *(word for word in typed if word not in resumed.overrides)]
    about = {"began": datetime.now(UTC).isoformat(timespec="seconds"), "host": platform.node()}
    files = [*leaves("task", settings.parts["task"]).values()]
    files += [settings.train.warmup_path] if isinstance(settings, RunSettings) else []
    return RunRecord(
        command.name,
        tuple(typed),
        {group: choice for group, choice in command.choices.items() if not group.startswith("hydra/")},
        {key: value for key, value in config.items() if key not in OF_A_RESUME},
        about | {"code": code_version(), "data": digests(files)} | ({"fit": list(chosen)} if chosen else {}),
    )


def _before(command: str, folder: Path, is_resumed: bool) -> RunRecord | None:
    """Return the record of the run that the command may continue; None if the folder is free."""
    before = read_record(folder)
    if is_resumed:
        return before
    left = [name for name in _LEFT_BY_A_RUN if (folder / name).exists() and (folder / name).stat().st_size]
    ended = read_object(folder / SUMMARY).get("status")
    # The same command restarts an evaluation or a profile that was cut short.
    again = before is not None and before.command == command != "train" and ended != "completed"
    if before is None and not left and not (folder / CHECKPOINTS).exists():
        return None
    if before is None or not again:
        raise _taken(folder, before)
    return before


def _taken(folder: Path, before: RunRecord | None) -> UserError:
    what = f"a run of grpo {before.command}" if before else f"the records of a run, without its {RUN}"
    on = f"Continue that run with resume={folder}, or choose" if before and before.command == "train" else "Choose"
    return UserError(f"{folder} already holds {what}. {on} another folder with hydra.run.dir=<folder>.")


def _go_on(folder: Path, before: RunRecord, record: RunRecord) -> None:
    """Record the settings of a resumed run if they have changed, and print those that are in both and differ."""
    if dict(before.config) == record.config:
        return
    then, now = ({**one.choices, **leaves("", one.config)} for one in (before, record))
    changed = list(before.about.get("changed", ()))
    for key in [key for key in then if key in now and then[key] != now[key]]:
        if not (key.endswith("_target_") and is_ours(then[key]) and is_ours(now[key])):
            changed.append(f"{key}={plain(shown(now[key]))} (was {plain(shown(then[key]))})")
            to_stderr(f"changed since the run began: {changed[-1]}")
    write_record(folder, replace(record, about={**record.about, "changed": changed}))
