"""A setting that needs a library that is not installed: one sentence, with the command that brings it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typed import grpo

from grpo_cli.support.extras import EXTRAS

ASKED = {
    "datasets": "task=gsm8k",
    "hydra_plugins.hydra_joblib_launcher": "-m hydra/launcher=joblib",
    "hydra_plugins.hydra_optuna_sweeper": "-m hydra/sweeper=optuna",
    "hydra_plugins.hydra_ray_launcher": "-m hydra/launcher=ray",
    "hydra_plugins.hydra_submitit_launcher": "-m hydra/launcher=submitit_slurm",
    "math_verify": "task.path=p.jsonl task=jsonl task.reward=math",
    "peft": "model.autocast=none model.lora.rank=2",
    "pyarrow": "task=jsonl task.path=p.parquet",
    "ray": "engine=ray",
    "reasoning_gym": "task.name=gcd task=reasoning_gym",
    "tensorboard": "logger=tensorboard",
    "trackio": "logger=trackio",
    "vllm": "engine=vllm",
}


def sentence(module: str) -> str:
    name = module.removeprefix("hydra_plugins.").replace("_", "-")
    return f" needs {name}, which is not installed: pip install 'grpo-cli[{EXTRAS[module]}]'"


@pytest.mark.parametrize("module", ASKED)
def test_the_command_stands_in_one_sentence(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "p.parquet"):
        Path(name).write_text('{"question": "1 + 1?", "answer": "2"}\n' * 2)
    monkeypatch.setitem(sys.modules, module, None)
    done, key = grpo("train", *ASKED[module].split()), ASKED[module].split()[-1].partition("=")[0].removesuffix(".rank")
    said = done.stderr
    assert done.exit_code == 2 and said.count("\n") == 1 and sentence(module) in said and key in said, said
