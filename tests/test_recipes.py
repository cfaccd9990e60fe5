"""Numbers that a model or a task brings along: composed, kept by a run, doubted where they are strange, and planned."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest
import torch
from small import some_and_the_rest
from typed import done

from grpo_cli.config.auto import decided
from grpo_cli.config.choices import read_choice
from grpo_cli.config.compose import settings_of
from grpo_cli.config.prepare import prepare
from grpo_cli.memory.planner import Planner
from grpo_cli.runs.record import read_record
from grpo_cli.support import processor
from grpo_cli.support.errors import UserError
from grpo_cli.support.processor import fast_in_bfloat16
from grpo_cli.tracking.introduction import doubts, doubts_of_prompts, doubts_of_shape
from grpo_cli.types import Prompt

COOKBOOK = (Path(__file__).parents[1] / "grpo_cli" / "docs" / "cookbook.md").read_text()
TRAINED = r"^    grpo train (.*?) *# (\d+) GB.*$"
REAL = re.findall(TRAINED, COOKBOOK, re.MULTILINE)
assert REAL, "there are recipes for real models"
CARD = 24e9
ONE_AND_THE_REST = some_and_the_rest(REAL, REAL[:1])


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


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("optim.lr=5.1e-5", "optim.lr=5.1e-05"),
        ("optim.lr=1e-3 model.lora.rank=8", ""),
        ("optim.warmup_steps=10 train.steps=10", "optim.warmup_steps=10 of train.steps=10"),
        ("optim.warmup_steps=9 train.steps=10", ""),
    ],
)
def test_a_rate_that_ruins_a_model_or_is_never_reached_is_doubted(words, key):
    told = list(doubts(settings_of("model=qwen2_5_0_5b", "task=gsm8k", *words.split())))
    assert len(told) == bool(key) and all(text.startswith(key) for text in told)


@pytest.mark.parametrize(("lr", "told"), [("seed=0", 1), ("optim.lr=1e-5", 0)])
def test_the_preset_of_a_folder_s_shape_is_named_where_its_rate_is_another(lr, told):
    presets = {"smollm2_135m": read_choice("model", "smollm2_135m").values}
    shape = SimpleNamespace(**presets["smollm2_135m"]["architecture"])
    assert len([*doubts_of_shape(settings_of("model=hf", "model.path=m", lr), shape, presets)]) == told


@pytest.mark.parametrize(
    ("path", "prompt", "told"), [("tiny", "What is 1+1?", 1), ("tiny", "1+1=", 0), ("x", "What?", 0)]
)
def test_prompts_with_words_are_doubted_where_the_model_knows_none(path, prompt, told):
    task: Any = SimpleNamespace(prompts=lambda split: [Prompt("p", (0,), "2")], reward=str, text=str)
    tokenizer, run = SimpleNamespace(decode=lambda ids: prompt, chat_template=None), settings_of(f"model.path={path}")
    assert len([*doubts_of_prompts(task, tokenizer, (1,), run)]) == told


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
    given = (f"task.path={file}", "task.eval_fraction=0.5", "model.autocast=bfloat16")  # 200 to evaluate on
    run = prepare(settings_of(*words, *given))
    peak = Planner.of(run, torch.device("cuda")).plan().peak
    assert peak < CARD
    assert float(size) == pytest.approx(peak / 1e9, abs=0.6)


# Precision


LORA, NONE = {"lora": made.lora(rank=4)}, {"lora": made.lora(rank=0)}
SHORT = ("model=hf", "model.path=tiny", "logger=jsonl", "device=cpu", "n=2", "train.prompts=1", "eval.every=0")
FLOAT32, BFLOAT16 = ("float32", "none"), ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    "dtype, autocast, adapters, on_fast, on_slow",
    [
        ("auto", "auto", NONE, ("float32", "bfloat16"), FLOAT32),
        ("auto", "auto", LORA, BFLOAT16, FLOAT32),
        ("auto", "bfloat16", LORA, BFLOAT16, BFLOAT16),
        ("bfloat16", "auto", NONE, BFLOAT16, ("bfloat16", "none")),
        ("float32", "bfloat16", NONE, ("float32", "bfloat16"), ("float32", "bfloat16")),
    ],
)
def test_what_auto_comes_to(dtype: str, autocast: str, adapters: Any, on_fast: Any, on_slow: Any) -> None:
    typed = replace(made.settings(), model=replace(made.model(), dtype=dtype, autocast=autocast, **adapters))
    for fast, expected in ((True, on_fast), (False, on_slow)):
        found = decided(typed, fast).model
        assert (found.dtype, found.autocast) == expected


@pytest.mark.parametrize("own", [True, False])
def test_a_gpu_that_emulates_bfloat16_is_not_fast_in_it(own, monkeypatch):
    """Turing computes it, too, many times as slowly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: own or including_emulation)
    assert fast_in_bfloat16("cuda") == fast_in_bfloat16("auto") == own


def test_a_run_goes_on_as_it_began_on_another_machine_and_with_another_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def on(fast: bool, *words: str) -> None:
        monkeypatch.setattr("grpo_cli.config.auto.fast_in_bfloat16", lambda device: fast)
        done(*words)

    train = ("train", *SHORT, "sampling.max_new_tokens=4", "model.lora.rank=1", "hydra.run.dir=run")
    on(False, *train, "train.steps=1")
    before = read_record(Path("run"))
    on(True, "train", "resume=run", "train.steps=2", "model.recipe.lr=3e-3")
    after = read_record(Path("run"))
    assert before is not None and after is not None
    assert (after.config["model"]["dtype"], after.config["model"]["autocast"]) == FLOAT32
    assert before.config["optim"] == after.config["optim"]
    on(True, "eval", "checkpoint=run", "eval.problems=1", "hydra.run.dir=seen")
    assert json.loads(Path("seen/run.json").read_text())["config"]["model"]["autocast"] == "none"


# Variables of the process


SKYLAKE = "fpu sse4_2 avx avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
USERS = {"OMP_WAIT_POLICY": "ACTIVE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7", "LRU_CACHE_CAPACITY": "7"}


@pytest.mark.parametrize(
    ("vendor", "flags", "given", "branch"),
    [
        ("GenuineIntel", SKYLAKE, {}, "AVX512,STRICT"),
        ("GenuineIntel", "fpu avx avx2 avx512f", {}, "AVX2,STRICT"),  # some of AVX-512 is not MKL's branch
        ("AuthenticAMD", SKYLAKE, {}, None),  # MKL takes these values for AUTO there
        ("GenuineIntel", SKYLAKE, {"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE"),
    ],
)
def test_what_is_documented_for_a_processor_is_set_unless_given(tmp_path, monkeypatch, vendor, flags, given, branch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t: 207\nflags\t: {flags}\n")
    environment, users = dict(given), {**given, **USERS}
    processor.set_variables(environment)
    processor.set_variables(users)
    assert environment.get("MKL_CBWR") == users.get("MKL_CBWR") == branch
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE" and USERS.items() <= users.items()


def test_one_of_several_processes_is_refused():
    processor.set_variables({"WORLD_SIZE": "1", "RANK": "0"})
    processor.set_variables({"WORLD_SIZE": "4"})  # of a cluster, without a launcher
    for rank in ("RANK", "LOCAL_RANK"):
        with pytest.raises(UserError, match="WORLD_SIZE=4"):
            processor.set_variables({"WORLD_SIZE": "4", rank: "3"})
