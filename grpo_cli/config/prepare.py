"""Prepares a command, once: what would silently ruin a run is refused, all at once, before a model is loaded; `auto` is
resolved, rules are made and tried, a device is picked.

Types and ranges are checked already (`config.read`). What a part can do it states itself (`support.facts`). Names of
choices appear in messages only.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch

from grpo_cli.collect.collection import MOST_ROLLOUTS, StepCollection
from grpo_cli.collect.equal import equal
from grpo_cli.config.auto import decided
from grpo_cli.config.instantiate import INNER, Factories
from grpo_cli.history import History
from grpo_cli.interfaces import Curriculum, Engine, Rules, Search, SetUp, Task
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
from grpo_cli.types import EngineStats, Finish, LossOutput, Prompt, Request, Reward, Rollout, Verdict

Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)
# The most rollouts of a synthetic group, and of a synthetic step of several: more take seconds.
MAX_SYNTHETIC_GROUP, MAX_SYNTHETIC_STEP = 4096, 1024


@dataclass(frozen=True)
class Prepared(Generic[Settings]):
    """A command before its model is loaded. A training has `rules`, an evaluation has a `search`."""

    settings: Settings
    parts: Factories
    rules_or_search: Rules | Search
    device: torch.device

    @property
    def rules(self) -> Rules:
        return cast(Rules, self.rules_or_search)

    @property
    def search(self) -> Search:
        return cast(Search, self.rules_or_search)


def prepare(settings: Settings, fast: bool | None = None) -> Prepared[Settings]:
    """Build and check what needs no model. UserError lists everything that is refused. `fast` as in `config.auto`."""
    parts, rules_or_search = build_and_check(settings)
    device = pick_device(settings.device)
    if isinstance(settings, RunSettings):
        keep_freed(settings.fit_bytes)
        check_optimizer(settings.optim, device)
    return Prepared(decided(settings, fast), parts, rules_or_search, device)


def build_and_check(settings: RunSettings | EvalRunSettings) -> tuple[Factories, Any]:
    """Build the factories of the parts, and a training's rules, which are tried once, or an evaluation's search.
    UserError lists everything that cannot be used."""
    parts, rules_or_search = Factories.of(settings.parts), None
    messages = [*conflicts(settings, parts)]
    with gathered(messages):
        parts.engine_parts({"seed": settings.seed}, early=True)
    with gathered(messages):
        if isinstance(settings, EvalRunSettings):
            rules_or_search = parts["search"].make()
        else:
            n, m, prompts = settings.n, settings.m, settings.train.prompts
            rules_or_search = rules = parts.rules({"n": n, "m": m, "prompts": prompts})
            if m <= n:
                try_rules(rules, n, m, prompts)
    refuse(messages)
    return parts, rules_or_search


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
    """Yield a message for each setting, or combination, that would silently ruin a run or do less than it says."""
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
        yield from _sampler_as_old_policy(parts)
    if isinstance(settings, ProfileRunSettings):
        profile = settings.profile
        if profile.lengths != "natural" and turns > 1:
            yield f"profile.lengths={profile.lengths} cannot be forced with task.turns={turns}: use natural"
        named = isinstance(profile.for_gpu, str)
        if profile.for_gpu and not (profile.plan_only and (named or settings.fit_bytes)):
            has = "" if named else " and its memory, such as fit=80GB"
            yield f"profile.for_gpu={shown(profile.for_gpu)} only plans: add profile.plan_only=true{has}"


def _model(model: ModelSettings) -> Iterator[str]:
    if model.quantize != "none" and not model.adapted:
        yield f"model.quantize={model.quantize} freezes all weights: give adapters to train, such as model.lora.rank=64"
    if model.lora.rank > 0 and not model.lora.targets:
        yield "model.lora.targets=[] leaves no layer to adapt; name some, such as [q_proj, v_proj]"
    if (model.lora.dora or model.lora.rslora) and not model.adapted:
        yield "model.lora.dora and model.lora.rslora need adapters: give model.lora.rank=16 or more"
    if model.offload_activations and model.gradient_checkpointing != "full":
        yield "model.offload_activations=true moves what model.gradient_checkpointing=full keeps: give both"


def _of_a_step(settings: RunSettings, parts: Factories) -> Iterator[str]:
    n, m, train, task, sampling = settings.n, settings.m, settings.train, settings.parts["task"], settings.sampling
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
    if isinstance(within := task.get("overlong_tokens"), int) and within > sampling.max_new_tokens:
        yield f"task.overlong_tokens={within} must not exceed sampling.max_new_tokens={sampling.max_new_tokens}"
    if train.truncated == "zero" and (task.get("weights") or {}).get("overlong"):
        yield "train.truncated=zero overrides task.weights.overlong: use train.truncated=train or leave_out"
    if sampling.truncated:
        cut = f"sampling.top_p={sampling.top_p} sampling.top_k={sampling.top_k}"
        yield f"{cut} would bias the importance ratio: train with sampling.top_p=1 sampling.top_k=0"


def _updates(settings: RunSettings) -> Iterator[str]:
    optim = settings.optim
    kept = {"name=adamw8bit": optim.name == "adamw8bit", "offload=true": optim.offload, "park=true": optim.park}
    places = [f"optim.{word}" for word, given in kept.items() if given]
    if len(places) > 1:
        yield f"{' and '.join(places)} keep the optimizer's state in different places: use one of them"
    if optim.lr * optim.weight_decay >= 1:
        yield f"optim.weight_decay={optim.weight_decay} times optim.lr={optim.lr} must be below 1, or weights turn sign"
    if settings.model.dtype == "bfloat16" and not settings.model.adapted:
        yield "model.dtype=bfloat16 loses small updates: use model.dtype=float32 model.autocast=bfloat16, or adapters"


def _sampler_as_old_policy(parts: Factories) -> Iterator[str]:
    if parts["correction"].settings.get("prox") != "sampler":
        return
    inner = parts["engine"].settings.get(INNER)
    others = {
        f"engine.{INNER}={inner}" if inner else parts.named("engine"): parts.fact("engine", "is_policy") is False,
        parts.named("sparsity"): parts.fact("sparsity", "evicts"),
        parts.named("collector"): parts.fact("collector", "resumes") and not parts.fact("collector", "stops"),
    }
    instead = "use correction.prox=step_start"
    for other in (other for other, differs in others.items() if differs):
        yield f"correction.prox=sampler takes {other} for the old policy, which it is not: {instead}"
    if parts["correction"].make().needs_old_logprobs:
        needs = f"{parts.named('correction')} needs a ratio other than 1"
        yield f"{needs}, but correction.prox=sampler makes it 1: {instead}"


def try_rules(rules: Rules, n: int, m: int, prompts: int) -> None:
    """Check the rules on synthetic rollouts, but for those that have `setup`. UserError for one that cannot be used."""
    rules, size = copy.deepcopy(rules), min(n, MAX_SYNTHETIC_GROUP + n % 2)  # of n's parity, which rules may require
    tried = {part for part, rule in vars(rules).items() if not isinstance(rule, SetUp)}
    name = {part: f"{part} {name_of(rule)}" for part, rule in vars(rules).items()}
    if "collector" in tried:
        _synthetic_collection(size, max(1, min(prompts, MAX_SYNTHETIC_STEP // size))).run(rules.collector)
    [group] = _synthetic_collection(size, 1).run(equal)
    keep = size if m == n else min(m, size - 1)
    kept = list(range(size - keep, size))
    if "downsample" in tried:
        kept = choose(rules.downsample, group, keep, np.random.default_rng(0))
    batch = rows_of(collate([group]), torch.tensor(kept))
    if "advantage" in tried:
        found = advantages(rules.advantage, group, kept)
        batch = replace(batch, advantages=batch.per_token(found.new_zeros(len(kept)) if found.dim() > 1 else found))
    if "correction" in tried:
        with own_code_unless_ours(name["correction"], rules.correction):
            verdict: Any = verdict_on(rules.correction, batch, batch.sampler_logprobs)
        if not isinstance(verdict, Verdict) or verdict.weights.shape != batch.weights.shape:
            raise UserError(f"{name['correction']} returned {verdict!r:.60}: return a Verdict")
        batch = corrected(batch, verdict)
    if "loss" in tried:
        reference = batch.sampler_logprobs if rules.loss.needs_reference else None
        logprobs = batch.sampler_logprobs.clone().requires_grad_()
        with own_code_unless_ours(name["loss"], getattr(rules.loss, "func", rules.loss)):
            output: Any = rules.loss(logprobs, replace(batch, ref_logprobs=reference), totals(batch, 1))
        is_scalar = isinstance(output, LossOutput) and not output.loss.dim()
        if not is_scalar or not output.loss.isfinite() or not output.loss.requires_grad:
            raise UserError(f"{name['loss']} returned {output!r:.60}: return a LossOutput, finite and with a gradient")


def _synthetic_collection(n: int, prompts: int) -> StepCollection:
    parts: dict[str, Any] = dict.fromkeys(("engine", "task", "curriculum"), _Synthetic())  # type: ignore[abstract]
    return StepCollection(n=n, prompts=prompts, sampling=Sampling.plain(8), seed=0, step=0, history=History(), **parts)


class _Synthetic(Engine, Task, Curriculum):
    """Engine, task and curriculum of a synthetic step, whose every second answer is right."""

    reads_stop_strings = False

    def pick(self, step: int, count: int, without: Set[str]) -> Sequence[Prompt]:
        return [Prompt(f"synthetic-{len(without) + place}", (0,), "0") for place in range(count)]

    def generate(self, requests: Sequence[Request], enough: Any = None) -> Iterator[Rollout]:
        return (Rollout(request, (0,), (-1.0,), Finish.EOS) for request in requests)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(float(rollout.request.sample % 2))

    def stats(self) -> EngineStats:
        return EngineStats()
