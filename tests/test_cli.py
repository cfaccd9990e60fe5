"""The `grpo` program as a person meets it: help, completion, and one short message for what they got wrong."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from typed import done, grpo, json_lines, refused

from grpo_cli import __version__, cli
from grpo_cli.cli import jobs
from grpo_cli.cli.hydra_run import with_checkpoint
from grpo_cli.cli.main import offered
from grpo_cli.cli.mistakes import without_effect
from grpo_cli.config.choices import read_command
from grpo_cli.config.overrides import quoted, value_of
from grpo_cli.runs.record import read_record
from grpo_cli.support.errors import UserError

pytestmark = pytest.mark.usefixtures("elsewhere")


COMPLETION = {"_GRPO_COMPLETE": "complete_bash", "COMP_WORDS": "grpo train sampler=in", "COMP_CWORD": "2"}


@pytest.mark.parametrize(
    ("words", "unneeded", "environment"),
    [
        ("--help", "torch transformers hydra wandb rich yaml", {}),
        ("", "torch transformers hydra wandb rich", COMPLETION),
        ("explain loss.clip_high sampler kl eval/pass@7 beta no_such_word", "torch transformers hydra wandb", {}),
        ("ls .", "torch transformers hydra wandb", {}),
        ("train --help", "torch transformers wandb", {}),
        ("train n=abc", "torch transformers wandb", {}),
        ("eval nowhere", "torch transformers wandb", {}),
    ],
)
def test_what_answers_at_once_loads_no_large_library(words, unneeded, environment):
    """What does load torch finds that its idle threads are to sleep."""
    program = (
        "import os, sys, contextlib, io\n"
        "from grpo_cli.cli.main import main\n"
        f"sys.argv = ['grpo', *{words.split()}]\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()\n"
        f"print([name for name in {unneeded.split()} if name in sys.modules], os.environ['OMP_WAIT_POLICY'])"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    start = [sys.executable, "-c", program]
    shown = subprocess.run(start, env=clean | environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "[] PASSIVE\n"


@pytest.mark.parametrize(
    ("before", "code", "said"),
    [  # a mathematics library ended the first with a line of its own, the dash the second in a UnicodeEncodeError
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", 2, "the current directory no longer exists"),
        ("cli.app = lambda **words: print('0.2\u20130.4')", 0, "0.2?0.4\n"),
    ],
)
def test_a_folder_that_is_no_more_and_a_screen_that_is_not_utf_8_are_no_traceback(before, code, said):
    program = [sys.executable, "-c", f"import os, grpo_cli.cli.main as cli; {before}; cli.main()"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert ended.returncode == code and said in ended.stdout + ended.stderr


def test_the_version_and_cfg_job_are_printed_and_nothing_runs(elsewhere):
    assert done("--version") == f"grpo {__version__}\n"
    shown = yaml.safe_load(done("train", "n=4", "--cfg", "job", "sampler=micro", "sampler.slots=3"))
    assert (shown["n"], shown["m"], shown["sampler"]["slots"]) == (4, "${n}", 3)
    assert list(elsewhere.iterdir()) == []


REFUSED = {
    "train sampler=ful": ("sampler=ful", "did you mean full?"),
    "train -m sampler=full,ful": ("sampler=ful", "did you mean full?"),
    "train sampler=micro sampler.slot=3": ("sampler.slot ", "did you mean sampler.slots?"),
    "train sampler.slots=3": ("sampler.slots", "sampler=infinite"),
    "train engine=vllm engine.options.cuda_grap=true": ("+engine.options.cuda_grap=",),
    "train task=./rows.jsonl": ("task=./rows.jsonl", "task=jsonl task.path=./rows.jsonl"),
    "train n=[1": ("n=[1",),
    "train --learning_rate 1e-6": ("--learning_rate", "optim.lr=..."),
    "train --config-dir=/dev/null": ("--config-dir=/dev/null",),
    "train seed=0,1": ("seed=0,1", "seed=[0,1]"),
    f"train optim.betas=[0.9,{5000 * '9'}]": ("optim.betas", "digits"),
    "train hydra.run.dir=": ("hydra.run.dir",),
    "train run_dir=null": ("hydra.run.dir=",),
    "train --cfg n=8": ("--cfg job",),
    "train hydra.mode=MULTIRUN": ("add -m",),
    "eval model=hf": ("give model.path=",),
    "train resume=auto": ("resume=auto found no run",),
    "train resume=empty": ("resume=empty is not a run folder",),
    "train resume=sweep": ("with -m",),
    "train -m seed=1,2 hydra.run.dir=a": ("hydra.run.dir=a", "hydra.sweep.dir="),
    "train -m seed=1,2 --cfg job": ("leave -m out",),
    "profile resume=a": ("resume=",),
    "train -m resume=sweep hydra.sweep.dir=empty": ("empty holds no sweep",),
    "eval checkpoint=empty": ("checkpoint=empty holds no complete checkpoint",),
    "eval checkpoint=a,b": ("checkpoint=a,b names several",),
    "eval loss=grpo": ("loss is a setting of grpo train",),
    "eval optim.lr=3": ("optim.lr is a setting of grpo train",),
    "train profile.steps=3": ("profile.steps is a setting of grpo profile",),
    "train -m sampler=micro,infinite sampler.slots=4 optm.lr=1": ("error: optm.lr ",),
    "train sampling.stop=[\\n,a]": ('sampling.stop=["\\n","a"]',),
    "train task=calculator task.turns=-1": ("error: task.turns",),
    "train -m n=0,1 hydra/launcher=basic": ("n=0 must be",),
}


@pytest.mark.parametrize(("arguments", "keys"), REFUSED.items(), ids=[words[:50] for words in REFUSED])
def test_what_a_person_got_wrong_is_one_message_and_exit_code_2(elsewhere, arguments, keys):
    (elsewhere / "empty").mkdir()
    said = refused(*arguments.split())
    assert [key for key in keys if key not in said] == [], said


def test_a_typed_setting_that_another_switches_off_is_named():
    settings = {key: one.value for key, one in read_command("train").settings.items()} | {"resume": None}
    typed = ["n", "optim.ess_reference", "train.warmup_steps", "accept_damage"]
    assert [line.partition(" with ") for line in without_effect(settings, typed)] == [
        ("train.warmup_steps has no effect", " with ", "train.warmup=none"),
        ("optim.ess_reference has no effect", " with ", "optim.ess=none"),
        ("accept_damage has no effect", " with ", "resume=null"),
    ]
    assert [*without_effect({**settings, "optim.ess": "sqrt"}, ["optim.ess_reference"])] == []


@pytest.mark.parametrize("name", ["out/lr=1e-3", "a, b", "it's ${n}", "~/x=1", "plain"])
def test_the_first_word_of_an_evaluation_may_be_a_folder_of_any_name(name: str) -> None:
    words = with_checkpoint([name, "seed=1", "~logger"])
    assert value_of("x", [f"x={quoted(name)}"]) == name
    assert value_of("checkpoint", words) == name and words[1:] == ["seed=1", "~logger"]
    for setting in ("seed=1", "~logger", "+a.b=1", "hydra/launcher=processes", "=5"):
        assert with_checkpoint([setting, "n=1"]) == [setting, "n=1"]
    assert with_checkpoint([]) == []


UNKNOWN = {
    "samplr=full": "did you mean sampler?",
    "optim.lrr=3": "did you mean optim.lr?",
    "task.weights.format=1": "type +task.weights.format=...",
    "zzz=3": "not a setting",
    "loss=grop": "did you mean grpo?",
}


def test_unknown_words_are_named_together_each_with_its_way_out():
    first, *lines = refused("train", *UNKNOWN, "optim.lr=1e-5", "model=hf").splitlines()
    assert first == f"error: {len(UNKNOWN)} settings cannot be used:" and len(lines) == len(UNKNOWN)
    for (word, way_out), line in zip(UNKNOWN.items(), lines, strict=True):
        key = word if word == "loss=grop" else word.partition("=")[0]
        assert line.startswith(f"  - {key} ") and way_out in line


def test_errors_of_ours_keep_their_traceback_and_runs_share_no_folder_and_find_own_modules(monkeypatch, elsewhere):
    """A module of the current folder can be named, and hides none that is installed."""
    (elsewhere / "my_rules_for_this_test.py").write_text("mine = 1\n")
    (elsewhere / "json.py").write_text("raise RuntimeError('hides the library')\n")
    folders, outcomes, before = list[str](), [UserError("task.path=x is empty"), OSError("a bug"), None], list(sys.path)

    def job(command: Any, settings: Any) -> None:
        import my_rules_for_this_test

        assert (my_rules_for_this_test.mine, sys.path[-1]) == (1, str(elsewhere))
        folders.append(settings.run_dir)
        if outcome := outcomes[len(folders) - 1]:
            raise outcome

    monkeypatch.setitem(jobs.JOBS, "train", job)
    assert refused("train") == "error: task.path=x is empty\n"
    result = grpo("train")
    assert (result.exit_code, type(result.exception), grpo("train").exit_code) == (1, OSError, 0)
    assert len({*folders}) == len(folders) == 3 and not list(elsewhere.rglob("*.log"))
    assert sys.path == before and json.loads("1") == 1


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ("n=4", "sampler=in", "sampler=infinite"),
        ("sampler", "", "full infinite micro"),  # how bash cuts `sampler=`
        ("", "sam", "sampler=full sampler=infinite sampler=micro"),
        ("", "nothing=", ""),
    ],
)
def test_completion_offers_groups_and_their_choices(words, incomplete, expected):
    of_train = SimpleNamespace(info_name="train", params={"overrides": words.split()})
    assert offered(of_train, incomplete) == expected.split()
    assert offered(SimpleNamespace(info_name="eval", params={}), "loss=") == []


def test_pages_are_listed_and_printed_and_an_unknown_one_is_answered_with_the_nearest():
    folder, names = Path(cli.__file__).parents[1] / "docs", done("docs").split()
    assert names[0] == "quickstart" and sorted(names) == sorted(page.stem for page in folder.glob("*.md"))
    for name in names:
        assert done("docs", name) == (folder / f"{name}.md").read_text(encoding="utf-8") + "\n"
    assert "no page quikstart; did you mean quickstart?" in refused("docs", "quikstart")


SMALL = "train.prompts=2 n=2 sampling.max_new_tokens=6 eval.problems=3 eval.k=2 logger=jsonl device=cpu".split()


def test_a_run_is_trained_continued_and_evaluated_as_it_was_started(elsewhere):
    first = grpo("train", *SMALL, "train.steps=1", "seed=7", "downsample=maxvar")
    assert "downsample=maxvar has nothing to choose from with m = n = 2" in first.stderr
    (run,) = (elsewhere / "outputs" / "train").iterdir()
    resumed = grpo("train", "resume=auto", "train.steps=2")
    assert resumed.exit_code == 0 and "resumed at step 1" in resumed.stdout, resumed.output
    assert resumed.stderr.splitlines()[0] == f"resume=auto continues {run}"
    assert f"grpo export {run.relative_to(elsewhere)} " in resumed.stdout.splitlines()[-1]
    assert list((elsewhere / "outputs" / "train").iterdir()) == [run]
    metrics = json_lines(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    config = read_record(run).config
    assert (config["seed"], config["n"], config["train"]["prompts"]) == (7, 2, 2)

    said = done("eval", str(run))
    assert "pass@2" in said and "to task=arithmetic; " in said
    (folder,) = (elsewhere / "outputs" / "eval").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    in_training = {name: value for name, value in metrics[-1].items() if name.startswith("eval/")}
    assert in_training == {name: value for name, value in summary.items() if name.startswith("eval/")}
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 3 + 3 * 2


HARD_TO_TYPE = ("data dir/my rows (1).jsonl", "données.jsonl", "it's.jsonl", "{question}", "a, b", 'say "hi" (now')
HARD_TO_TYPE += ("[x", "n=${n}", '"half', "a (b\\", "q: {x}\nA:")


@pytest.mark.parametrize("text", HARD_TO_TYPE)
def test_text_that_hydra_cannot_read_is_answered_with_a_word_that_it_reads(text):
    (word,) = shlex.split(refused("train", "task=jsonl", f"task.path={text}").rpartition(" typed ")[2])
    assert OverridesParser.create().parse_override(word).value() == text
