"""From settings to what a prediction needs: the model's shapes, the shape of a step, and an estimator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_cli.collect.epochs import Epochs
from grpo_cli.collect.equal import equal
from grpo_cli.config.compose import model_of
from grpo_cli.config.instantiate import engine_parts, make
from grpo_cli.config.prepare import Prepared
from grpo_cli.engine.batching import Sampler
from grpo_cli.experiment import is_ours
from grpo_cli.learner.forward import make_forward, packs_rows
from grpo_cli.learner.logprobs import logprobs_at
from grpo_cli.learner.old_policy import average_bytes, pass_before
from grpo_cli.learner.optimizer import state_bytes
from grpo_cli.model.checks import ARCHITECTURES, window_of
from grpo_cli.model.load import TINY, load_model, load_tokenizer, model_config
from grpo_cli.profile.estimate import Estimator, Passes, StepShape
from grpo_cli.profile.forced_lengths import Lengths
from grpo_cli.profile.shapes import NF4_BITS, EngineShape, ShapeModel, Workload
from grpo_cli.settings import ModelSettings, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import fact
from grpo_cli.support.memory import resident_bytes


def shapes_of(model: ModelSettings, device: torch.device) -> ShapeModel:
    """The model as it would be on that device. UserError for a model of whose passes nothing is known."""
    if (family := model_config(model, any_family=True).model_type) not in ARCHITECTURES:
        raise UserError(
            f"only of Llama-shaped models it is known what passes take, and model.path={model.path} is a {family}: "
            "give train.micro_batch_tokens a number, and see memory/* and time/* of a short grpo train"
        )
    bits = {"none": None, "8bit": 8.0, "4bit": NF4_BITS}[model.quantize]

    def load() -> Any:
        here = replace(model, random_init=True, quantize="none", offload_activations=False)
        return load_model(here, torch.device("cpu"), any_family=True)  # engine=generate keeps sliding windows

    return ShapeModel(load, model.autocast, bits, model.offload_activations, device.type == "cpu")


def estimator_of(settings: RunSettings, shapes: ShapeModel, device: torch.device, other: int) -> Estimator:
    parks = settings.optim.park and device.type != "cpu"
    return Estimator(shapes, optimizer_bytes(settings, shapes, device), other, device.type == "cpu", parks)


def optimizer_bytes(settings: RunSettings, shapes: ShapeModel, device: torch.device) -> int:
    """What persists between updates beside the weights: optimizer state, the weights' moving average if used, and on a
    CPU the copy of all that a lazy checkpoint is written from."""
    average = average_bytes(shapes.trained, settings.parts["correction"].get("prox"))
    kept = state_bytes(shapes.trained, settings.optim, device) + average
    copied = settings.train.checkpoint == "lazy" and device.type == "cpu"
    return kept + copied * (kept + sum(weight.nbytes for weight in shapes.trained))


def process_alone(device: torch.device) -> int:
    """Baseline memory of the process, in bytes: on a CPU the program and its libraries, after the embedded model has
    loaded them by using them once; on a GPU what the allocator keeps for them."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return 0  # a plan for another machine
    model = load_model(model_of(TINY), device)
    load_tokenizer(model_of(TINY))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids, place = torch.zeros(2, 16, dtype=torch.long, device=device), torch.ones(8, dtype=torch.long, device=device)
    logprobs_at(model, ids, 0 * place, place, 1.0, 8).sum().backward()
    optimizer.step()
    if device.type == "cpu":
        return resident_bytes()
    optimizer.zero_grad()
    del model, optimizer, ids, place
    gc.collect()
    return int(torch.cuda.memory_allocated(device))


def not_predicted(run: Prepared[Any]) -> tuple[str, ...]:
    """Memory of the run that cannot be predicted from shapes."""
    settings, notes = run.settings, list[str]()
    if not is_ours(settings):
        name = str(settings.parts["engine"]["_target_"]).rsplit(".", 1)[-1]
        notes.append(
            f"rollouts by {name}, which takes memory of its own (vLLM as much as engine.memory; Ray and workers on "
            "this machine count in what is measured): prefill, decode and eval are not predicted, and what fits is "
            "said of the update alone"
        )
    if fact(run.rules.collector, "resumes"):
        notes.append(
            "the collector leaves rollouts partial: steps are predicted as if all of them ended in the step, "
            "without the tokens that are prefilled again when they are resumed"
        )
    elif getattr(run.rules.collector, "func", None) is not equal:
        notes.append("rollouts are predicted for the most that the collector requests at a time, in one round")
    if settings.model.quantize != "none":
        notes.append(
            f"model.quantize={settings.model.quantize}: passes are those of plain layers whose weights are made whole "
            "one at a time; what products of 8 bits take beside that is left out"
        )
    return tuple(notes)


def step_of(
    run: Prepared[Any],
    dropout: bool,
    lengths: Lengths | None = None,
    seen: tuple[Workload, Workload | None] | None = None,
) -> tuple[Sampler, StepShape]:
    """The sampler and the shape of a step: as measured, else with forced lengths, else with all rollouts at full
    length."""
    settings, rules = run.settings, run.rules
    offered = {"seed": settings.seed}
    built = engine_parts(settings.parts, offered)
    rollouts, evaluation = seen or _workloads(run, lengths)
    prefix = built["predictor"].prefix_tokens if built["scheduler"].needs_lengths else 0
    packed = bool(settings.parts["engine"].get("packed_weights"))
    packs = window_of(model_config(settings.model, any_family=True)) is None
    several = settings.train.epochs * settings.train.minibatches > 1
    graphs = settings.parts["engine"].get("cuda_graph")
    graphs = run.device.type == "cuda" and graphs is not False
    engine = EngineShape(built["sampler"], built["sparsity"], prefix, packed, None, graphs, settings.sampling)
    correction = rules.correction
    over_all = correction.rejects and pass_before(correction.prox, True)
    before = pass_before(correction.prox, correction.needs_policy_logprobs or several or dropout)
    step = StepShape(
        rollouts=rollouts,
        m=settings.m if settings.m < settings.n else rollouts.n,
        engine=engine if is_ours(settings) else None,
        evaluation=evaluation,
        forward=make_forward(
            settings.train,
            settings.sampling.temperature,
            packs_rows(settings.model, run.device, packs),
        ),
        minibatches=settings.train.minibatches,
        passes=Passes(
            policy_over_all=over_all,
            policy_over_kept=not over_all and before,
            reference=rules.loss.needs_reference,
            second_model=not settings.model.adapted or settings.model.adapter is not None,
        ),
    )
    return built["sampler"], step


def _workloads(run: Prepared[Any], lengths: Lengths | None) -> tuple[Workload, Workload | None]:
    """A step's rollouts and an evaluation's, on the first prompts of the task."""
    settings, problems = run.settings, -(-run.at_once // run.settings.n)
    tokenizer = load_tokenizer(_without_weights(settings.model))
    # The run itself gives the warnings when it makes the task.
    quiet: Callable[[str], None] = lambda line: None  # noqa: E731
    offered = {"tokenizer": tokenizer, "seed": settings.seed, "max_prompt_tokens": 1 << 20, "warn": quiet}
    task = make("task", settings.parts["task"], offered)
    longest = settings.sampling.max_new_tokens

    def work(prompts: Sequence[Any], n: int) -> Workload:
        count = n * len(prompts)
        forced_to = (longest,) * count if lengths is None else tuple(lengths(count, longest))
        return Workload.equal(prompts, n, longest, forced_to)

    step = Epochs(task.prompts("train"), settings.train.prompts, settings.seed).pick(0, problems, frozenset())
    held_out = task.prompts("eval")
    examined = [held_out[i] for i in range(min(settings.eval.problems, len(held_out)))]
    wanted = getattr(getattr(settings, "profile", None), "eval", True) and settings.eval.every > 0
    return work(step, settings.n), work(examined, 1 + settings.eval.k) if wanted else None


def _without_weights(model: ModelSettings) -> ModelSettings:
    """A plan needs only a preset's shape, if there is one, and the embedded tokenizer."""
    return replace(model, random_init=True) if model.architecture is not None else model
