"""What to tell the user about a run before its first step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from grpo_cli.settings import RunSettings
from grpo_cli.support.formatting import gib, shown
from grpo_cli.support.memory import SHARE, held_by_others
from grpo_cli.support.processor import why_no_gpu
from grpo_cli.tasks.prompting import Tokenizer, told_by_model

MOST_LR = 5e-5  # for full fine-tuning of a pretrained model: more than in any recipe cited in conf/model
# What PyTorch says if nothing is wrong: a build without CUDA, no driver, no GPU or no visible one.
_NO_GPU = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs")


def introduction(
    settings: RunSettings, parameters: int, trained: int, device: torch.device, tokenizer: Tokenizer | None = None
) -> Iterator[str]:
    """Lines about the model's parameters and which are trained, a step's rollouts, and anything surprising."""
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
    told = settings.model.chat_template_kwargs if tokenizer else None
    for word, value in told_by_model(tokenizer, settings.parts["task"], told).items():
        yield (
            f"the chat template gets {word}={shown(value)}, the default of the model's preset; "
            f"'+task.chat_template_kwargs={{{word}:...}}' changes it"
        )
    if settings.model.adapted:
        yield f"{trained / 1e6:.3g} M of them are trained: adapters; the base weights are frozen"
    if settings.model.without_files:
        yield (
            f"model.random_init=true: random weights of {settings.model.path}'s shape, from its preset; prompts and "
            "completions use the embedded tokenizer (a token per byte) and its end-of-sequence token"
        )


def doubts(settings: RunSettings) -> Iterator[str]:
    """Likely mistakes in numbers that the model's or the task's recipe would have set."""
    model, lr, limit = settings.model, settings.optim.lr, settings.sampling.max_new_tokens
    usual = {**settings.parts["task"].get("recipe", {})}.get("max_new_tokens", 0) * settings.parts["task"].get(
        "turns", 1
    )
    if lr > MOST_LR >= model.recipe.get("lr", 0.0) and not (model.adapted or model.random_init):
        yield (
            f"optim.lr={lr:g} trains every weight of a pretrained model, which soon ruins it: leave it out "
            "(optim.lr=auto), or train adapters (model.lora.rank=16)"
        )
    if limit < min(usual, model.recipe.get("max_new_tokens") or usual):
        yield (
            f"sampling.max_new_tokens={limit} is less than the task's {usual}: replies that are cut off earn nothing. "
            "Leave it out, unless they are meant to be short"
        )


def _of_gpu(asked: str, device: torch.device) -> Iterator[str]:
    """That PyTorch cannot use a GPU, or that other processes (not jobs of this sweep) hold its memory."""
    if device.type == "cuda" and SHARE not in os.environ:
        others, free, total = held_by_others(device)
        if others > total / 10:
            yield (
                f"other processes hold {gib(others)} of the GPU's {gib(total)}, and {gib(free)} are free (nvidia-smi "
                "names them): end them, or fit updates into what is free with train.micro_batch_tokens=auto"
            )
    elif device.type == "cpu" and asked == "auto" and not any(sign in (why := why_no_gpu()) for sign in _NO_GPU):
        yield f"device=auto is cpu: there is a GPU driver, but PyTorch finds no GPU that it can use ({why})"
