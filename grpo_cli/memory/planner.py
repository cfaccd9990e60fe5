"""Plans from settings: the model's shapes, the shape of a step, and both with some settings changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.equal import equal, max_rollouts_at_once
from grpo_cli.config.auto import AUTO
from grpo_cli.config.choices import shipped
from grpo_cli.config.compose import model_of
from grpo_cli.config.instantiate import make
from grpo_cli.config.prepare import Prepared, Settings
from grpo_cli.experiment import uses_torch_engine
from grpo_cli.learner.forward import packs_rows
from grpo_cli.learner.logprobs import chosen_logprobs
from grpo_cli.learner.old_policy import average_bytes, is_needed_first
from grpo_cli.learner.optimizer import state_bytes
from grpo_cli.memory.plan import MemoryPlan, StepShape, Workload, plan
from grpo_cli.memory.shapes import ShapeModel, trained
from grpo_cli.model.checkpointing import last_states
from grpo_cli.model.checks import window_of
from grpo_cli.model.load import TINY, load_model, load_tokenizer
from grpo_cli.settings import CHUNK, PARK, SLOTS, STATE, TOKENS
from grpo_cli.support.extras import installed
from grpo_cli.support.facts import fact
from grpo_cli.support.memory import resident_bytes

Values = Mapping[str, Any]  # by dotted key, and choices by group
AS_IT_IS: Values = MappingProxyType({})
UNLIMITED_TOKENS = 1 << 30
UNREAD = 256  # tokens of a problem that is not read: as many as the longest of GSM8K have


@dataclass(frozen=True)
class Planner:
    """Plans of one run on a device, every rollout at full length, and with some settings changed."""

    run: Prepared[Any]
    device: torch.device
    step: StepShape
    shapes: Callable[[str, bool], ShapeModel]  # by model.gradient_checkpointing and model.offload_activations

    @classmethod
    def of(cls, run: Prepared[Any], device: torch.device, workspace: int = 0) -> Planner:
        """Build the planner of a process that holds `workspace` bytes without the run."""
        settings, (rollouts, evaluation) = run.settings, _workloads(run)
        model, train, correction = settings.model, settings.train, run.rules.correction

        @cache
        def shapes(recompute: str, offload: bool) -> ShapeModel:
            return ShapeModel(replace(model, gradient_checkpointing=recompute, offload_activations=offload), device)

        own = shapes(model.gradient_checkpointing, model.offload_activations)
        built = run.factories.engine_parts(settings.seed)
        first = correction.prox == "ewma" or is_needed_first(correction, train, model.lora.dropout > 0)
        passes = settings.n if correction.rejects else settings.m if first else 0
        step = StepShape(
            rollouts=rollouts,
            m=settings.m,
            sampler=built["sampler"] if uses_torch_engine(run.factories) else None,
            sparsity=built["sparsity"],
            evaluation=evaluation,
            tokens=UNLIMITED_TOKENS if train.micro_batch_tokens == AUTO else train.micro_batch_tokens,
            chunk=train.logprob_chunk,
            shares_prompts=packs_rows(model, device, window_of(own.config) is None),
            prefix=built["predictor"].prefix_tokens if built["scheduler"].needs_lengths else 0,
            pauses=(settings.parts["task"].get("turns") or 1) > 1,
            packed=bool(settings.parts["engine"].get("packed_weights")),
            minibatches=train.minibatches,
            updates=train.minibatches * train.epochs,
            logprobs_of=0 if correction.prox == "sampler" else passes,  # it has the sampler's own
            reference=run.rules.loss.needs_reference,
            second_model=not model.holds_reference,
            optimizer=_optimizer_bytes(settings, own),
            average=own.of_all_layers(lambda one: average_bytes(trained(one), correction.prox)),
            parks=settings.optim.park and device.type != "cpu",
            workspace=workspace,
        )
        return cls(run, device, step, shapes)

    def plan(self, values: Values = AS_IT_IS) -> MemoryPlan:
        """Compute the plan with these settings in place of the run's."""
        step, settings = self.step, with_values(self.run.settings, values)
        shapes = self.shapes(settings.model.gradient_checkpointing, settings.model.offload_activations)
        fields = {"tokens": TOKENS, "chunk": CHUNK, "parks": PARK}
        step = replace(step, **{field: values[key] for field, key in fields.items() if key in values})
        if SLOTS in values and step.sampler is not None:
            step = replace(step, sampler=step.sampler.with_slots(values[SLOTS]))
        if STATE in values:
            step = replace(step, optimizer=_optimizer_bytes(settings, shapes))
        return plan(shapes, step)


def with_values(settings: Settings, values: Values) -> Settings:
    """Return the settings with other values, and with other choices where a key has no dot."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        if (part := settings.parts.get(group)) is None:
            settings = replace(settings, **{group: replace(getattr(settings, group), **{name: value})})
        else:
            made = {**part, name: value} if name else shipped(group, value)
            settings = replace(settings, parts={**settings.parts, group: made})
    return settings


def _optimizer_bytes(settings: Any, shapes: ShapeModel) -> int:
    """Return what persists between updates: optimizer state, the weights' moving average if used, and on a CPU the copy
    of both and of the weights that a lazy checkpoint is written from."""
    prox = settings.parts["correction"].get("prox")
    copied = settings.train.checkpoint == "lazy" and shapes.on_cpu

    def of(model: Any) -> int:
        weights = trained(model)
        kept = state_bytes(weights, settings.optim, shapes.device) + average_bytes(weights, prox)
        return kept + copied * (kept + sum(weight.nbytes for weight in weights))

    return shapes.of_all_layers(of)


def process_size(device: torch.device) -> int:
    """Return the bytes of the process without a run: on a CPU the program and its libraries, after the embedded model
    has loaded them by using them once; on a GPU what the allocator keeps for them."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return 0  # a plan for another machine
    model = load_model(model_of(TINY), device)
    load_tokenizer(model_of(TINY))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(1, 16, dtype=torch.long, device=device)
    chosen_logprobs(model, last_states(model, ids)[0], ids[0], 1.0, 8).sum().backward()
    optimizer.step()
    if device.type == "cpu":
        return resident_bytes()
    del model, optimizer, ids
    gc.collect()
    return int(torch.cuda.memory_allocated(device))


def not_planned(run: Prepared[Any]) -> tuple[str, ...]:
    """Return what of a run's memory cannot be computed from shapes."""
    resumes, several = fact(run.rules.collector, "resumes"), getattr(run.rules.collector, "func", None) is not equal
    notes = {
        "rollouts of another engine: prefill, decode and eval are missing": not uses_torch_engine(run.factories),
        "rollouts that are left partial: all are taken to end in their step": resumes,
        "several rounds of rollouts: the most that the collector requests at a time count": several and not resumes,
        "train.warmup=sft: demonstrations may be longer than rollouts": run.settings.train.warmup == "sft",
        f"prompts, which the extra hub reads: each is taken to have {UNREAD} tokens": _unread(run),
    }
    return tuple(note for note, applies in notes.items() if applies)


def _workloads(run: Prepared[Any]) -> tuple[Workload, Workload | None]:
    """Return a step's rollouts and an evaluation's, on the first prompts of the task if they can be read."""
    settings, model = run.settings, run.settings.model
    count = -(-max_rollouts_at_once(run.rules.collector, settings.n, settings.train.prompts) // settings.n)
    if _unread(run):
        asked, examined = [UNREAD] * count, [UNREAD] * settings.eval.problems
    else:
        # A plan needs only a preset's shape, if there is one, and the embedded tokenizer.
        tokenizer = load_tokenizer(model if model.architecture is None else replace(model, random_init=True))
        # Without its warnings, which the run itself gives.
        offered = {"tokenizer": tokenizer, "seed": settings.seed, "max_prompt_tokens": 1 << 20, "warn": str}
        task = make("task", settings.parts["task"], offered)
        train, held_out = task.prompts("train"), task.prompts("eval")
        picked = Epochs(train, settings.train.prompts, settings.seed).pick(0, min(count, len(train)), frozenset())
        asked = [len(prompt.token_ids) for prompt in picked]
        examined = [len(held_out[i].token_ids) for i in range(min(settings.eval.problems, len(held_out)))]
    longest = settings.sampling.max_new_tokens
    wanted = getattr(getattr(settings, "profile", None), "eval", True) and settings.eval.every > 0
    exam = Workload(tuple(examined), 1 + settings.eval.k, longest) if wanted and examined else None  # one is greedy
    return Workload(tuple(asked), settings.n, longest), exam


def _unread(run: Prepared[Any]) -> bool:
    """True if this is a plan alone, of problems of the hub that this installation cannot read."""
    task, profile = run.settings.parts["task"], getattr(run.settings, "profile", None)
    source, runs = str(task.get("path") or task.get("default_path")), profile is None or profile.measures
    return not runs and source.startswith("hub:") and not installed("datasets")
