"""What a user should know about a run before its first step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from grpo_cli.settings import RunSettings
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import SHARE, held_by_others
from grpo_cli.support.processor import why_no_gpu

MOST_LR = 5e-5  # of all weights of a pretrained model: more than any recipe that is cited in conf/model
# What PyTorch says where there is nothing to mend: a build without CUDA, no driver, no GPU or none that may be seen.
_NO_GPU = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs")


def introduction(settings: RunSettings, parameters: int, trained: int, device: torch.device) -> Iterator[str]:
    """One line after another: the model's parameters and those that are trained, a step's rollouts, and surprises."""
    prompts, n, m = settings.train.prompts, settings.n, settings.m
    kept = "all trained on" if m == n else f"{m} of each {n} trained on"
    threads = torch.get_num_threads()
    place = f"{device} ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else str(device)
    precision = settings.model.dtype + ("" if settings.model.autocast == "none" else " computed in bfloat16")
    yield (
        f"{parameters / 1e6:.3g} M parameters, {precision}, on {place}; a step is {prompts} prompts x {n} "
        f"rollouts = {prompts * n}, {kept}; learning rate {settings.optim.lr:g}, replies of up to "
        f"{settings.sampling.max_new_tokens} tokens"
    )
    slots = settings.parts["sampler"].get("slots")
    if slots is not None and slots > prompts * n:
        yield (
            f"sampler.slots={slots} is more than the {prompts * n} rollouts of a step (train.prompts={prompts} x "
            f"n={n}), so {prompts * n} slots are allocated"
        )
    yield from _of_gpu(settings.device, device)
    if settings.model.adapted:
        yield f"{trained / 1e6:.3g} M of them are trained: adapters; the weights below stay as they are"
    if settings.model.without_files:
        yield (
            f"model.random_init=true: random weights of {settings.model.path}'s shape, from its preset; prompts and "
            "completions go by the embedded tokenizer (a token per byte), and completions end with its end"
        )


def doubts(settings: RunSettings) -> Iterator[str]:
    """What is likely a mistake in the numbers that the model's or the task's recipe would have given."""
    model, lr, limit = settings.model, settings.optim.lr, settings.sampling.max_new_tokens
    usual = {**settings.parts["task"].get("recipe", {})}.get("max_new_tokens", 0) * settings.parts["task"].get(
        "turns", 1
    )
    if lr > MOST_LR >= model.recipe.get("lr", 0.0) and not (model.adapted or model.random_init):
        yield (
            f"optim.lr={lr:g} trains every weight of a pretrained model, which it soon ruins: leave it out "
            "(optim.lr=auto), or train adapters (model.lora.rank=16)"
        )
    if limit < min(usual, model.recipe.get("max_new_tokens") or usual):
        yield (
            f"sampling.max_new_tokens={limit} is less than the task's {usual}: replies that are cut off earn nothing. "
            "Leave it out, unless they are meant to be short"
        )


def _of_gpu(asked: str, device: torch.device) -> Iterator[str]:
    """That there is one that PyTorch cannot use, or that others have its memory; a sweep's jobs know of each other."""
    if device.type == "cuda" and SHARE not in os.environ:
        others, free, total = held_by_others(device)
        if others > total / 10:
            yield (
                f"other processes hold {gib(others)} of the GPU's {gib(total)}, and {gib(free)} are free (nvidia-smi "
                "names them): end them, or let updates go by what is free, train.micro_batch_tokens=auto"
            )
    elif device.type == "cpu" and asked == "auto" and not any(sign in (why := why_no_gpu()) for sign in _NO_GPU):
        yield f"device=auto is cpu: there is a GPU's driver, but PyTorch finds no GPU that it can use ({why})"
