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
from typer.testing import CliRunner

from grpo_cli import __version__
from grpo_cli.cli import jobs
from grpo_cli.cli import main as cli
from grpo_cli.cli.completion import offered as offers
from grpo_cli.cli.hydra_run import with_checkpoint
from grpo_cli.config.overrides import quoted, unquoted, value_of
from grpo_cli.runs.record import read_record
from grpo_cli.support.errors import UserError

OLD_RUN = str(Path(__file__).parent / "old_run")
pytestmark = pytest.mark.usefixtures("elsewhere")


COMPLETION = {"_GRPO_COMPLETE": "complete_bash", "COMP_WORDS": "grpo train sampler=in", "COMP_CWORD": "2"}


@pytest.mark.parametrize(
    ("words", "unneeded", "environment"),
    [
        ("--help", "torch transformers hydra wandb rich", {}),
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


def after(start: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`grpo <words>` as a process of its own, which first does what `start` says."""
    program = [sys.executable, "-c", f"{start}; from grpo_cli.cli.main import main; main()", *words]
    return subprocess.run(program, capture_output=True, text=True, env={**os.environ, **environment})


def test_a_folder_that_is_no_more_is_said(tmp_path):
    """PyTorch's mathematics library ended the process with a line about a file of its own."""
    gone = tmp_path / "gone"
    gone.mkdir()
    said = after(f"import os; import grpo_cli.cli.main; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})", "train")
    assert said.returncode == 2
    assert "current directory" in said.stderr


def test_a_screen_that_is_not_utf_8_gets_question_marks():
    """The report's dashes and sparklines ended in a UnicodeEncodeError."""
    unfit = "import grpo_cli.cli.main as cli; cli.app = lambda **words: print('0.2\u20130.4')"
    said = after(unfit, PYTHONIOENCODING="ascii")
    assert (said.returncode, said.stdout) == (0, "0.2?0.4\n")


@pytest.mark.parametrize("words", [["train", "--help"], ["report", OLD_RUN]])
def test_a_reader_who_leaves_costs_no_word_and_no_failure(words):
    """`grpo train --help | head` ended in "Broken pipe", and `grpo report | head` with exit code 1."""
    program = [sys.executable, "-c", "from grpo_cli.cli.main import main; main()", *words]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (0, "")


def test_the_version_and_cfg_job_are_printed_and_nothing_runs(elsewhere):
    assert grpo("--version").stdout == f"grpo {__version__}\n"
    shown = yaml.safe_load(grpo("train", "n=4", "--cfg", "job", "sampler=micro", "sampler.slots=3").stdout)
    assert (shown["n"], shown["m"], shown["sampler"]["slots"]) == (4, "${n}", 3)
    assert list(elsewhere.iterdir()) == []


def test_every_example_in_the_help_composes():
    for command in ("train", "eval", "profile"):
        examples = grpo(command, "--help").stdout.partition("== Examples ==")[2].splitlines()
        tried = 0
        for line in examples:
            words = line.split("  ")[0].split()
            if words[:2] != ["grpo", command] or "--cfg" in words or any("<" in word or "," in word for word in words):
                continue
            assert grpo(*words[1:], "--cfg", "job").exit_code == 0, line
            tried += 1
        assert tried, f"the help of {command} has an example"


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
        ("-n 32", ("-n", "n=32")),
        ("--num-generations=8", ("--num-generations", " n=8")),
        ("--learning_rate 1e-6", ("--learning_rate", "optim.lr=1e-6")),
        ("--steps 10", ("--steps", "train.steps=10")),
        ("--use_vllm", ("--use_vllm", "engine=vllm")),
        ("train.steps=1_0", ("train.steps=1_0 ",)),
        ("-m n=1_6,32", ("n=1_6,32 ",)),
        ("optim.lr=1e1_0", ("optim.lr=1e1_0 ",)),
        ("optim.betas=[0.9,0.9_9]", ("optim.betas",)),
        ("--config-dir", ("--config-dir",)),
        ("--config-dir=/dev/null", ("--config-dir=/dev/null",)),
        ("seed=range(3)", ("seed=range(3)", "-m")),
        ("seed=0,1", ("seed=0,1", "seed=[0,1]")),
        (f"optim.betas=[0.9,{5000 * '9'}]", ("optim.betas", "digits")),
        ("n=0", ("n=0", "at least 1")),
        ("--no-such-flag", ("--no-such-flag",)),
        ("hydra.sweeper.max_batch_size=0", ("hydra.sweeper.max_batch_size",)),
        ("collector=null", ("collector=null",)),
        ("hydra.run.dir=", ("hydra.run.dir",)),
    ],
)
def test_what_a_person_got_wrong_is_one_message_and_exit_code_2(arguments: str, keys: tuple[str, ...]) -> None:
    ended = grpo("train", *arguments.split())
    assert (ended.exit_code, ended.stdout) == (2, "") and all(key in ended.stderr for key in keys), ended.output


@pytest.mark.parametrize("words", ["report", "export a", "show --fast", "show a --step b"])
def test_a_missing_argument_is_answered_in_one_line_with_an_example(words):
    (line,) = refused(*words.split()).splitlines()
    assert line.startswith(f"error: grpo {words.split()[0]}: ") and f": grpo {words.split()[0]} " in line


@pytest.mark.parametrize("name", ["out/lr=1e-3", "a, b", "it's ${n}", "~/x=1", "plain"])
def test_the_first_word_of_an_evaluation_may_be_a_folder_of_any_name(name: str) -> None:
    words = with_checkpoint([name, "seed=1", "~logger"])
    assert value_of("checkpoint", words) == name and words[1:] == ["seed=1", "~logger"]
    for setting in ("seed=1", "~logger", "+a.b=1", "hydra/launcher=processes", "=5"):
        assert with_checkpoint([setting, "n=1"]) == [setting, "n=1"]
    assert with_checkpoint([]) == []


UNKNOWN = {
    "samplr=full": "did you mean sampler?",
    "optim.lrr=3": "did you mean optim.lr?",
    "task.weights.format=1": "task=",
    "zzz=3": "no setting",
    "lr=1e-5": "did you mean optim.lr?",
    "num_generations=8": "did you mean n?",
    "actor_rollout_ref.rollout.n=8": "did you mean n?",
    "beta=0.04": "did you mean loss.kl_coef?",
    ".zzz=3": "no setting",
    "loss=grop": "did you mean grpo?",
}


def test_unknown_words_are_named_together_each_with_its_way_out():
    first, *lines = refused("train", *UNKNOWN, "optim.lr=1e-5", "model=hf").splitlines()
    assert first == f"error: {len(UNKNOWN)} settings cannot be used:" and len(lines) == len(UNKNOWN)
    for (word, way_out), line in zip(UNKNOWN.items(), lines, strict=True):
        key = word if word == "loss=grop" else word.partition("=")[0]
        assert line.startswith(f"  - {key} ") and way_out in line


def test_a_run_folder_that_cannot_be_made_is_named(elsewhere):
    (elsewhere / "outputs").write_text("in the way")
    assert "hydra.run.dir=<folder>" in refused("train")
    assert "hydra.sweep.dir=<folder>" in refused("train", "-m", "seed=1,2")


def fake_job(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[str]:
    """Replace training: every call keeps its folder, and then raises or returns `outcome`."""
    calls: list[str] = []

    def job(command: Any, settings: Any) -> Any:
        calls.append(settings.run_dir)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setitem(jobs.JOBS, "train", job)
    return calls


def test_an_error_of_the_user_is_printed_alone_one_of_ours_keeps_its_traceback_and_runs_share_no_folder(
    monkeypatch, elsewhere
):
    fake_job(monkeypatch, UserError("task.path=x is empty"))
    assert refused("train") == "error: task.path=x is empty\n"
    fake_job(monkeypatch, OSError("a bug"))
    result = grpo("train")
    assert (result.exit_code, type(result.exception)) == (1, OSError)
    folders = fake_job(monkeypatch, None)
    assert grpo("train").exit_code == grpo("train").exit_code == 0
    assert len({*folders}) == len(folders) == 2 and not list(elsewhere.rglob("*.log"))


@pytest.mark.parametrize("launcher", ["processes", "basic"])
def test_a_sweep_without_a_job_that_can_run_ends_with_the_reason(launcher):
    result = grpo("train", "-m", "n=0,1", f"hydra/launcher={launcher}")
    assert result.exit_code == 2
    assert "n=0 must be at least 1" in result.stderr


def test_modules_in_the_current_folder_can_be_named_and_hide_nothing(monkeypatch, elsewhere):
    (elsewhere / "my_rules_for_this_test.py").write_text("mine = 1\n")
    (elsewhere / "json.py").write_text("raise RuntimeError('hides the library')\n")
    seen = []

    def job(command: Any, settings: Any) -> None:
        import my_rules_for_this_test

        seen.append((my_rules_for_this_test.mine, sys.path[-1]))

    monkeypatch.setitem(jobs.JOBS, "train", job)
    before = list(sys.path)
    assert grpo("train").exit_code == 0
    assert seen == [(1, str(elsewhere))]
    assert sys.path == before
    assert json.loads("1") == 1


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


@pytest.mark.parametrize("text", ["it's", "a\\", "\\'", "a,b=c", "x y", "'half", "~/x"])
def test_a_text_that_was_quoted_for_hydra_is_read_back(text):
    word = f"resume={quoted(text)}"
    assert unquoted(quoted(text)) == value_of("resume", ["resume=no", word, "n=1"]) == text
    assert unquoted(text) == text, "without quotes, or with only one"


@pytest.mark.parametrize("line", ["grpo train sampler = in", "grpo train sampler=in"])
def test_completion_works_through_the_shell_s_protocol(line):
    words = line.split()
    environment = {"_GRPO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    shown = CliRunner().invoke(cli.app, [], prog_name="grpo", env=environment)
    assert shown.stdout.strip() in ("infinite", "sampler=infinite")


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
    assert f"the run is in {run.relative_to(elsewhere)}; " in resumed.stdout.splitlines()[-1]
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


@pytest.mark.parametrize("there", ["summary.json", "metrics.jsonl", None])
def test_a_run_whose_model_cannot_be_read_leaves_no_folder_and_nothing_of_another_run_changed(elsewhere, there):
    words = ["model=hf", "model.path=./nowhere", "logger=jsonl", "hydra.run.dir=out"]
    if there is None:
        for command in ("train", "eval"):
            assert "model.path=./nowhere is not a folder" in refused(command, *words)
        assert not list(elsewhere.iterdir())
        return
    (elsewhere / "out").mkdir()
    (elsewhere / "out" / there).write_text('{"step": 3}\n')
    refused("train", *words)
    assert [path.name for path in (elsewhere / "out").glob("*.json*")] == [there]
    assert (elsewhere / "out" / there).read_text() == '{"step": 3}\n'


def test_a_run_whose_task_s_code_is_gone_is_refused_in_one_line(elsewhere, monkeypatch):
    (elsewhere / "task_for_this_test.py").write_text("from grpo_cli.tasks.arithmetic import Arithmetic as Mine\n")
    words = ["eval.every=0", "train.steps=1", "hydra.run.dir=out", "task._target_=task_for_this_test.Mine"]
    assert grpo("train", *SMALL, *words).exit_code == 0
    (elsewhere / "task_for_this_test.py").unlink()
    monkeypatch.delitem(sys.modules, "task_for_this_test")
    before = (elsewhere / "out" / "summary.json").read_text()
    for words in (["train", "resume=out", "train.steps=2"], ["eval", "checkpoint=out"]):
        result = grpo(*words)
        (line,) = result.stderr.splitlines()
        assert result.exit_code == 2
        assert "task._target_=" in line and "task_for_this_test" in line
    assert (elsewhere / "out" / "summary.json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "resume=auto"], "resume=auto found no run"),
        (["train", "resume=nowhere"], "resume=nowhere does not exist"),
        (["train", "resume=empty"], "resume=empty is not a run folder"),
        (["train", "-m", "resume=empty", "seed=1,2"], "leave out -m"),
        (["train", "resume=sweep"], "add -m"),
        (["train", "-m", "resume=sweep", "hydra.sweep.dir=empty"], "empty holds no sweep"),
        (["eval", "checkpoint=nowhere"], "checkpoint=nowhere is not a folder"),
        (["eval", "no where"], "checkpoint=no where is not a folder"),
        (["eval", "checkpoint=empty"], "checkpoint=empty holds no complete checkpoint"),
        (["eval", "loss=grpo"], "loss is no setting"),
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
