"""The names in a run's folder are said once, and are read without anything heavy."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import grpo_cli
from grpo_cli.runs import layout

PACKAGE = Path(grpo_cli.__file__).parent
# `wandb` is a library as well, and any file may be `.tmp` while it is written.
NAMES = {value for value in vars(layout).values() if isinstance(value, str)} - {layout.WANDB, layout.UNFINISHED}


def test_no_other_module_says_a_name_of_a_run_s_folder():
    assert {"metrics.jsonl", "COMPLETE", "checkpoints", "run.json"} <= NAMES
    said = [
        f"{file.relative_to(PACKAGE)}, line {node.lineno}: {node.value}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file != Path(layout.__file__)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in NAMES
    ]
    assert said == []


def test_a_step_s_folder_tells_its_step_also_while_it_is_written():
    for step in (0, 100, 999_999, 1_000_000):
        name = layout.step_folder(step)
        assert layout.step_of(name) == layout.step_of(f".{name}{layout.UNFINISHED}") == step
    assert {layout.step_of(name) for name in ("best", "step_", "step_1.bak", "a_step_1", "step_1 ")} == {None}


def test_names_and_what_is_looked_for_by_them_load_no_torch():
    """The process that starts a sweep's jobs would need seconds and memory."""
    wanted = "grpo_cli.runs.find, grpo_cli.model.adapters, grpo_cli.config.overrides, hydra_plugins.grpo_processes"
    program = f"import sys, {wanted}; print({{'torch', 'wandb'}} & {{*sys.modules}})"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"
