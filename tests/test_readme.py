"""What the README files say that can be looked up: their links, commands, choices, rooms and the lines to copy."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from test_architecture import ROWS

from grpo_cli.cli.main import app
from grpo_cli.config.check import check, check_eval
from grpo_cli.config.choices import choices, config_dir, defaults_of, groups_of, is_experimental, parts_of
from grpo_cli.config.comments import read_choice, read_conf
from grpo_cli.config.compose import read_settings
from grpo_cli.config.elsewhere import meant_by
from grpo_cli.config.elsewhere import rows as other_words
from grpo_cli.settings import EvalRunSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import UserError

ROOT = Path(__file__).parent.parent
FRONT = ROOT / "README.md"
READMES = [FRONT, ROOT / "grpo_cli" / "README.md", *(ROOT / "conf").glob("*.md"), *(ROOT / "scripts").rglob("*.md")]
FOR_BASH = [FRONT, ROOT / "conf/README.md", ROOT / "scripts/README.md", ROOT / "scripts/examples/first_run.ipynb"]
PICTURES = ("train", "pods", "slots")
KINDS = {"train": RunSettings, "eval": EvalRunSettings, "profile": ProfileRunSettings}
# Where they stand they need a file or a folder that is not here.
ELSEWHERE = ("resume=", "checkpoint=", "hydra.", "hydra/")


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links(file: Path) -> Iterator[str]:
    yield from (link for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()) if not link.startswith("http"))


def commands() -> list[tuple[str, ...]]:
    """Every `grpo <command> ...` of an indented line or between backticks, without its comment and flags."""
    found = set()
    for file in READMES:
        for line in re.findall(r"(?:^    |`)grpo ([a-z][^`#\n]*)", file.read_text(), re.MULTILINE):
            words = shlex.split(re.sub(r"<[^>]*>|\.\.\.", "somewhere", line))
            found.add(tuple(word for word in words if not word.startswith("-")))
    return sorted(found)


def test_every_command_line_is_one_that_bash_can_read():
    shown = r"(?:^(?:    .*\n)+|(?<=`)grpo [^`\n]*)"
    texts = [block for file in FOR_BASH for block in re.findall(shown, file.read_text(), re.MULTILINE)]
    for text in texts:
        code = re.sub(r"<[^>\n]*>|\.\.\.", "somewhere", textwrap.dedent(text))
        if not re.search(r"^ *(def|return) ", code, re.MULTILINE):  # of Python
            found = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
            assert not found.stderr, text


def row_of(group: str) -> str:
    """The last cell of a group's row."""
    (row,) = re.findall(rf"^\| `{group}` \|.*\|(.*)\|$", FRONT.read_text(), re.MULTILINE)
    return row


def test_the_front_page_is_read_in_one_go():
    assert len(FRONT.read_text().splitlines()) <= 150


@pytest.mark.parametrize("file", READMES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_link_leads_to_a_file_and_a_heading(file):
    for link in links(file):
        name, _, heading = link.partition("#")
        target = (file.parent / name).resolve() if name else file
        assert target.exists(), link
        if heading:
            assert heading in map(anchor, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), link


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_small(name):
    assert (ROOT / "scripts" / "figures" / f"{name}.svg").stat().st_size < 60_000


@pytest.mark.parametrize("group", sorted({*groups_of("train"), *groups_of("eval")}))
def test_the_front_page_lists_the_choices_of_a_group_its_default_first(group):
    named = re.findall(r"`(\w+)`", row_of(group))
    assert sorted(named) == sorted(choices(group))
    assert {*re.findall(r"`(\w+)`", row_of(group).partition("experimental:")[2])} == {
        choice for choice in choices(group) if is_experimental(group, choice)
    }
    assert named[0] == {**defaults_of("eval"), **defaults_of("train")}[group]


def test_every_command_of_the_program_stands_on_the_front_page():
    named = {str(command.name or command.callback.__name__) for command in app.registered_commands}
    assert named == set(re.findall(r"^\| `grpo (\w+)", FRONT.read_text(), re.MULTILINE))


def first_of(override: Override) -> str:
    """A word of a sweep as its first job gets it."""
    if not override.is_sweep_override():
        return str(override.input_line)
    value = override.value()
    first = value.start if isinstance(value, IntervalSweep) else next(iter(override.sweep_string_iterator()))
    return f"{override.key_or_group}={first}"


@pytest.mark.parametrize("name", KINDS)
def test_the_settings_of_every_command_can_be_read(name, tmp_path, monkeypatch):
    """All are composed. A check tries its rules, so that of each set of choices only the longest is checked."""
    (rule,) = re.findall(r"^    # my_rules\.py.*?\n(.*?)\n\n", FRONT.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_rules.py").write_text(textwrap.dedent(rule))
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "samples.jsonl").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    checked: set[frozenset[str]] = set()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        for words in sorted((words for command, *words in commands() if command == name), key=len, reverse=True):
            here = [word for word in words if "=" in word and not word.startswith(ELSEWHERE)]
            given = [first_of(override) for override in OverridesParser.create().parse_overrides(here)]
            chosen = frozenset(word for word in given if word.partition("=")[0] in groups_of(name))
            try:
                settings = read_settings(compose(name, [*given, "run_dir=somewhere"]), KINDS[name])
                if chosen not in checked:
                    check_eval(settings) if name == "eval" else check(settings)
            except (UserError, HydraException) as error:
                pytest.fail(f"grpo {name} {shlex.join(words)}: {error}")
            checked.add(chosen)


def test_the_words_of_trl_and_verl_stand_in_the_settings_page():
    cells = [
        [", ".join(f"`{w}`" for w in words) for words in (row["trl"], row["verl"], (row["ours"],))]
        for row in other_words()
    ]
    table = "\n".join(["| TRL | verl | here |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells)])
    assert f"\n\n{table}\n\n" in (ROOT / "conf" / "README.md").read_text()


@pytest.mark.parametrize(("name", "words"), [("from_trl", r"^    (\w+)="), ("from_verl", r"^    ([\w.]+)=")])
def test_each_word_of_their_scripts_is_translated_on_its_page(name, words):
    page = (ROOT / "conf" / f"{name}.md").read_text()
    (script,) = re.findall(r"^```(?:python|bash)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    rows = "\n".join(re.findall(r"^\| .*$", page, re.MULTILINE))
    assert len(found := re.findall(words, script, re.MULTILINE)) > 10
    for word in found:
        known, (*_, last) = meant_by(word), word.split(".")
        (row,) = [row for row in rows.splitlines() if re.search(rf"[`.]{last}`", row.split("|")[1])] or [""]
        assert row, f"{word} stands in no row"
        assert known is None or known.partition("=")[0] in row.split("|", 2)[2], f"{word} is {known}"


def test_what_the_words_of_trl_and_verl_come_to_is_there():
    keys = {
        key for group in ("model", *parts_of("train")) for choice in choices(group) for key in keys_of(group, choice)
    }
    keys |= {*read_conf(config_dir() / "train.yaml").settings, "hydra.run.dir"}
    for row in other_words():
        group, _, choice = row["ours"].partition("=")
        assert choice in choices(group) if choice else row["ours"] in keys, row
    theirs = [word for row in other_words() for word in {*row["trl"], *row["verl"]}]
    assert len(theirs) == len(set(theirs)), "each word is of one row"


def keys_of(group: str, choice: str) -> list[str]:
    return [f"{group}.{key}" for key in read_choice(group, choice).settings]


def test_the_rooms_of_the_package_are_those_that_the_test_holds():
    text = (ROOT / "grpo_cli" / "README.md").read_text()
    rows = [set(re.findall(r"`([^`]*)`", row)) for row in re.findall(r"^\| \d+ \| ([^|]*) \|", text, re.MULTILINE)]
    assert [set(" ".join(row).split()) for row in rows] == [set(row.split()) for row in ROWS.strip().splitlines()]


def test_the_lines_for_a_notebook_train(tmp_path, monkeypatch):
    text = (ROOT / "grpo_cli" / "README.md").read_text().partition("## From a notebook")[2].partition("\n## ")[0]
    code = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    small = '"n=2", "train.steps=1", "train.prompts=1", "eval.every=0", "logger=jsonl", '
    monkeypatch.chdir(tmp_path)
    ran: dict[str, object] = {}
    exec(code.replace('"n=8", "train.steps=20", ', small), ran)
    assert ran["summary"]["status"] == "completed" and (tmp_path / "outputs" / "notebook" / "summary.json").is_file()
