"""`grpo merge`: a run's adapters and their base become one ordinary model folder."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from grpo_cli.cli import main as cli

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT itself asks for it
SHORT = ("train.steps=2", "train.prompts=4", "n=4", "sampling.max_new_tokens=48", "eval.every=0", "logger=jsonl")


def grpo(*words: object) -> str:
    result = CliRunner().invoke(cli.app, list(map(str, words)), prog_name="grpo")
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: object) -> str:
    result = CliRunner().invoke(cli.app, ["merge", *map(str, words)], prog_name="grpo")
    assert result.exit_code == 2, result.output
    return result.stderr


def accuracy(checkpoint: Path, folder: Path) -> float:
    asked = ("eval.problems=60", "eval.k=1", "sampling.max_new_tokens=48", "logger=jsonl")
    grpo("eval", f"checkpoint={checkpoint}", *asked, f"hydra.run.dir={folder}")
    return json.loads((folder / "summary.json").read_text())["eval/accuracy"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose adapters have moved far enough to change answers."""
    folder = tmp_path_factory.mktemp("merge") / "run"
    grpo("train", "model.lora.rank=4", "optim.lr=0.02", "optim.warmup_steps=0", *SHORT, f"hydra.run.dir={folder}")
    return folder


def test_the_merged_model_answers_as_the_run_does(run: Path, tmp_path: Path):
    assert f"holds {run}/checkpoints/step_000002 and its base" in grpo("merge", run, tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    merged = accuracy(tmp_path / "merged", tmp_path / "of_merged")
    assert merged == accuracy(run, tmp_path / "of_run")
    assert merged != accuracy(files("grpo_cli.model") / "tiny", tmp_path / "of_base")  # so that it says something


def test_the_merged_weights_are_those_that_peft_computes_with(run: Path, tmp_path: Path):
    checkpoint = run / "checkpoints" / "step_000002"
    grpo("merge", checkpoint, tmp_path / "merged", "--dtype=float32")
    base = AutoModelForCausalLM.from_pretrained(files("grpo_cli.model") / "tiny")
    ids = torch.arange(2, 14)[None]
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, checkpoint)(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
    torch.testing.assert_close(merged, adapted, atol=1e-4, rtol=0)


def test_what_holds_no_adapters_is_refused(run: Path, tmp_path: Path):
    assert "holds no adapters; give a run with model.lora.rank=" in refused(tmp_path, tmp_path / "merged")
    assert "holds no adapters" in refused(tmp_path / "nowhere", tmp_path / "merged")
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    for checkpoint in (damaged / "checkpoints").iterdir():
        (checkpoint / "adapter_model.safetensors").write_bytes(b"")
    assert "step_000002: adapter_model.safetensors has 0 bytes" in refused(damaged, tmp_path / "merged")


def test_nothing_is_written_over(run: Path, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    assert "exists and is not an empty folder; name a new one" in refused(run, tmp_path)
    assert "exists and is not an empty folder" in refused(run, tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_base_that_is_quantised_or_unknown_is_refused(run: Path, tmp_path: Path):
    quantised = tmp_path / "quantised"
    shutil.copytree(files("grpo_cli.model") / "tiny", quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config))
    said = refused(run, tmp_path / "merged", "--base", quantised)
    assert f"{quantised} is quantised" in said and "name the model that it was made from with --base" in said
    assert "is not a folder" in refused(run, tmp_path / "merged", "--base", "./nowhere")
    assert "--dtype=int3 must be one of float32, bfloat16" in refused(run, tmp_path / "merged", "--dtype", "int3")
    assert not (tmp_path / "merged").exists()
