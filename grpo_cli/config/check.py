"""Refuses settings that would silently ruin a run together, all at once. No model is loaded.

Types and ranges are checked already (`config.read`). What a part requires of others it states itself (`goes_with`: see
`facts.facts`). Names of choices appear in messages only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli.collect.collection import MOST_ROLLOUTS
from grpo_cli.config.choices import choice_of
from grpo_cli.config.instantiate import INNER, engine_parts, fact_of, rule_of, rules_of, says
from grpo_cli.config.trial import try_rules
from grpo_cli.interfaces import Rules
from grpo_cli.settings import EvalRunSettings, ModelSettings, ProfileRunSettings, RunSettings
from grpo_cli.support.errors import gathered, own_code_unless_ours, refuse
from grpo_cli.support.formatting import shown


def check(settings: RunSettings) -> Rules:
    """Return the rules of a training run, tried once. UserError lists everything that cannot be used."""
    problems, rules = list(conflicts(settings)), None
    with gathered(problems):
        engine_parts(settings.parts, {"seed": settings.seed}, early=True)
    with gathered(problems):
        rules = rules_of(settings.parts)
        if settings.m <= settings.n:
            try_rules(rules, settings.n, settings.m, settings.train.prompts)
    refuse(problems)
    assert rules is not None, "rules that cannot be made are refused"
    return rules


def check_eval(settings: EvalRunSettings) -> None:
    """Check the settings of an evaluation, whose k samples of a problem are its groups."""
    k = settings.eval.k
    problems = [*_model(settings.model, settings.device), *_turns(settings)]
    problems += Chosen(settings.parts, k, k, settings.eval.problems).goes_with()
    with gathered(problems):
        engine_parts(settings.parts, {"seed": settings.seed}, early=True)
    with gathered(problems):
        rule_of("search", settings.parts["search"])
    refuse(problems)


@dataclass(frozen=True)
class Chosen:
    """The other parts of the run, as in `facts.Others`."""

    parts: Mapping[str, Mapping[str, Any]]
    n: int
    m: int
    prompts: int

    def says(self, group: str, fact: str) -> Any:
        return says(self.parts, group, fact)

    def named(self, group: str) -> str:
        return f"{group}={choice_of(group, self.parts[group])}"

    def setting(self, group: str, key: str) -> Any:
        return self.parts[group].get(key)

    def goes_with(self) -> Iterator[str]:
        """Yield what the parts state against each other."""
        for group, part in self.parts.items():
            if callable(ask := fact_of(group, part, "goes_with")):
                with own_code_unless_ours(f"{group}._target_={part['_target_']}: goes_with", ask):
                    found = [*ask(part, self)]
                yield from found


def conflicts(settings: RunSettings) -> Iterator[str]:
    """Yield each pair of settings of a training that cannot be used together."""
    chosen = Chosen(settings.parts, settings.n, settings.m, settings.train.prompts)
    yield from _groups(settings, chosen)
    yield from _lengths(settings)
    yield from _turns(settings)
    yield from _updates(settings)
    yield from _model(settings.model, settings.device)
    yield from chosen.goes_with()
    yield from _drawn(chosen)
    yield from _partial(chosen)
    if isinstance(settings, ProfileRunSettings):
        yield from _profile(settings)


def _groups(settings: RunSettings, chosen: Chosen) -> Iterator[str]:
    n, m, train = settings.n, settings.m, settings.train
    if m > n:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif n == 1 or (m == 1 and chosen.setting("advantage", "stats_over") == "kept"):
        yield f"n={n} m={m} leaves {chosen.named('advantage')} nothing to compare with: take 2 or more"
    if train.minibatches > train.prompts * m:
        yield f"train.minibatches={train.minibatches} must not exceed train.prompts * m, which is {train.prompts * m}"
    if n * train.prompts > MOST_ROLLOUTS:
        yield f"n={n} times train.prompts={train.prompts} must not exceed {MOST_ROLLOUTS} rollouts a step: lower one"
    if train.warmup == "sft" and train.warmup_steps >= train.steps:
        yield (
            f"train.warmup_steps={train.warmup_steps} must be less than train.steps={train.steps}, which counts them: "
            "no step would learn from rewards"
        )


def _lengths(settings: RunSettings) -> Iterator[str]:
    task, sampling = settings.parts["task"], settings.sampling
    within = task.get("overlong_tokens")
    if isinstance(within, int) and within > sampling.max_new_tokens:
        yield f"task.overlong_tokens={within} must not exceed sampling.max_new_tokens={sampling.max_new_tokens}"
    if settings.train.truncated == "zero" and (task.get("weights") or {}).get("overlong"):
        yield (
            "train.truncated=zero punishes a cut-off reply more than task.weights.overlong does: use "
            "train.truncated=train or leave_out, or task.weights.overlong=null"
        )
    if sampling.truncated:
        yield (
            f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}: training on truncated sampling biases "
            "the importance ratio; use sampling.top_p=1 sampling.top_k=0"
        )


def _turns(settings: RunSettings | EvalRunSettings) -> Iterator[str]:
    if settings.sampling.max_turn_tokens is not None and settings.parts["task"].get("turns", 1) == 1:
        yield "sampling.max_turn_tokens bounds each of several turns, and the task has one: use sampling.max_new_tokens"


def _updates(settings: RunSettings) -> Iterator[str]:
    optim, model = settings.optim, settings.model
    if optim.name == "adamw8bit" and optim.offload:
        yield "optim.name=adamw8bit keeps its state on the GPU: use optim.offload=false, or optim.name=adamw"
    if optim.park and (optim.offload or optim.name == "adamw8bit"):
        other = "optim.offload=true" if optim.offload else "optim.name=adamw8bit"
        yield f"optim.park=true and {other} keep the optimizer's state in different places: use one of them"
    if optim.lr * optim.weight_decay >= 1:
        yield (
            f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be less than 1: an update would "
            "turn the sign of every weight"
        )
    if model.dtype == "bfloat16" and not model.adapted:
        yield (
            "model.dtype=bfloat16 loses updates of less than a 256th of a weight: use model.dtype=float32 with "
            "model.autocast=bfloat16, or train adapters (model.lora.rank=16)"
        )


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


def _drawn(chosen: Chosen) -> Iterator[str]:
    """Yield why the sampler cannot stand in for the old policy."""
    if chosen.setting("correction", "prox") != "drawn":
        return
    inner = chosen.setting("engine", INNER)
    engine = f"engine.{INNER}={inner}" if inner else chosen.named("engine")
    others = [engine] * (chosen.says("engine", "is_policy") is False)
    others += [chosen.named("sparsity")] * bool(chosen.says("sparsity", "evicts"))
    if chosen.says("collector", "resumes") and not chosen.says("collector", "stops"):
        others.append(chosen.named("collector"))
    for other in others:
        yield f"correction.prox=drawn takes {other} for the old policy, which it is not: use correction.prox=now"
    if rule_of("correction", chosen.parts["correction"]).needs_policy_logprobs:
        yield (
            f"{chosen.named('correction')} compares old policy and sampler, which correction.prox=drawn makes one: "
            "use correction.prox=now, or correction=none"
        )


def _partial(chosen: Chosen) -> Iterator[str]:
    """Yield what cannot work with a collector that stops rollouts, or resumes partial ones."""
    collector, resumes = chosen.named("collector"), chosen.says("collector", "resumes")
    if resumes and chosen.says("sparsity", "evicts"):
        yield f"{collector} resumes rollouts, whose tokens {chosen.named('sparsity')} never evicts: use sparsity=dense"
    if chosen.says("collector", "stops") and chosen.says("engine", "stops_early") is False:
        yield f"{collector} stops rollouts early, which {chosen.named('engine')} cannot: use engine=torch or vllm"


def _profile(settings: ProfileRunSettings) -> Iterator[str]:
    profile = settings.profile
    if profile.lengths != "natural" and (turns := settings.parts["task"].get("turns", 1)) > 1:
        yield f"profile.lengths={profile.lengths} cannot be forced with task.turns={turns}: use profile.lengths=natural"
    named = isinstance(profile.for_gpu, str)
    if profile.for_gpu and not (profile.plan_only and (named or settings.fit_bytes)):
        has = "" if named else " and its memory, such as fit=80GB"
        yield f"profile.for_gpu={shown(profile.for_gpu)} only plans: add profile.plan_only=true{has}"
