"""A run says which code it was; nothing that lies around makes it say another, or fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_cli.runs import record
from grpo_cli.runs.record import commit_of


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one commit, made with nobody's own settings."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name, value in (("HOME", str(tmp_path)), ("GIT_CONFIG_GLOBAL", os.devnull), ("GIT_CONFIG_NOSYSTEM", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(record, "GIT_SECONDS", 300.0)
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "code.py").write_text("one")
    for words in ("init -q", "add code.py", "-c user.name=a -c user.email=a@b commit -qm one"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    return folder


def test_a_checkout_is_its_commit_and_whether_a_tracked_file_differs(repository):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    commit = head.stdout.strip()
    (repository / "untracked.py").write_text("not part of it")
    assert commit_of(repository) == commit
    (repository / "code.py").write_text("two")
    assert commit_of(repository) == f"{commit}-dirty"


def test_neither_the_current_folder_nor_the_environment_names_another_repository(repository, monkeypatch):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    installed = repository / "site-packages"
    (installed / ".git").mkdir(parents=True)  # damaged: git would look for the next one above
    assert commit_of(installed) is commit_of(repository.parent) is None


def test_without_git_and_with_a_git_that_hangs_there_is_no_commit(repository, tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    assert commit_of(repository) is None
    (programs / "git").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setattr(record, "GIT_SECONDS", 0.1)
    assert commit_of(repository) is None
