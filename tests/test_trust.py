"""What a run folder of a stranger may ask for: values, and nothing that runs, reads the environment or writes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import made
import pytest
from typer.testing import CliRunner

from grpo_cli.cli.arguments import after_those_of_the_run, checkpoint_overrides
from grpo_cli.cli.main import app
from grpo_cli.config.compose import model_of
from grpo_cli.model.adapters import with_adapters
from grpo_cli.runs.files import json_line
from grpo_cli.runs.record import RunRecord, read_record, write_record
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.resume import Sweep, started_with
from grpo_cli.sweep.status import Job

COPY = ["logger._target_=shutil.copyfile", "++logger.src=harmless", "++logger.dst=precious"]
MODULE = """
import shutil
from shutil import copyfile
from grpo_cli.tasks.arithmetic import Arithmetic as Sums
class Tracker:
    def log(self, record): ...
    def close(self, summary): ...
def rule(group, keep, rng): return range(keep)
def wipe(path): raise AssertionError("called")
def score(reply): return 1.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of one's own, beside a run folder of a stranger that is to be filled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stranger").mkdir()
    (tmp_path / "mine_and_trusted.py").write_text(MODULE)
    (tmp_path / "leads_out.jsonl").symlink_to(tmp_path.parent / "beside.jsonl")
    monkeypatch.delitem(sys.modules, "mine_and_trusted", raising=False)
    return tmp_path


def resumed(folder: Path, recorded: list[str], *typed: str) -> list[str]:
    made.record(folder, {}, recorded)
    return after_those_of_the_run("resume", [f"resume={folder}", *typed])


def sections(**changed: Any) -> dict[str, Any]:
    """The composed config of a run, with other values at some places."""
    from omegaconf import OmegaConf
    from test_config import compose

    config = compose("logger=jsonl", "predictor=none")
    OmegaConf.set_struct(config, False)
    for key, value in changed.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return plain


def evaluated(folder: Path, config: dict[str, Any], *typed: str, **choices: str) -> list[str]:
    chosen = {"model": "tiny", "task": "arithmetic", "engine": "torch", "sampler": "full", "scheduler": "fifo"}
    chosen |= {"predictor": "none", "sparsity": "dense", "logger": "jsonl", **choices}
    folder.mkdir(exist_ok=True)
    write_record(folder, RunRecord("train", (), chosen, config, {}))
    checkpoint = folder / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.pt").touch()
    (checkpoint / "settings.json").write_text("{}")
    size = {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    (checkpoint / "COMPLETE").write_text(json.dumps({"files": {"trainer_state.pt": size}}))
    return checkpoint_overrides(str(folder), typed=typed)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        (COPY[0], "logger._target_"),
        ("++logger={_target_: shutil.copyfile, src: a, dst: b}", "logger"),
        ("++logger.src={_target_: os.mkdir, _args_: [x]}", "logger.src"),
        ("++logger.src=[{_target_: os.mkdir}]", "logger.src"),
        ("++logger.deep.deeper._target_=os.mkdir", "logger.deep.deeper._target_"),
        ("++zzz._target_=os.mkdir", "zzz._target_"),
        ("++={logger: {_target_: os.mkdir}}", "_target_"),
        ("logger._target_=grpo_cli.config.instantiate.hydra.utils.get_object", "logger._target_"),
        ("logger._target_=grpo_cli.engine.ray.worker.hollow", "logger._target_"),
        ("logger._target_=grpo_cli.rules.loss.Grpo", "logger._target_"),
        ("downsample._target_=mine_and_trusted.shutil.copyfile", "downsample._target_"),
        ("downsample._target_=mine_and_trusted.copyfile", "downsample._target_"),
        ("logger._target_=mine_and_trusted.wipe", "logger._target_"),
        ("logger._target_=stranger.evil.Tracker", "logger._target_"),
        ("logger._target_=mine_and_trusted.Sums", "logger._target_"),
        ("logger.space_id=stranger/space", "logger.space_id"),
        ("logger.project=stranger", "logger.project"),
        ("++logger.url=http://stranger", "logger.url"),
        ("++logger.hosts=[stranger]", "logger.hosts"),
        ("task.path=/etc/passwd", "task.path"),
        ("task.eval_path=../beside.jsonl", "task.eval_path"),
        ("task.few_shot_path='~/notes.jsonl'", "task.few_shot_path"),
        ("task.judge.prompt=/etc/hostname", "task.judge.prompt"),
        ("train.warmup_path=leads_out.jsonl", "train.warmup_path"),
        ("++train={warmup_path: /etc/passwd}", "train"),
        ("task.reward=os:system", "task.reward"),
        ("task.environment=os:system", "task.environment"),
        ("task.tools='os:getcwd,system'", "task.tools"),
        ("task.reward=mine_and_trusted:copyfile", "task.reward"),
        ("collector._partial_=true", "collector._partial_"),
        ("++curriculum._args_=[1]", "curriculum._args_"),
        ("++loss._recursive_=false", "loss._recursive_"),
        ("hydra.run.dir=/precious", "hydra.run.dir"),
        ("hydra.job_logging.handlers.file.class=logging.FileHandler", "hydra.job_logging"),
        ("++hydra={job_logging: {}}", "hydra"),
        ("++hydra.callbacks.mine._target_=os.mkdir", "hydra.callbacks"),
        ("hydra.searchpath=[file:///tmp/evil]", "hydra.searchpath"),
        ("++hydra.job.env_set.LD_PRELOAD=evil.so", "hydra.job.env_set"),
        ("hydra/job_logging=default", "hydra/job_logging"),
        ("hydra/launcher=../../stranger/evil", "hydra/launcher"),
        ("+evil@hydra=x", "evil"),
        ("model=../../stranger/evil", "model"),
        ("logger={_target_: os.mkdir}", "logger"),
        ("run_dir=/precious", "run_dir"),
        ("logger.name='${oc.env:HOME}'", "logger.name"),
        ("++logger.name='${oc.${which}:HOME}'", "logger.name"),
        ("model.trust_remote_code=true", "model.trust_remote_code"),
        ("engine.address=10.0.0.1:6379", "engine.address"),
        ("+engine.options.trust_remote_code=true", "engine.options"),
        ("++engine.options.address=10.0.0.1", "engine.options"),
        ("engine.options={options: {worker_cls: evil.Worker}}", "engine.options"),
    ],
)
def test_a_recorded_run_is_not_obeyed_in_what_runs_reads_or_writes(here: Path, word: str, key: str) -> None:
    (here / "stranger" / "__init__.py").touch()
    (here / "stranger" / "evil.py").write_text("raise AssertionError('imported')")
    with pytest.raises(UserError) as refused:
        resumed(here / "stranger", ["n=4", word])
    assert key in str(refused.value) and "command line" in str(refused.value) and "n=4" not in str(refused.value)


def test_a_package_that_has_the_run_in_it_came_with_the_run(here: Path) -> None:
    (here / "stranger" / "__init__.py").touch()
    (here / "stranger" / "evil.py").write_text("raise AssertionError('imported')")
    for run in (here / "stranger" / "0", here / "stranger"):
        with pytest.raises(UserError, match=r"logger\._target_"):
            resumed(run, ["logger._target_=stranger.evil.Tracker"])
    (here / "package").mkdir()
    (here / "package" / "__init__.py").write_text(MODULE)
    word = "logger._target_=package.Tracker"
    assert word in resumed(here / "other", [word])


@pytest.mark.parametrize(
    "word",
    [
        "task.template='a: b'",
        "downsample._target_=mine_and_trusted.rule",
        "logger._target_=mine_and_trusted.Tracker",
        "task._target_=mine_and_trusted.Sums",
        "task.reward=mine_and_trusted:score",
        "task.reward=numbers",
        "advantage._target_=grpo_cli.methods.rloo.rloo",
        "m=${n}",
        "task.weights={correct: 1.0, short: 0.1}",
        "engine.options={compile: true, max_num_batched_tokens: 4096}",
        "model.path=/some/where/else",
        "run_dir=stranger",
        "~logger",
    ],
)
def test_values_parts_of_ours_and_code_of_one_s_own_are_taken_as_they_are(here: Path, word: str) -> None:
    assert word in resumed(here / "stranger", [word])


def test_what_is_typed_again_is_taken_and_changes_nothing_of_the_record(here: Path) -> None:
    words = resumed(here / "stranger", COPY[:1], *COPY[:1])
    assert words.count(COPY[0]) == 1
    typed = "logger._target_=mine_and_trusted.Tracker"
    assert COPY[0] not in (other := resumed(here / "other", COPY[:1], typed)) and typed in other
    assert COPY[0] not in resumed(here / "third", COPY[:1], "logger=jsonl")


def test_a_module_that_this_command_line_names_may_be_used_by_the_run(here: Path, tmp_path: Path) -> None:
    """`json` is installed, and so trusted as soon as somebody names it; what is asked of a part counts all the same."""
    with pytest.raises(UserError, match=r"logger\._target_"):
        resumed(here / "stranger", ["logger._target_=json.JSONDecoder", "n=4"], "task._target_=json.Thing")
    with pytest.raises(UserError, match=r"collector\._target_"):
        resumed(here / "other", ["collector._target_=json.loads"])
    assert resumed(here / "third", ["collector._target_=json.loads"], "task.reward=json:dumps")


def test_a_file_is_not_overwritten_by_resuming_or_evaluating_a_folder(here: Path) -> None:
    Path("harmless").write_text("harmless")
    Path("precious").write_text("precious")
    made.record(here / "stranger", sections(), ["logger=jsonl", *COPY, "train.steps=1"])
    (here / "stranger" / "checkpoints").mkdir()
    ended = CliRunner().invoke(app, ["train", "resume=stranger", "accept_damage=true"])
    assert (ended.exit_code, Path("precious").read_text()) == (2, "precious") and "shutil.copyfile" in ended.output
    config = sections(logger___target_="shutil.copyfile", logger__src="harmless", logger__dst="precious")
    with pytest.raises(UserError, match=r"shutil\.copyfile"):
        evaluated(here / "again", config)
    with pytest.raises(UserError, match="model="):
        evaluated(here / "third", sections(), model="../../stranger/evil")
    assert Path("precious").read_text() == "precious"


def test_the_environment_is_not_read_for_a_recorded_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "s3cr3t")
    config = sections(task__name="${oc.env:A_SECRET}", seed="${oc.env:A_SECRET}")
    with pytest.raises(UserError) as refused:
        evaluated(here / "stranger", config)
    assert "task.name" in str(refused.value) and "seed" in str(refused.value) and "s3cr3t" not in str(refused.value)
    words = evaluated(here / "other", config, "task.name=x", "seed=1")
    assert not any("A_SECRET" in word or "s3cr3t" in word for word in words)


@pytest.mark.parametrize(
    ("of_hydra", "overrides"),
    [
        (["hydra.callbacks.x._target_=os.mkdir"], ["n=2,4"]),
        (["hydra/launcher=joblib", "hydra.launcher.pre_dispatch=evil"], ["n=2,4"]),
        (["hydra.sweeper.params.n=1"], ["n=2,4"]),
        (["hydra.launcher._recursive_=true"], ["n=2,4"]),
        (["hydra.sweep.subdir=../../x"], ["n=2,4"]),
        ([], ["advantage=grpo,../../evil"]),
        ([], ["logger._target_=shutil.copyfile,os.mkdir"]),
    ],
)
def test_a_recorded_sweep_is_not_obeyed_either(here: Path, of_hydra: list[str], overrides: list[str]) -> None:
    asked = {"command": "train", "flags": [], "hydra": of_hydra, "overrides": overrides}
    (here / "sweep.json").write_text(json.dumps(asked))
    with pytest.raises(UserError) as refused:
        started_with("train", ["hydra.sweep.dir=."])
    assert (of_hydra or overrides)[-1] in str(refused.value)
    assert started_with("train", ["hydra.sweep.dir=.", *of_hydra, *overrides])  # typed again


def test_flags_of_a_sweep_are_typed_again(here: Path) -> None:
    flags = ["--config-dir", "evil"]
    words = ["hydra/launcher=processes", "hydra.launcher.jobs=2"]
    asked = {
        "command": "train",
        "flags": flags,
        "hydra": words,
        "overrides": ["n=2,4", "seed=range(3)", "loss=glob(*)"],
    }
    (here / "sweep.json").write_text(json.dumps(asked))
    with pytest.raises(UserError, match="--config-dir"):
        started_with("train", ["hydra.sweep.dir=."])
    assert "n=2,4" in started_with("train", ["hydra.sweep.dir=."], flags)


def test_a_job_that_goes_on_is_told_again_what_is_not_taken_from_its_record(here: Path) -> None:
    made.record(here / "0", {}, [*COPY, "n=4", "downsample._target_=mine_and_trusted.rule"])
    job = Job(0, here / "0", (*COPY, "n=4", "downsample._target_=mine_and_trusted.rule"), "")
    words = Sweep("train", lambda cfg: None).command_of(job)
    assert words[-3:] == COPY and "n=4" not in words


@pytest.mark.parametrize(
    "odd", [{"peft_type": "PROMPT_TUNING"}, {"megatron_config": {"x": 1}, "megatron_core": "evil"}]
)
def test_adapters_of_a_stranger_import_nothing(here: Path, odd: dict[str, Any]) -> None:
    (here / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, **odd}))
    (here / "adapter_model.safetensors").touch()
    settings = model_of("tiny", adapter=".")
    with pytest.raises(UserError, match=r"model\.adapter=\. holds unsupported adapters"):
        with_adapters(None, settings)


@pytest.mark.parametrize(
    "odd", [{"overrides": [3]}, {"config": [1]}, {"config": "text"}, {"command": 1}, {"choices": 1}]
)
def test_a_record_of_other_things_than_settings_is_damaged(here: Path, odd: dict[str, Any]) -> None:
    """Its checksum is right: whoever writes a record writes that, too."""
    made.record(here / "stranger", {})
    values = json.loads((here / "stranger" / "run.json").read_text()) | odd
    values["sha256"] = hashlib.sha256(
        json_line({k: v for k, v in values.items() if k != "sha256"}).encode()
    ).hexdigest()
    (here / "stranger" / "run.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"run\.json is damaged \(its"):
        read_record(here / "stranger")
