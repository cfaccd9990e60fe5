"""Numbers that a model or a task brings along: composed, kept by a run, doubted where they are strange, and planned."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from small import some_and_the_rest
from typed import done

from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.memory.planner import Planner
from grpo_cli.runs.record import read_record
from grpo_cli.tracking.introduction import doubts

COOKBOOK = (Path(__file__).parents[1] / "grpo_cli" / "docs" / "cookbook.md").read_text()
TRAINED = r"^    grpo train (.*?) *# (\d+) GB.*$"
REAL = re.findall(TRAINED, COOKBOOK, re.MULTILINE)
assert len(REAL) == 3, "there are recipes for real models"
CARD = 24e9
ONE_AND_THE_REST = some_and_the_rest(REAL, REAL[2:])  # of which the first takes longest


@pytest.mark.parametrize(
    ("words", "lr", "reply"),
    [
        ("", 5e-4, 128),
        ("model=hf model.path=x task=gsm8k", 1e-6, 512),
        ("model=hf model.path=x task=math model.adapter=y", 2e-5, 1024),
        ("model=qwen2_5_3b task=gsm8k model.lora.rank=64", 5e-6, 512),
        ("model=qwen3_4b task=gsm8k optim.lr=3e-6 sampling.max_new_tokens=64", 3e-6, 64),
        ("experiment=pods_gsm8k optim.lr=1e-5 model.lora.rank=64", 1e-5, 512),
    ],
)
def test_the_rate_is_the_models_and_the_reply_length_the_tasks_unless_something_says_otherwise(words, lr, reply):
    run = settings_of(*words.split())
    assert (run.optim.lr, run.sampling.max_new_tokens) == (lr, reply)


SMALL = ("logger=jsonl", "n=2", "train.prompts=2", "train.steps=1", "eval.problems=2", "eval.k=1", "eval.every=1")


def test_a_run_writes_its_numbers_down_and_goes_on_with_them_whatever_a_recipe_says_since(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done("train", *SMALL, "hydra.run.dir=R")
    begun = read_record(Path("R"))
    assert begun.config["optim"]["lr"] == 5e-4 and begun.config["sampling"]["max_new_tokens"] == 128
    done("train", "resume=R", "train.steps=2", "model.recipe.lr=3e-3")  # as a version with another default has it
    lr = [json.loads(line).get("optim/lr") for line in Path("R/metrics.jsonl").read_text().splitlines()]
    assert read_record(Path("R")).config["optim"]["lr"] == 5e-4
    assert lr[2] == pytest.approx(5e-4 * 2 / 5), "the second of five steps of warm-up"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("optim.lr=5.1e-5", "optim.lr=5.1e-05"),
        ("optim.lr=1e-3 model.lora.rank=8", ""),
        ("sampling.max_new_tokens=511", "sampling.max_new_tokens=511"),
    ],
)
def test_a_rate_that_ruins_a_model_and_replies_that_are_cut_off_are_doubted(words, key):
    told = list(doubts(settings_of("model=qwen2_5_0_5b", "task=gsm8k", *words.split())))
    assert len(told) == bool(key) and all(text.startswith(key) for text in told)


# As long as the problems of GSM8K are on average, in characters; a plan counts a token for each, three times too many.
QUESTION = (
    "A shop sells pens at 2 dollars each and books at 7 dollars each. Ann buys three pens and two books, and gives the "
    "cashier 30 dollars. She shares what is left with her two brothers. How much does each of the three get?"
)


@pytest.mark.parametrize(("line", "size"), ONE_AND_THE_REST, ids=lambda value: value)
def test_every_line_with_a_real_model_fits_one_card_of_24_gb_as_the_cookbook_says(line, size, tmp_path):
    """Every rollout as long as may be; of a folder of one's own the shape of half a billion weights."""
    file = tmp_path / "problems.jsonl"
    rows = ({"question": f"{QUESTION} ({i})", "answer": "#### 3"} for i in range(400))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = line.replace("model=hf model.path=<folder or hub id>", "model=qwen2_5_0_5b")
    words = [word for word in line.split() if not word.startswith(("task.path=", "task.reward="))]
    run = prepare(settings_of(*words, f"task.path={file}", "model.autocast=bfloat16"))
    peak = Planner.of(run, torch.device("cuda")).plan().peak
    assert peak < CARD
    assert float(size) == pytest.approx(peak / 1e9, abs=0.6)
