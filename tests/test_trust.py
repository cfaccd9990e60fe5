"""What a run folder of a stranger may name: choices of ours, code of the current directory; nothing else runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import made
import pytest
from omegaconf import OmegaConf
from typed import grpo

from grpo_cli.config.overrides import key_of
from grpo_cli.config.trust import taken
from grpo_cli.support.errors import UserError
from grpo_cli.sweep.resume import started_with

MODULE = """
import shutil
from shutil import copyfile
class Tracker:
    def log(self, record): ...
    def close(self, summary): ...
def score(reply): return 1.0
"""


@pytest.fixture
def here(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of one's own, beside a run folder of a stranger."""
    for folder, file, text in (("stranger", "__init__", ""), ("package", "__init__", MODULE), ("", "mine", MODULE)):
        (elsewhere / folder).mkdir(exist_ok=True)
        (elsewhere / folder / f"{file}.py").write_text(text)
    (elsewhere / "stranger" / "evil.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    return elsewhere


FOREIGN = """
++logger={_target_: shutil.copyfile, src: a, dst: b}
logger._target_=grpo_cli.config.instantiate.hydra.utils.get_object
downsample._target_=mine.copyfile
downsample._target_=mine:shutil.copyfile
logger._target_=stranger.evil.Tracker
logger._target_=shutil.copyfile,os.mkdir
task.tools='os:getcwd,system'
task.reward=os:system
++hydra.job.env_set.LD_PRELOAD=evil.so
++hydra.job.env_set.PYTHONINSPECT=1
hydra.callbacks.x._target_=os.mkdir
hydra.searchpath=[file://evil]
collector.path=/etc
hydra.launcher._target_=os.mkdir
hydra.launcher.python=/tmp/evil
hydra.launcher.setup=[evil]
model=../../stranger/evil
model.trust_remote_code=true
engine.options={trust_remote_code: true}
engine.options={dtype: float16}
engine.address=ray://stranger
logger.name='${oc.env:HOME}'
logger.space_id=stranger/space
task.path=/etc/passwd
task.path=${oc.env:HOME}
train.warmup_path=../rows.jsonl
task.judge.base_url=http://stranger/v1
task.judge.key=AWS_SECRET_ACCESS_KEY
"""


@pytest.mark.parametrize("word", FOREIGN.strip().splitlines())
def test_code_files_and_machines_of_others_have_to_be_typed_again(here: Path, word: str) -> None:
    with pytest.raises(UserError) as refused:
        taken(["n=4", word], [], here / "stranger")
    assert key_of(word) in str(refused.value) and "n=4" not in str(refused.value)
    assert word in taken([word], [word], here / "stranger")
    (here / "sweep.json").write_text(json.dumps({"command": "train", "hydra": [word], "overrides": ["seed=range(3)"]}))
    with pytest.raises(UserError):
        started_with("train", ["hydra.sweep.dir=."])


OURS = """
task.template='a: b'
logger._target_=mine.Tracker
logger._target_=package.Tracker
task.reward=mine:score
task.reward=judge
advantage._target_=grpo_cli.methods.rloo.rloo
m=${n}
optim.lr=interval(1e-5,1e-3)
task.path=rows.jsonl
hydra.launcher.jobs=2
hydra/launcher=joblib
~logger
"""


@pytest.mark.parametrize("word", OURS.strip().splitlines())
def test_values_choices_of_ours_and_code_of_one_s_own_are_taken_as_they_are(here: Path, word: str) -> None:
    assert taken([word], [], here / "stranger") == [word]
    if word.endswith("package.Tracker"):
        with pytest.raises(UserError):  # it came with the run
            taken([word], [], here / "package" / "0")


def test_a_typed_value_or_choice_replaces_what_is_not_taken(here: Path) -> None:
    for typed in ("logger._target_=mine.Tracker", "logger=jsonl"):
        assert taken(["logger._target_=shutil.copyfile"], [typed], here / typed) == []


def test_a_file_is_not_overwritten_by_resuming_a_folder(here: Path) -> None:
    Path("harmless").write_text("harmless")
    Path("precious").write_text("precious")
    cfg: Any = OmegaConf.to_container(made.configuration())
    cfg["logger"] = {"_target_": "shutil.copyfile", "src": "harmless", "dst": "precious"}
    made.record(here / "stranger", cfg)
    (here / "stranger" / "checkpoints").mkdir()
    ended = grpo("train", "resume=stranger", "accept_damage=true")
    assert (ended.exit_code, Path("precious").read_text()) == (2, "precious") and "shutil.copyfile" in ended.output
