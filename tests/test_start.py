"""A run folder defends itself: a refused command changes nothing in it, a run goes on as what it was, one at a time."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typed import content, done, grpo, refused

from grpo_cli.config.compose import composed, settings_from
from grpo_cli.runs import lock, record
from grpo_cli.support.errors import UserError

pytestmark = pytest.mark.usefixtures("elsewhere")
SMALL = ("logger=jsonl", "n=2", "train.prompts=2", "train.steps=2", "eval.every=0", "sampling.max_new_tokens=4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with seed 5, that has been made to look as if it was killed after the first."""
    folder = tmp_path_factory.mktemp("made") / "R"
    done("train", *SMALL, "seed=5", "train.checkpoint_every=1", "train.keep_checkpoints=9", f"hydra.run.dir={folder}")
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    return folder


@pytest.fixture
def run(trained: Path, elsewhere: Path) -> Path:
    return Path(shutil.copytree(trained, elsewhere / "R"))


REFUSED = [
    "train seed=7 optim.lr=1e-2 hydra.run.dir=R",
    "train resume=R n=1",
    "train resume=R nothing=1",
    "train resume=R hydra.run.dir=S",
    "eval checkpoint=R hydra.run.dir=R",
    "profile hydra.run.dir=R profile.plan_only=true",
    "profile resume=R profile.steps=0",
]


def test_refused_commands_leave_every_byte_of_a_run_folder_which_goes_on_with_its_own_settings(run: Path) -> None:
    before = content(run)
    for words in REFUSED:
        refused(*words.split())
        assert content(run) == before, words
    done("train", "resume=R")
    found = record.read_record(run)
    assert found is not None and found.config["seed"] == 5 and found.source == run / "run.json"


def test_what_differs_when_a_run_goes_on_is_printed_and_recorded_a_part_by_its_choice_or_its_code(run: Path) -> None:
    begun = record.read_record(run)
    assert begun is not None and begun.config["train"]["steps"] == 2
    Path("mine.py").write_text("def maxvar(group, keep, rng):\n    return range(keep)\n")
    result = grpo("train", "resume=R", "train.steps=3", "loss=dapo", "downsample._target_=mine.maxvar")
    assert result.exit_code == 0, result.output
    changed = ["loss=dapo (was grpo)", "train.steps=3 (was 2)"]
    changed += ["downsample._target_=mine.maxvar (was grpo_cli.methods.pods.maxvar)"]
    assert all(f"changed since the run began: {one}\n" in result.stderr for one in changed)
    assert grpo("train", "resume=R").stdout.endswith("has done its 3 steps; train.steps=... asks for more\n")
    assert "has done its 3 steps, without n=9 (was " in grpo("train", "resume=R", "n=9").stderr
    later = record.read_record(run)
    assert later is not None and later.config["train"]["steps"] == 3 and {*changed} <= {*later.about["changed"]}
    Path("mine.py").write_text("def maxvar(group, keep, rng):\n    return range(1, keep + 1)\n")
    assert "changed since the run began: mine.py=" in grpo("train", "resume=R", "train.steps=4").stderr


def test_a_run_goes_on_with_no_other_task(run: Path) -> None:
    before = content(run)
    for words in (("task=word_problems",), ("task=reasoning_gym", "task.name=gcd")):
        message = refused("train", "resume=R", "train.steps=3", *words)
        assert "task" in message.splitlines()[-1] and len(message.split("error: ")) == 2
    assert {name: data for name, data in content(run).items() if name in before} == before


def test_a_run_that_was_killed_in_its_first_save_begins_anew(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step_000001")
    half = (run / "checkpoints/step_000000").rename("half")
    (half / "COMPLETE").unlink()
    assert "accept_damage=true" in refused("train", "resume=R"), "rows of later steps say that there was a checkpoint"
    half.rename(run / "checkpoints/.step_000000.tmp")  # or, with train.checkpoint=lazy, that it is being written
    assert "begins anew" in done("train", "resume=R")
    assert not list(run.glob("checkpoints/.*.tmp"))


def test_a_damaged_checkpoint_that_is_named_costs_the_run_no_good_one(run: Path) -> None:
    (max((run / "checkpoints").iterdir()) / "COMPLETE").unlink()
    before, named = content(run), f"resume=R/checkpoints/{max((run / 'checkpoints').iterdir()).name}"
    assert "takes the newest good one" in refused("train", named, "accept_damage=true")
    assert content(run) == before


def test_one_command_begins_a_run_goes_on_with_it_and_is_content_with_its_end(elsewhere: Path) -> None:
    words = ("train", *SMALL, "hydra.run.dir=job", "resume=here")
    done(*words)
    (elsewhere / "job/summary.json").unlink()
    shutil.rmtree(elsewhere / "job/checkpoints/step_000002")
    assert "resumed at step 0" in grpo(*words).stdout
    before = content(elsewhere / "job")
    assert grpo(*words).stdout.endswith("job has done its 2 steps; train.steps=... asks for more\n")
    assert content(elsewhere / "job") == before
    assert "name one" in refused("train", "resume=here")


def test_a_refused_command_leaves_no_folder_behind(elsewhere: Path) -> None:
    lacking = ["model=hf", "model.path=./nothing"]  # found only once the run has its folder
    for words in (
        ["n=1"],
        [*SMALL, "hydra.run.dir=''"],
        [*lacking, "hydra.run.dir=new/deep"],
        [*SMALL, "task=jsonl", "task.path=nothing.jsonl"],
        ["hydra.job.chdir=true"],
    ):
        refused("train", *words)
        assert not list(elsewhere.iterdir()), words


def test_a_run_goes_on_only_with_the_data_that_it_began_with(elsewhere: Path) -> None:
    rows, other = elsewhere / "rows.jsonl", elsewhere / "other.jsonl"
    rows.write_text("".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(9)))
    shutil.copy(rows, other)
    words = ("task=jsonl", "task.path=rows.jsonl", "hydra.run.dir=R", "train.checkpoint_every=1")
    done("train", *SMALL, *words)
    shutil.rmtree(elsewhere / "R/checkpoints/step_000002")  # as if it was killed
    before = content(elsewhere / "R")
    rows.write_text(rows.read_text() + '{"question": "9+9", "answer": "18"}\n')
    assert "rows.jsonl" in refused("train", "resume=R", "train.steps=3")
    assert "rows.jsonl" in refused("train", *SMALL, *words, "resume=here")
    assert content(elsewhere / "R") == before
    assert grpo("train", "resume=R", "train.steps=3", "task.path=other.jsonl").exit_code == 0, "a move is typed"


HOLD = """
import sys, time
from pathlib import Path
from grpo_cli.runs.lock import sole_use
with sole_use(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held(elsewhere: Path):
    folder = elsewhere / "R"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield folder, process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_with_the_pid_and_host_of_the_first(held) -> None:
    folder, process = held
    before = content(folder)
    with pytest.raises(UserError, match=f"R is in use by process {process.pid} on {platform.node()} "):
        with lock.sole_use(folder, print):
            raise AssertionError("two processes in one folder")
    message = refused("train", *SMALL, f"hydra.run.dir={folder}")
    assert f"process {process.pid} on {platform.node()}" in message
    assert content(folder) == before


FORK = """
import os, signal, sys, time
from pathlib import Path
from grpo_cli.runs.lock import sole_use
from grpo_cli.runs.stop import Stop
from grpo_cli.support.errors import own_code
with sole_use(Path("R"), print), Stop(print), own_code("reward"):
    child = os.fork()
    if not child:
        {child}
    if {signal}:
        os.kill(child, {signal})
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("the run goes on")
"""


@pytest.mark.parametrize(
    ("child", "number", "code"),
    [
        ("time.sleep(60)", 15, -15),
        ("raise KeyboardInterrupt", 0, 1),
        ("pass; os.waitpid = lambda pid, options: (pid, 0)", 0, 0),  # comes back, as if it were the run
    ],
)
def test_a_forked_child_is_ended_by_signals_and_does_not_go_on_as_the_run(child: str, number: int, code: int) -> None:
    script = FORK.replace("{child}", child).replace("{signal}", str(number))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    came_back = [] if "waitpid" not in child else ["0"]
    assert ended.stdout.split("\n") == [*came_back, str(code), "the run goes on", ""]


def test_a_run_goes_on_neither_with_fewer_steps_than_it_has_done_nor_with_another_model(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step_000001", "other")
    values = json.loads(Path("other/config.json").read_text())
    Path("other/config.json").write_text(json.dumps(values | {"vocab_size": 77}))
    assert grpo("train", "resume=R", "train.steps=3").exit_code == 0
    before = content(run)
    for words in ("train.steps=2", "train.steps=4 model=hf model.path=/no", "model=smollm2_135m model.path=other"):
        (run / "summary.json").unlink(missing_ok=True)
        assert words.split()[-1] in refused("train", "resume=R", "train.steps=4", *words.split())
    (run / "summary.json").unlink(missing_ok=True)
    del before["summary.json"]
    assert content(run) == before


def test_text_that_needs_escapes_is_recorded_as_typed_and_resumed_as_meant(elsewhere: Path) -> None:
    """A line break, a backslash and n, and what looks like a reference, also after a second start."""
    Path("rows.jsonl").write_text("".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(9)))
    words = ("task=jsonl", "task.path=rows.jsonl", r'task.template="\${n}: {question}\n"', "train.steps=1")
    assert grpo("train", *SMALL, *words, r'sampling.stop=["\n","a\neq","\${n}"]', "hydra.run.dir=R").exit_code == 0
    for steps in (1, 2):
        found = settings_from(composed("train", ["resume=R"]))
        assert found.sampling.stop == ("\n", r"a\neq", "${n}")
        assert found.parts["task"]["template"] == "${n}: {question}\n"
        done("train", "resume=R", f"train.steps={steps}")


def test_a_record_that_is_missing_or_damaged_is_no_reason_to_take_the_defaults(run: Path) -> None:
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text[: len(text) // 2])
    for words in (("train", "resume=R"), ("eval", "checkpoint=R"), ("train", "resume=here", "hydra.run.dir=R")):
        assert "run.json is damaged" in refused(*words)
    (run / "run.json").unlink()
    assert "R has no run.json" in refused("train", "resume=R")
    assert "type task=" in refused("eval", "checkpoint=R")
