"""`grpo profile` as a person types it, what is measured, and what a run that is out of memory says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from grpo_cli.cli import main as cli
from grpo_cli.memory.gpus import MEMORY
from grpo_cli.memory.measure import PhasePeaks
from grpo_cli.report.profiles import (
    SCHEMA,
    profile_row,
    profile_table,
    read_profile,
)
from grpo_cli.settings import GpuWord
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import is_out_of_memory, peak_bytes, start_peak
from grpo_cli.support.meter import WallMeter, spans_around

SMALL = ["train.prompts=1", "n=4", "sampling.max_new_tokens=8", "eval.problems=2", "eval.k=1", "logger=jsonl"]


def grpo(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words), prog_name="grpo")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def profile(*words: str, out: str = "out") -> tuple[dict[str, Any], str]:
    result = grpo("profile", *SMALL, f"hydra.run.dir={out}", *words)
    assert result.exit_code == 0, result.output
    return read_profile(Path(out, "profile.json")), result.stdout


def test_a_profile_measures_every_phase_and_predicts_what_training_takes():
    words = ["profile.steps=1", "profile.warmup=0", "loss.kl_coef=0.1", "profile.lengths=full", "profile.trace=true"]
    found, shown = profile(*words)
    phases, predicted = found["measured"]["phases"], found["predicted"]["phases"]
    wanted = {"prefill", "decode", "reward", "ref_logprobs", "forward", "backward", "optimizer", "rest", "step", "eval"}
    assert set(phases) == wanted and set(predicted) == wanted - {"reward", "rest", "step"}
    inside = sum(phases[name]["seconds_median"] for name in wanted - {"step", "eval"})
    assert inside == pytest.approx(phases["step"]["seconds_median"])
    engine = found["measured"]["engine"]
    assert engine["engine/decode_steps"] == 7  # the first of 8 tokens comes from the prompt
    assert phases["decode"]["tokens"] == 4 * 8
    assert predicted["decode"]["held_by"]["kv"] == engine["engine/kv_peak_bytes"]
    assert all(phases[name]["peak_bytes"] for name in predicted) and found["measured"]["peak"]["phase"] in phases
    assert all(name in shown for name in ("decode", "backward", "fits"))
    assert Path("out/trace.json.gz").stat().st_size


def test_a_plan_reads_no_weights_and_runs_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("grpo_cli.memory.measure.Step", None)
    shape = ["model=qwen2_5_3b", "model.architecture.num_hidden_layers=1", "model.dtype=float32"]
    shape += ["model.lora.rank=2", "model.lora.dropout=0.5"]
    found, _ = profile("profile.plan_only=true", *shape, "fit=2GB", "eval.every=0")
    assert found["measured"] is None
    # Embedding, queries and output, keys and values, the MLP; the rest are vectors.
    numbers = (151_936 + 2 * 2048 + 2 * 256 + 3 * 11_008) * 2048
    assert "policy_logprobs" in found["predicted"]["phases"], "dropout needs another pass"
    assert found["predicted"]["phases"]["decode"]["held_by"]["weights"] == pytest.approx(4 * numbers, rel=0.002)
    assert found["fit"] == {"room_bytes": 2 * 10**9, "fits": False, "largest_n": found["fit"]["largest_n"]}
    assert found["schema"] == SCHEMA


def test_a_plan_for_a_gpu_has_its_precision_and_its_allocators_ways(monkeypatch: pytest.MonkeyPatch):
    """No phase keeps what another has freed, nothing is resident beside the tensors, and 4 bits can be planned for."""
    monkeypatch.setattr("grpo_cli.support.processor.fast_in_bfloat16", lambda device: False)
    words = ["model=smollm2_135m", "model.architecture.num_hidden_layers=1", "model.lora.rank=2", "model.quantize=4bit"]
    words += ["model.gradient_checkpointing=full", "model.offload_activations=true", "eval.every=0", "fit=2GB"]
    found, _ = profile("profile.plan_only=true", "profile.for_gpu=true", *words)
    assert (found["settings"]["model"]["dtype"], found["settings"]["model"]["autocast"]) == ("bfloat16", "bfloat16")
    held = {name: phase["held_by"] for name, phase in found["predicted"]["phases"].items()}
    assert {sizes["workspace"] for sizes in held.values()} == {0} and found["device"] == "a GPU of 1.86 GiB"
    assert held["optimizer"]["activations"] == 0
    assert held["decode"]["activations"] > 0 and held["backward"]["activations"] > 0
    refused = grpo("profile", *SMALL, "profile.for_gpu=true").stderr
    assert "profile.for_gpu=true" in refused and "profile.plan_only=true" in refused


def test_a_gpu_that_is_named_says_what_it_has():
    words = ["model=smollm2_135m", "model.architecture.num_hidden_layers=1", "eval.every=0", "profile.plan_only=true"]
    found, _ = profile(*words, "profile.for_gpu=l4")
    assert found["device"] == "l4 of 22.35 GiB" and found["fit"]["room_bytes"] == 24 * 10**9
    assert set(MEMORY) == set(get_args(GpuWord))
    old, _ = profile(*words, "profile.for_gpu=t4", out="old")
    assert old["settings"]["model"]["autocast"] == "none", "it has no bfloat16"
    wrong = grpo("profile", *SMALL, "profile.for_gpu=rtx4091").stderr
    assert "profile.for_gpu=rtx4091" in wrong and "did you mean rtx4090?" in wrong


def test_what_cannot_be_profiled_is_refused_all_at_once():
    wrong = ["profile.lengths=long", "profile.steps=0"]
    result = grpo("profile", *SMALL, *wrong)
    assert result.exit_code == 2 and all(word in result.stderr for word in wrong)
    for words in (["fit=much"], ["profile.fit=2GB"], ["profile.lengths=trace"]):
        said = grpo("profile", *SMALL, *words)
        assert said.exit_code == 2 and all(word.partition("=")[0] in said.stderr for word in words)


def test_a_sweep_ends_in_one_table_with_ratios_to_its_first_row():
    line = {"phases": {"step": {"seconds_median": 2.0}, "decode": {"tokens_per_second": 50.0}}}
    engine = {"engine/decode_steps": 10.0, "engine/slot_utilisation": 0.5, "engine/kv_peak_bytes": 4 * 2**20}
    peak = {"phase": "decode", "bytes": 2**30}
    first = {"measured": {**line, "engine": engine, "peak": peak}, "predicted": {}}
    second = json.loads(json.dumps(first))
    second["measured"]["engine"]["engine/kv_peak_bytes"] = 2**20
    table = profile_table([profile_row("sampler=full", first), profile_row("sampler=micro", second)])
    assert [row[table.columns.index("KV")] for row in table.rows] == ["4.0 MiB (1.00)", "1.0 MiB (0.25)"]


@pytest.mark.process
def test_a_sweep_of_profiles_is_run_as_any_other_and_compared_at_its_end():
    words = [*SMALL[:1], *SMALL[2:], "eval.every=0", "n=4,5", "m=5", "profile.plan_only=true", "hydra.sweep.dir=s"]
    told = grpo("profile", "-m", *words)
    assert told.exit_code == 2, "a combination that cannot be profiled is missing in the table"
    assert "job 0  n=4: skipped  m=5 must not be more than n=4" in told.stdout
    assert "2 jobs: 1 done, 1 skipped" in told.stdout
    rows = json.loads(Path("s/comparison.json").read_text())
    assert [(row["name"], row["peak_bytes"]) for row in rows] == [
        ("n=5", json.loads(Path("s/1/summary.json").read_text())["peak_bytes"])
    ]


def test_another_schema_is_refused(tmp_path: Path):
    (tmp_path / "profile.json").write_text('{"schema": 0}')
    with pytest.raises(UserError, match="schema 0"):
        read_profile(tmp_path / "profile.json")


def test_what_is_not_planned_is_reported():
    found, shown = profile("profile.plan_only=true", "engine=vllm")
    assert len(found["not_predicted"]) == 1 and "Not planned" in shown and "decode" not in found["predicted"]["phases"]


def test_a_run_out_of_memory_names_phase_breakdown_and_keys(monkeypatch: pytest.MonkeyPatch):
    def failing(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("grpo_cli.learner.forward.packed_hidden", failing)
    result = grpo("train", *SMALL, "train.steps=1", "hydra.run.dir=out", "eval.every=0")
    assert result.exit_code == 2
    assert "out of memory in forward (CUDA out of memory. Tried to allocate 20.00 GiB)" in result.stderr
    assert "train.micro_batch_tokens" in result.stderr and "optimizer" in result.stderr
    assert "Traceback" not in result.stderr


# As PyTorch 2.13 and CUDA say it: an allocation, a graph's instantiation, a kernel's stack, a handle, a convolution.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 1.00 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory",
)


def test_an_allocation_that_failed_is_known_by_its_kind_or_its_text():
    lacking = [MemoryError(), torch.OutOfMemoryError("x"), *map(RuntimeError, OUT_OF_MEMORY)]
    assert all(map(is_out_of_memory, lacking))
    others = [RuntimeError("shapes do not match"), ValueError("CUDA"), *map(ValueError, OUT_OF_MEMORY)]
    assert not any(map(is_out_of_memory, others))


def test_what_fails_while_a_graph_is_recorded_is_told_by_what_came_before():
    recording = "CUDA error: operation failed due to a previous error during capture"
    for first, taken in ((torch.OutOfMemoryError("x"), True), (RuntimeError("shapes"), False)):
        try:
            try:
                raise first
            finally:
                raise RuntimeError(recording)
        except RuntimeError as error:
            assert is_out_of_memory(error) == taken
    assert not is_out_of_memory(RuntimeError(recording))


def test_an_error_tells_the_spans_that_it_passed_through():
    meter = WallMeter()
    with pytest.raises(ValueError) as raised, meter.span("step"), meter.span("rollout"):
        with meter.span("prefill"):
            pass
        with meter.span("decode"):
            raise ValueError
    assert spans_around(raised.value) == ("step", "rollout", "decode")


def test_a_phase_has_the_peak_of_its_own_time():
    peaks = iter([1, 5, 50, 7, 90, 3])
    watch = PhasePeaks(lambda: next(peaks))
    for names in [("step",), ("step", "a"), ("step",), ("step", "a"), ("step",), ()]:
        watch(names)
    assert watch.take() == {"step": 90, "a": 90} and watch.take() == {}


def test_resident_memory_is_seen_to_rise_and_to_fall():
    cpu = torch.device("cpu")
    start_peak(cpu)
    before = peak_bytes(cpu)
    block = torch.ones(2**27, dtype=torch.uint8)
    high = peak_bytes(cpu)
    del block
    start_peak(cpu)
    assert high > before + 2**26 > peak_bytes(cpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_profile_on_a_gpu_reads_the_allocator_and_agrees_with_its_prediction():
    found, _ = profile("device=cuda", "profile.steps=1", "profile.lengths=full")
    assert found["predicted"]["peak"]["bytes"] == pytest.approx(found["measured"]["peak"]["bytes"], rel=0.2)
