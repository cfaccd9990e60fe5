"""The message for a failed allocation: what its phase holds, and which settings would lower that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from grpo_cli.config.instantiate import Factories
from grpo_cli.config.prepare import Prepared, conflicts
from grpo_cli.memory.plan import GRADIENTS, KV, OPTIMIZER, REFERENCE, WEIGHTS, WORKSPACE
from grpo_cli.memory.planner import AS_IT_IS, Planner, Values, with_values
from grpo_cli.memory.shapes import ACTIVATIONS, LOGITS
from grpo_cli.settings import OFFLOAD, PARK, RECOMPUTE, STATE, EvalRunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import held_by_others, is_out_of_memory
from grpo_cli.support.meter import spans_around

# What lowers each kind. Of settings a message names those that are otherwise and go with the run's others.
_LESS = {
    WEIGHTS: ("a smaller model", "model.dtype=bfloat16", "model.quantize=4bit"),
    REFERENCE: ("a loss without loss.kl_coef",),
    OPTIMIZER: ("a smaller model", "model.lora.rank=16", f"{STATE}=true", "optim.name=adamw8bit", f"{PARK}=true"),
    GRADIENTS: ("a smaller model", "model.lora.rank=16"),
    LOGITS: ("lower train.logprob_chunk",),
    ACTIVATIONS: ("lower train.micro_batch_tokens or sampling.max_new_tokens", f"{RECOMPUTE}=full", f"{OFFLOAD}=true"),
    WORKSPACE: ("no setting: the program and what its allocator keeps",),
}
_OF_GPUS = ("model.quantize", "optim.name", OFFLOAD, PARK, STATE)


def breakdown(planner: Planner, values: Values = AS_IT_IS, phase: str = "") -> list[str]:
    """Return a line for each kind that a phase, else the fullest, is expected to hold, and what would lower it."""
    settings, plan, less = with_values(planner.run.settings, values), planner.plan(values), _LESS
    phase = phase if phase in plan else plan.fullest
    useless = {"model.lora.rank": settings.model.adapted, "sparsity": planner.run.factories.fact("sparsity", "evicts")}
    useless |= dict.fromkeys(_OF_GPUS if planner.device.type == "cpu" else [PARK] * planner.step.has_state(phase), True)
    if phase in ("prefill", "decode", "eval"):
        slots = "fewer sampler.slots" if "slots" in settings.parts["sampler"] else "sampler=infinite sampler.slots=16"
        makes = slots, "lower sampling.max_new_tokens"
        less = less | {KV: (*makes, "sparsity=rkv"), LOGITS: makes, ACTIVATIONS: makes}

    def helps(word: str) -> bool:
        key, _, text = word.partition("=")
        if " " in word or key == "model.lora.rank" or useless.get(key):
            return not useless.get(key)
        changed = with_values(settings, {key: yaml.safe_load(text)})
        return changed != settings and not any(conflicts(changed, Factories.of(changed.parts)))

    parts = sorted(((size, kind) for kind, size in plan[phase].items() if size), reverse=True)
    whole = f"with every rollout at full length {phase} takes {gib(plan.bytes_of(phase))}:"
    return [whole, *(f"  {kind} {gib(size)}: {', '.join(filter(helps, less[kind]))}" for size, kind in parts)]


@contextmanager
def explaining_out_of_memory(run: Prepared[Any]) -> Iterator[None]:
    """Turn a failed allocation into a UserError: the phase, what it was expected to hold, and what would lower that."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        spans = spans_around(error) or ("setting up",)
        is_eval = isinstance(run.settings, EvalRunSettings)  # which has no spans and no plan
        phase = "eval" if is_eval or "eval" in spans else spans[-1]
        lines = [f"out of memory in {phase} ({' '.join(str(error).split())[:200]})"]
        if run.device.type == "cuda":
            others, free, whole = held_by_others(run.device)
            lines.append(f"other processes hold {gib(others)} of the GPU's {gib(whole)}; {gib(free)} are free")
        if is_eval:
            lines.append("decode fewer at a time: sampler=infinite sampler.slots=16; or lower sampling.max_new_tokens")
            raise UserError("\n".join(lines)) from error
        try:
            lines += breakdown(Planner.of(run, run.device), phase=phase)
        except (UserError, MemoryError, RuntimeError) as fault:
            lines.append(f"its memory could not be planned: {fault}")
        choose = "fit=auto chooses settings that fit; " * (run.settings.resume is None)  # a resumed run keeps its own
        lines.append(f"{choose}grpo profile profile.plan_only=true fit=<memory> shows what fits")
        raise UserError("\n".join(lines)) from error
