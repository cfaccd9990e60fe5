"""Prepares a command, once: what would silently ruin a run is refused, all at once, before a model is loaded; `auto` is
resolved, rules are made and tried, a device is picked.

Types and ranges are checked already (`config.read`). What a part can do it states itself (`support.facts`). Names of
choices appear in messages only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from grpo_cli.collect.collection import MOST_ROLLOUTS
from grpo_cli.collect.equal import at_once
from grpo_cli.config.auto import decided
from grpo_cli.config.instantiate import INNER, Factories
from grpo_cli.config.trial import try_rules
from grpo_cli.interfaces import Rules
from grpo_cli.learner.optimizer import check_optimizer
from grpo_cli.settings import EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import explained, gathered, refuse
from grpo_cli.support.formatting import shown
from grpo_cli.support.memory import SHARE, keep_freed, part_of_gpu
from grpo_cli.support.processor import flush_denormals

Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)


@dataclass(frozen=True)
class Prepared(Generic[Settings]):
    """A command before its model is loaded. `made` are the rules of a run, or the search of an evaluation."""

    settings: Settings
    parts: Factories
    made: Any
    device: torch.device

    @property
    def rules(self) -> Rules:
        rules: Rules = self.made
        return rules

    @property
    def at_once(self) -> int:
        """The most rollouts that a step of a training requests at a time."""
        settings: Any = self.settings
        return at_once(self.rules.collector, settings.n, settings.train.prompts)


def prepare(settings: Settings, say: Callable[[str], None] = print, fast: bool | None = None) -> Prepared[Settings]:
    """UserError with everything that can be refused before a model is read. `say` gets what `auto` became; `fast` as in
    `config.auto`."""
    parts, made = check(settings)
    device = pick_device(settings.device)
    if isinstance(settings, RunSettings):
        keep_freed(settings.fit_bytes)
        check_optimizer(settings.optim, device)
    return Prepared(decided(settings, say, fast), parts, made, device)


def check(settings: RunSettings | EvalRunSettings) -> tuple[Factories, Any]:
    """Return the factories of a run's parts, and its rules, tried once (of an evaluation its search). UserError lists
    everything that cannot be used."""
    parts, made = Factories.of(settings.parts), None
    problems = [*conflicts(settings, parts)]
    with gathered(problems):
        parts.engine_parts({"seed": settings.seed}, early=True)
    with gathered(problems):
        if isinstance(settings, EvalRunSettings):
            made = parts["search"].make()
        else:
            n, m, prompts = settings.n, settings.m, settings.train.prompts
            made = parts.rules({"n": n, "m": m, "prompts": prompts})
            if m <= n:
                try_rules(made, n, m, prompts)
    refuse(problems)
    return parts, made


def pick_device(word: str) -> torch.device:
    """`auto`, `cpu` or `cuda`. A sweep's job that shares a GPU is limited to its share of the memory."""
    flush_denormals()  # called before anything computes
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "cpu"
    if word == "cuda":
        with explained("device=cuda: PyTorch finds no GPU", "; use device=auto or device=cpu"):
            torch.cuda.init()
        # Threads of autograd take up the context with their first product, and PyTorch warns of it.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS", UserWarning)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(part_of_gpu(float(os.environ.get(SHARE, "1")), total))
    return torch.device(word)


def conflicts(settings: RunSettings | EvalRunSettings, parts: Factories) -> Iterator[str]:
    """Yield each pair of settings that cannot be used together."""
    yield from _turns(settings, parts)
    yield from _model(settings.model)
    if isinstance(settings, RunSettings):
        yield from _groups(settings, parts)
        yield from _lengths(settings)
        yield from _updates(settings)
        yield from _drawn(parts)
        yield from _stopping(parts)
    if isinstance(settings, ProfileRunSettings):
        yield from _profile(settings)


def _groups(settings: RunSettings, parts: Factories) -> Iterator[str]:
    n, m, train = settings.n, settings.m, settings.train
    if m > n:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif n == 1 or (m == 1 and settings.parts["advantage"].get("stats_over") == "kept"):
        yield f"n={n} m={m} leaves {parts.named('advantage')} nothing to compare with: take 2 or more"
    if train.minibatches > train.prompts * m:
        yield f"train.minibatches={train.minibatches} must not exceed train.prompts * m, which is {train.prompts * m}"
    if n * train.prompts > MOST_ROLLOUTS:
        yield f"n={n} times train.prompts={train.prompts} must not exceed {MOST_ROLLOUTS} rollouts a step: lower one"
    if train.warmup == "sft" and train.warmup_steps >= train.steps:
        yield f"train.warmup_steps={train.warmup_steps} must be less than train.steps={train.steps}, which counts them"


def _lengths(settings: RunSettings) -> Iterator[str]:
    task, sampling = settings.parts["task"], settings.sampling
    within = task.get("overlong_tokens")
    if isinstance(within, int) and within > sampling.max_new_tokens:
        yield f"task.overlong_tokens={within} must not exceed sampling.max_new_tokens={sampling.max_new_tokens}"
    if settings.train.truncated == "zero" and (task.get("weights") or {}).get("overlong"):
        yield "train.truncated=zero overrides task.weights.overlong: use train.truncated=train or leave_out"
    if sampling.truncated:
        cut = f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}"
        yield f"{cut} would bias the importance ratio: train with sampling.top_p=1 sampling.top_k=0"


def _turns(settings: RunSettings | EvalRunSettings, parts: Factories) -> Iterator[str]:
    """Yield what cannot work with the number of a task's turns, or with evicted tokens."""
    turns = settings.parts["task"].get("turns") or 1
    for group in parts.by_group:
        if turns > 1 and parts.fact(group, "one_turn"):
            task = parts.named("task")
            yield f"{parts.named(group)} is for replies of one turn, and {task} has several: use task.turns=1"
        if parts.fact(group, "resumes") and parts.fact("sparsity", "evicts"):
            yield f"{parts.named(group)} resumes what {parts.named('sparsity')} has dropped: use sparsity=dense"


def _updates(settings: RunSettings) -> Iterator[str]:
    optim, model = settings.optim, settings.model
    if optim.name == "adamw8bit" and optim.offload:
        yield "optim.name=adamw8bit keeps its state on the GPU: use optim.offload=false, or optim.name=adamw"
    if optim.park and (optim.offload or optim.name == "adamw8bit"):
        other = "optim.offload=true" if optim.offload else "optim.name=adamw8bit"
        yield f"optim.park=true and {other} keep the optimizer's state in different places: use one of them"
    if optim.lr * optim.weight_decay >= 1:
        yield f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be below 1, or weights turn sign"
    if model.dtype == "bfloat16" and not model.adapted:
        yield "model.dtype=bfloat16 loses small updates: use model.dtype=float32 model.autocast=bfloat16, or adapters"


def _model(model: ModelSettings) -> Iterator[str]:
    lora = [f"model.lora.{kind}" for kind in ("dora", "rslora") if getattr(model.lora, kind)]
    if lora and not model.adapted:
        yield f"{lora[0]}=true needs adapters: give model.lora.rank=16 or more"
    if model.lora.rank > 0 and not model.lora.targets:
        yield "model.lora.targets=[] leaves no layer to adapt; name some, such as [q_proj, v_proj]"
    if model.offload_activations and model.gradient_checkpointing != "full":
        yield "model.offload_activations=true moves what model.gradient_checkpointing=full keeps: give both"
    quantized = f"model.quantize={model.quantize}"
    if model.quantize != "none" and not model.adapted:
        yield f"{quantized} freezes all weights: give adapters to train, such as model.lora.rank=64"
    if model.quantize != "none" and model.random_init:
        yield f"{quantized} quantises weights as they are read, and model.random_init=true reads none"


def _drawn(parts: Factories) -> Iterator[str]:
    """Yield why the sampler cannot stand in for the old policy."""
    if parts["correction"].settings.get("prox") != "sampler":
        return
    inner = parts["engine"].settings.get(INNER)
    others = [f"engine.{INNER}={inner}" if inner else parts.named("engine")] * (
        parts.fact("engine", "is_policy") is False
    )
    others += [parts.named("sparsity")] * bool(parts.fact("sparsity", "evicts"))
    if parts.fact("collector", "resumes") and not parts.fact("collector", "stops"):
        others.append(parts.named("collector"))
    for other in others:
        yield f"correction.prox=sampler takes {other} for the old policy, which it is not: use prox=step_start"
    if parts["correction"].make().needs_old_logprobs:
        yield f"{parts.named('correction')} compares what correction.prox=sampler makes one: use prox=step_start"


def _stopping(parts: Factories) -> Iterator[str]:
    if parts.fact("collector", "stops") and parts.fact("engine", "stops_early") is False:
        stops = f"{parts.named('collector')} stops rollouts early"
        yield f"{stops}, which {parts.named('engine')} cannot: use engine=torch or vllm"


def _profile(settings: ProfileRunSettings) -> Iterator[str]:
    profile = settings.profile
    if profile.lengths != "natural" and (turns := settings.parts["task"].get("turns", 1)) > 1:
        yield f"profile.lengths={profile.lengths} cannot be forced with task.turns={turns}: use profile.lengths=natural"
    named = isinstance(profile.for_gpu, str)
    if profile.for_gpu and not (profile.plan_only and (named or settings.fit_bytes)):
        has = "" if named else " and its memory, such as fit=80GB"
        yield f"profile.for_gpu={shown(profile.for_gpu)} only plans: add profile.plan_only=true{has}"
