"""Lines about a run before its first step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from grpo_cli.interfaces import Runtime, Task
from grpo_cli.model.load import TINY
from grpo_cli.settings import EvalRunSettings, RunSettings
from grpo_cli.tasks.prompting import TODAY, turn_end

LEAST_STEPS = 10  # of more than a trial
MOST_LR = 5e-5  # for full fine-tuning of a pretrained model: more than in any recipe cited in conf/model


def introduction(settings: RunSettings, runtime: Runtime) -> Iterator[str]:
    """Yield lines about the model and a step's rollouts."""
    weights, device = list(runtime.model.parameters()), runtime.device
    parameters, trained = sum(p.numel() for p in weights), sum(p.numel() for p in weights if p.requires_grad)
    prompts, n, m = settings.train.prompts, settings.n, settings.m
    kept = "all trained on" if m == n else f"{m} of each {n} trained on"
    threads = torch.get_num_threads()
    place = f"{device} ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else str(device)
    precision = settings.model.dtype + ("" if settings.model.autocast == "none" else " computed in bfloat16")
    adapters = f" ({trained / 1e6:.3g} M in adapters)" if settings.model.adapted else ""
    count = f"{parameters / 1e9:.3g} B" if parameters >= 9.995e8 else f"{parameters / 1e6:.3g} M"
    yield (
        f"{count} parameters{adapters}, {precision}, on {place}; a step is {prompts} prompts x {n} "
        f"rollouts = {prompts * n}, {kept}; learning rate {settings.optim.lr:g}, replies of up to "
        f"{settings.sampling.max_new_tokens} tokens"
    )


def doubts(settings: RunSettings) -> Iterator[str]:
    """Yield that a learning rate is likely a mistake, or never reached."""
    model, lr, steps = settings.model, settings.optim.lr, settings.train.steps
    if settings.optim.warmup_steps >= steps >= LEAST_STEPS:
        yield f"optim.warmup_steps={settings.optim.warmup_steps} of train.steps={steps}: the rate stays below {lr:g}"
    if lr > MOST_LR >= model.recipe.get("lr", 0.0) and not (model.adapted or model.random_init):
        yield f"optim.lr={lr:g} soon ruins a pretrained model: leave it out, or train adapters (model.lora.rank=16)"


def doubts_of_shape(settings: RunSettings, config: Any, presets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield that a model has the shape of one of the presets with another learning rate, if none was chosen."""
    path, own = settings.model.path, settings.model.recipe.get("lr")
    shape = ("hidden_size", "num_hidden_layers", "vocab_size")
    for preset, values in presets.items() if settings.optim.lr == own else ():
        published, rate = values.get("architecture") or {}, values["recipe"]["lr"]
        if rate != own and all(published.get(key) == getattr(config, key, "") for key in shape):
            yield f"{path} has the shape of {preset}, which learns at {rate:g}: type model={preset} model.path={path}"


def doubts_of_prompts(
    task: Task, tokenizer: Any, eos: Sequence[int], run: RunSettings | EvalRunSettings
) -> Iterator[str]:
    """Yield what is odd about the beginnings and ends of replies, and about prompts that have words for a model that
    knows none, or the date."""
    prompts = [prompt.token_ids for prompt in task.prompts("eval")[:1]]
    if run.model.path == TINY and any(re.search("[A-Za-z]{3}", tokenizer.decode(prompt)) for prompt in prompts):
        yield "the embedded model knows sums only, and prompts have words: choose another, such as model=smollm2_135m"
    first = [prompt[-1] for prompt in prompts]
    if set(first) & set(eos):
        yield f"prompts end with {tokenizer.decode(first)}, which ends a completion: correct the chat template"
    if not (tokenizer.chat_template and run.parts["task"].get("use_chat_template")):
        return
    text, end = turn_end(tokenizer)
    if text and end not in eos and not any(stop in text for stop in run.sampling.stop):
        yield (
            f"the chat template ends a turn with {text[:40]!r}, which ends no completion: name a token of it in "
            "model.eos_tokens, or text of it in sampling.stop"
        )
    if "strftime_now" in str(tokenizer.chat_template):
        yield f"the chat template reads the clock: each prompt has the date {TODAY:%d %b %Y}, so that runs repeat"


def smaller(settings: RunSettings) -> str:
    """Return settings of a smaller step, as they are typed; empty for a step that is small."""
    few = {"n": 8, "m": 8, "train.prompts": 4, "sampling.max_new_tokens": 64}
    return " ".join(f"{key}={value}" for key, value in few.items() if value < attrgetter(key)(settings))
