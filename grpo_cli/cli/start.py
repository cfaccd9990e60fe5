"""Starts a command in its run folder: takes the lock, refuses a folder in use, and writes `run.json`."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from grpo_cli.config.auto import resolved
from grpo_cli.config.overrides import is_ours, key_of, leaves
from grpo_cli.config.recorded import OF_A_RESUME
from grpo_cli.runs.files import json_line
from grpo_cli.runs.layout import CHECKPOINTS, METRICS, PROFILE, ROLLOUTS, RUN, SAMPLES, SUMMARY
from grpo_cli.runs.lock import sole_use
from grpo_cli.runs.provenance import code_version
from grpo_cli.runs.record import RunRecord, check_data, digests, read_record, write_record
from grpo_cli.runs.summary import failure_noted, read_object
from grpo_cli.settings import EvalRunSettings, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain, shown
from grpo_cli.support.terminal import to_stderr

_LEFT_BY_A_RUN = (METRICS, ROLLOUTS, SAMPLES, PROFILE, SUMMARY)


@contextmanager
def started(
    command: str,
    cfg: DictConfig,
    settings: RunSettings | EvalRunSettings,
    resume: str | None = None,
    wait: float = 0.0,
    chosen: Sequence[str] = (),
) -> Iterator[Callable[[], None]]:
    """Lock the command's folder; a failure in the body is recorded in its `summary.json`, a refusal leaves none.

    `auto` in `cfg` is recorded as in `settings`; `chosen` are the words that `fit` has added. Yields a function to call
    when a resumed run is about to continue: it records and prints the settings that changed. UserError if another
    process or another run has the folder; then nothing in it is touched.
    """
    folder = Path(cfg.run_dir)
    _before(command, folder, resume)  # once before the lock: a refusal leaves the folder untouched
    with sole_use(folder, wait, to_stderr):
        before = _before(command, folder, resume)
        record = _record(command, cfg, settings, chosen, before if resume is not None else None)
        if before is None:
            write_record(folder, record)
        elif resume is not None:
            check_data(folder, before, record)
        elif before.overrides != record.overrides:
            raise _taken(folder, before)
        with failure_noted(folder, is_new=before is None):
            yield lambda: None if before is None else _go_on(folder, before, record)


def _record(
    command: str,
    cfg: DictConfig,
    settings: RunSettings | EvalRunSettings,
    chosen: Sequence[str],
    resumed: RunRecord | None,
) -> RunRecord:
    hydra = HydraConfig.get()
    config = json.loads(json_line(OmegaConf.to_container(cfg, resolve=False)))  # in the form in which it is read back
    for group, values in resolved(settings).items():
        config[group] |= values
    choices = {str(group): str(choice) for group, choice in hydra.runtime.choices.items()}
    choices |= {group: choice for group, _, choice in (word.partition("=") for word in chosen) if group in choices}
    typed = [word for word in hydra.overrides.task if key_of(word) not in OF_A_RESUME]
    if resumed is not None:  # its choices are among the words that were composed
        new = [word for word in typed if resumed.choices.get(key_of(word)) != word.partition("=")[2]]
        typed = [*resumed.overrides, *(word for word in new if word.lstrip("+") not in resumed.overrides)]
    about = {"began": datetime.now(UTC).isoformat(timespec="seconds"), "host": platform.node()}
    files = [*leaves("task", settings.parts["task"]).values()]
    files += [settings.train.warmup_path] if isinstance(settings, RunSettings) else []
    return RunRecord(
        command,
        tuple(typed),
        {group: choice for group, choice in choices.items() if not group.startswith("hydra/")},
        {key: value for key, value in config.items() if key not in OF_A_RESUME},
        about | {"code": asdict(code_version()), "data": digests(files)} | ({"fit": list(chosen)} if chosen else {}),
    )


def _before(command: str, folder: Path, resume: str | None) -> RunRecord | None:
    """Return the record of the run that the command may continue; None if the folder is free."""
    before = read_record(folder)
    if resume is not None:
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
    """Record the settings of a resumed run if they have changed, and print the differences."""
    if dict(before.config) == record.config:
        return
    exchanged = _differences(before.choices, record.choices)
    changed = _differences(leaves("", before.config), leaves("", record.config))
    for line in (*exchanged, *changed):
        to_stderr(f"changed since this run was started: {line}")
    write_record(folder, record)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each choice or setting that exists in both and differs."""
    for key in [key for key in before if key in now and before[key] != now[key]]:
        if not (key.endswith("_target_") and is_ours(before[key]) and is_ours(now[key])):
            yield f"{key}={plain(shown(before[key]))} is {plain(shown(now[key]))}"
