"""What dominates, and which key would lower it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpo_cli.config.prepare import Prepared
from grpo_cli.engine.batching import Sampler
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, LOGITS
from grpo_cli.profile.estimate import KINDS, OPTIMIZER, OTHER, REFERENCE, WEIGHTS, Prediction, total
from grpo_cli.profile.from_settings import estimator_of, shapes_of, step_of
from grpo_cli.profile.measure import PHASES, Measured
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

_TIME: Mapping[str, str] = {
    "prefill": "lower train.prompts, or take shorter prompts",
    "decode": "sampler=infinite with scheduler=lpt ends rounds earlier; sampling.max_new_tokens and n bound the tokens",
    "reward": "the task's judge is slow: task=<another>, or fewer rollouts with n",
    "policy_logprobs": "correction=none train.epochs=1 train.minibatches=1 model.lora.dropout=0 need no such pass",
    "ref_logprobs": "loss.kl_coef=0 needs no reference",
    "forward": "lower m (downsample=maxvar chooses which are trained on), or model.autocast=bfloat16 on a GPU",
    "backward": "lower m (downsample=maxvar chooses which are trained on); model.gradient_checkpointing=false",
    "optimizer": "train fewer weights, or fewer updates with train.minibatches",
    "eval": "lower eval.problems or eval.k, or raise eval.every",
    "rest": "choosing, padding and bookkeeping: fewer rollouts with n",
}


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
        return "lower train.micro_batch_tokens, or model.gradient_checkpointing=true"
    return {
        WEIGHTS: "a smaller model, or model.dtype=bfloat16",
        REFERENCE: "loss.kl_coef=0 needs no reference",
        OPTIMIZER: "a smaller model, or train fewer of its weights",
        GRADIENTS: "a smaller model, or train fewer of its weights",
        OTHER: "the program itself and what its allocator keeps; no key lowers it",
    }[kind]


def sentences(predicted: Prediction, measured: Measured | None, sampler: Sampler) -> tuple[str, ...]:
    """What to say about the measurements or, without any, about the prediction."""
    if measured is None:
        return (of_memory(predicted.fullest, predicted.phases[predicted.fullest], sampler),)
    return of_time(measured), of_memory(measured.fullest, measured.memory, sampler)


def of_fit(at_most: Prediction, room: int, largest: Mapping[str, int | None], sampler: Sampler) -> tuple[str, ...]:
    """If rollouts of full length do not fit `room` bytes: the one key that fixes it, or else what each phase takes."""
    if at_most.peak <= room:
        return ()
    if largest.get(TOKENS) is not None:
        return (f"One key makes it fit: {TOKENS}=auto.",)
    if (slots := largest.get("sampler.slots")) is not None:
        infinite = "sampler=infinite " if sampler.all_at_once else ""
        return (f"One choice makes it fit: {infinite}sampler.slots={slots or '<any number>'}.",)
    lines = ["No single key makes it fit, because more than one phase is too large:"]
    for phase, sizes in at_most.phases.items():
        if total(sizes) > room:
            lines.append(f"  {phase} takes {gib(total(sizes))}: {memory_keys(dominating(sizes), phase, sampler)}")
    return ("\n".join(lines),)


def dominating(sizes: Sizes) -> str:
    """The largest kind, preferring those that some key can lower."""
    lowered = [kind for kind in KINDS if kind != OTHER and sizes.get(kind, 0)]
    return max(lowered or [OTHER], key=lambda kind: sizes.get(kind, 0))


def of_memory(phase: str, sizes: Sizes, sampler: Sampler) -> str:
    """A sentence on the fullest phase."""
    kind = dominating(sizes)
    share = sizes.get(kind, 0) / total(sizes)
    return f"Memory peaks in {phase}; {kind} takes {share:.0%} of it. To lower it: {memory_keys(kind, phase, sampler)}."


def of_time(measured: Measured) -> str:
    """A sentence on the slowest phase of a step."""
    inside = {name: measured.phases[name].median for name in (*PHASES[:-1], "rest") if name in measured.phases}
    slowest = max(inside, key=lambda name: inside[name])
    share = inside[slowest] / sum(inside.values())
    return f"A step spends most time in {slowest}: {share:.0%} of it. To lower it: {_TIME[slowest]}."


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
    if where in ("prefill", "decode", "eval") and sampler.on_oom == "fail":
        lines.append("  or sampler.on_oom=halve, which continues with half the slots")
    if settings.fit == "none":
        lines.append("or fit=auto, which chooses settings that fit what is free when the run starts")
    lines.append("what fits: grpo profile profile.plan_only=true profile.fit=<memory> with the same settings")
    return UserError("\n".join(lines))
