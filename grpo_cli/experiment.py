"""Settings to a run: builds the configured parts and connects them, nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_cli.collect.equal import max_rollouts_at_once
from grpo_cli.collect.warmup import sft
from grpo_cli.config.choices import ENGINE_PARTS, choices, read_choice
from grpo_cli.config.instantiate import Factories
from grpo_cli.config.prepare import Prepared, prepare
from grpo_cli.config.recorded import checkpoint_to_resume
from grpo_cli.engine.common import EngineParts
from grpo_cli.engine.torch_engine import TorchEngine
from grpo_cli.evaluate import EvalResult, evaluate_with, search_with
from grpo_cli.interfaces import Engine, Parts, Runtime, Tracker, Warmup
from grpo_cli.model.checks import check_vocabulary, context_of
from grpo_cli.model.load import at_checkpoint, eos_token_ids, load_model, load_tokenizer, pad_token_id, save_pretrained
from grpo_cli.runs.files import json_line, write_atomically, write_object
from grpo_cli.runs.layout import SAMPLES, SUMMARY
from grpo_cli.runs.record import code_version, read_record
from grpo_cli.settings import EvalRunSettings, ModelSettings, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import expand_segments
from grpo_cli.support.meter import Meter
from grpo_cli.support.terminal import to_stderr
from grpo_cli.tasks.demonstrations import demonstrations
from grpo_cli.tasks.prompting import turn_end
from grpo_cli.tracking.console import ConsoleTracker
from grpo_cli.tracking.introduction import doubts, doubts_of_prompts, doubts_of_shape, introduction, smaller
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.train import Trainer
from grpo_cli.types import Record


def uses_torch_engine(parts: Factories) -> bool:
    """True if `engine=torch` makes the rollouts: it allocates through PyTorch, and its shapes are known."""
    kind = parts["engine"].code
    return isinstance(kind, type) and issubclass(kind, TorchEngine)


def say_to_stderr(text: str) -> None:
    """Print a warning, where there is no live view that it could garble."""
    to_stderr(f"warning: {text}")


def build(run: RunSettings | Prepared[RunSettings]) -> Trainer:
    """Return a training run that is ready to start: its model is loaded, and its checkpoint, if it resumes from one."""
    prepared = run if isinstance(run, Prepared) else prepare(run)
    settings = prepared.settings
    console = ConsoleTracker(settings.train.steps, Path(settings.run_dir), smaller(settings))
    checkpoint = checkpoint_to_resume(settings, console.warn)
    weights = at_checkpoint(settings.model, checkpoint) if checkpoint else settings.model
    runtime = set_up(prepared, weights, console.warn)
    if uses_torch_engine(prepared.factories):  # compiles C and tries the bits before training is timed
        with torch.autocast(runtime.device.type, torch.bfloat16, enabled=settings.model.autocast == "bfloat16"):
            list(runtime.engine.generate([]))
    for line in introduction(replace(settings, model=weights), runtime):
        console.say(line)
    presets = {name: read_choice("model", name).values for name in choices("model")}
    for line in (*doubts(settings), *doubts_of_shape(settings, runtime.model.config, presets)):
        console.warn(line)
    files = JsonlTracker(Path(settings.run_dir), settings.resume is not None, settings.accept_damage, console.warn)
    if checkpoint is None and settings.resume is not None:  # it begins again
        files.load_state_dict({})
    meter = Meter(runtime.device, on_phase=console.phase, on_progress=console.progress)
    parts = parts_of(prepared, runtime, meter, console.say, console.warn)
    logger = _logger(prepared, "train", console.say, console.warn)  # last: what is refused before leaves nothing
    try:
        return Trainer(settings, replace(parts, trackers=(files, console, logger)), checkpoint)
    except BaseException:  # a checkpoint that cannot be resumed
        logger.close({"status": "failed"})
        raise


def set_up(
    run: Prepared[Any], weights: ModelSettings, warn: Callable[[str], None] = say_to_stderr, **engine: Any
) -> Runtime:
    """Load the model and build its task and engine; `engine` replaces what its builder is offered."""
    settings, device = run.settings, run.device
    if device.type == "cuda" and uses_torch_engine(run.factories):
        expand_segments()
    tokenizer = load_tokenizer(weights)
    model = _load(run, weights)
    check_vocabulary(model, tokenizer, weights.path)
    eos = eos_token_ids(model, tokenizer, () if weights.without_files else weights.eos_tokens, turn_end(tokenizer)[1])
    pad = pad_token_id(tokenizer, eos)
    context, most = context_of(model.config), settings.sampling.max_new_tokens
    if (room := context - most) < 1:
        raise UserError(
            f"sampling.max_new_tokens={most} leaves no room for prompts: the context is {context}; lower it"
        )
    offered = {"tokenizer": tokenizer, "seed": settings.seed, "max_prompt_tokens": room, "warn": warn}
    offered |= {"chat_template_kwargs": weights.chat_template_kwargs, "run_dir": Path(settings.run_dir)}
    task = run.factories["task"].make(offered)
    for doubt in doubts_of_prompts(task, tokenizer, eos, settings):
        warn(doubt)
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    # For workers of engine=ray, which may not have the code of a custom collector.
    per_step = None
    if isinstance(settings, RunSettings):
        per_step = max_rollouts_at_once(run.rules.collector, settings.n, settings.train.prompts)
    of_worker = partial(worker_engine, settings, eos, pad, decode=decode, rollouts_per_step=per_step)
    more = {"warn": warn, "decode": decode, "build": of_worker, "rollouts_per_step": per_step, **engine}
    made = make_engine(settings, run.factories, model, eos, pad, **more)
    if (stops := [*settings.sampling.stop, *getattr(task, "turn_ends", ())]) and not made.reads_stop_strings:
        raise UserError(f"sampling.stop or turn ends, {stops}, are not read by this engine: use engine=torch")
    return Runtime(device, model, tokenizer, task, made, eos)


def _load(run: Prepared[Any], weights: ModelSettings) -> Any:
    """Load the model. Random weights, and anything else that draws from the global generators, follow the seed."""
    random.seed(run.settings.seed)
    np.random.seed(run.settings.seed % 2**32)
    torch.manual_seed(run.settings.seed)
    return load_model(weights, run.device, bool(run.factories.fact("engine", "any_family")))


def make_engine(
    settings: RunSettings | EvalRunSettings, parts: Factories, model: Any, eos: tuple[int, ...], pad: int, **more: Any
) -> Engine:
    """Build the rollout engine with its sampler, scheduler, predictor and sparsity."""
    offered = {"model": model, "eos_token_ids": eos, "pad_token_id": pad, "seed": settings.seed, **more}
    offered |= parts.engine_parts(settings.seed)
    given = EngineParts(**{field.name: offered[field.name] for field in fields(EngineParts) if field.name in offered})
    return parts["engine"].make({**offered, "parts": given})


def worker_engine(
    settings: RunSettings | EvalRunSettings, eos: tuple[int, ...], pad: int, model: Any, **more: Any
) -> Engine:
    """Build the engine of a worker of `engine=ray`."""
    parts = Factories.of({name: settings.parts[name] for name in ENGINE_PARTS})
    parts = Factories({**parts, "engine": parts.sampling_engine})
    return make_engine(settings, parts, model, eos, pad, **more)


def parts_of(
    run: Prepared[Any], runtime: Runtime, meter: Meter, say: Callable[[str], None], warn: Callable[[str], None]
) -> Parts:
    """Build the parts of a trainer, but for its trackers."""
    settings, rules, train = run.settings, run.rules, run.settings.train
    offered = {"prompts": runtime.task.prompts("train"), "per_step": train.prompts, "steps": train.steps}
    offered |= {"n": settings.n, "seed": settings.seed, "history": runtime.history}
    curriculum = run.factories["curriculum"].make(offered)
    reference: Any = None
    warmup: Warmup | None = None
    if rules.loss.needs_reference:  # of the start's weights, never a checkpoint's
        held = settings.model.holds_reference
        reference = runtime.model if held else _load(run, settings.model).requires_grad_(False).eval()
    if train.warmup == "sft":
        shown = demonstrations(settings, runtime, context_of(runtime.model.config), warn)
        warmup = sft(train.warmup_steps, train.warmup_lr, shown, train.prompts * settings.m, settings.seed)
    save_model = partial(save_pretrained, runtime.model, runtime.tokenizer, with_base=settings.model.random_init)
    return Parts(runtime, curriculum, rules, reference, save_model, (), meter, say, warn, warmup)


def _logger(run: Prepared[Any], job_type: str, say: Callable[[str], None], warn: Callable[[str], None]) -> Tracker:
    """Build the tracker besides the run's files and the console. `job_type` is the command."""
    folder, config = Path(run.settings.run_dir), asdict(run.settings) | {"code": code_version()}
    record = read_record(folder)
    offered = {"run_dir": folder, "config": config, "choices": {} if record is None else record.choices}
    offered |= {"job_type": job_type, "say": say, "warn": warn}
    return run.factories["logger"].make(offered)


def evaluate_model(run: Prepared[EvalRunSettings]) -> EvalResult:
    """Return greedy accuracy and pass@k of a model; `samples.jsonl` and `summary.json` go into the run's folder."""
    settings, summary = run.settings, dict[str, Any](status="failed")
    runtime, start = set_up(run, settings.model), time.perf_counter()
    tracker = _logger(run, "eval", print, say_to_stderr)  # a model that is refused leaves nothing
    try:
        with torch.autocast(runtime.device.type, torch.bfloat16, enabled=settings.model.autocast == "bfloat16"):
            found = search_with(runtime, run.search, settings.eval, settings.sampling, settings.seed)
            greedy = evaluate_with(runtime, settings)
        result = EvalResult({**greedy.metrics, **found.metrics}, greedy.examples + found.examples)
        rows = "".join(f"{json_line(example.row())}\n" for example in result.examples)
        write_atomically(Path(settings.run_dir, SAMPLES), rows.encode())
        seconds, stats = time.perf_counter() - start, greedy.stats
        tracker.log(Record(0, result.metrics, result.examples))
        summary = {"status": "completed", "checkpoint": settings.checkpoint, "model": settings.model.path}
        summary |= {"k": settings.eval.k, "split": settings.eval.split, "seconds": seconds, **result.metrics}
        summary["problems"] = len({example.prompt_id for example in result.examples})
        summary |= {"engine/kv_peak_bytes": float(stats.kv_peak_bytes), **stats.details}
        summary |= {"engine": runtime.engine.facts(), "code": code_version()}
        write_object(Path(settings.run_dir) / SUMMARY, summary)
    finally:
        tracker.close(summary)
    return result
