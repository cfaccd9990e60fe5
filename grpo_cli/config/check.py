"""Every range of a setting, and every rule that relates two of them: what is broken is said all at once.

What a part refuses it says itself; the parts are asked here too. Nothing here touches a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from grpo_cli.config.choices import choice_of
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
from grpo_cli.support.errors import UserError, gathered, refuse
from grpo_cli.support.formatting import parse_bytes, shown
from grpo_cli.support.ranges import out_of_range

if TYPE_CHECKING:
    from grpo_cli.config.rehearsal import Tried


def check(settings: RunSettings) -> Tried | None:
    """Every rule that relates settings of a training run. UserError lists all that are broken.

    Returns the rules that were tried, None where code of a person's own crashed: it does so again in its run.
    """
    tried: list[Tried] = []
    refuse(
        [
            *ranges(settings),
            *_group_problems(settings),
            *_train_problems(settings.train, settings.m),
            *_sampling_problems(settings.sampling),
            *_turn_problems(settings),
            *_optim_problems(settings.optim),
            *_model_problems(settings.model, settings.device),
            *_rounding_problems(settings),
            *_resume_problems(settings),
            *_engine_problems(settings),
            *_rule_problems(settings, tried.append),
            *_curriculum_problems(settings),
            *_own_problems(settings, "replay"),
        ]
    )
    return tried[0] if tried else None


def _resume_problems(settings: RunSettings) -> Iterator[str]:
    if settings.accept_damage and settings.resume is None:
        yield "accept_damage=true is about the records of a run that goes on: name it, resume=<run folder>"


def check_profile(settings: ProfileRunSettings) -> Tried | None:
    """The same for `grpo profile`: those of the training run, then those of the profile."""
    tried = check(settings)
    refuse([*_profile_problems(settings.profile, settings.sampling, _turns(settings))])
    return tried


def _turns(settings: RunSettings | EvalRunSettings) -> int:
    """Most turns of an episode, as the task has it."""
    return settings.parts["task"].get("turns", 1)


def _turn_problems(settings: RunSettings | EvalRunSettings) -> Iterator[str]:
    if settings.sampling.max_turn_tokens is not None and _turns(settings) == 1:
        yield (
            f"sampling.max_turn_tokens={settings.sampling.max_turn_tokens} bounds each of several turns, and the task "
            "has one: use sampling.max_new_tokens"
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
        yield from _size_problems("profile.fit", profile.fit)


def check_eval(settings: EvalRunSettings) -> None:
    """The same for `grpo eval`."""
    problems = settings.eval.problems
    few = [f"eval.problems={problems} must be at least 1, or -1 for all"] if problems < 1 and problems != -1 else []
    refuse(
        [
            *ranges(settings),
            *few,
            *_stop_problems(settings.sampling),
            *_turn_problems(settings),
            *_model_problems(settings.model, settings.device),
            *_engine_problems(settings),
        ]
    )


def ranges(settings: RunSettings | EvalRunSettings) -> Iterator[str]:
    """Values beyond the ranges that `settings` declares."""
    yield from out_of_range(type(settings), vars(settings))


def _size_problems(key: str, value: Any) -> Iterator[str]:
    try:
        parse_bytes(shown(value), key)
    except UserError as error:
        yield str(error)


def _group_problems(settings: RunSettings) -> Iterator[str]:
    n, m, parts = settings.n, settings.m, settings.parts
    if m < 1 and m != n:  # m follows n unless it was given
        yield f"m={m} must be at least 1: nothing would be trained on"
    elif m > n >= 2:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif m == 1 and parts["advantage"].get("stats_over") == "kept":
        yield (
            f"m=1 leaves advantage={choice_of('advantage', parts['advantage'])} nothing to compare with: take m of 2 "
            "or more, or advantage.stats_over=group"
        )


def _train_problems(train: TrainSettings, m: int) -> Iterator[str]:
    kept = train.prompts * m
    if train.minibatches > kept > 0:
        yield (
            f"train.minibatches={train.minibatches} must not be more than the {kept} rollouts trained on per step "
            f"(train.prompts={train.prompts} times m={m})"
        )


def _stop_problems(sampling: SampleSettings) -> Iterator[str]:
    if "" in sampling.stop:
        yield "sampling.stop holds an empty string, which every text contains: leave it out"


def _sampling_problems(sampling: Sampling) -> Iterator[str]:
    yield from _stop_problems(sampling)
    if sampling.truncated and 0 < sampling.top_p <= 1 and sampling.top_k >= 0:
        yield (
            f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}: training on truncated sampling biases "
            "the importance ratio, since the policy is not what was sampled from; "
            "use sampling.top_p=1 sampling.top_k=0 (grpo eval takes both)"
        )


def _optim_problems(optim: OptimSettings) -> Iterator[str]:
    if optim.name == "adamw8bit" and optim.offload:
        yield "optim.name=adamw8bit keeps its state on the GPU; use optim.offload=false, or optim.name=adamw"
    if optim.lr * optim.weight_decay >= 1:
        yield (
            f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be less than 1: an update takes "
            "that share off every weight, and more would turn its sign"
        )


def _rounding_problems(settings: RunSettings) -> Iterator[str]:
    """A run of a version that allowed it goes on as it is."""
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
    if model.lora.rank > 0 and not model.lora.targets:
        yield "model.lora.targets=[] leaves no layer to adapt; name some, such as [q_proj, v_proj]"
    if model.offload_activations and not model.gradient_checkpointing:
        yield "model.offload_activations=true moves what model.gradient_checkpointing=true keeps: ask for both"
    if model.quantize != "none" and not model.adapted:
        yield (
            f"model.quantize={model.quantize} freezes the weights, so that there is nothing to train; give adapters, "
            "such as model.lora.rank=64"
        )
    if model.quantize != "none" and model.random_init:
        yield f"model.quantize={model.quantize} quantises weights as they are read, and model.random_init reads none"
    if model.quantize != "none" and device == "cpu":
        yield f"model.quantize={model.quantize} needs a CUDA GPU, whose kernels bitsandbytes brings, not device=cpu"


def _engine_problems(settings: RunSettings | EvalRunSettings) -> list[str]:
    from grpo_cli.config.instantiate import engine_parts  # loads torch, which the run does next in any case

    return _refused(lambda: engine_parts(settings.parts, {"seed": settings.seed}, early=True))


def _rule_problems(settings: RunSettings, keep: Callable[[Tried], None]) -> list[str]:
    """What rules say of their settings, of `n` and `m`, and of each other."""
    from grpo_cli.config import together
    from grpo_cli.config.rehearsal import try_rules

    def ask() -> None:
        if (tried := try_rules(settings)) is not None:
            keep(tried)

    return [*together.problems(settings), *_refused(ask)]


def _curriculum_problems(settings: RunSettings) -> list[str]:
    """What the curriculum says of its settings, and the place of a profile."""
    from grpo_cli.collect.profile import no_history

    return [*no_history(settings.train.history), *_own_problems(settings, "curriculum")]


def _own_problems(settings: RunSettings, group: str) -> list[str]:
    """What a part says of its settings before it can be made."""
    from grpo_cli.config.instantiate import refused_by

    return _refused(lambda: refuse([*refused_by(group, settings.parts[group], {})]))


def _refused(make: Callable[[], Any]) -> list[str]:
    """The problems that parts have when they are made. What crashes does so again in its run, where it is seen."""
    problems: list[str] = []
    with suppress(Exception, SystemExit, GeneratorExit), gathered(problems):
        make()
    return problems
