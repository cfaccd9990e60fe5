"""`grpo profile`: a run put together as for training, measured for a few steps, and predicted from shapes."""

from __future__ import annotations

import dataclasses
import gc
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_cli import __version__, experiment
from grpo_cli.config.compose import model_of
from grpo_cli.config.instantiate import Rules, build_rules, engine_parts, make
from grpo_cli.engine.engine import TorchEngine
from grpo_cli.engine.lengths import read_trace
from grpo_cli.errors import UserError
from grpo_cli.formatting import parse_bytes
from grpo_cli.interfaces import AdvantageFn
from grpo_cli.learner.forward import make_pass
from grpo_cli.learner.logprobs import logprobs_at
from grpo_cli.learner.optimizer import state_bytes
from grpo_cli.memory import is_out_of_memory, resident_bytes
from grpo_cli.meter import spans_around
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.model.load import TINY, load_model, load_tokenizer
from grpo_cli.profile import advice
from grpo_cli.profile.estimate import Passes, Plan, Prediction, Predictor
from grpo_cli.profile.findings import Report, metrics, versions, write
from grpo_cli.profile.forced_lengths import NEVER, Lengths, ProfiledEngine, forced
from grpo_cli.profile.measure import Bench, Measured, Probe, measure, write_trace
from grpo_cli.profile.shapes import EngineShape, ShapeModel, Work
from grpo_cli.rollout import PromptOrder
from grpo_cli.settings import ModelSettings, ProfileRunSettings, RunSettings
from grpo_cli.train import Trainer
from grpo_cli.types import Record

Say = Callable[[str], None]


def profile(settings: ProfileRunSettings, command: Sequence[str], say: Say, warn: Say) -> Report:
    """Measure (unless only a plan is wanted), predict, and write `profile.json`; W&B or whichever logger there is gets
    the numbers."""
    device = experiment.pick_device(settings.device)
    rules = build_rules(settings.parts, settings.n, settings.m)
    lengths = _lengths(settings)
    other = _process_alone(device)
    measured = None
    folder = Path(settings.run_dir)
    if not settings.profile.plan_only:
        measured = _measured(settings, rules, lengths, folder, say, warn)
    say("predicting from shapes")
    shapes = _shapes(settings.model)
    sampler, plan = _plan(settings, rules, lengths, measured, has_dropout(shapes.model))
    predictor = _predictor(settings, shapes, device, other)
    room = _room(settings, device)
    predicted = predictor.predict(plan)
    report = Report(
        command=tuple(command),
        settings=dataclasses.asdict(settings),
        versions={"grpo_cli": __version__, "python": platform.python_version(), **versions("torch", "transformers")},
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        threads=torch.get_num_threads(),
        measured=measured,
        predicted=predicted,
        at_most=predictor.predict(plan.at_full_length()),
        room=room,
        largest=predictor.largest(plan, room),
        advice=_advice(predicted, measured, sampler),
        not_predicted=_not_predicted(settings),
    )
    write(report, folder)
    _log(settings, report, folder, say, warn)
    return report


def _lengths(settings: ProfileRunSettings) -> Lengths | None:
    wanted = settings.profile
    if wanted.lengths != "natural" and not _is_ours(settings):
        raise UserError(f"profile.lengths={wanted.lengths} forces lengths, which only engine=torch does")
    trace = read_trace(wanted.trace_file) if wanted.trace_file is not None else ()
    return forced(wanted.lengths, wanted.mean, wanted.cv, settings.seed, trace)


def _process_alone(device: torch.device) -> int:
    """Bytes that are there before the run's model is: on a CPU the program and its libraries, which the embedded model
    has used once so that they are loaded; on a GPU what the allocator keeps for them."""
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


def _measured(
    settings: ProfileRunSettings, rules: Rules, lengths: Lengths | None, folder: Path, say: Say, warn: Say
) -> Measured:
    device = experiment.pick_device(settings.device)
    probe = Probe(device)
    instead: dict[str, Any] = {} if lengths is None else {"eos_token_ids": (NEVER,)}
    try:
        bench = experiment.set_up(settings, settings.model, meter=probe, warn=warn, **instead)
        engine = ProfiledEngine(bench.engine, lengths)
        bench = replace(bench, engine=engine)
        rules = replace(rules, advantage=partial(_never_all_equal, rules.advantage))
        parts = experiment.parts_of(settings, rules, bench, (), probe, say, warn)
        trainer = Trainer(settings, parts, folder)
        seen = Bench(trainer, parts.model, parts.reference, engine, probe)
        measured = measure(seen, settings.profile, settings.profile.eval and settings.eval.every > 0, say)
        if settings.profile.trace:
            folder.mkdir(parents=True, exist_ok=True)
            for path in write_trace(seen, folder):
                say(f"wrote {path}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(settings, error) from error
    return measured


def _never_all_equal(rule: AdvantageFn, kept_rewards: torch.Tensor, group_rewards: torch.Tensor) -> torch.Tensor:
    """A group's advantages, made up where all are 0: steps are measured with a gradient, without which the optimizer
    neither steps nor holds anything, also where replies of forced length all earn nothing."""
    advantages = rule(kept_rewards, group_rewards)
    return advantages if advantages.any() else torch.ones_like(advantages)


def _shapes(model: ModelSettings) -> ShapeModel:
    bits = {"none": None, "8bit": 8, "4bit": 4}[model.quantize]

    def load() -> Any:
        return load_model(replace(model, random_init=True, quantize="none"), torch.device("cpu"))

    return ShapeModel(load, model.autocast, bits)


def _predictor(settings: RunSettings, shapes: ShapeModel, device: torch.device, other: int) -> Predictor:
    return Predictor(shapes, state_bytes(shapes.trained, settings.optim, device), other, device.type == "cpu")


def _is_ours(settings: RunSettings) -> bool:
    """Whether rollouts are made by the engine whose shapes are known."""
    return str(settings.parts["engine"]["_target_"]).endswith(TorchEngine.__name__)


def _not_predicted(settings: RunSettings) -> tuple[str, ...]:
    """What the run takes that no shape tells."""
    notes = []
    if not _is_ours(settings):
        name = str(settings.parts["engine"]["_target_"]).rsplit(".", 1)[-1]
        notes.append(
            f"rollouts by {name}, which takes memory of its own (vLLM as much as engine.memory): prefill, decode and "
            "eval are not predicted, and what fits is said of the update alone"
        )
    if settings.parts["engine"].get("cuda_graph"):
        notes.append("engine.cuda_graph=true: what captured graphs keep is not predicted; decode and eval take more")
    if settings.model.quantize != "none":
        notes.append(
            f"model.quantize={settings.model.quantize}: weights are predicted without their scales, and passes as "
            "those of a model that is not quantised"
        )
    return tuple(notes)


def _plan(
    settings: RunSettings, rules: Rules, lengths: Lengths | None, measured: Measured | None, dropout: bool
) -> tuple[Any, Plan]:
    """The sampler, and what a step is made of: as it was measured, else with lengths as they are forced, else with all
    rollouts as long as may be."""
    offered = {"seed": settings.seed}
    built = engine_parts(settings.parts, offered)
    if measured is not None:
        rollouts, exam = measured.rollouts, measured.exam
    else:
        rollouts, exam = _works(settings, lengths)
    prefix = built["predictor"].prefix_tokens if built["scheduler"].needs_lengths else 0
    several = settings.train.epochs * settings.train.minibatches > 1
    plan = Plan(
        rollouts=rollouts,
        m=settings.m,
        engine=EngineShape(built["sampler"], built["sparsity"], prefix) if _is_ours(settings) else None,
        exam=exam,
        way=make_pass(settings.train),
        temperature=settings.sampling.temperature,
        minibatches=settings.train.minibatches,
        passes=Passes(
            policy_over_all=rules.correction.rejects,
            policy_over_kept=not rules.correction.rejects
            and (rules.correction.needs_policy_logprobs or several or dropout),
            reference=rules.loss.needs_reference,
            second_model=not settings.model.adapted or settings.model.adapter is not None,
        ),
    )
    return built["sampler"], plan


def _works(settings: RunSettings, lengths: Lengths | None) -> tuple[Work, Work | None]:
    """A step's rollouts and an evaluation's, on the first prompts of the task."""
    tokenizer = load_tokenizer(_without_weights(settings.model))
    offered = {"tokenizer": tokenizer, "seed": settings.seed, "max_prompt_tokens": 1 << 20}
    task = make("task", settings.parts["task"], offered)
    longest = settings.sampling.max_new_tokens

    def work(prompts: Sequence[Any], n: int) -> Work:
        count = n * len(prompts)
        forced_to = (longest,) * count if lengths is None else tuple(lengths(count, longest))
        return Work(tuple(prompts), n, longest, forced_to)

    step = PromptOrder(task.prompts("train"), settings.train.prompts, settings.seed).of_step(0)
    held_out = task.prompts("eval")
    exam = [held_out[i] for i in range(min(settings.eval.problems, len(held_out)))]
    wanted = getattr(getattr(settings, "profile", None), "eval", True) and settings.eval.every > 0
    return work(step, settings.n), work(exam, 1 + settings.eval.k) if wanted else None


def _without_weights(model: ModelSettings) -> ModelSettings:
    """What a plan reads of a model: a preset's shape where there is one, and then the embedded tokenizer."""
    return replace(model, random_init=True) if model.architecture is not None else model


def _room(settings: ProfileRunSettings, device: torch.device) -> int:
    if settings.profile.fit is not None:
        return parse_bytes(settings.profile.fit, "profile.fit")
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def _advice(predicted: Prediction, measured: Measured | None, sampler: Any) -> tuple[str, ...]:
    kind = type(sampler).__name__
    if measured is None:
        return (advice.of_memory(predicted.fullest, predicted.phases[predicted.fullest], kind),)
    return advice.of_time(measured), advice.of_memory(measured.fullest, measured.memory, kind)


def _log(settings: ProfileRunSettings, report: Report, folder: Path, say: Say, warn: Say) -> None:
    offered = {"run_dir": folder, "config": dataclasses.asdict(settings), "say": say, "warn": warn}
    tracker = make("logger", settings.parts["logger"], offered)
    tracker.log(Record(0, metrics(report)))
    tracker.close({"status": "completed", **metrics(report)})


def out_of_memory(settings: RunSettings, error: BaseException) -> UserError:
    """What a person is told in place of a traceback: where, what was expected to be there, and what would lower it."""
    spans = spans_around(error)
    phase = next((name for name in reversed(spans) if name not in ("step", "update", "logprobs", "rollout")), "")
    if "eval" in spans:
        phase = "eval"
    said = " ".join(str(error).split())[:200]
    lines = [f"out of memory in {phase or (spans[-1] if spans else 'setting up')} ({said})"]
    try:
        rules = build_rules(settings.parts, settings.n, settings.m)
        shapes = _shapes(settings.model)
        sampler, plan = _plan(settings, rules, None, None, has_dropout(shapes.model))
        predicted = _predictor(settings, shapes, experiment.pick_device(settings.device), 0).predict(plan)
    except (UserError, MemoryError, RuntimeError) as also:
        lines.append(f"what it would have taken could not be predicted: {also}")
        return UserError("\n".join(lines))
    where = phase if phase in predicted.phases else predicted.fullest
    lines += advice.breakdown(where, predicted.phases[where], type(sampler).__name__)
    if where in ("prefill", "decode", "eval") and sampler.on_oom == "fail":
        lines.append("  or sampler.on_oom=halve: rollouts go on with half the slots")
    lines.append("what fits: grpo profile profile.plan_only=true profile.fit=<memory> with the same settings")
    return UserError("\n".join(lines))
