"""Every range of a setting, and every rule that relates two of them: what is broken is said all at once.

What a part refuses it says itself; the parts are asked here too. Nothing here touches a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from grpo_cli.config.choices import choice_of
from grpo_cli.settings import (
    EvalRunSettings,
    EvalSettings,
    ModelSettings,
    OptimSettings,
    ProfileRunSettings,
    ProfileSettings,
    RunSettings,
    SampleSettings,
    Sampling,
    TrainSettings,
)
from grpo_cli.support.errors import UserError, closest, gathered, refuse
from grpo_cli.support.formatting import parse_bytes, shown

if TYPE_CHECKING:
    from grpo_cli.config.rehearsal import Tried

_SCHEDULES = ("constant", "linear", "cosine")
_DTYPES = ("auto", "float32", "bfloat16")
_QUANTISED = ("none", "8bit", "4bit")
_OPTIMIZERS = ("adamw", "adamw8bit")
_AUTOCASTS = ("auto", "none", "bfloat16")
_DEVICES = ("auto", "cpu", "cuda")
_COUNTED = ("rollout", "prompt")
_ESS = ("none", "sqrt", "linear")
_SPLITS = ("eval", "train")
MOST_SAMPLES = 2**16
_LENGTHS = ("natural", "lognormal", "full", "trace")


def check(settings: RunSettings) -> Tried | None:
    """Every rule that relates settings of a training run. UserError lists all that are broken.

    Returns the rules that were tried, None where code of a person's own crashed: it does so again in its run.
    """
    tried: list[Tried] = []
    refuse(
        [
            *_seed_problems(settings.seed),
            *_group_problems(settings),
            *_train_problems(settings.train, settings.m),
            *_sampling_problems(settings.sampling),
            *_optim_problems(settings.optim),
            *_eval_problems(settings.eval),
            *_model_problems(settings.model, settings.device),
            *_rounding_problems(settings),
            *_at_least("record.rollouts", settings.record.rollouts, -1),
            *_at_least("resume_wait", settings.resume_wait, 0),
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
    refuse([*_profile_problems(settings.profile, settings.sampling)])
    return tried


def _profile_problems(profile: ProfileSettings, sampling: Sampling) -> Iterator[str]:
    yield from _at_least("profile.steps", profile.steps, 1)
    yield from _at_least("profile.warmup", profile.warmup, 0)
    yield from _one_of("profile.lengths", profile.lengths, _LENGTHS)
    yield from _above_0("profile.cv", profile.cv, 100, "lengths are whole numbers up to sampling.max_new_tokens")
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
    refuse(
        [
            *_one_of("eval.split", settings.eval.split, _SPLITS),
            *(
                [f"eval.problems={problems} must be at least 1, or -1 for all"]
                if problems < 1 and problems != -1
                else []
            ),
            *_seed_problems(settings.seed),
            *_range_problems(settings.sampling),
            *_exam_problems(settings.eval.k, settings.eval.temperature),
            *_model_problems(settings.model, settings.device),
            *_engine_problems(settings),
        ]
    )


def _at_least(key: str, value: int | float, least: int) -> Iterator[str]:
    if not value >= least:
        yield f"{key}={value} must be at least {least}"


def _above_0(key: str, value: int | float, most: int | float, reason: str) -> Iterator[str]:
    if not 0 < value <= most:
        yield f"{key}={value} must be more than 0" + ("" if value <= 0 else f" and at most {most:g}: {reason}")


def _one_of(key: str, value: str, known: Sequence[str]) -> Iterator[str]:
    if value not in known:
        yield f"{key}={value} must be one of {', '.join(known)}{closest(value, known)}"


def _size_problems(key: str, value: Any) -> Iterator[str]:
    try:
        parse_bytes(shown(value), key)
    except UserError as error:
        yield str(error)


def _group_problems(settings: RunSettings) -> Iterator[str]:
    n, m, parts = settings.n, settings.m, settings.parts
    if n < 2:
        yield f"n={n} must be at least 2: GRPO compares the rollouts of a prompt with each other"
    if m < 1 and m != n:  # m follows n unless it was given
        yield f"m={m} must be at least 1: nothing would be trained on"
    elif m > n >= 2:
        yield f"m={m} must not be more than n={n}: only {n} rollouts of a prompt are generated"
    elif m == 1 and parts["advantage"].get("stats_over") == "kept":
        yield (
            f"m=1 leaves advantage={choice_of('advantage', parts['advantage'])} nothing to compare with: take m of 2 "
            "or more, or advantage.stats_over=group"
        )


def _seed_problems(seed: int) -> Iterator[str]:
    if not 0 <= seed < 2**64:
        yield f"seed={seed} must be from 0 to 2^64 - 1: NumPy and PyTorch take no other"


def _train_problems(train: TrainSettings, m: int) -> Iterator[str]:
    if train.micro_batch_tokens != "auto":
        yield from _at_least("train.micro_batch_tokens", train.micro_batch_tokens, 1)
    for key in ("steps", "prompts", "epochs", "minibatches", "logprob_chunk", "max_bad_steps"):
        yield from _at_least(f"train.{key}", getattr(train, key), 1)
    yield from _at_least("train.checkpoint_every", train.checkpoint_every, 1)
    yield from _at_least("train.keep_checkpoints", train.keep_checkpoints, 1)
    yield from _one_of("train.count_by", train.count_by, _COUNTED)
    if train.max_generated is not None and not train.max_generated > 0:
        yield f"train.max_generated={train.max_generated} must be more than 0, or null for no bound: it counts tokens"
    kept = train.prompts * m
    if train.minibatches > kept > 0:
        yield (
            f"train.minibatches={train.minibatches} must not be more than the {kept} rollouts trained on per step "
            f"(train.prompts={train.prompts} times m={m})"
        )


def _range_problems(sampling: SampleSettings) -> Iterator[str]:
    yield from _at_least("sampling.max_new_tokens", sampling.max_new_tokens, 1)
    yield from _at_least("sampling.top_k", sampling.top_k, 0)
    if not 0 < sampling.top_p <= 1:
        yield f"sampling.top_p={sampling.top_p} must be more than 0 and at most 1"
    if "" in sampling.stop:
        yield "sampling.stop holds an empty string, which every text contains: leave it out"


def _sampling_problems(sampling: Sampling) -> Iterator[str]:
    out_of_range = list(_range_problems(sampling))
    yield from out_of_range
    if not sampling.temperature > 0:
        yield (
            f"sampling.temperature={sampling.temperature} must be more than 0: greedy rollouts of a prompt are all the "
            "same and teach nothing"
        )
    else:
        yield from _temperature_problems("sampling.temperature", sampling.temperature)
    if sampling.truncated and not out_of_range:
        yield (
            f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}: training on truncated sampling biases "
            "the importance ratio, since the policy is not what was sampled from; "
            "use sampling.top_p=1 sampling.top_k=0 (grpo eval takes both)"
        )


def _optim_problems(optim: OptimSettings) -> Iterator[str]:
    yield from _one_of("optim.name", optim.name, _OPTIMIZERS)
    if optim.name == "adamw8bit" and optim.offload:
        yield "optim.name=adamw8bit keeps its state on the GPU; use optim.offload=false, or optim.name=adamw"
    yield from _above_0("optim.lr", optim.lr, 1, "an update of AdamW moves every weight by about as much")
    yield from _above_0("optim.eps", optim.eps, 1, "nothing is learnt with a larger one, which updates are divided by")
    yield from _above_0("optim.max_grad_norm", optim.max_grad_norm, 1e15, "AdamW squares gradients, in float32")
    yield from _at_least("optim.weight_decay", optim.weight_decay, 0)
    if optim.lr * optim.weight_decay >= 1:
        yield (
            f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be less than 1: an update takes "
            "that share off every weight, and more would turn its sign"
        )
    yield from _at_least("optim.warmup_steps", optim.warmup_steps, 0)
    yield from _one_of("optim.schedule", optim.schedule, _SCHEDULES)
    yield from _one_of("optim.ess", optim.ess, _ESS)
    yield from _above_0("optim.ess_reference", optim.ess_reference, 1, "it is a share of the rollouts")
    for i, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            yield f"optim.betas[{i}]={beta} must be at least 0 and less than 1"


def _eval_problems(settings: EvalSettings) -> Iterator[str]:
    yield from _at_least("eval.every", settings.every, 0)
    yield from _at_least("eval.problems", settings.problems, 1)
    yield from _exam_problems(settings.k, settings.temperature)


def _exam_problems(k: int, temperature: float) -> Iterator[str]:
    yield from _at_least("eval.k", k, 1)
    if k > MOST_SAMPLES:
        yield f"eval.k={k} must be at most {MOST_SAMPLES}: it is how many answers each problem is given"
    if not temperature > 0:
        yield f"eval.temperature={temperature} must be more than 0; greedy accuracy is measured in any case"
    else:
        yield from _temperature_problems("eval.temperature", temperature)


def _temperature_problems(key: str, temperature: float) -> Iterator[str]:
    if not 1e-4 <= temperature <= 1e4:
        yield f"{key}={temperature} must be from 0.0001 to 10000: logits are divided by it, in float32"


def _rounding_problems(settings: RunSettings) -> Iterator[str]:
    """A run of a version that allowed it goes on as it is."""
    if settings.model.dtype == "bfloat16" and not settings.model.adapted and settings.resume is None:
        yield (
            "model.dtype=bfloat16 would train every weight in 8 bits of precision, where steps of less than a 256th of "
            "a weight are lost; leave model.dtype=float32 (model.autocast=bfloat16 computes in bfloat16 all the same), "
            "or train adapters, such as model.lora.rank=16"
        )


def _model_problems(model: ModelSettings, device: str) -> Iterator[str]:
    yield from _one_of("model.dtype", model.dtype, _DTYPES)
    yield from _one_of("model.autocast", model.autocast, _AUTOCASTS)
    yield from _one_of("device", device, _DEVICES)
    yield from _one_of("model.quantize", model.quantize, _QUANTISED)
    yield from _at_least("model.lora.rank", model.lora.rank, 0)
    yield from _above_0("model.lora.alpha", model.lora.alpha, 1e6, "what adapters learn is multiplied by it")
    for name, value in (model.architecture or {}).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"model.architecture.{name}={value} must be finite"
    if not 0 <= model.lora.dropout < 1:
        yield f"model.lora.dropout={model.lora.dropout} must be at least 0 and less than 1"
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
