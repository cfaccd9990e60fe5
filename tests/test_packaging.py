"""What is shipped: a wheel that works outside the checkout, and the programs that set a fresh machine up."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typed import grpo

from grpo_cli.support.extras import EXTRAS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout without network and unpacked into an empty folder."""
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target / "site")
    return target / "site"


def files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


def test_the_wheel_holds_the_package_the_choices_and_nothing_else(installed):
    packaged = files(installed / "grpo_cli")
    assert packaged == files(ROOT / "grpo_cli") | {f"conf/{name}" for name in files(ROOT / "conf")}
    assert {path.name.split("-")[0] for path in installed.iterdir()} == {"grpo_cli", "hydra_plugins"}


def test_the_wheel_trains_with_its_own_choices_outside_the_checkout(installed, tmp_path):
    settings = installed / "grpo_cli" / "conf" / "train.yaml"
    settings.write_text(settings.read_text().replace("\n  steps: 80\n", "\n  steps: 1\n"))
    small = ["train.prompts=1", "n=2", "sampling.max_new_tokens=4", "eval.every=0", "logger=jsonl"]
    command = [sys.executable, "-P", "-m", "grpo_cli", "train", *small]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    (summary,) = (tmp_path / "outputs" / "train").glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert (found["status"], found["step"]) == ("completed", 1)


PYTHON3 = """
case "$1 $2 $3" in
"-c import"*) exit 0 ;;
--version*) echo Python 3.11 ;;
"-m venv --clear") rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-m pip install") for tool in grpo ruff mypy pytest; do cp "$TOOLS/note" ".venv/bin/$tool"; done ;;
esac
"""


def test_a_fresh_clone_installs_once_and_trains(tmp_path):
    """On a machine whose `python3` makes pretended virtual environments and notes what it is called with."""
    clone, tools, log = tmp_path / "a clone", tmp_path / "tools", tmp_path / "log"  # with a space
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    shutil.copy(ROOT / "pyproject.toml", clone)
    tools.mkdir()
    for name, script in (("python3", PYTHON3), ("note", "")):
        (tools / name).write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >>"{log}"\n{script}')
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "TOOLS": str(tools)}

    def train(*words: str) -> list[str]:
        log.unlink(missing_ok=True)
        command = [str(clone / "scripts/train.sh"), *words]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        return [line for line in log.read_text().splitlines() if re.search("-m venv| install |^grpo", line)]

    first = train("n=4", "task.template=a b")
    assert first[0] == "python3 -m venv --clear .venv" and first[-1] == "grpo train n=4 task.template=a b"
    assert [line.rpartition(" ")[2] for line in first if " pip install " in line] == ["."]
    assert train() == ["grpo train"]


# What a small run of each bench gets besides --quick. The others need a commit to compare with, a control group
# (Linux, as root), or a real model and TRL.
SMALL = {"memory": (), "real": ("--parts", "floor", "train"), "rollout": ("--arms", "infinite")}


@pytest.mark.study
@pytest.mark.filterwarnings("ignore:This process .*fork:DeprecationWarning")
@pytest.mark.parametrize("name", SMALL)
def test_a_bench_works_at_a_small_size_and_leaves_its_figures(name, tmp_path):
    out = tmp_path / "figures" / "out.json"
    assert importlib.import_module(name).main([*SMALL[name], "--quick", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["quick"] is True and {"torch", "machine", "load"} <= found["environment"].keys()
    assert len(found.keys() - {"settings", "environment", "checks"}) >= 1


# Libraries that are not installed


ASKED = {
    "datasets": "task=gsm8k",
    "hydra_plugins.hydra_optuna_sweeper": "-m hydra/sweeper=optuna",
    "math_verify": "task.path=p.jsonl task=jsonl task.reward=math",
    "peft": "model.autocast=none model.lora.rank=2",
    "pyarrow": "task=jsonl task.path=p.parquet",
    "ray": "engine=ray",
    "reasoning_gym": "task.name=gcd task=reasoning_gym",
    "tensorboard": "logger=tensorboard",
    "vllm": "engine=vllm",
}


def sentence(module: str) -> str:
    name = module.removeprefix("hydra_plugins.").replace("_", "-")
    return f" needs {name}, which is not installed: pip install 'grpo-cli[{EXTRAS[module]}]'"


@pytest.mark.parametrize("module", ASKED)
def test_the_command_stands_in_one_sentence(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "p.parquet"):
        Path(name).write_text('{"question": "1 + 1?", "answer": "2"}\n' * 2)
    monkeypatch.setitem(sys.modules, module, None)
    done, key = grpo("train", *ASKED[module].split()), ASKED[module].split()[-1].partition("=")[0].removesuffix(".rank")
    said = done.stderr
    assert done.exit_code == 2 and said.count("\n") == 1 and sentence(module) in said and key in said, said
