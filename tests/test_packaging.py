"""What is shipped: a wheel that works outside the checkout, and the programs that set a fresh machine up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def grpo(*arguments: str, path: Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-m", "grpo_cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_wheel_holds_the_package_the_choices_and_nothing_else(installed):
    packaged = files(installed / "grpo_cli")
    assert packaged == files(ROOT / "grpo_cli") | {f"conf/{name}" for name in files(ROOT / "conf")}
    assert {path.name.split("-")[0] for path in installed.iterdir()} == {"grpo_cli", "hydra_plugins"}


def test_the_wheel_trains_with_its_own_choices_outside_the_checkout(installed, tmp_path):
    settings = installed / "grpo_cli" / "conf" / "train.yaml"
    settings.write_text(settings.read_text().replace("\n  steps: 80\n", "\n  steps: 1\n"))
    small = ["train.prompts=1", "n=2", "sampling.max_new_tokens=4", "eval.every=0", "logger=jsonl"]
    grpo("train", *small, path=installed, cwd=tmp_path)
    (summary,) = (tmp_path / "outputs" / "train").glob("*/summary.json")
    found = json.loads(summary.read_text())
    assert (found["status"], found["step"]) == ("completed", 1)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A clone on a machine whose `python3` makes pretended virtual environments and notes what it is asked to do."""
    clone = tmp_path / "a clone"  # with a space
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    shutil.copy(ROOT / "pyproject.toml", clone)
    tools = tmp_path / "tools"
    tools.mkdir()
    log = f'echo "${{0##*/}} $*" >>"{tmp_path}/log"\n'
    note = f"#!/bin/bash\n{log}"
    (tools / "python3").write_text(
        f"""#!/bin/bash
{log}
case "$1 $2 $3" in
"-c import"*) exit 0 ;;
--version*) echo Python 3.11 ;;
"-m venv --clear") rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-m pip install") for tool in grpo ruff mypy pytest; do cp "{tools}/note" ".venv/bin/$tool"; done ;;
esac
"""
    )
    (tools / "note").write_text(note)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return clone


def run(clone: Path, *command: str) -> list[str]:
    """Run a script in the clone. Returns what the pretended tools were asked to do, questions left out."""
    log = clone.parent / "log"
    log.unlink(missing_ok=True)
    environment = {"PATH": f"{clone.parent / 'tools'}:/usr/bin:/bin", "HOME": str(clone.parent)}
    subprocess.run(command, cwd=clone.parent, env=environment, check=True, capture_output=True)
    asked = log.read_text().splitlines()
    return [line for line in asked if line and "-c import" not in line and "--version" not in line]


def installs(asked: list[str]) -> list[str]:
    return [line.rpartition(" ")[2] for line in asked if " pip install " in line]


def test_a_fresh_clone_installs_once_and_trains(fresh):
    first = run(fresh, str(fresh / "scripts/train.sh"), "n=4", "task.template=a b")
    assert first[0] == "python3 -m venv --clear .venv"
    assert installs(first) == ["."]
    assert first[-1] == "grpo train n=4 task.template=a b"
    assert run(fresh, str(fresh / "scripts/train.sh")) == ["grpo train"]
