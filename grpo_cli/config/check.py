"""Checks relations between settings, and reports all violations at once. Parts check their own; no model is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from grpo_cli.config import together
from grpo_cli.config.choices import choice_of
from grpo_cli.config.instantiate import engine_parts, refused_by, rule_of, rules_of
from grpo_cli.config.trial import try_rules
from grpo_cli.interfaces import Rules
from grpo_cli.settings import (
    EvalRunSettings,
    ModelSettings,
    OptimSettings,
    ProfileRunSettings,
    ProfileSettings,
    RunSettings,
    SampleSettings,
    Sampling,
    TrainSettings,
)
from grpo_cli.support.errors import gathered, refuse
from grpo_cli.support.formatting import parse_bytes, shown


def check(settings: RunSettings) -> Rules:
    """Check a training run's settings, whose types and ranges are checked already. Returns its tried rules. UserError
    lists every violation."""
    problems = [
        *_group_problems(settings),
        *_train_problems(settings.train, settings.m),
        *_sampling_problems(settings.sampling),
        *_turn_problems(settings),
        *_length_problems(settings),
        *_optim_problems(settings.optim),
        *_checkpoint_problems(settings),
        *_model_problems(settings.model, settings.device),
        *_rounding_problems(settings),
        *together.problems(settings),
    ]
    rules = None
    with gathered(problems):
        engine_parts(settings.parts, {"seed": settings.seed}, early=True)
    with gathered(problems):
        rules = rules_of(settings.parts)
        problems += together.undone(settings, rules) if settings.resume is None else []
        if 1 <= settings.m <= settings.n:
            try_rules(rules, settings.n, settings.m, settings.train.prompts)
    with gathered(problems):
        problems += refused_by("curriculum", settings.parts["curriculum"], {})
    refuse(problems)
    assert rules is not None, "what cannot be made is refused"
    return rules


def check_profile(settings: ProfileRunSettings) -> Rules:
    """The same for `grpo profile`: the training run's settings, then the profile's."""
    rules = check(settings)
    refuse([*_profile_problems(settings.profile, settings.sampling, _turns(settings))])
    return rules


def _turns(settings: RunSettings | EvalRunSettings) -> int:
    """The most turns of an episode of the task."""
    return settings.parts["task"].get("turns", 1)


def _turn_problems(settings: RunSettings | EvalRunSettings) -> Iterator[str]:
    if settings.sampling.max_turn_tokens is not None and _turns(settings) == 1:
        yield (
            f"sampling.max_turn_tokens={settings.sampling.max_turn_tokens} bounds each of several turns, and the task "
            "has one: use sampling.max_new_tokens"
        )


def _length_problems(settings: RunSettings) -> Iterator[str]:
    task, longest = settings.parts["task"], settings.sampling.max_new_tokens
    within = task.get("overlong_tokens")
    if isinstance(within, int) and within > longest:
        yield (
            f"task.overlong_tokens={within} must not be more than sampling.max_new_tokens={longest}: they are the last "
            "ones of it"
        )
    if settings.train.truncated == "zero" and (task.get("weights") or {}).get("overlong"):
        yield (
            "train.truncated=zero gives a reply that is cut off more than task.weights.overlong leaves one that nearly "
            "is: use train.truncated=train or leave_out, or task.weights.overlong=null"
        )


def _profile_problems(profile: ProfileSettings, sampling: Sampling, turns: int) -> Iterator[str]:
    if profile.lengths != "natural" and turns > 1:
        yield f"profile.lengths={profile.lengths} cannot be had with task.turns={turns}: use profile.lengths=natural"
    if profile.mean is not None and not 1 <= profile.mean <= sampling.max_new_tokens:
        yield (
            f"profile.mean={profile.mean} must be from 1 to sampling.max_new_tokens={sampling.max_new_tokens}: "
            "no rollout is longer"
        )
    if (profile.lengths == "trace") != (profile.trace_file is not None):
        yield (
            f"profile.lengths={profile.lengths} and profile.trace_file={shown(profile.trace_file)}: a recorded "
            "rollouts.jsonl goes with profile.lengths=trace, and with nothing else"
        )
    named = isinstance(profile.for_gpu, str)
    if profile.for_gpu and not (profile.plan_only and (named or profile.fit is not None)):
        has = "" if named else ", and what it has, such as profile.fit=80GB (or name it, such as profile.for_gpu=h100)"
        yield (
            f"profile.for_gpu={shown(profile.for_gpu)} plans for a GPU that may not be here: add "
            f"profile.plan_only=true{has}"
        )
    if profile.fit is not None:
        problems: list[str] = []
        with gathered(problems):
            parse_bytes(profile.fit, "profile.fit")
        yield from problems


def check_eval(settings: EvalRunSettings) -> None:
    """The same for `grpo eval`."""
    count = settings.eval.problems
    problems = [f"eval.problems={count} must be at least 1, or -1 for all"] if count < 1 and count != -1 else []
    problems += [*_stop_problems(settings.sampling), *_turn_problems(settings)]
    problems += [*_model_problems(settings.model, settings.device), *together.eval_problems(settings)]
    with gathered(problems):
        engine_parts(settings.parts, {"seed": settings.seed}, early=True)
    with gathered(problems):
        rule_of("search", settings.parts["search"])
    refuse(problems)


def _group_problems(settings: RunSettings) -> Iterator[str]:
    n, m, parts = settings.n, settings.m, settings.parts
    if m < 1:
        yield f"m={m} must be at least 1: nothing would be trained on"
    elif m > n:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif n == 1:
        yield (
            f"n=1 leaves advantage={choice_of('advantage', parts['advantage'])} nothing to compare with: GRPO compares "
            "the rollouts of a prompt with each other; take n of 2 or more"
        )
    elif m == 1 and parts["advantage"].get("stats_over") == "kept":
        yield (
            f"m=1 leaves advantage={choice_of('advantage', parts['advantage'])} nothing to compare with: take m of 2 "
            "or more, or advantage.stats_over=group"
        )


def _train_problems(train: TrainSettings, m: int) -> Iterator[str]:
    kept = train.prompts * m
    if train.minibatches > kept > 0:  # else m is said to be wrong
        yield (
            f"train.minibatches={train.minibatches} must not be more than the {kept} rollouts trained on per step "
            f"(train.prompts={train.prompts} times m={m})"
        )

    if train.warmup == "sft" and train.warmup_steps >= train.steps:
        yield (
            f"train.warmup_steps={train.warmup_steps} must be less than train.steps={train.steps}, which counts them: "
            "no step would learn from rewards"
        )


def _stop_problems(sampling: SampleSettings) -> Iterator[str]:
    if "" in sampling.stop:
        yield "sampling.stop holds an empty string, which every text contains: leave it out"


def _sampling_problems(sampling: Sampling) -> Iterator[str]:
    yield from _stop_problems(sampling)
    if sampling.truncated:
        yield (
            f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}: training on truncated sampling biases "
            "the importance ratio; use sampling.top_p=1 sampling.top_k=0 (grpo eval takes both)"
        )


def _optim_problems(optim: OptimSettings) -> Iterator[str]:
    if optim.name == "adamw8bit" and optim.offload:
        yield "optim.name=adamw8bit keeps its state on the GPU; use optim.offload=false, or optim.name=adamw"
    if optim.park and (optim.offload or optim.name == "adamw8bit"):
        keeps = "optim.offload=true keeps there anyway" if optim.offload else "optim.name=adamw8bit keeps on the GPU"
        yield f"optim.park=true moves the optimizer's state to the CPU's memory, which {keeps}; use one of them"
    if optim.lr * optim.weight_decay >= 1:
        yield (
            f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be less than 1: an update takes "
            "that share off every weight, and more would turn its sign"
        )


def _checkpoint_problems(settings: RunSettings) -> Iterator[str]:
    if settings.accept_damage and settings.resume is None:
        yield "accept_damage=true is about the records of a run that goes on: name it, resume=<run folder>"
    if settings.train.checkpoint == "lazy" and settings.optim.offload:
        yield (
            "train.checkpoint=lazy copies what a checkpoint holds to the CPU's memory, where optim.offload=true has "
            "most of it already, and a second copy would double that: use train.checkpoint=now, or optim.park=true"
        )


def _rounding_problems(settings: RunSettings) -> Iterator[str]:
    # An older version may have allowed it to a run that is resumed.
    if settings.model.dtype == "bfloat16" and not settings.model.adapted and settings.resume is None:
        yield (
            "model.dtype=bfloat16 would train every weight in 8 bits of precision, where steps of less than a 256th of "
            "a weight are lost; leave model.dtype=float32 (model.autocast=bfloat16 computes in bfloat16 all the same), "
            "or train adapters, such as model.lora.rank=16"
        )


def _model_problems(model: ModelSettings, device: str) -> Iterator[str]:
    for name, value in (model.architecture or {}).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"model.architecture.{name}={value} must be finite"
    for kind in ("dora", "rslora"):
        if getattr(model.lora, kind) and not model.adapted:
            yield f"model.lora.{kind}=true is about adapters, and there are none: give model.lora.rank=16 or more"
    if model.lora.rank > 0 and not model.lora.targets:
        yield "model.lora.targets=[] leaves no layer to adapt; name some, such as [q_proj, v_proj]"
    if model.offload_activations and model.gradient_checkpointing != "full":
        yield "model.offload_activations=true moves what model.gradient_checkpointing=full keeps: give both"
    if model.quantize != "none" and not model.adapted:
        yield (
            f"model.quantize={model.quantize} freezes the weights, so that there is nothing to train; give adapters, "
            "such as model.lora.rank=64"
        )
    if model.quantize != "none" and model.random_init:
        yield f"model.quantize={model.quantize} quantises weights as they are read, and model.random_init reads none"
    if model.quantize != "none" and device == "cpu":
        yield f"model.quantize={model.quantize} needs a CUDA GPU, whose kernels bitsandbytes brings, not device=cpu"
