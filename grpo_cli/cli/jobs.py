"""The work of `grpo train`, `grpo eval` and `grpo profile` with settings that are read, each in a folder of its own: it
takes the lock, refuses a folder in use, and writes `run.json`. Loads PyTorch."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_cli import experiment
from grpo_cli.config.auto import AUTO, MAY_BE_AUTO
from grpo_cli.config.choices import shipped
from grpo_cli.config.compose import settings_from
from grpo_cli.config.overrides import is_package_target, key_of, leaves
from grpo_cli.config.prepare import prepare
from grpo_cli.config.recorded import OF_A_RESUME, Command
from grpo_cli.memory import fit
from grpo_cli.memory import profile as profiling
from grpo_cli.memory.out_of_memory import explaining_out_of_memory
from grpo_cli.report.tables import Table, print_table
from grpo_cli.runs import record as records
from grpo_cli.runs.files import json_line, read_object, write_object
from grpo_cli.runs.find import completed_steps
from grpo_cli.runs.layout import CHECKPOINTS, LOCK, METRICS, PROFILE, ROLLOUTS, RUN, SAMPLES, SUMMARY
from grpo_cli.runs.lock import sole_use
from grpo_cli.runs.stop import Stop
from grpo_cli.settings import EvalRunSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import plain, shown
from grpo_cli.support.terminal import console, to_stderr

_LEFT_BY_A_RUN = (METRICS, ROLLOUTS, SAMPLES, PROFILE, SUMMARY)


def fitted(command: Command, settings: RunSettings) -> RunSettings:
    """Return a training's settings with what `fit` or an automatic micro-batch chooses, which goes into the command
    too. A resumed run computes as it began."""
    if (settings.fit == "none" or settings.resume is not None) and settings.train.micro_batch_tokens != AUTO:
        return settings
    chosen = fit.choose(prepare(settings), {key_of(word) for word in command.typed}, to_stderr)
    for key, value in chosen.items():
        command.choices.update({} if "." in key else {key: value})
        OmegaConf.update(command.cfg, key, value if "." in key else shipped(key, value), merge=False)
    return settings_from(command)


def train(command: Command, settings: RunSettings) -> Any:
    """Train, and return the value that a sweeper optimizes; None for a resumed run with nothing left to do."""
    if settings.resume is not None and completed_steps(Path(settings.resume)) == settings.train.steps:
        done = f"{settings.run_dir} has done its {settings.train.steps} steps"
        before = records.read_record(Path(settings.run_dir))
        if before and (changed := _changed(before, replace(_record(command, settings, before), about=before.about))):
            raise UserError(f"{done}, without {', '.join(changed)}: start a new run, or continue with train.steps=...")
        print(f"{done}; train.steps=... asks for more")
        return None
    run = prepare(settings)
    has_choice = settings.m < settings.n or run.factories.fact("downsample", "keeps_fewer")
    if not has_choice and "downsample" in map(key_of, command.typed):
        rule = run.factories.named("downsample")
        to_stderr(f"warning: {rule} has nothing to choose from with m = n = {settings.n}: set a smaller m")
    in_folder = run_folder(command, run.settings, is_resumed=settings.resume is not None)
    with in_folder as record_changes, explaining_out_of_memory(run), Stop(to_stderr) as stop:
        trainer = experiment.build(run)
        record_changes()
        return trainer.fit(stop)["final_accuracy"]


def evaluate(command: Command, settings: EvalRunSettings) -> Any:
    """Evaluate, print a table, and return the accuracy."""
    run = prepare(settings)
    with run_folder(command, run.settings), explaining_out_of_memory(run):
        metrics = experiment.evaluate_model(run).metrics
    rows = list[tuple[str, ...]]()
    for name in (name for name in metrics if not name.endswith(("_low", "_high"))):
        ends = [f"{metrics[end]:.3f}" for end in (f"{name}_low", f"{name}_high") if end in metrics]
        value = f"{metrics[name]:.3f}" if ends else f"{metrics[name]:g}"
        rows.append((name.removeprefix("eval/"), value, " to ".join(ends)))
    print_table(console(), Table(("", "value", "95% interval"), tuple(rows), frozenset({"value"})))
    exam, of, path = settings.eval, settings.checkpoint or settings.model.path, settings.parts["task"].get("path")
    problems = run.factories.named("task") + (f" task.path={path}" if path else "")
    sampled = f"; pass@: {exam.k} samples at temperature {exam.temperature:g}, top_p {settings.sampling.top_p:g}"
    print(f"accuracy: greedy answers of {of} to {problems}{sampled}")
    print(f"every answer ({exam.split} split): {settings.run_dir}/{SAMPLES}")
    return metrics["eval/accuracy"]


def profile(command: Command, settings: ProfileRunSettings) -> Any:
    """Profile, print what was found, and return the peak memory."""
    if settings.resume is not None:
        raise UserError("resume= is for grpo train: type the settings of the run that is to be profiled")
    gpu = settings.profile.for_gpu
    run = prepare(settings, gpu != "t4" if gpu else None)  # all others compute faster in bfloat16
    with run_folder(command, run.settings):
        peak = profiling.profile(run, command.typed, console())
        print(f"all of it: {settings.run_dir}/{PROFILE}")
        write_object(Path(settings.run_dir) / SUMMARY, {"status": "completed", "peak_bytes": peak})
    return peak


JOBS: Mapping[str, Callable[[Command, Any], Any]] = {"train": train, "eval": evaluate, "profile": profile}


@contextmanager
def run_folder(
    command: Command, settings: RunSettings | EvalRunSettings, is_resumed: bool = False
) -> Iterator[Callable[[], None]]:
    """Lock the command's folder and record the command in it; a refusal in the body leaves no trace of a new run.

    `auto` is recorded as in `settings`. Yield `record_changes`, to be called when a resumed run is about to continue.
    UserError if another process or another run has the folder.
    """
    folder = Path(settings.run_dir)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with sole_use(folder, to_stderr):
            before = records.read_record(folder)
            record = _record(command, settings, before if is_resumed else None)
            if before is not None and is_resumed:
                records.check_data(folder, before, record)
            elif not _is_free(folder, before, record):
                raise UserError(f"{folder} already holds a run: type resume={folder}, or another hydra.run.dir=")
            else:
                records.write_record(folder, record)
            try:
                yield lambda: None if before is None else _record_changes(folder, before, record)
            except UserError:
                for name in () if is_resumed or _has_records(folder) else (RUN, LOCK, *_LEFT_BY_A_RUN):
                    (folder / name).unlink(missing_ok=True)
                raise
    finally:
        for path in new:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _is_free(folder: Path, before: records.RunRecord | None, record: records.RunRecord) -> bool:
    """True if the folder holds no run, or the same evaluation or profile, which was cut short."""
    if before is None:
        return not _has_records(folder)
    is_over = record.command == "train" or read_object(folder / SUMMARY).get("status") == "completed"
    return not is_over and (before.command, before.overrides) == (record.command, record.overrides)


def _has_records(folder: Path) -> bool:
    files = (path for path in (folder / name for name in _LEFT_BY_A_RUN) if path.exists())
    return (folder / CHECKPOINTS).exists() or any(path.stat().st_size for path in files)


def _record(
    command: Command, settings: RunSettings | EvalRunSettings, resumed: records.RunRecord | None
) -> records.RunRecord:
    # As it was typed, since it is read again: escapes and references are kept.
    config = json.loads(json_line(OmegaConf.to_container(command.cfg, resolve=False)))
    for group, _, name in (key.partition(".") for key in leaves("", config).keys() & MAY_BE_AUTO):
        config[group][name] = getattr(getattr(settings, group), name)
    typed = [word for word in command.typed if key_of(word) not in OF_A_RESUME]
    if resumed is not None:
        typed = [*(word for word in resumed.overrides if word not in typed), *typed]
    files = [*leaves("task", config["task"]).values(), config.get("train", {}).get("warmup_path")]
    about: dict[str, Any] = {"began": datetime.now(UTC).isoformat(timespec="seconds"), "host": platform.node()}
    about |= {"code": records.code_version(), "data": records.digests(files)}
    called = [str(text) for key, text in leaves("", config).items() if key.endswith("_target_") or ":" in str(text)]
    modules = [name.rpartition(":" if ":" in name else ".")[0] for name in called if not is_package_target(name)]
    own = records.digests(f"{module.replace('.', '/')}.py" for module in modules)
    about["own_code"] = {name: digest[:12] for name, digest in own.items()}
    choices = {group: choice for group, choice in command.choices.items() if not group.startswith("hydra/")}
    kept = {key: value for key, value in config.items() if key not in OF_A_RESUME}
    return records.RunRecord(command.name, tuple(typed), choices, kept, about)


def _record_changes(folder: Path, before: records.RunRecord, record: records.RunRecord) -> None:
    """Record the settings and own code of a resumed run if they have changed, and print what is in both and differs."""
    for line in (changed := _changed(before, record)):
        to_stderr(f"changed since the run began: {line}")
    data, changed = before.about.get("data", {}) | record.about["data"], [*before.about.get("changed", ()), *changed]
    about = {**before.about, "own_code": record.about["own_code"], "data": data, "changed": changed}
    records.write_record(folder, replace(record, about=about))


def _changed(before: records.RunRecord, now: records.RunRecord) -> list[str]:
    """Return what is in both records and differs."""
    old, new = ({**one.choices, **leaves("", one.config), **one.about.get("own_code", {})} for one in (before, now))
    keys = [key for key in old if key in new and old[key] != new[key]]
    return [f"{key}={plain(shown(new[key]))} (was {plain(shown(old[key]))})" for key in keys]
