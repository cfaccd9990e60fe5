"""What a person should know of a run before its first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grpo_cli.settings import RunSettings


def introduction(settings: RunSettings, parameters: int, trained: int, device: torch.device) -> Iterator[str]:
    """One line after another: the model's parameters and those that are trained, a step's rollouts, and surprises."""
    prompts, n, m = settings.train.prompts, settings.n, settings.m
    kept = "all trained on" if m == n else f"{m} of each {n} trained on"
    threads = torch.get_num_threads()
    place = f"{device} ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else str(device)
    precision = settings.model.dtype + ("" if settings.model.autocast == "none" else " computed in bfloat16")
    yield (
        f"{parameters / 1e6:.3g} M parameters, {precision}, on {place}; a step is {prompts} prompts x {n} "
        f"rollouts, {kept}"
    )
    slots = settings.parts["sampler"].get("slots")
    if slots is not None and slots > prompts * n:
        yield (
            f"sampler.slots={slots} is more than the {prompts * n} rollouts of a step (train.prompts={prompts} x "
            f"n={n}), so {prompts * n} slots are allocated"
        )
    if settings.model.adapted:
        yield f"{trained / 1e6:.3g} M of them are trained: adapters; the weights below stay as they are"
    if settings.model.without_files:
        yield (
            f"model.random_init=true: random weights of {settings.model.path}'s shape, from its preset; prompts and "
            "completions go by the embedded tokenizer (a token per byte), and completions end with its end"
        )
