"""Help pages and `grpo explain`: both repeat what stands in `conf/`, setting by setting."""

from __future__ import annotations

import itertools
import re

import pytest
from typed import grpo, refused

from grpo_cli.cli.explain import explain
from grpo_cli.cli.mistakes import listed
from grpo_cli.config.choices import Setting, choices, parts_of, read_choice, read_command, read_conf
from grpo_cli.metric_names import METRICS

GROUPS = sorted({*parts_of("train"), *parts_of("eval")})
BASE = """# What the base is for.

# How far.
far: 1
# Both ends.
low: 0.1
high: 0.9
"""
CHOICE = """# What the choice is:
# in two lines.
defaults:
  - _base
  - other: mapping

_target_: some.thing
# Farther.
far: 2
low: 1.0e-3
parts:
  # Of the whole.
  first: "a: b"
  second: ~
  lines: [x]
"""


def said(*arguments: str) -> str:
    result = grpo(*arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def test_a_file_s_comments_are_read_along_with_those_of_its_bases(tmp_path):
    (tmp_path / "_base.yaml").write_text(BASE)
    (tmp_path / "choice.yaml").write_text(CHOICE)
    found = read_conf(tmp_path / "choice.yaml")
    assert (found.about, found.values["_target_"]) == ("What the choice is: in two lines.", "some.thing")
    assert found.settings == {
        "far": Setting("2", "Farther.", "choice.yaml:9"),
        "low": Setting("1.0e-3", "Both ends.", "choice.yaml:10"),
        "high": Setting("0.9", "Both ends.", "_base.yaml:7"),
        "parts": Setting("", "", "choice.yaml:11"),
        "parts.first": Setting('"a: b"', "Of the whole.", "choice.yaml:13"),
        "parts.second": Setting("~", "Of the whole.", "choice.yaml:14"),
        "parts.lines": Setting("[x]", "Of the whole.", "choice.yaml:15"),
    }


def test_every_command_and_choice_says_what_it_is_and_what_each_of_its_settings_is():
    files = [read_command(command) for command in ("train", "eval", "profile")]
    for file in files + [read_choice(group, choice) for group in ("model", *GROUPS) for choice in choices(group)]:
        assert file.about and [one.place for one in file.settings.values() if one.value and not one.comment] == []


def test_a_help_page_has_every_setting_in_a_line_with_its_value_and_its_comment() -> None:
    lines = said("train", "--help").splitlines()
    files = [("", read_command("train"))]
    headings = filter(None, (re.match(r"(\w+)=(\w+): ", line) for line in lines))
    files += [(f"{heading[1]}.", read_choice(heading[1], heading[2])) for heading in headings]
    rows = [(f"{prefix}{key}={one.value}", one) for prefix, file in files for key, one in file.settings.items()]
    told = {left: one.comment for left, one in rows if one.value}
    found = {left: [line for line in lines if line.startswith(f"{left}  ") or line == left] for left in told}
    assert [left for left, having in found.items() if len(having) != 1] == [] and len(told) > 60
    above = {line: before for before, line in itertools.pairwise(lines)}
    for left, (line,) in found.items():  # a comment that is that of the line above is not repeated
        assert line.endswith(told[left]) or (line == left and above[line] and told[left]), left


def test_a_help_page_is_of_the_choices_that_stand_beside_it() -> None:
    page = said("train", "sampler=infinite", "-m", "seed=1,2", "experiment=pods_arithmetic", "--help")
    assert "sampler=infinite: " in page and "sampler.slots=null" in page and page.count("\nn=64 ") == 2
    assert "\nmodel=smollm2_135m: " in said("train", "experiment=own_smollm2", "--help")
    assert "loss=" not in said("eval", "--help") and "\nprofile.plan_only=false " in said("profile", "--help")
    assert "did you mean grpo?" in refused("train", "loss=grop", "--help")


EXPLAINED = {
    "sampler": ("\nsampler=full      (the default) All rollouts", "conf/sampler/"),
    "sampler=infinite": ("\nsampler.slots=null  ", "(conf/sampler/infinite.yaml)"),
    "search": ("search=none", "(the default)"),
    "experiment=pods_arithmetic": ("\ntrain.prompts=8 ",),
    "loss.clip_high": ("loss.clip_high=0.2 ", "How far it may rise", "loss.clip_high=4.0 ", "loss.clip_high=0.28"),
    "loss.aggregation": ("loss.aggregation=token ", "conf/loss/dapo.yaml:"),
    "eval.problems": ("eval.problems=auto", "conf/_run.yaml:"),
    "maxvar": ("downsample=maxvar: ",),
    "pass@7": ("eval/pass@<k>:",),
    "eval/pass@7": ("eval/pass@<k>:",),
    "eval/pass@<k>": ("eval/pass@<k>:",),
    "advantage.beta": ("advantage.beta=",),
    "beta": ("loss.kl_coef here",),
}


@pytest.mark.parametrize(("word", "parts"), EXPLAINED.items(), ids=list(EXPLAINED))
def test_a_word_is_explained_by_what_stands_in_the_files(word: str, parts: tuple[str, ...]) -> None:
    text = said("explain", word)
    assert [part for part in parts if part not in text] == []
    assert word not in ("loss.clip_high", "advantage.beta") or "(TRL, verl)" not in text, "a setting of ours"


def test_every_word_that_a_person_may_meet_is_explained(capsys: pytest.CaptureFixture[str]):
    """Choices, settings, metrics and their parts, concepts, and the words of others."""
    words = [choice for group in GROUPS for choice in choices(group)]
    words += [key.rpartition(".")[2] for key in read_command("train").settings]
    words += [part for name in METRICS for part in (name, *name.split("/")) if "<" not in part]
    others = (word for row in listed("elsewhere") for word in (*row["trl"], *row["verl"]))
    for word in {*words, *listed("concepts"), *others}:
        explain(word)
        assert capsys.readouterr().out, word


def test_an_unknown_word_gets_the_nearest_one():
    for word, message in (("optim.lrr", "did you mean optim.lr?"), ("mismatch/kll", "did you mean mismatch/kl?")):
        assert message in refused("explain", word)
    assert "zzzzzzz is no group, choice, setting or metric\n" in refused("explain", "zzzzzzz")
