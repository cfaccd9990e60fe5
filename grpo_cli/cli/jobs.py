"""The work of `grpo train`, `grpo eval` and `grpo profile` with settings that are read. Loads PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.table import Table

from grpo_cli import experiment
from grpo_cli.cli.start import started
from grpo_cli.config.auto import AUTO, decided
from grpo_cli.config.choices import shipped
from grpo_cli.config.compose import settings_from
from grpo_cli.config.instantiate import Factories
from grpo_cli.config.overrides import key_of
from grpo_cli.config.prepare import Prepared, prepare
from grpo_cli.config.recorded import Command
from grpo_cli.memory import explain, fit
from grpo_cli.memory import profile as profiling
from grpo_cli.runs.files import write_object
from grpo_cli.runs.find import completed_steps
from grpo_cli.runs.layout import PROFILE, SAMPLES, SUMMARY
from grpo_cli.runs.stop import Stop
from grpo_cli.settings import EvalRunSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.terminal import console, to_stderr


def train(command: Command, settings: RunSettings) -> Any:
    """Train, and return the value that a sweeper optimizes; None for a resumed run with nothing left to do."""
    run = prepare(settings, to_stderr)
    done = None if settings.resume is None else completed_steps(Path(settings.resume))
    if done == settings.train.steps:
        print(f"{settings.run_dir} has done its {done} steps; train.steps=... asks for more")
        return None
    run, chosen = _fitted(run, command)
    with started(command, run.settings, chosen) as go_on, explain.memory_explained(run), Stop(to_stderr) as stop:
        trainer = experiment.build(run)
        go_on()
        return trainer.fit(stop)["final_accuracy"]


def _fitted(run: Prepared[RunSettings], command: Command) -> tuple[Prepared[RunSettings], tuple[str, ...]]:
    """Return the run with what `fit` or an automatic micro-batch chooses, which goes into the command too, and that as
    words. A resumed run computes as it began."""
    settings = run.settings
    if (settings.fit == "none" or settings.resume is not None) and settings.train.micro_batch_tokens != AUTO:
        return run, ()
    chosen = fit.choose(run, {key_of(word) for word in command.typed}, to_stderr)
    for key, _, text in (word.partition("=") for word in chosen):
        OmegaConf.update(command.cfg, key, yaml.safe_load(text) if "." in key else shipped(key, text), merge=False)
    settings = decided(settings_from(command), lambda line: None)
    return replace(run, settings=settings, parts=Factories.of(settings.parts)), chosen


def evaluate(command: Command, settings: EvalRunSettings) -> Any:
    """Evaluate, print a table, and return the accuracy."""
    run = prepare(settings, to_stderr)
    with started(command, run.settings):
        result = experiment.evaluate_model(run)
    _print_table(result.metrics)
    print(f"every answer ({settings.eval.split} split): {settings.run_dir}/{SAMPLES}")
    return result.metrics["eval/accuracy"]


def _print_table(metrics: Mapping[str, float]) -> None:
    table = Table("", "value", "95 % interval")
    for name, value in metrics.items():
        low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
        if not name.endswith(("_low", "_high")):
            interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
            is_count = name in ("eval/problems", "search/tokens", "search/sequential")
            table.add_row(name.removeprefix("eval/"), f"{value:.0f}" if is_count else f"{value:.3f}", interval)
    console().print(table)


def profile(command: Command, settings: ProfileRunSettings) -> Any:
    """Profile, print what was found, and return the peak memory."""
    run = prepare(settings, to_stderr, profiling.fast_when_planned(settings.profile.for_gpu))
    with started(command, run.settings):
        peak = profiling.profile(run, command.typed, to_stderr, experiment.say_to_stderr, console())
        print(f"all of it: {settings.run_dir}/{PROFILE}")
        write_object(Path(settings.run_dir) / SUMMARY, {"status": "completed", "peak_bytes": peak})
    return peak


JOBS: Mapping[str, Callable[[Command, Any], Any]] = {"train": train, "eval": evaluate, "profile": profile}
