"""The `grpo` program: Typer picks the command, Hydra composes a run's settings, a typed value is handed over.

What a person got wrong ends in one message and exit code 2; the rest is our bug, with its traceback and exit code 1.
Only Typer is imported at the top, so that help and completion answer at once.
"""

from __future__ import annotations

import io
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from grpo_cli import __version__
from grpo_cli.cli.arguments import after_those_of_the_run, all_of_a_named_file, sorted_out, with_slots
from grpo_cli.cli.completion import offered
from grpo_cli.cli.mistakes import explained
from grpo_cli.errors import UserError
from grpo_cli.processor import settle

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from grpo_cli.settings import RunSettings
    from grpo_cli.sweep.launcher import Sweep

MOST_FAILED = 100  # an exit code above 125 would say something else to the shell

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


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[group=choice ...] [key=value ...]",
        autocompletion=_offer,
        help="Hydra overrides and flags; `--help` after the command lists them.",
    ),
]


def main() -> None:
    """The `grpo` program."""
    # A screen without some of our signs (a locale that is not UTF-8) gets a question mark for each, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        os.getcwd()
    except FileNotFoundError:
        typer.echo("error: the folder that you are in is no more; change into another one", err=True)
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
    with _refusals():
        arguments = after_those_of_the_run("resume", with_slots(overrides or []))
    _hand_over("train", arguments, _train, _checked, "final_accuracy")


@app.command("eval", **_HANDS_OVER)
def evaluate(overrides: Overrides = None) -> None:
    """Measure a checkpoint's accuracy and pass@k."""
    with _refusals():
        arguments = all_of_a_named_file(after_those_of_the_run("checkpoint", overrides or []))
    _hand_over("eval", arguments, _evaluate, _checked_eval, "eval/accuracy")


@app.command("profile", **_HANDS_OVER)
def profile(overrides: Overrides = None) -> None:
    """Measure and predict where memory and time go."""
    arguments = with_slots(overrides or [])
    sweeps = {"-m", "--multirun"} & set(arguments) and "--help" not in arguments
    _profile_each(arguments) if sweeps else _hand_over("profile", arguments, _profile)


def _profile_each(arguments: Sequence[str]) -> None:
    from hydra.errors import HydraException

    from grpo_cli.profile.compare import compare
    from grpo_cli.profile.jobs import run_each

    flags, words = sorted_out([word for word in arguments if word not in ("-m", "--multirun")])
    try:
        root, jobs, failed = run_each(words, flags, typer.echo)
        if jobs:
            compare(jobs, root)
    except (HydraException, UserError) as error:
        _fail(error if isinstance(error, UserError) else explained(error, "profile", arguments))
    if failed:
        raise typer.Exit(2)


def _profile(cfg: DictConfig) -> Any:
    from grpo_cli.config.check import check_profile
    from grpo_cli.config.compose import parse_profile

    settings = parse_profile(cfg)
    check_profile(settings)
    from hydra.core.hydra_config import HydraConfig
    from rich.console import Console

    from grpo_cli.profile import command as profiling
    from grpo_cli.profile.show import show

    command = ["grpo", "profile", *HydraConfig.get().overrides.task]
    found = profiling.profile(settings, command, _to_stderr, lambda text: _to_stderr(f"warning: {text}"))
    show(found, Console())
    typer.echo(f"all of it: {settings.run_dir}/profile.json")
    return found.predicted.peak if found.measured is None else found.measured.peak_bytes


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Run folders, sweep folders, or any folder that holds such.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write. Default: a new folder below outputs/report.", show_default=False),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="The accuracy whose time is compared. Default: 95 % of the highest mean accuracy.", show_default=False
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Which accuracy: greedy, or of samples, such as eval/pass@1.")
    ] = "eval/accuracy",
) -> None:
    """Compare runs: a table here, pictures and one HTML page in a folder."""
    from grpo_cli.report.make import make

    with _refusals():
        make(folders, out, target, metric)


def _checked(cfg: DictConfig) -> Any:
    from grpo_cli.config.check import check
    from grpo_cli.config.compose import parse

    settings = parse(cfg)
    check(settings)
    return settings


def _checked_eval(cfg: DictConfig) -> Any:
    from grpo_cli.config.check import check_eval
    from grpo_cli.config.compose import parse_eval

    settings = parse_eval(cfg)
    check_eval(settings)
    return settings


def _train(cfg: DictConfig) -> Any:
    settings = _checked(cfg)
    from grpo_cli import experiment

    with _memory_explained(settings):
        return experiment.build(settings).fit()["final_accuracy"]  # what a sweeper would optimise


@contextmanager
def _memory_explained(settings: RunSettings) -> Iterator[None]:
    """A failed allocation becomes a message that says where, and what would make it fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        from grpo_cli.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        from grpo_cli.profile.command import out_of_memory

        raise out_of_memory(settings, error) from error


def _evaluate(cfg: DictConfig) -> Any:
    settings = _checked_eval(cfg)
    from grpo_cli import experiment

    result = experiment.evaluate_model(settings)
    _print_table(result.metrics)
    typer.echo(f"every answer: {settings.run_dir}/samples.jsonl")
    return result.metrics["eval/accuracy"]


def _print_table(metrics: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "value", "95 % interval")
    for name, value in metrics.items():
        low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
        if not name.endswith(("_low", "_high")):
            interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
            table.add_row(name.removeprefix("eval/"), f"{value:.3f}", interval)
    Console().print(table)


def _hand_over(
    command: str,
    arguments: Sequence[str],
    job: Callable[[DictConfig], Any],
    check: Callable[[DictConfig], Any] = lambda cfg: None,
    objective: str = "final_accuracy",
) -> None:
    """Run `job` on what Hydra makes of the arguments; in a sweep, once for every combination that `check` lets through.

    A sweeper optimises the `objective` in a run's `summary.json`.
    """
    from grpo_cli.sweep.launcher import sweep_of

    with _refusals():
        arguments, sweep = sweep_of(command, *sorted_out(arguments), check, objective)
    called = _Called(job, sweep)
    with _said_in_our_words(command, arguments, called), _command_line(command, arguments):
        _hydra(command, called)
    if called.refused:
        _fail(called.refused)
    if sweep.outcomes:
        _end(sweep, min(sweep.counts()["failed"], MOST_FAILED))


def _hydra(command: str, task: _Called) -> None:
    """Let Hydra read the command line, and compose a run or a sweep of it."""
    import hydra
    from omegaconf import OmegaConf

    from grpo_cli.config.choices import choices, config_dir, groups_of

    def offered() -> str:  # in the help; Hydra's own list would hold what choices only build on
        return "".join(f"{group}: {', '.join(choices(group))}\n" for group in sorted(groups_of(command)))

    OmegaConf.register_new_resolver("choices", offered, replace=True)
    # Cached, so that a run names one folder however often its config is read, and a sweep's jobs share theirs.
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=command)(task)()


class _Called:
    """What Hydra calls: the job, with a word on which one it is in a sweep, and a note of what became of it.

    Our launcher calls nothing but starts processes: it needs only the `sweep`.
    """

    def __init__(self, job: Callable[[DictConfig], Any], sweep: Sweep) -> None:
        self.sweep = sweep
        self.started = False
        self.refused: UserError | None = None
        self._job = job

    def __call__(self, cfg: DictConfig) -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        self.started = True
        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        if in_sweep:
            typer.echo(f"job {HydraConfig.get().job.num}: {' '.join(HydraConfig.get().overrides.task)}")
        try:
            return self._job(cfg)
        except UserError as error:
            if in_sweep:
                raise
            self.refused = error  # raised through Hydra, it would come with Hydra's own words
            return None


@contextmanager
def _said_in_our_words(command: str, arguments: Sequence[str], called: _Called) -> Iterator[None]:
    """A mistake ends with its message, a stopped sweep with how to go on with it; errors of ours pass."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    sweep = called.sweep
    try:
        yield
    except UserError as error:
        _fail(error)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        if called.started or sweep.outcomes:
            raise
        _fail(explained(error, command, arguments))
    except KeyboardInterrupt:
        if not sweep.outcomes:
            raise
        _end(sweep, 130)
    except ValueError:
        if not sweep.outcomes or sweep.counts()["done"]:
            raise  # without a single result a sweeper has no best one, and says so in its own way


def _end(sweep: Sweep, code: int) -> NoReturn:
    """Say how a sweep ended, and end with this exit code; or as a mistake, if none of its jobs could be run."""
    typer.echo(sweep.told())
    if sweep.counts()["skipped"] == len(sweep.outcomes):
        reasons = dict.fromkeys(str(status.reason) for status in sweep.outcomes.values())
        _fail("\n".join(["no combination can be run:", *reasons]))
    raise typer.Exit(code)


@contextmanager
def _command_line(command: str, arguments: Sequence[str]) -> Iterator[None]:
    """What Hydra finds around it: the arguments, the folder of a user's modules, and to raise errors to us."""
    argv, path, full_error = sys.argv, list(sys.path), os.environ.get("HYDRA_FULL_ERROR")
    flags, overrides = sorted_out(arguments)
    sys.argv = [f"grpo {command}", *flags, *overrides]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file there hides an installed module
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        _fail(error)


def _fail(error: UserError | str) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)
