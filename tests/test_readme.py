"""What the pages show can be looked up: their links, commands, choices, settings, parts and the lines to copy."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from made import composed

from grpo_cli.config.choices import choices, groups_of, is_experimental, read_command
from grpo_cli.config.prepare import build_and_check
from grpo_cli.support.errors import UserError

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "grpo_cli" / "docs"
PAGES = [*ROOT.glob("*.md"), *(page for of in ("grpo_cli", "conf", "scripts") for page in (ROOT / of).rglob("*.md"))]
# Where they stand they need a file or a folder that is not here.
ELSEWHERE = ("resume=", "checkpoint=", "hydra", "experiment=mine", "experiment=sweep", "downsample=middle")
FILE = re.compile(r"^    # (\w+\.py)\n(?:(?!    grpo )(?:    .*)?\n)*", re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def docs(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def commands() -> list[tuple[str, ...]]:
    """Every `grpo <command> ...` of an indented line or between backticks, without its comment and flags."""
    found = set()
    for page in PAGES:
        for line in re.findall(r"(?:^    |`)grpo ([a-z][^`#\n]*)", page.read_text(), re.MULTILINE):
            line = re.sub(r"<[^>]*>|\.\.\.", "somewhere", line.rstrip("\\ "))
            assert not subprocess.run(["bash", "-n", "-c", f"grpo {line}"]).returncode, line
            found.add(tuple(word for word in shlex.split(line) if not word.startswith("-")))
    return sorted(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_link_and_every_file_that_is_named_is_there(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert link.startswith("http") or target.exists(), link
        if heading and target.suffix == ".md":
            assert heading in map(anchor, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), link
    for file in re.findall(r"`((?:\w+/)+\w+\.(?:py|sh|yaml))`", page.read_text()):
        assert any((folder / file).is_file() for folder in (ROOT, ROOT / "grpo_cli", page.parent)), file


@pytest.mark.parametrize("group", sorted({*groups_of("train"), *groups_of("eval")}))
def test_the_settings_page_lists_the_choices_of_a_group_its_default_first(group):
    (row,) = re.findall(rf"^\| `{group}` \|(.*)\|$", docs("settings"), re.MULTILINE)
    core, _, experimental = row.partition("experimental:")
    names = {experiment: re.findall(r"`(\w+)`", cell) for experiment, cell in ((False, core), (True, experimental))}
    for experiment, named in names.items():
        assert sorted(named) == sorted(one for one in choices(group) if is_experimental(group, one) is experiment)
    assert names[False][0] == {**read_command("eval").choices, **read_command("train").choices}[group]


def first_of(override: Override) -> str:
    """A word of a sweep as its first job gets it."""
    if not override.is_sweep_override():
        return str(override.input_line)
    value = override.value()
    first = value.start if isinstance(value, IntervalSweep) else next(iter(override.sweep_string_iterator()))
    return f"{override.key_or_group}={first}"


@pytest.mark.parametrize("name", ["train", "eval", "profile"])
def test_the_settings_of_every_command_can_be_read(name, tmp_path, monkeypatch):
    for page in PAGES:  # the Python files that they show, by the name in their first line
        for found in FILE.finditer(page.read_text()):
            (tmp_path / found[1]).write_text(textwrap.dedent(found[0]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words in (words for command, *words in commands() if command == name):
        here = [word for word in words if "=" in word and not word.startswith(ELSEWHERE)]
        given = [first_of(override) for override in OverridesParser.create().parse_overrides(here)]
        try:
            build_and_check(composed(*given, command=name))
        except (UserError, HydraException) as error:
            pytest.fail(f"grpo {name} {shlex.join(words)}: {error}")


def test_the_lines_for_a_notebook_train(tmp_path, monkeypatch):
    text = docs("extending").partition("## From a notebook")[2]
    code = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    small = '"n=2", "train.steps=1", "train.prompts=1", "eval.every=0", "logger=jsonl", '
    monkeypatch.chdir(tmp_path)
    ran: dict[str, object] = {}
    exec(code.replace('"n=8", "train.steps=20", ', small), ran)
    assert ran["summary"]["status"] == "completed" and (tmp_path / "outputs" / "notebook" / "summary.json").is_file()
