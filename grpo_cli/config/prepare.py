"""Prepares a command, once: what would silently ruin a run is refused, all at once, before a model is loaded; `auto` is
resolved, rules are made and tried, a device is picked.

Types and ranges are checked already (`config.read`). What a part can do it states itself (`support.facts`). Names of
choices appear in messages only.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from grpo_cli.config.auto import decided
from grpo_cli.config.instantiate import Factories
from grpo_cli.interfaces import Rules, Search, SetUp
from grpo_cli.learner.batch import collate, corrected, rows_of, totals, verdict_on
from grpo_cli.learner.optimizer import check_optimizer
from grpo_cli.rules.advantage import advantages
from grpo_cli.rules.downsample import choose
from grpo_cli.settings import EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings, Sampling
from grpo_cli.support.errors import UserError, explained, gathered, own_code_unless_ours, refuse
from grpo_cli.support.facts import name_of
from grpo_cli.support.formatting import shown
from grpo_cli.support.memory import SHARE, keep_freed, part_of_gpu
from grpo_cli.support.processor import flush_denormals
from grpo_cli.types import Finish, LossOutput, Prompt, Request, Reward, Rollout, ScoredGroup, Verdict

Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)
MAX_SYNTHETIC = 4096  # rollouts of a synthetic group: more take seconds


@dataclass(frozen=True)
class Prepared(Generic[Settings]):
    """A command before its model is loaded. Only a training has `rules`, only an evaluation a `search`."""

    settings: Settings
    parts: Factories
    rules: Rules | Any
    search: Search | Any
    device: torch.device


def prepare(settings: Settings, fast: bool | None = None) -> Prepared[Settings]:
    """Build and check what needs no model. UserError lists everything that is refused. `fast` as in `config.auto`."""
    parts, rules, search = build_and_check(settings)
    device = pick_device(settings.device)
    if isinstance(settings, RunSettings):
        keep_freed(settings.fit_bytes)
        check_optimizer(settings.optim, device)
    return Prepared(decided(settings, fast), parts, rules, search, device)


def build_and_check(settings: RunSettings | EvalRunSettings) -> tuple[Factories, Any, Any]:
    """Build the factories of the parts, and a training's rules, which are tried once, or an evaluation's search.
    UserError lists everything that cannot be used."""
    parts, rules, search = Factories.of(settings.parts), None, None
    messages = [*conflicts(settings, parts)]
    with gathered(messages):
        parts.engine_parts({"seed": settings.seed}, early=True)
    with gathered(messages):
        if isinstance(settings, EvalRunSettings):
            search = parts["search"].make()
        else:
            rules = parts.rules({"n": settings.n, "m": settings.m, "prompts": settings.train.prompts})
            if settings.m <= settings.n:
                try_rules(rules, settings.n, settings.m)
    refuse(messages)
    return parts, rules, search


def effective(settings: Settings) -> Settings:
    """Return the settings without those that change nothing of what is computed: two runs of equal ones repeat."""
    without = {"logger", "downsample"} if isinstance(settings, RunSettings) and settings.m == settings.n else {"logger"}
    parts = {group: part for group, part in settings.parts.items() if group not in without}
    return replace(settings, run_dir="", parts=parts)


def pick_device(word: str) -> torch.device:
    """Return the device of `auto`, `cpu` or `cuda`. A sweep's job that shares a GPU gets its share of the memory."""
    flush_denormals()  # called before anything computes
    if word == "cpu" or (word == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    with explained("device=cuda: PyTorch finds no GPU", "; use device=auto or device=cpu"):
        torch.cuda.init()
    # Threads of autograd take up the context with their first product, and PyTorch warns of it.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS", UserWarning)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(part_of_gpu(float(os.environ.get(SHARE, "1")), total))
    return torch.device("cuda")


def conflicts(settings: RunSettings | EvalRunSettings, parts: Factories) -> Iterator[str]:
    """Yield a message for each combination that would silently ruin a run or do less than it says."""
    yield from _model(settings.model)
    turns = settings.parts["task"].get("turns") or 1
    for part in parts.by_group:
        if turns > 1 and parts.fact(part, "one_turn"):
            yield f"{parts.named(part)} is for replies of one turn, not for task.turns={turns}: use task.turns=1"
        if parts.fact(part, "resumes") and parts.fact("sparsity", "evicts"):
            evicted = f"whose KV entries {parts.named('sparsity')} has evicted"
            yield f"{parts.named(part)} cannot resume rollouts {evicted}: use sparsity=dense"
    if isinstance(settings, RunSettings):
        yield from _of_a_step(settings, parts)
        yield from _updates(settings)
        if parts["correction"].settings.get("prox") == "sampler":
            yield from _sampler_as_old_policy(parts)
    if isinstance(settings, ProfileRunSettings) and (gpu := settings.profile.for_gpu):
        if not settings.profile.plan_only or (gpu is True and not settings.fit_bytes):
            yield f"profile.for_gpu={shown(gpu)} only plans: add profile.plan_only=true, and fit=80GB to for_gpu=true"


def _model(model: ModelSettings) -> Iterator[str]:
    if model.quantize != "none" and not model.adapted:
        yield f"model.quantize={model.quantize} freezes all weights: give adapters to train, such as model.lora.rank=64"
    if (model.lora.dora or model.lora.rslora) and not model.adapted:
        yield "model.lora.dora and model.lora.rslora need adapters: give model.lora.rank=16 or more"
    if model.offload_activations and model.gradient_checkpointing != "full":
        yield "model.offload_activations=true moves what model.gradient_checkpointing=full keeps: give both"


def _of_a_step(settings: RunSettings, parts: Factories) -> Iterator[str]:
    n, m, train, sampling = settings.n, settings.m, settings.train, settings.sampling
    if m > n:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif n == 1 or (m == 1 and settings.parts["advantage"].get("stats_over") == "kept"):
        yield f"n={n} m={m} leaves {parts.named('advantage')} nothing to compare with: take 2 or more"
    if train.minibatches > train.prompts * m:
        yield f"train.minibatches={train.minibatches} must not exceed train.prompts * m, which is {train.prompts * m}"
    if train.warmup == "sft" and train.warmup_steps >= train.steps:
        yield f"train.warmup_steps={train.warmup_steps} must be less than train.steps={train.steps}, which counts them"
    if sampling.truncated:
        cut = f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}"
        yield f"{cut} would bias the importance ratio: train with sampling.top_p=1 sampling.top_k=0"


def _updates(settings: RunSettings) -> Iterator[str]:
    optim = settings.optim
    if (optim.name == "adamw8bit") + optim.offload + optim.park > 1:
        yield "optim.name=adamw8bit, optim.offload and optim.park keep the optimizer's state in two places: use one"
    if optim.lr * optim.weight_decay >= 1:
        yield f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be below 1, or weights turn sign"
    if settings.model.dtype == "bfloat16" and not settings.model.adapted:
        yield "model.dtype=bfloat16 loses small updates: use model.dtype=float32 model.autocast=bfloat16, or adapters"


def _sampler_as_old_policy(parts: Factories) -> Iterator[str]:
    unlike = {
        "engine": parts.fact("engine", "is_policy") is False,
        "sparsity": parts.fact("sparsity", "evicts"),
        "collector": parts.fact("collector", "resumes") and not parts.fact("collector", "stops"),
        "correction": parts["correction"].make().needs_old_logprobs,  # a ratio other than 1
    }
    for part in (part for part, found in unlike.items() if found):
        instead = "use correction.prox=step_start"
        yield f"correction.prox=sampler takes the sampler for the old policy, unlike {parts.named(part)}: {instead}"


def try_rules(rules: Rules, n: int, m: int) -> None:
    """Check the rules on a synthetic group whose every second answer is right, but for the collector and rules that
    have `setup`. UserError for one that cannot be used."""
    rules, size = copy.deepcopy(rules), min(n, MAX_SYNTHETIC + n % 2)  # of n's parity, which rules may require
    tried = {part for part, rule in vars(rules).items() if not isinstance(rule, SetUp)}
    prompt, sampling = Prompt("synthetic", (0,), "0"), Sampling.plain(8)
    requests = [Request(prompt, sample, 0, sampling) for sample in range(size)]
    rollouts = tuple(Rollout(request, (0,), (-1.0,), Finish.EOS) for request in requests)
    group = ScoredGroup(prompt, rollouts, tuple(Reward(float(sample % 2)) for sample in range(size)))
    keep = size if m == n else min(m, size - 1)
    kept = list(range(size - keep, size))
    if "downsample" in tried:
        kept = choose(rules.downsample, group, keep, np.random.default_rng(0))
    batch = rows_of(collate([group]), torch.tensor(kept))
    if "advantage" in tried:
        found = advantages(rules.advantage, group, kept)
        batch = replace(batch, advantages=batch.per_token(found.reshape(len(kept), -1)[:, 0]))
    if "correction" in tried:
        name = f"correction {name_of(rules.correction)}"
        with own_code_unless_ours(name, rules.correction):
            verdict: Any = verdict_on(rules.correction, batch, batch.sampler_logprobs)
        if not isinstance(verdict, Verdict) or verdict.weights.shape != batch.weights.shape:
            raise UserError(f"{name} returned {verdict!r:.60}: return a Verdict")
        batch = corrected(batch, verdict)
    if "loss" in tried:
        name = f"loss {name_of(rules.loss)}"
        reference = batch.sampler_logprobs if rules.loss.needs_reference else None
        logprobs = batch.sampler_logprobs.clone().requires_grad_()
        with own_code_unless_ours(name, getattr(rules.loss, "func", rules.loss)):
            output: Any = rules.loss(logprobs, replace(batch, ref_logprobs=reference), totals(batch, 1))
        is_scalar = isinstance(output, LossOutput) and not output.loss.dim()
        if not is_scalar or not output.loss.isfinite() or not output.loss.requires_grad:
            raise UserError(f"{name} returned {output!r:.60}: return a LossOutput, finite and with a gradient")
