"""The message for a failed allocation: what its phase holds, and which settings would lower that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_cli.config.prepare import Prepared
from grpo_cli.memory.allocations import ACTIVATIONS, LOGITS
from grpo_cli.memory.plan import GRADIENTS, KV, OPTIMIZER, REFERENCE, WEIGHTS, WORKSPACE, MemoryPlan
from grpo_cli.memory.planner import Planner
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import held_by_others, is_out_of_memory
from grpo_cli.support.meter import spans_around

NOTHING_FITS = "sampling.max_new_tokens=<fewer>, or adapters, model.lora.rank=16, which need next to no gradients"
_ROLLOUTS = "sampler=infinite with fewer sampler.slots, or lower n, train.prompts or sampling.max_new_tokens"
_KEYS = {
    WEIGHTS: "a smaller model, or model.dtype=bfloat16",
    REFERENCE: "loss.kl_coef=0 needs no reference",
    OPTIMIZER: "a smaller model, or model.lora.rank=16",
    GRADIENTS: "a smaller model, or model.lora.rank=16",
    KV: f"{_ROLLOUTS}, or sparsity=rkv",
    LOGITS: "lower train.logprob_chunk",
    ACTIVATIONS: "lower train.micro_batch_tokens, or model.gradient_checkpointing=full",
    WORKSPACE: "no setting: the program and what its allocator keeps",
}


def breakdown(plan: MemoryPlan, phase: str) -> list[str]:
    """Return a line for each kind that a phase is expected to hold, largest first, with the settings that lower it."""
    keys = _KEYS | ({LOGITS: _ROLLOUTS, ACTIVATIONS: _ROLLOUTS} if phase in ("prefill", "decode", "eval") else {})
    parts = sorted(((size, kind) for kind, size in plan.phases[phase].items() if size), reverse=True)
    whole = f"with every rollout at full length {phase} takes {gib(plan.bytes_of(phase))}:"
    return [whole, *(f"  {kind} {gib(size)}: {keys[kind]}" for size, kind in parts)]


@contextmanager
def explaining_out_of_memory(run: Prepared[Any]) -> Iterator[None]:
    """Turn a failed allocation into a UserError: the phase, what it was expected to hold, and what would lower that."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        spans = spans_around(error) or ("setting up",)
        phase = "eval" if "eval" in spans else spans[-1]
        lines = [f"out of memory in {phase} ({' '.join(str(error).split())[:200]})"]
        if run.device.type == "cuda":
            others, free, whole = held_by_others(run.device)
            lines.append(f"other processes hold {gib(others)} of the GPU's {gib(whole)}; {gib(free)} are free")
        try:
            plan = Planner.of(run, run.device).plan()
            lines += breakdown(plan, phase if phase in plan.phases else plan.fullest)
        except (UserError, MemoryError, RuntimeError) as fault:
            lines.append(f"its memory could not be planned: {fault}")
        lines.append("fit=auto chooses settings that fit; grpo profile profile.plan_only=true fit=<memory> shows them")
        raise UserError("\n".join(lines)) from error
