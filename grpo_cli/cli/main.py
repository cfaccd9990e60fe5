"""The `grpo` program: Typer picks the command, Hydra composes its settings, and the command gets a typed value.

A user's mistake ends in one message and exit code 2; anything else is our bug, with its traceback and exit code 1.
Only Typer is imported at the top, so that help and completion are fast.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from grpo_cli import __version__
from grpo_cli.support.errors import UserError, closest, gathered
from grpo_cli.support.formatting import legible
from grpo_cli.support.processor import set_variables
from grpo_cli.support.terminal import outlive_the_reader


def fail(error: UserError | str) -> NoReturn:
    """End the program as for every mistake: one message and exit code 2."""
    typer.echo(f"error: {legible(str(error))}", err=True)
    sys.exit(2)


class _Group(TyperGroup):
    """The commands; a mistake ends in its message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            fail(error)
        except PermissionError as error:
            fail(f"{error.filename} cannot be read: {error.strerror}")
        except RuntimeError as error:  # of pathlib
            if "home directory" not in str(error):
                raise
            fail("a path begins with ~ and the name of no user: write the folder in full")


app = typer.Typer(
    cls=_Group,
    help="Grouped reinforcement learning (GRPO) of language models when memory is short.",
    epilog="grpo COMMAND --help lists its choices, its settings and examples",
    no_args_is_help=True,
    rich_markup_mode=None,  # importing rich takes longer than all the rest of --help
    pretty_exceptions_enable=False,
)


def offered(ctx: Any, incomplete: str) -> list[str]:
    """Return completions of the word being typed: `sampler=in` to `sampler=infinite`.

    Bash splits words at `=`: then `incomplete` is what follows it, and `words` ends with the group (and `=`, once
    something follows).
    """
    from grpo_cli.config.choices import choices, groups_of

    groups = groups_of(ctx.info_name)
    before = [word for word in ctx.params.get("overrides") or () if word != "="]
    words = [f"{group}={choice}" for group in groups for choice in choices(group)]
    if before and before[-1] in groups:
        words = list(choices(before[-1]))
    return [word for word in words if word.startswith(incomplete)]


def _add(name: str, about: str) -> None:
    """Add a command that composes settings: its words are Hydra's overrides."""

    def run(
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[key=value ...]", autocompletion=offered)
        ] = None,
        many: Annotated[bool, typer.Option("--multirun", "-m", help="A sweep.")] = False,
        cfg: Annotated[str | None, typer.Option("--cfg", "-c", help="job: print the settings.")] = None,
        own: Annotated[Path | None, typer.Option("--config-dir", help="A folder of your own choices.")] = None,
        helps: Annotated[bool, typer.Option("--help", "-h", help="List choices, settings and examples.")] = False,
    ) -> None:
        if own is not None and not own.is_dir():
            raise UserError(f"--config-dir={own} is not a folder: name the one that holds your choices")
        from grpo_cli.config.choices import add_own

        add_own(own)
        if cfg not in (None, "job"):
            raise UserError(f"--cfg={cfg}: type --cfg job, which prints the settings")
        if helps:
            from grpo_cli.cli.explain import print_help

            print_help(name, [word for word in overrides or [] if "," not in word])
        else:
            from grpo_cli.cli.hydra_run import hand_over

            hand_over(name, overrides or [], many, cfg is not None, own)

    # A setting that is typed as an option is a word, which `mistakes` answers.
    app.command(name, help=about, add_help_option=False, context_settings={"ignore_unknown_options": True})(run)


_add("train", "Train a model with groups of rollouts.")
_add("eval", "Measure a checkpoint's accuracy and pass@k.")
_add("profile", "Measure and predict where memory and time go.")


def main() -> None:
    """Run the `grpo` program."""
    # Where the locale is not UTF-8, characters that cannot be printed become question marks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    outlive_the_reader()
    try:
        os.getcwd()
        set_variables()
    except FileNotFoundError:
        fail("the current directory no longer exists; change into another one")
    except UserError as error:
        fail(error)
    app(prog_name="grpo")


@app.callback(invoke_without_command=True)
def grpo(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"grpo {__version__}")
        raise typer.Exit()


@app.command(epilog="an example is: grpo report outputs/train")
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, sweep folders, or any folder that contains them.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write; else below outputs/report.")] = None,
    target: Annotated[float | None, typer.Option(help="The accuracy to reach. Default: 95% of the highest.")] = None,
    metric: Annotated[str, typer.Option(help="Which accuracy: greedy, or sampled as eval/pass@1.")] = "eval/accuracy",
    base: Annotated[str | None, typer.Option(help="The arm to compare with, such as n=8. Default: the first.")] = None,
) -> None:
    """Compare runs: a table here, plots and all numbers in a folder."""
    from grpo_cli.report.make import make

    make(folders, out, target, metric, base)


@app.command(epilog="an example is: grpo show outputs/train/my_run")
def show(
    folder: Annotated[Path, typer.Argument(help="A run or evaluation folder.")],
    step: Annotated[int | None, typer.Option(help="Which step. Default: the last one.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Only the prompt with this id.")] = None,
    best: Annotated[int, typer.Option(min=0, help="Only this many, of the highest rewards.", show_default=False)] = 0,
    worst: Annotated[int, typer.Option(min=0, help="Only this many, of the lowest rewards.", show_default=False)] = 0,
) -> None:
    """Show a step's completions, and why each was kept or dropped."""
    from grpo_cli.cli.show import show_rollouts

    show_rollouts(folder, step, prompt, best, worst)


@app.command("ls", epilog="an example is: grpo ls outputs")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where to look for runs, subfolders included.")] = Path("outputs"),
) -> None:
    """List runs, newest first: status, settings and accuracy."""
    from grpo_cli.cli.ls import list_runs as ls

    ls(folder)


@app.command(epilog="an example is: grpo explain sampler kl train.epochs", no_args_is_help=True)
def explain(
    words: Annotated[list[str], typer.Argument(help="Such as sampler, maxvar, train.epochs, kl, group.")],
) -> None:
    """Explain a choice, setting, metric or concept."""
    from grpo_cli.cli.explain import explain as explain_word

    unknown = list[str]()
    for place, word in enumerate(words):
        typer.echo("\n" * (place > 0), nl=False)
        with gathered(unknown):
            explain_word(word)
    if unknown:
        raise UserError("\n".join(unknown))


@app.command(epilog="an example is: grpo export outputs/train/my_run my_model")
def export(
    run: Annotated[Path, typer.Argument(help="A run, one of its checkpoints, or a folder of adapters.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    merge: Annotated[bool, typer.Option("--merge", help="Make adapters part of the weights of their base.")] = False,
    base: Annotated[str | None, typer.Option(help="The adapters' base: a folder or hub id. Else the run's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16. Default: as trained.")] = None,
) -> None:
    """Write a run's model for other programs, with its card."""
    from grpo_cli.cli.export import export as export_run

    place = export_run(run, out, merge, base, dtype)
    typer.echo(f"{place} holds the model of {run}")


@app.command(epilog="an example is: grpo init my_experiment")
def init(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Write an experiment of your own to start from."""
    from grpo_cli.runs.files import folder_written_atomically, place_of_new

    place, template = place_of_new(folder), Path(__file__).with_name("template")
    with folder_written_atomically(place) as written:
        shutil.copytree(template, written, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    commands = re.findall(r"^    (.*)$", (place / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    typer.echo("\n".join([f"cd {shlex.quote(str(folder))}", *commands]))


@app.command(epilog="an example is: grpo docs quickstart")
def docs(page: Annotated[str | None, typer.Argument(help="Which page. Default: the names of all.")] = None) -> None:
    """Print a page about grpo-cli."""
    pages = {file.stem: file.read_text(encoding="utf-8") for file in (Path(__file__).parents[1] / "docs").glob("*.md")}
    if page not in (None, *pages):
        fail(f"there is no page {page}{closest(str(page), pages)}; grpo docs lists them")
    first = ("quickstart", "concepts", "cookbook", "settings", "extending")
    typer.echo(pages[page] if page else "\n".join([*first, *sorted(pages.keys() - {*first})]))
