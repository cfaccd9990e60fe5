"""Help pages and `grpo explain`: both repeat what stands in `conf/`, setting by setting."""

from __future__ import annotations

import itertools
import re

import pytest
from typed import grpo, refused

from grpo_cli.cli.explain import concepts, explain
from grpo_cli.config.choices import choices, config_dir, parts_of
from grpo_cli.config.comments import Setting, flow, read_choice, read_conf
from grpo_cli.config.elsewhere import rows
from grpo_cli.metrics import METRICS

GROUPS = sorted({*parts_of("train"), *parts_of("eval")})
BASE = """# What the base is for.
# How far.
far: 1
# Both ends.
low: 0.1
high: 0.9
# Left as it is.
kept: [a, b]
"""
CHOICE = """# What the choice is:
# in two lines.
defaults:
  - _base
  - _self_
  - other: mapping

_target_: some.thing
# Farther.
far: 2
low: 1.0e-3
parts:
  # Of the whole.
  first: "a: b"
  second: ~
  lines:
    - x
    - y
"""


def said(*arguments: str) -> str:
    result = grpo(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def test_a_file_s_comments_are_read_along_with_those_of_its_bases(tmp_path):
    (tmp_path / "_base.yaml").write_text(BASE)
    (tmp_path / "choice.yaml").write_text(CHOICE)
    found = read_conf(tmp_path / "choice.yaml")
    assert (found.about, found.builds) == ("What the choice is: in two lines.", "some.thing")
    assert found.settings == {
        "far": Setting("2", "Farther.", "choice.yaml:10"),
        "low": Setting("0.001", "Both ends.", "choice.yaml:11"),
        "high": Setting("0.9", "Both ends.", "_base.yaml:6"),
        "kept": Setting("[a, b]", "Left as it is.", "_base.yaml:8"),
        "parts": Setting("", "", "choice.yaml:12"),
        "parts.first": Setting("'a: b'", "Of the whole.", "choice.yaml:14"),
        "parts.second": Setting("null", "Of the whole.", "choice.yaml:15"),
        "parts.lines": Setting("[x, y]", "Of the whole.", "choice.yaml:16"),
    }
    base = read_conf(tmp_path / "_base.yaml")
    assert (base.about, base.settings["far"].comment) == ("What the base is for.", "How far.")


@pytest.mark.parametrize("group", ["model", *GROUPS])
def test_every_choice_says_what_it_is_and_what_each_of_its_settings_is(group):
    for choice in choices(group):
        told = read_choice(group, choice)
        silent = [key for key, setting in told.settings.items() if setting.value and not setting.comment]
        assert told.about and not silent, f"conf/{group}/{choice}.yaml says nothing of {silent}"


@pytest.mark.parametrize("command", ["train", "eval", "profile"])
def test_every_setting_of_a_command_is_commented(command):
    settings = read_conf(config_dir() / f"{command}.yaml").settings
    assert [key for key, setting in settings.items() if setting.value and not setting.comment] == []


@pytest.mark.parametrize("value", [None, True, 0.5, 1e-8, "", "auto", "a: b", "a\nb", [1, "x"], {"k": 1}, "${n}"])
def test_a_value_is_one_line_that_reads_back(value):
    import yaml

    assert "\n" not in flow(value) and yaml.safe_load(flow(value)) == value


def test_a_help_page_has_every_setting_in_a_line_with_its_value_and_its_comment() -> None:
    lines = said("train", "--help").splitlines()
    told = {f"{key}={one.value}": one.comment for key, one in read_conf(config_dir() / "train.yaml").settings.items()}
    for heading in filter(None, (re.match(r"(\w+)=(\w+): ", line) for line in lines)):
        below = read_choice(heading[1], heading[2]).settings
        told |= {f"{heading[1]}.{key}={one.value}": one.comment for key, one in below.items()}
    told = {left: comment for left, comment in told.items() if not left.endswith("=")}
    found = {left: [line for line in lines if line.startswith(f"{left}  ") or line == left] for left in told}
    assert [left for left, having in found.items() if len(having) != 1] == [] and len(told) > 60
    above = {line: before for before, line in itertools.pairwise(lines)}
    for left, (line,) in found.items():  # a comment that is that of the line above is not repeated
        assert line.endswith(told[left]) or (line == left and above[line] and told[left]), left


def test_a_help_page_is_of_the_choices_that_stand_beside_it() -> None:
    page = said("train", "sampler=infinite", "-m", "seed=1,2", "experiment=pods_arithmetic", "--help")
    assert "sampler=infinite: " in page and "sampler.slots=null" in page and "\nn=64 " in page
    assert "loss=" not in said("eval", "--help") and "\nprofile.plan_only=false " in said("profile", "--help")
    assert "did you mean grpo?" in refused("train", "loss=grop", "--help")


def test_a_group_is_explained_by_its_choices_and_a_choice_by_its_settings():
    group = said("explain", "sampler")
    assert "\n  sampler=full      (the default) All rollouts" in group and "conf/sampler/" in group
    choice = said("explain", "sampler=infinite")
    assert choice.startswith("sampler=infinite: Continuous sampling") and "\n  sampler.slots=null  " in choice
    assert "conf/sampler/infinite.yaml and builds grpo_cli.engine.samplers.Infinite." in choice
    assert "  train.prompts=8 " in said("explain", "experiment=pods_arithmetic")


def test_a_setting_is_explained_with_its_value_wherever_it_has_one():
    clip = said("explain", "loss.clip_high").splitlines()
    assert clip[0] == "loss.clip_high: How far it may rise above 1."
    assert any(line.startswith("  0.2 ") and "loss=grpo: conf/loss/" in line for line in clip)
    assert any(line.startswith("  4.0 ") and "loss=cispo: conf/loss/cispo.yaml:" in line for line in clip)
    assert "grpo train, grpo eval, grpo profile: conf/_run.yaml:" in said("explain", "eval.problems")
    assert "model.lora.rank: " in said("explain", "lora") and "every model" in said("explain", "lora")


def test_a_word_may_be_a_part_of_a_name_a_concept_or_another_program_s():
    assert said("explain", "epochs") == said("explain", "train.epochs") == said("explain", "train.epochs=4")
    assert said("explain", "maxvar") == said("explain", "downsample=maxvar")
    assert "loss/kl " in said("explain", "kl") and "mismatch/kl " in said("explain", "kl")
    assert "eval/pass@7  Probability that at least one of k" in said("explain", "eval/pass@7")
    both = said("explain", "group", "num_generations")
    assert both.startswith("group: The n rollouts of one prompt") and "\n\nnum_generations" in both
    assert "is n here" in both and "is loss.kl_coef here" in said("explain", "beta")


def every_word() -> list[str]:
    """What a person may meet: choices, settings, metrics and their parts, concepts, and the words of others."""
    words = [choice for group in GROUPS for choice in choices(group)]
    words += [key.rpartition(".")[2] for key in read_conf(config_dir() / "train.yaml").settings]
    words += [part for name in METRICS for part in (name, *name.split("/")) if "<" not in part]
    return sorted({*words, *concepts(), *(word for row in rows() for word in (*row["trl"], *row["verl"]))})


def test_every_word_that_a_person_may_meet_is_explained(capsys: pytest.CaptureFixture[str]):
    for word in every_word():
        explain(word)
        assert capsys.readouterr().out, word


def test_a_concept_names_settings_and_groups_that_exist():
    keys = [key for group in (*GROUPS, "model") for key in (group, *keys_of(group))]
    keys += read_conf(config_dir() / "train.yaml").settings
    keys += [name for name in METRICS] + ["resume"]
    for word, text in concepts().items():
        named = re.findall(r"\b(?:[a-z]+\.[a-z_.]+[a-z]|[a-z]+/[a-z_]+|[a-z]+(?==))", text)
        assert [name for name in named if name not in keys] == [], word


def keys_of(group: str) -> list[str]:
    return [f"{group}.{key}" for choice in choices(group) for key in read_choice(group, choice).settings]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lrr", "did you mean optim.lr?"),
        ("mismatch/kll", "did you mean mismatch/kl?"),
        ("loss=grop", "a2po (experimental), echo (experimental), mu_grpo (experimental); did you mean grpo?"),
        ("zzzzzzz", "zzzzzzz is no group, choice, setting or metric\n"),
    ],
)
def test_an_unknown_word_gets_the_nearest_one(word, message):
    assert message in refused("explain", word)


def test_a_page_wraps_in_a_terminal_below_its_comments(monkeypatch: pytest.MonkeyPatch):
    import io

    from rich.console import Console

    from grpo_cli.cli import help as page

    screen = io.StringIO()
    monkeypatch.setattr(page.terminal, "console", lambda: Console(file=screen, force_terminal=True, width=40))
    page.say_rows([("a=1", "one two three four five six seven eight"), ("a.longer=2", "x"), ("b=3", "x")])
    assert screen.getvalue().splitlines() == [
        "a=1         one two three four five six",
        "            seven eight",
        "a.longer=2  x",
        "b=3",
    ]


def test_words_are_found_in_any_case_and_after_an_unknown_one():
    assert "zzzzzzz" in refused("explain", "zzzzzzz", "PODS", "Batch_Size")
    assert "pods: " in said("explain", "PODS") and "batch size: " in said("explain", "Batch_Size")
