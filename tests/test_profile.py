"""`grpo profile` as a person types it, what is measured, and what a run that is out of memory says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typed import done, refused

from grpo_cli.memory.profile import GPUS
from grpo_cli.runs.files import read_object
from grpo_cli.settings import GpuWord
from grpo_cli.support.memory import is_out_of_memory

SMALL = ["train.prompts=1", "n=4", "sampling.max_new_tokens=8", "eval.problems=2", "eval.k=1", "logger=jsonl"]
LAYER = ["model=smollm2_135m", "model.architecture.num_hidden_layers=1", "eval.every=0", "profile.plan_only=true"]


pytestmark = pytest.mark.usefixtures("elsewhere")


def profile(*words: str, out: str = "out") -> tuple[dict[str, Any], str]:
    shown = done("profile", *SMALL, f"hydra.run.dir={out}", *words)
    return read_object(Path(out, "profile.json")), shown


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
    assert "old_logprobs" in found["predicted"]["phases"], "dropout needs another pass"
    assert found["predicted"]["phases"]["decode"]["held_by"]["weights"] == pytest.approx(4 * numbers, rel=0.002)
    assert found["fit"] == {"room_bytes": 2 * 10**9, "fits": False, "largest_n": found["fit"]["largest_n"]}


def test_a_plan_for_a_gpu_has_its_memory_its_precision_and_its_allocators_ways(monkeypatch: pytest.MonkeyPatch):
    """Nothing is resident beside the tensors, and 4 bits can be planned for; a T4 has no bfloat16."""
    monkeypatch.setattr("grpo_cli.support.processor.fast_in_bfloat16", lambda device: False)
    words = ["model.lora.rank=2", "model.quantize=4bit", "fit=2GB"]
    words += ["model.gradient_checkpointing=full", "model.offload_activations=true"]
    found, _ = profile("profile.for_gpu=true", *LAYER, *words)
    assert (found["settings"]["model"]["dtype"], found["settings"]["model"]["autocast"]) == ("bfloat16", "bfloat16")
    held = [phase["held_by"] for phase in found["predicted"]["phases"].values()]
    assert {sizes["workspace"] for sizes in held} == {0} and found["device"] == "a GPU of 1.86 GiB"
    found, _ = profile(*LAYER, "profile.for_gpu=t4", out="old")
    assert found["device"] == "t4 of 14.90 GiB" and found["fit"]["room_bytes"] == 16 * 10**9
    assert found["settings"]["model"]["autocast"] == "none" and set(GPUS) == set(get_args(GpuWord))


def test_a_run_out_of_memory_names_phase_breakdown_and_keys(monkeypatch: pytest.MonkeyPatch):
    def failing(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("grpo_cli.learner.forward.packed_hidden", failing)
    said = refused("train", *SMALL, "train.steps=1", "hydra.run.dir=out", "eval.every=0")
    assert "out of memory in forward (CUDA out of memory. Tried to allocate 20.00 GiB)" in said
    assert "train.micro_batch_tokens" in said and "optimizer" in said


# As PyTorch 2.13 and CUDA say it: a graph's instantiation, a handle, a convolution, the host.
OUT_OF_MEMORY = (
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory",
)


def test_an_allocation_that_failed_is_known_by_its_kind_its_text_or_what_came_before():
    after = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert not any(map(is_out_of_memory, [after, RuntimeError("no"), *map(ValueError, OUT_OF_MEMORY)]))
    after.__context__ = torch.OutOfMemoryError("x")
    assert all(map(is_out_of_memory, [after, MemoryError(), after.__context__, *map(RuntimeError, OUT_OF_MEMORY)]))


@pytest.mark.gpu
def test_a_profile_on_a_gpu_reads_the_allocator_and_agrees_with_its_prediction():
    found, _ = profile("device=cuda", "profile.steps=1", "profile.lengths=full")
    assert found["predicted"]["peak"]["bytes"] == pytest.approx(found["measured"]["peak"]["bytes"], rel=0.2)
