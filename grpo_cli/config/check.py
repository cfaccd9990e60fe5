"""Refuses settings that would silently ruin a run together, all at once. No model is loaded.

Types and ranges are checked already (`config.read`). What a part can do it states itself (`support.facts`). Names of
choices appear in messages only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_cli.collect.collection import MOST_ROLLOUTS
from grpo_cli.config.instantiate import INNER, Factory, engine_parts, fact, factories, named, rules_of
from grpo_cli.config.trial import try_rules
from grpo_cli.settings import EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import gathered, refuse
from grpo_cli.support.formatting import shown

ROUNDING = 1e-6  # of a sum of weights
Parts = Mapping[str, Factory]


def check(settings: RunSettings | EvalRunSettings) -> tuple[dict[str, Factory], Any]:
    """Return the factories of a run's parts, and its rules, tried once (of an evaluation its search). UserError lists
    everything that cannot be used."""
    parts, made = factories(settings.parts), None
    problems = [*conflicts(settings, parts)]
    with gathered(problems):
        engine_parts(parts, {"seed": settings.seed}, early=True)
    with gathered(problems):
        if isinstance(settings, EvalRunSettings):
            made = parts["search"].make()
        else:
            n, m, prompts = settings.n, settings.m, settings.train.prompts
            made = rules_of(parts, {"n": n, "m": m, "prompts": prompts})
            if m <= n:
                try_rules(made, n, m, prompts)
    refuse(problems)
    return parts, made


def conflicts(settings: RunSettings | EvalRunSettings, parts: Parts) -> Iterator[str]:
    """Yield each pair of settings that cannot be used together."""
    yield from _turns(settings, parts)
    yield from _model(settings.model, settings.device)
    if isinstance(settings, RunSettings):
        yield from _groups(settings, parts)
        yield from _lengths(settings)
        yield from _updates(settings)
        yield from _drawn(parts)
        yield from _rules(settings, parts)
    if isinstance(settings, ProfileRunSettings):
        yield from _profile(settings)


def _groups(settings: RunSettings, parts: Parts) -> Iterator[str]:
    n, m, train = settings.n, settings.m, settings.train
    if m > n:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif n == 1 or (m == 1 and _stats_of_kept(settings)):
        yield f"n={n} m={m} leaves {named(parts, 'advantage')} nothing to compare with: take 2 or more"
    if train.minibatches > train.prompts * m:
        yield f"train.minibatches={train.minibatches} must not exceed train.prompts * m, which is {train.prompts * m}"
    if n * train.prompts > MOST_ROLLOUTS:
        yield f"n={n} times train.prompts={train.prompts} must not exceed {MOST_ROLLOUTS} rollouts a step: lower one"
    if train.warmup == "sft" and train.warmup_steps >= train.steps:
        yield f"train.warmup_steps={train.warmup_steps} must be less than train.steps={train.steps}, which counts them"


def _stats_of_kept(settings: RunSettings) -> bool:
    return bool(settings.parts["advantage"].get("stats_over") == "kept")


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


def _turns(settings: RunSettings | EvalRunSettings, parts: Parts) -> Iterator[str]:
    """Yield what cannot work with the number of a task's turns, or with evicted tokens."""
    turns = settings.parts["task"].get("turns") or 1
    if settings.sampling.max_turn_tokens is not None and turns == 1:
        yield "sampling.max_turn_tokens bounds each of several turns, and the task has one: use sampling.max_new_tokens"
    for group in parts:
        if turns > 1 and fact(parts, group, "one_turn"):
            task = named(parts, "task")
            yield f"{named(parts, group)} is for replies of one turn, and {task} has several: use task.turns=1"
        if fact(parts, group, "resumes") and fact(parts, "sparsity", "evicts"):
            yield f"{named(parts, group)} resumes what {named(parts, 'sparsity')} has dropped: use sparsity=dense"


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


def _model(model: ModelSettings, device: str) -> Iterator[str]:
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
    if model.quantize != "none" and device == "cpu":
        yield f"{quantized} needs a CUDA GPU, not device=cpu"


def _drawn(parts: Parts) -> Iterator[str]:
    """Yield why the sampler cannot stand in for the old policy."""
    if parts["correction"].settings.get("prox") != "drawn":
        return
    inner = parts["engine"].settings.get(INNER)
    others = [f"engine.{INNER}={inner}" if inner else named(parts, "engine")] * (
        fact(parts, "engine", "is_policy") is False
    )
    others += [named(parts, "sparsity")] * bool(fact(parts, "sparsity", "evicts"))
    if fact(parts, "collector", "resumes") and not fact(parts, "collector", "stops"):
        others.append(named(parts, "collector"))
    for other in others:
        yield f"correction.prox=drawn takes {other} for the old policy, which it is not: use correction.prox=now"
    if parts["correction"].make().needs_policy_logprobs:
        yield f"{named(parts, 'correction')} compares what correction.prox=drawn makes one: use correction.prox=now"


def _rules(settings: RunSettings, parts: Parts) -> Iterator[str]:
    """Yield what a rule needs of the others."""
    divides, divided = fact(parts, "advantage", "divides"), parts["collector"].settings.get("divided")
    if isinstance(divided, bool) and divides not in (None, divided):
        counts = f"{named(parts, 'collector')} collector.divided={shown(divided)}"
        yield f"{counts} is not what {named(parts, 'advantage')} does: change one of them"
    if fact(parts, "collector", "stops") and fact(parts, "engine", "stops_early") is False:
        stops = f"{named(parts, 'collector')} stops rollouts early"
        yield f"{stops}, which {named(parts, 'engine')} cannot: use engine=torch or vllm"
    if fact(parts, "loss", "needs_values") and not fact(parts, "advantage", "of_values"):
        yield f"{named(parts, 'loss')} needs rewards less their problems' values, not {named(parts, 'advantage')}"
    weights = settings.parts["task"].get("weights")
    given = [one for one in weights.values() if isinstance(one, int | float)] if isinstance(weights, Mapping) else []
    if fact(parts, "advantage", "unit_rewards") and (sum(given) > 1 + ROUNDING or weights and weights.get("overlong")):
        most = f"{named(parts, 'advantage')} takes rewards from 0 to 1"
        yield f"{most}: lower task.weights={shown(weights)} to a sum of 1, without overlong"
    for group in ("advantage", "downsample"):
        if fact(parts, group, "same_size") and fact(parts, "collector", "unequal"):
            yield f"{named(parts, group)} takes groups of n rollouts, not those of {named(parts, 'collector')}"
    size, counted = ("m", settings.m) if _stats_of_kept(settings) else ("n", settings.n)
    if fact(parts, "advantage", "odd") and counted % 2 == 0:
        yield f"{size}={counted} has no middle rollout for {named(parts, 'advantage')}: use an odd {size}"
    if fact(parts, "downsample", "leaves_out") and settings.m == settings.n:
        yield f"m=n={settings.n} leaves nothing out, as {named(parts, 'downsample')} does: use m={settings.n - 1}"


def _profile(settings: ProfileRunSettings) -> Iterator[str]:
    profile = settings.profile
    if profile.lengths != "natural" and (turns := settings.parts["task"].get("turns", 1)) > 1:
        yield f"profile.lengths={profile.lengths} cannot be forced with task.turns={turns}: use profile.lengths=natural"
    named = isinstance(profile.for_gpu, str)
    if profile.for_gpu and not (profile.plan_only and (named or settings.fit_bytes)):
        has = "" if named else " and its memory, such as fit=80GB"
        yield f"profile.for_gpu={shown(profile.for_gpu)} only plans: add profile.plan_only=true{has}"
