"""`grpo export`: other programs load what a run has made and get its answers, and nothing is left half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typed import content, done, json_lines, refused

from grpo_cli.config.compose import composed, settings_from

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT itself asks for it
SHORT = ("train.steps=2", "train.prompts=4", "n=4", "sampling.max_new_tokens=48", "eval.problems=8", "eval.k=1")
MOVED = ("optim.lr=0.02", "optim.warmup_steps=0", "logger=jsonl")  # far enough to change answers
TINY = Path(str(files("grpo_cli.model") / "tiny"))
CHECKPOINT = "checkpoints/step_000002"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters."""
    folder = tmp_path_factory.mktemp("export") / "run"
    done("train", "model.lora.rank=4", *MOVED, *SHORT, f"hydra.run.dir={folder}")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all weights, evaluated before and after, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("export") / "whole"
    done("train", "optim.lr=0.003", *MOVED[1:], *SHORT, "eval.every=2", "seed=7", f"hydra.run.dir={folder}")
    return folder


def answers(checkpoint: Path, folder: Path) -> dict[str, str]:
    """The repository's own engine: what it answers 50 held-out problems, greedily."""
    asked = ("eval.problems=50", "eval.k=1", "sampling.max_new_tokens=48", "logger=jsonl")
    done("eval", f"checkpoint={checkpoint}", *asked, f"hydra.run.dir={folder}")
    rows = json_lines(folder / "samples.jsonl")
    return {row["prompt"]: row["reply"] for row in rows if row["reason"] == "greedy"}


def generated(folder: Path, prompts: list[str]) -> dict[str, str]:
    """The same of plain `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    asked = tokenizer(prompts, return_tensors="pt", padding=True)
    made = model.generate(**asked, do_sample=False, max_new_tokens=48)[:, asked["input_ids"].shape[1] :]
    return dict(zip(prompts, tokenizer.batch_decode(made, skip_special_tokens=True), strict=True))


@pytest.mark.parametrize(("kind", "flags"), [("whole", []), ("run", ["--merge"])])
def test_transformers_answers_50_of_50_problems_as_the_run_does(
    kind: str, flags: list[str], request: pytest.FixtureRequest, tmp_path: Path
):
    of = request.getfixturevalue(kind)
    assert f"{tmp_path / 'out'} holds the model of {of}" in done("export", of, tmp_path / "out", *flags)
    expected = answers(of, tmp_path / "evaluated")
    assert len(expected) == 50 and generated(tmp_path / "out", list(expected)) == expected
    assert generated(TINY, list(expected)) != expected  # so that it says something
    task = settings_from(composed("eval", [f"checkpoint={tmp_path / 'out'}", "task=gsm8k"]))
    assert task.sampling.max_new_tokens == 512, "the task's own, not the embedded model's"
    assert (tmp_path / "out" / "adapter_config.json").exists() == (kind == "run" and not flags)
    assert not {"trainer_state.pt", "COMPLETE"} & {*os.listdir(tmp_path / "out")}


def test_the_card_says_the_recipe_and_weights_have_the_precision_that_is_asked_for(whole: Path, tmp_path: Path):
    done("export", whole, tmp_path / "my model", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "my model")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    config = GenerationConfig.from_pretrained(tmp_path / "my model").to_dict()  # as rollouts were
    wanted = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 48, "pad_token_id": 0}
    assert {key: config[key] for key in wanted} == wanted and config["eos_token_id"] == [1]
    card = huggingface_hub.ModelCard.load(tmp_path / "my model" / "README.md")
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers" and "grpo" in card.data.tags
    first, *_, last = json_lines(whole / "metrics.jsonl")
    for row, when in ((first, "before"), (last, "after")):
        low, accuracy, high = (row[f"eval/accuracy{end}"] for end in ("_low", "", "_high"))
        between = f"95% interval {low:.3f} to {high:.3f}, {8 * accuracy:.0f} of 8 problems"
        assert f"| accuracy {when} | {accuracy:.3f} at step {row['step']} ({between}) |" in card.text
    assert all(text in card.text for text in ("# my model", f"torch {torch.__version__.split('+')[0]}", "| seed | 7 |"))
    recipe = set(re.findall(r"^    (\S+=.*)$", card.text, re.MULTILINE))
    assert {"n=4", "optim.lr=0.003", "sampling.max_new_tokens=48", "train.steps=2"} <= recipe
    assert not any(word.startswith(("logger", "model.path", "hydra")) for word in recipe)


def test_adapters_go_into_a_base_that_has_moved_with_its_template_and_ends_and_without_its_penalties(tmp_path: Path):
    base, out, moved = Path(shutil.copytree(TINY, tmp_path / "base")), tmp_path / "out", tmp_path / "moved"
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(base)
    penal = json.loads((base / "generation_config.json").read_text()) | {"repetition_penalty": 1.1, "eos_token_id": 5}
    (base / "generation_config.json").write_text(json.dumps(penal))
    (base / "README.md").unlink()
    words = ("model=hf", f"model.path={base}", "model.lora.rank=2", "model.eos_tokens=['<eos>','=']", "eval.every=0")
    done("train", *words, "model.dtype=bfloat16", "logger=jsonl", *SHORT, f"hydra.run.dir={tmp_path / 'r'}")
    base.rename(moved)
    done("export", tmp_path / "r", tmp_path / "small", "--base", moved)
    kept = load_file(tmp_path / "small" / "adapter_model.safetensors").values()
    assert {weight.dtype for weight in kept} == {torch.float32}
    assert f"model.path={base}" in refused("export", tmp_path / "r", out, "--merge") and not out.exists()
    done("export", tmp_path / "r", out, "--merge", "--base", moved)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    config = GenerationConfig.from_pretrained(out)
    assert config.eos_token_id == [1, tokenizer.convert_tokens_to_ids("=")] and not config.repetition_penalty
    said = (out / "README.md").read_text()
    assert "| base | moved |" in said and "| its licence | unknown" in said and str(tmp_path) not in said
    assert "accuracy before | not measured" in said


def test_what_cannot_be_exported_is_refused_and_nothing_is_written_over(run: Path, whole: Path, tmp_path: Path):
    out, theirs = tmp_path / "out", Path(shutil.copytree(TINY, tmp_path / "theirs"))
    (tmp_path / "mine.txt").write_text("mine")
    before = content(tmp_path)
    for words, message in (
        ((whole, out, "--merge"), "holds no adapters but an ordinary model; leave it out"),
        ((whole, out, "--dtype", "int3"), "dtype=int3 must be"),
        ((whole, out, "--dtype", "auto"), "--dtype=auto"),
        ((tmp_path, out), "holds no complete checkpoint; name a run"),
        *(((run, place), "is not an empty folder; name a new one") for place in (theirs, tmp_path / "mine.txt")),
    ):
        assert message in refused("export", *words)
    assert content(tmp_path) == before
    newest = Path(shutil.copytree(whole, tmp_path / "newest"))
    (newest / CHECKPOINT / "model.safetensors").write_bytes(b"")
    assert "passed over step_000002: model.safetensors has changed" in done("export", newest, out)
    assert "| steps | 0 |" in (out / "README.md").read_text()
    (newest / "run.json").write_text("{")
    assert "run.json is damaged" in refused("export", newest, tmp_path / "no") and not (tmp_path / "no").exists()


def test_a_disk_that_is_full_at_the_end_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = content(tmp_path)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("grpo_cli.cli.export.write_card", full)
    assert "No space left on device" in refused("export", run, tmp_path / "out")
    assert content(tmp_path) == before
