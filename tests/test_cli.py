"""The `grpo` program as a person meets it: help, completion, and one short message for what they got wrong."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from typed import content, grpo, refused

from grpo_cli import __version__
from grpo_cli.cli import jobs
from grpo_cli.cli.main import offered as offers
from grpo_cli.cli.hydra_run import with_checkpoint
from grpo_cli.config.overrides import quoted, unquoted, value_of
from grpo_cli.runs.record import read_record
from grpo_cli.support.errors import UserError

pytestmark = pytest.mark.usefixtures("elsewhere")


COMPLETION = {"_GRPO_COMPLETE": "complete_bash", "COMP_WORDS": "grpo train sampler=in", "COMP_CWORD": "2"}


@pytest.mark.parametrize(
    ("words", "unneeded", "environment"),
    [
        ("--help", "torch transformers hydra wandb rich yaml", {}),
        ("", "torch transformers hydra wandb rich", COMPLETION),
        ("explain loss.clip_high sampler kl eval/pass@7 beta", "torch transformers hydra wandb", {}),
        ("explain no_such_word", "torch transformers hydra wandb", {}),
        ("ls .", "torch transformers hydra wandb", {}),
        ("train --help", "torch transformers wandb", {}),
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
    assert grpo("--version").stdout == f"grpo {__version__}\n"
    shown = yaml.safe_load(grpo("train", "n=4", "--cfg", "job", "sampler=micro", "sampler.slots=3").stdout)
    assert (shown["n"], shown["m"], shown["sampler"]["slots"]) == (4, "${n}", 3)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ("sampler=ful", ("sampler=ful", "did you mean full?")),
        ("-m sampler=full,ful", ("sampler=ful", "did you mean full?")),
        ("sampler=micro sampler.slot=3", ("sampler.slot ", "did you mean sampler.slots?")),
        ("sampler.slots=3", ("sampler.slots", "sampler=infinite")),
        ("engine=vllm engine.options.cuda_grap=true", ("+engine.options.cuda_grap=",)),
        ("task=./rows.jsonl", ("task=./rows.jsonl", "task=jsonl task.path=./rows.jsonl")),
        ("fast", ("fast", "key=value")),
        ("=5", ("=5", "key=value")),
        ("n=[1", ("n=[1",)),
        ("--n 32", ("--n", "n=32")),
        ("--learning_rate 1e-6", ("--learning_rate", "optim.lr=1e-6")),
        ("--use_vllm", ("--use_vllm", "engine=vllm")),
        ("--config-dir=/dev/null", ("--config-dir=/dev/null",)),
        ("seed=0,1", ("seed=0,1", "seed=[0,1]")),
        (f"optim.betas=[0.9,{5000 * '9'}]", ("optim.betas", "digits")),
        ("hydra.sweeper.max_batch_size=0", ("hydra.sweeper.max_batch_size",)),
        ("collector=null", ("collector=null",)),
        ("hydra.run.dir=", ("hydra.run.dir",)),
    ],
)
def test_what_a_person_got_wrong_is_one_message_and_exit_code_2(arguments: str, keys: tuple[str, ...]) -> None:
    ended = grpo("train", *arguments.split())
    assert (ended.exit_code, ended.stdout) == (2, "") and all(key in ended.stderr for key in keys), ended.output


@pytest.mark.parametrize("name", ["out/lr=1e-3", "a, b", "it's ${n}", "~/x=1", "plain"])
def test_the_first_word_of_an_evaluation_may_be_a_folder_of_any_name(name: str) -> None:
    words = with_checkpoint([name, "seed=1", "~logger"])
    assert unquoted(quoted(name)) == name
    assert value_of("checkpoint", words) == name and words[1:] == ["seed=1", "~logger"]
    for setting in ("seed=1", "~logger", "+a.b=1", "hydra/launcher=processes", "=5"):
        assert with_checkpoint([setting, "n=1"]) == [setting, "n=1"]
    assert with_checkpoint([]) == []


UNKNOWN = {
    "samplr=full": "did you mean sampler?",
    "optim.lrr=3": "did you mean optim.lr?",
    "task.weights.format=1": "task=",
    "zzz=3": "not a setting",
    "lr=1e-5": "did you mean optim.lr?",
    "num_generations=8": "did you mean n?",
    "actor_rollout_ref.rollout.n=8": "did you mean n?",
    "beta=0.04": "did you mean loss.kl_coef?",
    ".zzz=3": "not a setting",
    "loss=grop": "did you mean grpo?",
}


def test_unknown_words_are_named_together_each_with_its_way_out():
    first, *lines = refused("train", *UNKNOWN, "optim.lr=1e-5", "model=hf").splitlines()
    assert first == f"error: {len(UNKNOWN)} settings cannot be used:" and len(lines) == len(UNKNOWN)
    for (word, way_out), line in zip(UNKNOWN.items(), lines, strict=True):
        key = word if word == "loss=grop" else word.partition("=")[0]
        assert line.startswith(f"  - {key} ") and way_out in line


def test_errors_of_ours_keep_their_traceback_runs_share_no_folder_and_find_modules_of_the_current_one(
    monkeypatch, elsewhere
):
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


@pytest.mark.parametrize("launcher", ["processes", "basic"])
def test_a_sweep_without_a_job_that_can_run_ends_with_the_reason(launcher):
    result = grpo("train", "-m", "n=0,1", f"hydra/launcher={launcher}")
    assert result.exit_code == 2
    assert "n=0 must be at least 1" in result.stderr


@pytest.mark.parametrize(
    ("words", "incomplete", "offered"),
    [
        ([], "sampler=", ["sampler=full", "sampler=infinite", "sampler=micro"]),
        (["n=4"], "sampler=in", ["sampler=infinite"]),
        (["sampler"], "", ["full", "infinite", "micro"]),  # how bash cuts `sampler=`
        (["n", "=", "4", "sampler", "="], "in", ["infinite"]),  # and `sampler=in`
        ([], "s", ["sampler=", "scheduler=", "sparsity="]),
        ([], "nothing=", []),
    ],
)
def test_completion_offers_groups_and_their_choices(words, incomplete, offered):
    assert offers("train", words, incomplete) == offered
    assert "loss=" not in offers("eval", [], "")


SMALL = "train.prompts=2 n=2 sampling.max_new_tokens=6 eval.problems=3 eval.k=2 logger=jsonl device=cpu".split()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_trained_continued_and_evaluated_as_it_was_started(elsewhere):
    assert grpo("train", *SMALL, "train.steps=1", "seed=7").exit_code == 0
    (run,) = (elsewhere / "outputs" / "train").iterdir()

    before = content(run)
    done = grpo("train", "resume=auto")
    assert (done.exit_code, done.stdout) == (0, f"{run} has done its 1 steps; train.steps=... asks for more\n")
    assert before == content(run)
    resumed = grpo("train", "resume=auto", "train.steps=2")
    assert resumed.exit_code == 0, resumed.output
    assert "resumed at step 1" in resumed.stdout
    assert resumed.stderr.splitlines()[0] == f"resume=auto continues {run.relative_to(elsewhere)}"
    assert f"grpo export {run.relative_to(elsewhere)} " in resumed.stdout.splitlines()[-1]
    assert list((elsewhere / "outputs" / "train").iterdir()) == [run]
    assert [row["step"] for row in metrics_of(run)] == [0, 1, 2]
    config = read_record(run).config
    assert (config["seed"], config["n"], config["train"]["prompts"]) == (7, 2, 2)

    evaluated = grpo("eval", str(run))
    assert evaluated.exit_code == 0, evaluated.output
    assert "pass@2" in evaluated.stdout
    (folder,) = (elsewhere / "outputs" / "eval").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    in_training = {name: value for name, value in metrics_of(run)[-1].items() if name.startswith("eval/")}
    assert in_training == {name: value for name, value in summary.items() if name.startswith("eval/")}
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 3 + 3 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "resume=auto"], "resume=auto found no run"),
        (["train", "resume=empty"], "resume=empty is not a run folder"),
        (["train", "-m", "resume=empty", "seed=1,2"], "without -m"),
        (["train", "resume=sweep"], "with -m"),
        (["train", "-m", "resume=sweep", "hydra.sweep.dir=empty"], "empty holds no sweep"),
        (["eval", "checkpoint=nowhere"], "checkpoint=nowhere is not a folder"),
        (["eval", "checkpoint=empty"], "checkpoint=empty holds no complete checkpoint"),
        (["eval", "loss=grpo"], "loss is not a setting"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(elsewhere, arguments, message):
    for name in ("empty", "it's"):
        (elsewhere / name).mkdir()
    assert message in refused(*arguments)


HARD_TO_TYPE = ("data dir/my rows (1).jsonl", "données.jsonl", "it's.jsonl", "{question}", "a, b", 'say "hi" (now')
HARD_TO_TYPE += ("[x", "n=${n}", '"half', "a (b\\", "q: {x}\nA:")


@pytest.mark.parametrize("text", HARD_TO_TYPE)
def test_text_that_hydra_cannot_read_is_answered_with_a_word_that_it_reads(text):
    (word,) = shlex.split(refused("train", "task=jsonl", f"task.path={text}").rpartition(" typed ")[2])
    assert OverridesParser.create().parse_override(word).value() == text
