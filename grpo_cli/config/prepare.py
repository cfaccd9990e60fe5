"""Prepares a command: refuses what would silently ruin a run before a model is loaded, makes and tries the rules.

Types and ranges are checked already (`config.read`). What a part can do it states itself (`support.facts`).
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np
import torch

from grpo_cli.config.auto import decided
from grpo_cli.config.instantiate import Factories
from grpo_cli.interfaces import Rules, Search, SetUp
from grpo_cli.learner.batch import collate, corrected, rows_of, totals, verdict_on
from grpo_cli.rules.advantage import advantages
from grpo_cli.rules.downsample import choose
from grpo_cli.settings import SHARE_VARIABLE, EvalRunSettings, RunSettings, Sampling, Settings
from grpo_cli.support.errors import UserError, explained, gathered, own_code_unless_ours, refuse
from grpo_cli.support.facts import name_of
from grpo_cli.support.memory import CUDA_CONTEXT_BYTES, keep_freed
from grpo_cli.support.processor import flush_denormals
from grpo_cli.types import Finish, LossOutput, Prompt, Request, Reward, Rollout, ScoredGroup


@dataclass(frozen=True)
class Prepared(Generic[Settings]):
    """A command before its model is loaded. Only a training has `rules`, only an evaluation a `search`."""

    settings: Settings
    factories: Factories
    rules: Rules | Any
    search: Search | Any
    device: torch.device


def prepare(settings: Settings, fast: bool | None = None) -> Prepared[Settings]:
    """Build and check what needs no model. UserError lists everything that is refused. `fast` as in `config.auto`."""
    factories, rules, search = build_and_check(settings)
    device = pick_device(settings.device)
    if isinstance(settings, RunSettings):
        keep_freed(settings.fit_bytes)
    return Prepared(decided(settings, fast), factories, rules, search, device)


def build_and_check(settings: RunSettings | EvalRunSettings) -> tuple[Factories, Any, Any]:
    """Build the factories of the parts, and a training's rules, which are tried once, or an evaluation's search.
    UserError lists everything that cannot be used."""
    parts, rules, search = Factories.of(settings.parts), None, None
    messages = [*conflicts(settings, parts)]
    with gathered(messages):
        parts.engine_parts(settings.seed)
    with gathered(messages):
        if isinstance(settings, EvalRunSettings):
            search = parts["search"].make()
        else:
            rules = parts.rules({"n": settings.n, "m": settings.m, "prompts": settings.train.prompts})
            try_rules(rules, settings.n, settings.m)
    refuse(messages)
    return parts, rules, search


def effective(settings: Settings) -> Settings:
    """Return the settings without those that change nothing of what is computed: two runs of equal ones repeat."""
    unused = ("logger", "downsample") if isinstance(settings, RunSettings) and settings.m == settings.n else ("logger",)
    return replace(settings, run_dir="", parts={**settings.parts, **dict.fromkeys(unused, {})})


def pick_device(word: str) -> torch.device:
    """Return the device of `auto`, `cpu` or `cuda`. A sweep's job that shares a GPU gets its share of the memory."""
    flush_denormals()  # called before anything computes
    if word == "cpu" or (word == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    with explained("device=cuda: PyTorch finds no GPU", "; use device=auto or device=cpu"):
        torch.cuda.init()
    # Threads of autograd take up the context with their first product, and PyTorch warns of it.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS", UserWarning)
    share = float(os.environ.get(SHARE_VARIABLE, "1"))
    if share < 1:  # each process on the GPU holds memory of CUDA's own, too
        share = max(0.0, share - CUDA_CONTEXT_BYTES / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.set_per_process_memory_fraction(share)
    return torch.device("cuda")


def conflicts(settings: RunSettings | EvalRunSettings, parts: Factories) -> Iterator[str]:
    """Yield a message for each combination that would silently ruin a run or ignore a setting."""
    model, turns = settings.model, settings.parts["task"].get("turns") or 1
    if model.quantize != "none" and not model.adapted:
        yield f"model.quantize={model.quantize} freezes all weights: give adapters to train, such as model.lora.rank=64"
    if model.quantize != "none" and model.random_init:
        yield f"model.quantize={model.quantize} is for weights that are read: use model.random_init=false"
    if (model.lora.dora or model.lora.rslora) and not model.adapted:
        yield "model.lora.dora and model.lora.rslora need adapters: give model.lora.rank=16 or more"
    if model.offload_activations and model.gradient_checkpointing != "full":
        yield "model.offload_activations=true moves what model.gradient_checkpointing=full keeps: give both"
    if settings.sampling.max_turn_tokens is not None and turns == 1:
        yield "sampling.max_turn_tokens bounds each reply of several: use sampling.max_new_tokens for a single one"
    if parts.sampling_engine is not parts["engine"]:  # workers make whole replies
        if turns > 1 and parts.fact("sparsity", "evicts"):
            yield f"{parts.named('engine')} cannot resume what {parts.named('sparsity')} has evicted: use engine=torch"
        if parts.fact("collector", "stops"):
            yield f"{parts.named('engine')} cannot stop rollouts, as {parts.named('collector')} does: use engine=torch"
    for part in parts:
        if turns > 1 and parts.fact(part, "one_turn"):
            yield f"{parts.named(part)} is for replies of one turn, not for task.turns={turns}: use task.turns=1"
        if parts.fact(part, "resumes") and parts.fact("sparsity", "evicts"):
            yield f"{parts.named(part)} cannot resume what {parts.named('sparsity')} has evicted: use sparsity=dense"
    if isinstance(settings, RunSettings):
        yield from _of_training(settings, parts)


def _of_training(settings: RunSettings, parts: Factories) -> Iterator[str]:
    n, m, train, sampling, optim = settings.n, settings.m, settings.train, settings.sampling, settings.optim
    if m > n:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif n == 1 or (m == 1 and settings.parts["advantage"].get("stats_over") == "kept"):
        yield f"n={n} m={m} leaves {parts.named('advantage')} nothing to compare with: take 2 or more"
    if train.truncated == "zero" and (settings.parts["task"].get("weights") or {}).get("overlong"):
        yield "train.truncated=zero undoes what task.weights.overlong does to a cut reply: use train.truncated=train"
    if (last := settings.parts["task"].get("overlong_tokens") or 0) > sampling.max_new_tokens:
        yield f"task.overlong_tokens={last} must not exceed sampling.max_new_tokens={sampling.max_new_tokens}"
    if train.minibatches > train.prompts * m:
        yield f"train.minibatches={train.minibatches} must not exceed train.prompts * m, which is {train.prompts * m}"
    if train.warmup == "sft" and train.warmup_steps >= train.steps:
        yield f"train.warmup_steps={train.warmup_steps} must be less than train.steps={train.steps}, which counts them"
    if sampling.top_p < 1 or sampling.top_k > 0:  # some tokens can never be sampled
        unlikely = f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k} cut off unlikely tokens"
        yield f"{unlikely}, which biases importance ratios: train with 1 and 0"
    if (optim.name == "adamw8bit") + optim.offload + optim.park > 1:
        yield "optim.name=adamw8bit, optim.offload and optim.park keep the optimizer's state in two places: use one"
    if optim.lr * optim.weight_decay >= 1:
        yield f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be below 1, or weights turn sign"
    if settings.model.dtype == "bfloat16" and not settings.model.adapted:
        yield "model.dtype=bfloat16 loses small updates: use model.dtype=float32 model.autocast=bfloat16, or adapters"
    prox = parts["correction"].settings.get("prox")
    if prox == "ewma" and parts["correction"].settings.get("importance") == "none":
        yield "correction.prox=ewma needs the weights that relate it to the sampler: use correction=decoupled with it"
    if prox == "sampler":
        excluded = {
            "engine": parts.fact("engine", "is_policy") is False,
            "sparsity": parts.fact("sparsity", "evicts"),
            "collector": parts.fact("collector", "resumes") and not parts.fact("collector", "stops"),
            # a ratio other than 1
            "correction": parts["correction"].make({"n": n, "m": m, "prompts": train.prompts}).needs_old_logprobs,
        }
        for part in (part for part, found in excluded.items() if found):
            yield f"correction.prox=sampler is no old policy for {parts.named(part)}: use correction.prox=step_start"


def try_rules(rules: Rules, n: int, m: int) -> None:
    """Call the rules, but for the collector, on a synthetic group whose every second answer is right. UserError for one
    that cannot be used. If one of them has `setup`, none is tried."""
    if m > n or any(isinstance(rule, SetUp) for part, rule in vars(rules).items() if part != "collector"):
        return
    rules = copy.deepcopy(rules)
    prompt, sampling = Prompt("synthetic", (0,), "0"), Sampling.plain(8)
    rollouts = tuple(Rollout(Request(prompt, i, 0, sampling), (0,), (-1.0,), Finish.EOS) for i in range(n))
    group = ScoredGroup(prompt, rollouts, tuple(Reward(float(i % 2)) for i in range(n)))
    kept = choose(rules.downsample, group, m, np.random.default_rng(0))
    batch, found = rows_of(collate([group]), torch.tensor(kept)), advantages(rules.advantage, group, kept)
    batch = replace(batch, advantages=batch.per_token(found.reshape(len(kept), -1)[:, 0]))
    with own_code_unless_ours(f"correction {name_of(rules.correction)}", rules.correction):
        batch = corrected(batch, verdict_on(rules.correction, batch, batch.sampler_logprobs))
    logprobs = batch.sampler_logprobs.clone().requires_grad_()
    batch = replace(batch, ref_logprobs=batch.sampler_logprobs if rules.loss.needs_reference else None)
    name = f"loss {name_of(rules.loss)}"
    with own_code_unless_ours(name, getattr(rules.loss, "func", rules.loss)):
        output: Any = rules.loss(logprobs, batch, totals(batch, 1))
    given = [output.loss, *output.metrics.values()] if isinstance(output, LossOutput) else [None]
    if not all(isinstance(one, torch.Tensor) for one in given):
        what = f"a {type(output).__name__}"
        raise UserError(f"{name} returned {what}: return LossOutput(loss, metrics), all of them tensors")
    faults = {"several numbers: return their sum over totals.tokens": output.loss.dim() > 0}
    faults |= {"NaN or infinity: check what it divides by": not output.loss.isfinite().all()}
    faults |= {"no gradient: compute it from logprobs": not output.loss.requires_grad}
    refuse([f"{name} returned {fault}" for fault, found in faults.items() if found])
