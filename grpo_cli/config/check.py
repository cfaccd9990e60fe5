"""Every range of a setting, and every rule that relates two of them: what is broken is said all at once.

Nothing here touches a model: a run that cannot work is refused in the first second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_cli.config.choices import choices
from grpo_cli.config.read import is_a, shown
from grpo_cli.errors import UserError, closest, refuse
from grpo_cli.formatting import parse_bytes
from grpo_cli.settings import (
    EvalRunSettings,
    EvalSettings,
    ModelSettings,
    OptimSettings,
    ProfileRunSettings,
    ProfileSettings,
    RunSettings,
    Sampling,
    TrainSettings,
)

# By the class that `_target_` ends with. A scheduler from outside says so itself, when it is built.
_NEEDS_LENGTHS = {"Sjf": "sjf", "Lpt": "lpt", "Fptas": "fptas"}
_SCHEDULES = ("constant", "linear", "cosine")
_DTYPES = ("float32", "bfloat16")
_QUANTISED = ("none", "8bit", "4bit")
_OPTIMIZERS = ("adamw", "adamw8bit")
_AUTOCASTS = ("none", "bfloat16")
_DEVICES = ("auto", "cpu", "cuda")
_LENGTHS = ("natural", "lognormal", "full", "trace")


def check(settings: RunSettings) -> None:
    """Every rule that relates settings of a training run. UserError lists all that are broken."""
    refuse(
        [
            *_seed_problems(settings.seed),
            *_group_problems(settings),
            *_train_problems(settings.train, settings.m),
            *_sampling_problems(settings.sampling),
            *_optim_problems(settings.optim),
            *_eval_problems(settings.eval),
            *_model_problems(settings.model, settings.device),
            *_engine_problems(settings.parts),
            *_loss_problems(settings.parts["loss"]),
            *_at_least("record.rollouts", settings.record.rollouts, -1),
        ]
    )


def check_profile(settings: ProfileRunSettings) -> None:
    """The same for `grpo profile`: those of the training run, then those of the profile."""
    check(settings)
    refuse([*_profile_problems(settings.profile, settings.sampling)])


def _profile_problems(profile: ProfileSettings, sampling: Sampling) -> Iterator[str]:
    yield from _at_least("profile.steps", profile.steps, 1)
    yield from _at_least("profile.warmup", profile.warmup, 0)
    yield from _one_of("profile.lengths", profile.lengths, _LENGTHS)
    yield from _above("profile.cv", profile.cv)
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
    if profile.fit is not None:
        yield from _size_problems("profile.fit", profile.fit)


def check_eval(settings: EvalRunSettings) -> None:
    """The same for `grpo eval`."""
    problems = settings.eval.problems
    drawn = settings.sampling
    sampling = Sampling(1.0, drawn.top_p, drawn.top_k, drawn.max_new_tokens, drawn.stop)
    refuse(
        [
            *(
                [f"eval.problems={problems} must be at least 1, or -1 for all"]
                if problems < 1 and problems != -1
                else []
            ),
            *_seed_problems(settings.seed),
            *_range_problems(sampling),
            *_exam_problems(settings.eval.k, settings.eval.temperature),
            *_model_problems(settings.model, settings.device),
            *_engine_problems(settings.parts),
        ]
    )


def _target(part: Mapping[str, Any]) -> str:
    return str(part["_target_"]).rsplit(".", 1)[-1]


def _at_least(key: str, value: int | float, least: int) -> Iterator[str]:
    if not value >= least:
        yield f"{key}={value} must be at least {least}"


def _above(key: str, value: float, bound: int = 0) -> Iterator[str]:
    if not bound < value < math.inf:
        yield f"{key}={value} must be more than {bound}" + ("" if math.isfinite(value) else ", and finite")


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
            f"m=1 leaves advantage={_target(parts['advantage'])} nothing to compare with: take m of 2 or more, or "
            "advantage.stats_over=group"
        )
    if m == 1 and _target(parts["downsample"]) == "maxvar":
        yield "m=1 cannot be chosen by downsample=maxvar: one reward has no variance; take m of 2 or more"
    if 1 <= m < n and _target(parts["downsample"]) == "all_rollouts":
        rules = ", ".join(rule for rule in choices("downsample") if rule != "all")
        yield f"m={m} is less than n={n}, but downsample=all keeps all; choose downsample={rules} or m={n}"


def _seed_problems(seed: int) -> Iterator[str]:
    if not 0 <= seed < 2**64:
        yield f"seed={seed} must be from 0 to 2^64 - 1: NumPy and PyTorch take no other"


def _train_problems(train: TrainSettings, m: int) -> Iterator[str]:
    for key in ("steps", "prompts", "micro_batch_tokens", "epochs", "minibatches", "logprob_chunk", "max_bad_steps"):
        yield from _at_least(f"train.{key}", getattr(train, key), 1)
    yield from _at_least("train.checkpoint_every", train.checkpoint_every, 1)
    yield from _at_least("train.keep_checkpoints", train.keep_checkpoints, 1)
    kept = train.prompts * m
    if train.minibatches > kept > 0:
        yield (
            f"train.minibatches={train.minibatches} must not be more than the {kept} rollouts trained on per step "
            f"(train.prompts={train.prompts} times m={m})"
        )


def _range_problems(sampling: Sampling) -> Iterator[str]:
    yield from _at_least("sampling.max_new_tokens", sampling.max_new_tokens, 1)
    yield from _at_least("sampling.top_k", sampling.top_k, 0)
    if not 0 < sampling.top_p <= 1:
        yield f"sampling.top_p={sampling.top_p} must be more than 0 and at most 1"
    if "" in sampling.stop:
        yield "sampling.stop holds an empty string, which every text contains: leave it out"


def _sampling_problems(sampling: Sampling) -> Iterator[str]:
    out_of_range = list(_range_problems(sampling))
    yield from out_of_range
    if not 0 < sampling.temperature < math.inf:
        yield (
            f"sampling.temperature={sampling.temperature} must be more than 0: greedy rollouts of a prompt are all the "
            "same and teach nothing"
        )
    if sampling.truncated and not out_of_range:
        yield (
            f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}: training on truncated sampling biases "
            "the importance ratio, since the policy is not what was sampled from; "
            "use sampling.top_p=1 sampling.top_k=0 (grpo eval takes both)"
        )


def _optim_problems(optim: OptimSettings) -> Iterator[str]:
    yield from _one_of("optim.name", optim.name, _OPTIMIZERS)
    if optim.name == "adamw8bit" and optim.offload:
        yield "optim.name=adamw8bit keeps its averages on the GPU; use optim.offload=false, or optim.name=adamw"
    yield from _above("optim.lr", optim.lr)
    yield from _above("optim.eps", optim.eps)
    yield from _above("optim.max_grad_norm", optim.max_grad_norm)
    yield from _at_least("optim.weight_decay", optim.weight_decay, 0)
    yield from _at_least("optim.warmup_steps", optim.warmup_steps, 0)
    yield from _one_of("optim.schedule", optim.schedule, _SCHEDULES)
    for i, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            yield f"optim.betas[{i}]={beta} must be at least 0 and less than 1"


def _eval_problems(settings: EvalSettings) -> Iterator[str]:
    yield from _at_least("eval.every", settings.every, 0)
    yield from _at_least("eval.problems", settings.problems, 1)
    yield from _exam_problems(settings.k, settings.temperature)


def _exam_problems(k: int, temperature: float) -> Iterator[str]:
    yield from _at_least("eval.k", k, 1)
    if not 0 < temperature < math.inf:
        yield f"eval.temperature={temperature} must be more than 0; greedy accuracy is measured in any case"


def _model_problems(model: ModelSettings, device: str) -> Iterator[str]:
    yield from _one_of("model.dtype", model.dtype, _DTYPES)
    yield from _one_of("model.autocast", model.autocast, _AUTOCASTS)
    yield from _one_of("device", device, _DEVICES)
    yield from _one_of("model.quantize", model.quantize, _QUANTISED)
    yield from _at_least("model.lora.rank", model.lora.rank, 0)
    yield from _above("model.lora.alpha", model.lora.alpha)
    if not 0 <= model.lora.dropout < 1:
        yield f"model.lora.dropout={model.lora.dropout} must be at least 0 and less than 1"
    if model.lora.rank > 0 and not model.lora.targets:
        yield "model.lora.targets=[] leaves no layer to adapt; name some, such as [q_proj, v_proj]"
    if model.quantize != "none" and not model.adapted:
        yield (
            f"model.quantize={model.quantize} freezes the weights, so that there is nothing to train; give adapters, "
            "such as model.lora.rank=64"
        )
    if model.quantize != "none" and model.random_init:
        yield f"model.quantize={model.quantize} quantises weights as they are read, and model.random_init reads none"
    if model.quantize != "none" and device == "cpu":
        yield f"model.quantize={model.quantize} needs a CUDA GPU, whose kernels bitsandbytes brings, not device=cpu"


def _engine_problems(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    scheduler = _NEEDS_LENGTHS.get(_target(parts["scheduler"]))
    if scheduler and _target(parts["predictor"]) == "NoPredictor":
        others = ", ".join(name for name in choices("predictor") if name != "none")
        yield f"scheduler={scheduler} orders by predicted length, but predictor=none; choose predictor={others}"
    if _target(parts["engine"]) == "VllmEngine" and _target(parts["sparsity"]) != "Dense":
        yield (
            f"sparsity={_target(parts['sparsity']).lower()} cannot be had with engine=vllm: its cache is in blocks "
            "that rollouts share, from which no policy can evict single keys; choose engine=torch or sparsity=dense"
        )
    slots = parts["sampler"].get("slots")
    if slots is not None and not (is_a(int, slots) and slots >= 1):
        yield f"sampler.slots={shown(slots)} must be a whole number of at least 1"
    budget = parts["sampler"].get("kv_budget")
    if budget is not None:
        yield from _size_problems("sampler.kv_budget", budget)


def _loss_problems(loss: Mapping[str, Any]) -> Iterator[str]:
    for key in ("clip_low", "clip_high", "kl_coef"):
        value = loss.get(key, 0.0)
        if not is_a(float, value):
            yield f"loss.{key}={shown(value)} must be a number"
        elif not value >= 0:
            yield f"loss.{key}={value} must be at least 0"
