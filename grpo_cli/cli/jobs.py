"""What `grpo train`, `grpo eval` and `grpo profile` do with a configuration that Hydra composed. Loads PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from grpo_cli.cli.start import started
from grpo_cli.config.check import check, check_eval, check_profile
from grpo_cli.config.compose import parse, parse_eval, parse_profile
from grpo_cli.config.overrides import apply, chosen_of
from grpo_cli.config.prepare import Prepared, prepare, prepare_eval
from grpo_cli.runs.find import completed_steps
from grpo_cli.runs.layout import PROFILE, SAMPLES
from grpo_cli.runs.record import read_record
from grpo_cli.runs.stop import Stop
from grpo_cli.runs.summary import write_summary
from grpo_cli.settings import RunSettings
from grpo_cli.support.terminal import console, to_stderr

# Checks that can refuse a sweep's job before it starts.
CHECKS: Mapping[str, Callable[[DictConfig], Any]] = {
    "train": lambda cfg: check(parse(cfg)),
    "eval": lambda cfg: check_eval(parse_eval(cfg)),
    "profile": lambda cfg: check_profile(parse_profile(cfg)),
}


def train(cfg: DictConfig) -> Any:
    """Train, and return the value that a sweeper optimizes."""
    from grpo_cli import experiment
    from grpo_cli.memory import explain, fit

    run = prepare(parse(cfg), to_stderr)
    if _is_done(run.settings):
        return None
    run, chosen = _fitted(run, cfg)
    run = fit.with_tokens(run, run.device, to_stderr)
    fit.foresee(run, to_stderr)
    settings = run.settings
    with (
        started("train", cfg, settings, settings.resume, settings.resume_wait, chosen) as go_on,
        explain.memory_explained(run),
        Stop(to_stderr) as stop,
    ):
        if _is_done(settings):  # finished by the process that held the lock
            return None
        trainer = experiment.build(run)
        go_on()
        return trainer.fit(stop)["final_accuracy"]


def _fitted(run: Prepared[RunSettings], cfg: DictConfig) -> tuple[Prepared[RunSettings], tuple[str, ...]]:
    """The run with what `fit` chooses, in `cfg` too, and that as words. A resumed run keeps the words of its record,
    which it was composed with."""
    from grpo_cli.memory import fit

    settings = run.settings
    if settings.resume is not None:
        record = read_record(Path(settings.run_dir))
        chosen = () if record is None else chosen_of(record)
        if record is not None and record.config.get("fit", "none") != settings.fit:
            to_stderr(
                f"warning: fit={settings.fit} chooses nothing for a resumed run, which computes as it began "
                f"({' '.join(chosen) or 'nothing was chosen'}); settings typed beside resume= do change it"
            )
        return run, chosen
    if settings.fit == "none":
        return run, ()
    plan = fit.decided(run, fit.typed_keys(HydraConfig.get().overrides.task), to_stderr)
    chosen = fit.words(run.settings, plan.values)
    apply(cfg, chosen)
    return (prepare(parse(cfg), lambda line: None) if chosen else run), chosen


def _is_done(settings: RunSettings) -> bool:
    """Whether the resumed run has nothing left to do; if so, says it."""
    done = completed_steps(settings.resume)
    if done != settings.train.steps:
        return False
    print(f"{settings.run_dir} has done its {done} steps; train.steps=... asks for more")
    return True


def evaluate(cfg: DictConfig) -> Any:
    from grpo_cli import experiment

    settings = prepare_eval(parse_eval(cfg), to_stderr)
    with started("eval", cfg, settings):
        result = experiment.evaluate_model(settings)
    _print_table(result.metrics)
    print(f"every answer ({settings.eval.split} split): {settings.run_dir}/{SAMPLES}")
    return result.metrics["eval/accuracy"]


def _print_table(metrics: Mapping[str, float]) -> None:
    from rich.table import Table

    table = Table("", "value", "95 % interval")
    for name, value in metrics.items():
        low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
        if not name.endswith(("_low", "_high")):
            interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
            said = f"{value:.0f}" if name in ("eval/problems", "search/tokens", "search/sequential") else f"{value:.3f}"
            table.add_row(name.removeprefix("eval/"), said, interval)
    console().print(table)


def profile(cfg: DictConfig) -> Any:
    from grpo_cli import experiment
    from grpo_cli.memory import command as profiling
    from grpo_cli.memory.gpus import fast_when_planned

    settings = parse_profile(cfg)
    run = prepare(settings, to_stderr, fast_when_planned(settings.profile.for_gpu))
    command = ["grpo", "profile", *HydraConfig.get().overrides.task]
    with started("profile", cfg, run.settings):
        found = profiling.profile(run, command, to_stderr, experiment.say_to_stderr)
        found.show(console())
        print(f"all of it: {settings.run_dir}/{PROFILE}")
        peak = found.predicted.peak if found.measured is None else found.measured.peak_bytes
        write_summary(Path(settings.run_dir), {"status": "completed", "peak_bytes": peak})
    return peak
