"""What a phase holds, and which key would lower it: the message in place of a failed allocation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_cli.config.prepare import Prepared
from grpo_cli.engine.batching import Sampler
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, LOGITS
from grpo_cli.profile.estimate import OPTIMIZER, OTHER, REFERENCE, WEIGHTS, total
from grpo_cli.profile.from_settings import estimator_of, shapes_of, step_of
from grpo_cli.profile.shapes import KV, Sizes
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import held_by_others, is_out_of_memory
from grpo_cli.support.meter import spans_around

_ROLLOUTS = ("prefill", "decode")
TOKENS = "train.micro_batch_tokens"
# Where not even one sequence fits.
NOTHING_FITS = (
    "sampling.max_new_tokens=<fewer>, or adapters, which need next to no gradients and optimizer: model.lora.rank=16"
)


def memory_keys(kind: str, phase: str, sampler: Sampler) -> str:
    """The keys that lower what `kind` takes in `phase`."""
    fewer = "sampler=infinite sampler.slots=<fewer than all rollouts>"
    refilled = fewer if sampler.all_at_once else "lower sampler.slots"
    asked = "eval.problems or eval.k" if phase == "eval" else "n, train.prompts or sampling.max_new_tokens"
    if kind == KV:
        return f"{refilled}; lower {asked}; or sparsity=rkv"
    if kind == LOGITS:
        return refilled if phase in (*_ROLLOUTS, "eval") else "lower train.logprob_chunk"
    if kind == ACTIVATIONS:
        if phase in (*_ROLLOUTS, "eval"):
            return f"{refilled}; lower {asked}"
        return "lower train.micro_batch_tokens, or model.gradient_checkpointing=full"
    return {
        WEIGHTS: "a smaller model, or model.dtype=bfloat16",
        REFERENCE: "loss.kl_coef=0 needs no reference",
        OPTIMIZER: "a smaller model, or train fewer of its weights",
        GRADIENTS: "a smaller model, or train fewer of its weights",
        OTHER: "the program itself and what its allocator keeps; no key lowers it",
    }[kind]


def breakdown(phase: str, sizes: Sizes, sampler: Sampler) -> list[str]:
    """A line for each kind that a phase is expected to hold, largest first, with the keys that lower it."""
    parts = sorted(((size, kind) for kind, size in sizes.items() if size), reverse=True)
    lines = [f"with every rollout at full length {phase} takes {gib(total(sizes))}, beside the program itself:"]
    for size, kind in parts:
        lines.append(f"  {kind} {gib(size)}: {memory_keys(kind, phase, sampler)}")
    return lines


@contextmanager
def memory_explained(run: Prepared[Any]) -> Iterator[None]:
    """Turns a failed allocation into a UserError that says where it failed, and what would make it fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(run, error) from error


def out_of_memory(run: Prepared[Any], error: BaseException) -> UserError:
    """The message in place of a traceback: the phase, what it was expected to hold, and what would lower that."""
    spans = spans_around(error)
    phase = next((name for name in reversed(spans) if name not in ("step", "update", "logprobs", "rollout")), "")
    if "eval" in spans:
        phase = "eval"
    said = " ".join(str(error).split())[:200]
    lines = [f"out of memory in {phase or (spans[-1] if spans else 'setting up')} ({said})"]
    settings, device = run.settings, run.device
    if device.type == "cuda":
        others, free, whole = held_by_others(device)
        lines.append(f"other processes hold {gib(others)} of the GPU's {gib(whole)}; {gib(free)} are free")
    try:
        shapes = shapes_of(settings.model, device)
        sampler, step = step_of(run, has_dropout(shapes.model))
        predicted = estimator_of(settings, shapes, device, 0).predict(step)
    except (UserError, MemoryError, RuntimeError) as also:
        lines.append(f"its memory use could not be predicted: {also}")
        return UserError("\n".join(lines))
    where = phase if phase in predicted.phases else predicted.fullest
    lines += breakdown(where, predicted.phases[where], sampler)
    if settings.fit == "none":
        lines.append("or fit=auto, which chooses settings that fit what is free when the run starts")
    lines.append("what fits: grpo profile profile.plan_only=true profile.fit=<memory> with the same settings")
    return UserError("\n".join(lines))
