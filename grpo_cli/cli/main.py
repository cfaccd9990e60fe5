"""The `grpo` program: Typer picks the command, Hydra composes a run's settings, a typed value is handed over.

What a person got wrong ends in one message and exit code 2; the rest is our bug, with its traceback and exit code 1.
Only Typer is imported at the top, so that help and completion answer at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_cli import __version__
from grpo_cli.cli.arguments import (
    after_those_of_the_run,
    all_of_a_named_file,
    in_seconds,
    with_checkpoint,
    with_slots,
)
from grpo_cli.cli.completion import offered
from grpo_cli.cli.hydra_run import hand_over
from grpo_cli.cli.mistakes import named, refusals
from grpo_cli.runs.layout import PROFILE, SAMPLES
from grpo_cli.support.errors import UserError
from grpo_cli.support.processor import settle
from grpo_cli.support.terminal import console, outlive_the_reader

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpo_cli.config.prepare import Prepared
    from grpo_cli.settings import RunSettings
    from grpo_cli.sweep.resume import Sweep

app = typer.Typer(
    help="Grouped reinforcement learning (GRPO) of language models when memory is short.",
    epilog="grpo COMMAND --help lists its choices, its settings and examples.",
    no_args_is_help=True,
    rich_markup_mode=None,  # importing rich takes longer than all the rest of --help
    pretty_exceptions_enable=False,
)

# Everything after the command is Hydra's: overrides, -m, --cfg, --help.
_HANDS_OVER: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


def _offer(ctx: Any, incomplete: str) -> list[str]:
    return offered(ctx.info_name or "", ctx.params.get("overrides") or (), incomplete)


def _help(ctx: Any, overrides: list[str] | None) -> list[str] | None:
    """The page of a command, if that is asked for; with more of Hydra's flags it is Hydra's own."""
    flags = {word for word in overrides or [] if word.startswith("-")}
    if ctx.resilient_parsing or not {"--help", "-h"} & flags or flags - {"--help", "-h", "-m", "--multirun"}:
        return overrides
    from grpo_cli.cli.help import print_help

    with refusals():
        print_help(ctx.info_name or "", with_slots(overrides or []))
    raise typer.Exit()


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[group=choice ...] [key=value ...]",
        autocompletion=_offer,
        callback=_help,
        help="Hydra overrides and flags; `--help` after the command lists them.",
    ),
]


def main() -> None:
    """The `grpo` program."""
    # Where the locale is not UTF-8, characters that cannot be printed become question marks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    outlive_the_reader()
    try:
        os.getcwd()
    except FileNotFoundError:
        typer.echo("error: the current directory no longer exists; change into another one", err=True)
        sys.exit(2)
    try:
        settle()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    app(prog_name="grpo")


def _print_version(wanted: bool | None) -> None:
    if wanted:
        typer.echo(f"grpo {__version__}")
        raise typer.Exit()


@app.callback()
def grpo(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = None,
) -> None:
    pass


@app.command(**_HANDS_OVER)
def train(overrides: Overrides = None) -> None:
    """Train a model with groups of rollouts."""
    with refusals():
        arguments = after_those_of_the_run("resume", with_slots(in_seconds(overrides or [])))
    hand_over("train", arguments, _train, _checked, "final_accuracy")


@app.command("eval", **_HANDS_OVER)
def evaluate(overrides: Overrides = None) -> None:
    """Measure a checkpoint's accuracy and pass@k."""
    with refusals():
        named = with_checkpoint(overrides or [])
        arguments = all_of_a_named_file(after_those_of_the_run("checkpoint", named))
    hand_over("eval", arguments, _evaluate, _checked_eval, "eval/accuracy")


@app.command("profile", **_HANDS_OVER)
def profile(overrides: Overrides = None) -> None:
    """Measure and predict where memory and time go."""
    with refusals():
        arguments = with_slots(overrides or [])
    hand_over("profile", arguments, _profile, _checked_profile, "peak_bytes", _compared)


def _compared(sweep: Sweep) -> int:
    """Show the profiles of a sweep side by side. Returns the exit code, 2 if one is missing."""
    from grpo_cli.report.profiles import compare_profiles

    done = sweep.done()
    if done:
        assert sweep.folder is not None, "the launcher has written there"
        compare_profiles([(job.label, job.folder) for job in done], sweep.folder)
    return 0 if len(done) == len(sweep.jobs) else 2


def _checked_profile(cfg: DictConfig) -> None:
    from grpo_cli.config.check import check_profile
    from grpo_cli.config.compose import parse_profile

    check_profile(parse_profile(cfg))


def _profile(cfg: DictConfig) -> Any:
    from grpo_cli.config.compose import parse_profile
    from grpo_cli.config.prepare import prepare
    from grpo_cli.profile.roofline import fast_when_planned

    settings = parse_profile(cfg)
    run = prepare(settings, _to_stderr, fast_when_planned(settings.profile.for_gpu))
    from hydra.core.hydra_config import HydraConfig

    from grpo_cli.cli.start import started
    from grpo_cli.profile import command as profiling
    from grpo_cli.profile.show import show
    from grpo_cli.runs.summary import write_summary

    command = ["grpo", "profile", *HydraConfig.get().overrides.task]
    with started("profile", cfg, run.settings):
        found = profiling.profile(run, command, _to_stderr, lambda text: _to_stderr(f"warning: {text}"))
        show(found, console())
        typer.echo(f"all of it: {settings.run_dir}/{PROFILE}")
        peak = found.predicted.peak if found.measured is None else found.measured.peak_bytes
        write_summary(Path(settings.run_dir), {"status": "completed", "peak_bytes": peak})
    return peak


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            parser=named, help="Run folders, sweep folders, or any folder that contains them.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=named, help="Where to write. Default: a new folder below outputs/report.", show_default=False
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Compare the time to this accuracy. Default: 95 % of the highest mean accuracy.", show_default=False
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Which accuracy: greedy, or sampled such as eval/pass@1.")
    ] = "eval/accuracy",
) -> None:
    """Compare runs: a table here, plots and an HTML page in a folder."""
    from grpo_cli.report.make import make

    with refusals():
        make(folders, out, target, metric)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(parser=named, help="A run or evaluation folder.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Which step. Default: the last one.", show_default=False)] = None,
    prompt: Annotated[str | None, typer.Option(help="Only the prompt with this id.", show_default=False)] = None,
    kept: Annotated[
        bool | None, typer.Option("--kept/--dropped", help="Only rollouts that were trained on, or only the others.")
    ] = None,
    best: Annotated[
        int, typer.Option(min=0, help="Only this many, those with the highest rewards.", show_default=False)
    ] = 0,
    worst: Annotated[
        int, typer.Option(min=0, help="Only this many, those with the lowest rewards.", show_default=False)
    ] = 0,
) -> None:
    """Show a step's completions, and why each was kept or dropped."""
    from grpo_cli.cli.show import show_rollouts

    with refusals():
        show_rollouts(folder, step, prompt, kept, best, worst)


@app.command("ls")
def list_runs(
    folder: Annotated[Path, typer.Argument(parser=named, help="Where to look for runs, subfolders included.")] = Path(
        "outputs"
    ),
) -> None:
    """List runs, newest first: status, settings and accuracy."""
    from grpo_cli.cli.ls import list_runs as ls

    with refusals():
        ls(folder)


@app.command()
def explain(
    words: Annotated[
        list[str], typer.Argument(help="Such as sampler, maxvar, train.epochs, kl, group.", show_default=False)
    ],
) -> None:
    """Explain a choice, setting, metric or concept."""
    from grpo_cli.cli.explain import explain_each

    with refusals():
        explain_each(words)


@app.command()
def merge(
    checkpoint: Annotated[
        Path, typer.Argument(parser=named, help="A run with adapters, or one of its checkpoints.", show_default=False)
    ],
    folder: Annotated[
        Path, typer.Argument(parser=named, help="A new folder for the merged model.", show_default=False)
    ],
    base: Annotated[
        str | None,
        typer.Option(
            help="The base model: a folder or a hub id. Default: the one that the adapters name.", show_default=False
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the merged weights: float32 or bfloat16.")] = "float32",
) -> None:
    """Merge saved adapters into their base model."""
    from grpo_cli.model.merge import merge as merge_adapters

    with refusals():
        merged = merge_adapters(checkpoint, folder, base, dtype)
    typer.echo(f"{folder} holds {merged} and its base as one model")


def _checked(cfg: DictConfig) -> None:
    from grpo_cli.config.check import check
    from grpo_cli.config.compose import parse

    check(parse(cfg))


def _checked_eval(cfg: DictConfig) -> None:
    from grpo_cli.config.check import check_eval
    from grpo_cli.config.compose import parse_eval

    check_eval(parse_eval(cfg))


def _train(cfg: DictConfig) -> Any:
    from grpo_cli import experiment
    from grpo_cli.cli.start import started
    from grpo_cli.config.compose import parse
    from grpo_cli.config.prepare import prepare
    from grpo_cli.profile import micro_batch
    from grpo_cli.runs.stop import Stop

    run = prepare(parse(cfg), _to_stderr)
    if _is_done(run.settings):
        return None
    run = micro_batch.decided(run, run.device, _to_stderr)
    micro_batch.foresee(run, _to_stderr)
    settings = run.settings
    with (
        started("train", cfg, settings, settings.resume, settings.resume_wait) as go_on,
        _memory_explained(run),
        Stop(_to_stderr) as stop,
    ):
        if _is_done(settings):  # by the process that was waited for
            return None
        trainer = experiment.build(run)
        go_on()
        return trainer.fit(stop)["final_accuracy"]  # what a sweeper would optimise


def _is_done(settings: RunSettings) -> bool:
    """Whether the resumed run has nothing left to do; if so, say it."""
    from grpo_cli.runs.find import completed_steps

    done = completed_steps(settings.resume)
    if done is None or done < settings.train.steps:
        return False
    if done > settings.train.steps:
        raise UserError(f"train.steps={settings.train.steps} is less than the {done} steps that are done: ask for more")
    typer.echo(f"{settings.run_dir} has done its {done} steps; train.steps=... asks for more")
    return True


@contextmanager
def _memory_explained(run: Prepared[RunSettings]) -> Iterator[None]:
    """A failed allocation becomes a message that says where, and what would make it fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        from grpo_cli.support.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        from grpo_cli.profile.advice import out_of_memory

        raise out_of_memory(run, error) from error


def _evaluate(cfg: DictConfig) -> Any:
    from grpo_cli import experiment
    from grpo_cli.cli.start import started
    from grpo_cli.config.compose import parse_eval
    from grpo_cli.config.prepare import prepare_eval

    settings = prepare_eval(parse_eval(cfg), _to_stderr)

    with started("eval", cfg, settings):
        result = experiment.evaluate_model(settings)
    _print_table(result.metrics)
    typer.echo(f"every answer ({settings.eval.split} split): {settings.run_dir}/{SAMPLES}")
    return result.metrics["eval/accuracy"]


def _print_table(metrics: Mapping[str, float]) -> None:
    from rich.table import Table

    table = Table("", "value", "95 % interval")
    for name, value in metrics.items():
        low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
        if not name.endswith(("_low", "_high")):
            interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
            said = f"{value:.0f}" if name == "eval/problems" else f"{value:.3f}"
            table.add_row(name.removeprefix("eval/"), said, interval)
    console().print(table)
