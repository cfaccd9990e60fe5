"""From settings to a run: builds the configured parts and connects them, nothing else."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra.utils
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig

from grpo_cli.collect.warmup import Sft
from grpo_cli.config import together
from grpo_cli.config.instantiate import engine_parts, inner_engine, make, rule_of, says
from grpo_cli.config.prepare import Prepared, pick_device, prepare
from grpo_cli.engine.torch.engine import TorchEngine
from grpo_cli.evaluate import EvalResult, evaluate_with, search_with, write_samples
from grpo_cli.history import History
from grpo_cli.interfaces import Bench, Curriculum, Engine, Meter, Parts, Task, Tracker
from grpo_cli.model.anatomy import AdapterOff
from grpo_cli.model.checks import check_device, check_vocabulary, context_of
from grpo_cli.model.load import (
    at_checkpoint,
    eos_token_ids,
    load_model,
    load_tokenizer,
    model_config,
    pad_token_id,
    save_pretrained,
)
from grpo_cli.runs.find import find_checkpoint, never_saved, resolve_run
from grpo_cli.runs.layout import step_of
from grpo_cli.runs.provenance import code_version
from grpo_cli.runs.record import read_record
from grpo_cli.runs.summary import write_summary
from grpo_cli.settings import EvalRunSettings, ModelSettings, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import expand_segments
from grpo_cli.support.meter import WallMeter
from grpo_cli.support.processor import remarks
from grpo_cli.support.terminal import to_stderr
from grpo_cli.tasks.demonstrations import conversations, solutions
from grpo_cli.tasks.prompting import TODAY, reads_clock, turn_end
from grpo_cli.tracking.console import ConsoleTracker
from grpo_cli.tracking.introduction import doubts, introduction
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.train import Trainer
from grpo_cli.types import Record


def is_ours(settings: RunSettings | EvalRunSettings) -> bool:
    """Whether rollouts are made by the engine that allocates through PyTorch and whose shapes are known."""
    kind = hydra.utils.get_object(str(settings.parts["engine"]["_target_"]))
    return isinstance(kind, type) and issubclass(kind, TorchEngine)


def say_to_stderr(text: str) -> None:
    """A warning, for when there is no live view it could garble."""
    to_stderr(f"warning: {text}")


def set_up(
    run: Prepared[Any] | EvalRunSettings,
    weights: ModelSettings,
    warn: Callable[[str], None] = say_to_stderr,
    **engine: Any,
) -> Bench:
    """Load the model and build its task and engine; `engine` is offered to the engine's builder first."""
    settings: RunSettings | EvalRunSettings = run.settings if isinstance(run, Prepared) else run
    device = run.device if isinstance(run, Prepared) else pick_device(run.device)
    if device.type == "cpu":
        for remark in remarks(os.environ, torch.get_num_threads()):
            warn(remark)
    elif is_ours(settings):
        expand_segments()
    check_device(weights, device)
    tokenizer = load_tokenizer(weights)
    model = _load(weights, device, settings)
    check_vocabulary(model, tokenizer, weights.path)
    eos = eos_token_ids(model, tokenizer, () if weights.without_files else weights.eos_tokens, turn_end(tokenizer)[1])
    pad = pad_token_id(tokenizer, eos)
    room = context_of(model.config) - settings.sampling.max_new_tokens
    offered = {"tokenizer": tokenizer, "seed": settings.seed, "max_prompt_tokens": room, "warn": warn}
    offered["chat_defaults"] = weights.chat_template_kwargs
    offered["run_dir"] = Path(settings.run_dir)
    task = make("task", settings.parts["task"], offered)
    for doubt in _doubts(task, tokenizer, eos, settings):
        warn(doubt)
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    # Told to workers of engine=ray, which may not have the code of a custom collector.
    per_step = run.at_once if isinstance(run, Prepared) else None
    of_worker = partial(worker_engine, settings, eos, pad, decode, rollouts_per_step=per_step)
    more = {"warn": warn, "decode": decode, "build": of_worker, "rollouts_per_step": per_step, **engine}
    return Bench(device, model, tokenizer, pad, task, _engine(settings, model, eos, pad, **more), eos)


def _doubts(task: Task, tokenizer: Any, eos: tuple[int, ...], run: RunSettings | EvalRunSettings) -> Iterator[str]:
    """What is odd about the beginnings and ends of replies, and about prompts that tell the time."""
    first = [prompt.token_ids[-1] for prompt in task.prompts("eval")[:1]]
    if set(first) & set(eos):
        yield f"prompts end with {tokenizer.decode(first)}, which ends a completion: correct the chat template"
    if not (tokenizer.chat_template and run.parts["task"].get("use_chat_template")):
        return
    text, end = turn_end(tokenizer)
    if text and end not in eos and not any(stop in text for stop in run.sampling.stop):
        yield (
            f"the chat template ends a turn with {text[:40]!r}, which ends no completion: name a token of it in "
            "model.eos_tokens, or text of it in sampling.stop"
        )
    if reads_clock(tokenizer):
        yield f"the chat template reads the clock: every prompt tells {TODAY:%d %b %Y}, so that runs can be repeated"


def _load(weights: ModelSettings, device: torch.device, run: RunSettings | EvalRunSettings) -> Any:
    """The model. Random weights, and anything else that draws from the global generators, follow the seed."""
    random.seed(run.seed)
    np.random.seed(run.seed % 2**32)
    torch.manual_seed(run.seed)
    return load_model(weights, device, takes_any_family(run))


def takes_any_family(run: RunSettings | EvalRunSettings) -> bool:
    """Whether rollouts can be made of models that are not Llama-shaped."""
    return bool(says(run.parts, "engine", "any_family"))


def _engine(settings: RunSettings | EvalRunSettings, model: Any, eos: tuple[int, ...], pad: int, **more: Any) -> Engine:
    """The rollout engine with its sampler, scheduler, predictor and sparsity."""
    offered = {"model": model, "eos_token_ids": eos, "pad_token_id": pad, "seed": settings.seed, **more}
    built = engine_parts(settings.parts, offered)
    engine: Engine = make("engine", settings.parts["engine"], {**offered, **built})
    if settings.sampling.stop and not engine.reads_stop_strings:
        raise UserError(
            f"sampling.stop={list(settings.sampling.stop)}: {settings.parts['engine']['_target_']} does not look for "
            "stop strings; use engine=torch, or leave sampling.stop empty"
        )
    return engine


def worker_engine(
    settings: RunSettings | EvalRunSettings,
    eos: tuple[int, ...],
    pad: int,
    decode: Callable[..., Any],
    model: Any,
    tells_lengths: bool,
    told: Mapping[tuple[str, int, int], float],
    **more: Any,
) -> Engine:
    """Build the engine of a worker of `engine=ray`. `told` will have the lengths if the trainer `tells_lengths`."""
    parts = dict(settings.parts) | {"engine": inner_engine(settings.parts["engine"])}
    if tells_lengths:
        parts["predictor"] = {"_target_": "grpo_cli.engine.order.predict.Told"}
    return _engine(replace(settings, parts=parts), model, eos, pad, decode=decode, told=told, **more)


def build(run: RunSettings | Prepared[RunSettings]) -> Trainer:
    """A training run, ready to start: its model loaded, and its checkpoint, if it resumes from one."""
    prepared = run if isinstance(run, Prepared) else prepare(run)
    settings = prepared.settings
    run_dir = Path(settings.run_dir)
    console = ConsoleTracker(settings.train.steps, folder=run_dir)
    checkpoint = _checkpoint_to_resume(settings.resume, settings.accept_damage, console.warn)
    if checkpoint is not None:
        _refuse_what_is_past(settings, checkpoint)
    weights = at_checkpoint(settings.model, checkpoint) if checkpoint else settings.model
    bench = set_up(prepared, weights, console.warn)
    for remark in together.remarks(settings, prepared.rules):
        console.warn(remark)
    everything = sum(p.numel() for p in bench.model.parameters())
    trained = sum(p.numel() for p in bench.model.parameters() if p.requires_grad)
    for line in introduction(replace(settings, model=weights), everything, trained, bench.device, bench.tokenizer):
        console.say(line)
    for line in doubts(settings):
        console.warn(line)
    trackers = _trackers(settings, run_dir, checkpoint, console)
    meter = WallMeter(bench.device, on_phase=console.phase)
    parts = parts_of(prepared, bench, trackers, meter, console.say, console.warn)
    parts = replace(parts, warmup=_warmup(settings, bench, console.warn))
    return Trainer(settings, parts, checkpoint)


def _warmup(settings: RunSettings, bench: Bench, warn: Callable[[str], None]) -> Sft | None:
    """What the run begins by imitating. UserError where there is nothing of the kind."""
    train, tokenizer = settings.train, bench.tokenizer
    if train.warmup != "sft":
        return None
    chat = tokenizer.chat_template and (train.warmup_path or settings.parts["task"].get("use_chat_template"))
    usual = (turn_end(tokenizer)[1] if chat else None, tokenizer.eos_token_id, bench.ends[0])
    eos = next(token for token in usual if token in bench.ends)
    if train.warmup_path is None:
        most = train.warmup_steps * train.prompts * settings.m
        found = solutions(bench.task, train.warmup_field, tokenizer, eos, warn, most)
    else:
        found = conversations(train.warmup_path, tokenizer, settings.model.chat_template_kwargs or {}, eos)
    room = context_of(bench.model.config)
    shown = tuple(one for one in found if len(one.request.prompt.token_ids) + len(one) <= room)
    if len(shown) < len(found):
        warn(f"train.warmup=sft: {len(found) - len(shown)} of {len(found)} are left out, with more than {room} tokens")
    if not shown:
        raise UserError(f"train.warmup=sft: nothing is left to imitate that has at most {room} tokens")
    return Sft(train.warmup_steps, train.warmup_lr, shown, train.prompts * settings.m, settings.seed)


def parts_of(
    run: Prepared[Any],
    bench: Bench,
    trackers: tuple[Tracker, ...],
    meter: Meter,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Parts:
    """The parts that a trainer is built from."""
    settings, rules = run.settings, run.rules
    curriculum = curriculum_of(run, bench.task, bench.history)
    reference = _reference(settings, bench) if rules.loss.needs_reference else None
    save_model = partial(save_pretrained, bench.model, bench.tokenizer, with_base=settings.model.random_init)
    return Parts(bench, curriculum, rules, reference, save_model, trackers, meter, say, warn)


def curriculum_of(run: Prepared[Any], task: Task, history: History) -> Curriculum:
    """Build the curriculum of a run. UserError if the task has fewer problems than a step."""
    settings, prompts = run.settings, task.prompts("train")
    train = settings.train
    offered = {"prompts": prompts, "per_step": train.prompts, "steps": train.steps, "n": settings.n}
    offered |= {"seed": settings.seed, "history": history}
    made: Curriculum = make("curriculum", settings.parts["curriculum"], offered)
    return made


def _checkpoint_to_resume(resume: str | None, accept_damage: bool, warn: Callable[[str], None]) -> Path | None:
    if resume is None:
        return None
    folder = resolve_run(resume)
    found = find_checkpoint(folder)
    for reason in found.skipped:
        warn(f"checkpoint passed over: {reason}")
    if found.path is None and not (accept_damage or never_saved(folder)):
        reasons = "; ".join(found.skipped) or "they are gone"
        raise UserError(
            f"resume={resume} holds no complete checkpoint ({reasons}); name another run, or begin this one anew in "
            "its folder: accept_damage=true"
        )
    if found.path is None:
        warn(f"{folder} holds no complete checkpoint: the run begins anew, as it was started")
    return found.path


def _refuse_what_is_past(settings: RunSettings, checkpoint: Path) -> None:
    """A resumed run takes its weights and its step count from its checkpoint."""
    done, steps = step_of(checkpoint.name), settings.train.steps
    if done is not None and done > steps:
        raise UserError(f"train.steps={steps} is less than the {done} steps that {checkpoint} has done: ask for more")
    record = read_record(Path(settings.run_dir))
    begun = {} if record is None else record.config.get("model", {})
    if settings.model.adapted or begun.get("path") == settings.model.path:
        return  # adapters go on the model that is named, which may have been moved
    both = settings.model, at_checkpoint(settings.model, checkpoint)
    named, saved = (model_config(which, takes_any_family(settings)) for which in both)
    shapes = [[getattr(config, name, None) for name in _SHAPE] for config in (named, saved)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"model.path={settings.model.path} is another model than that of {checkpoint}, with whose weights the run "
            "goes on: leave model= and model.path= out"
        )


_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def _trackers(
    settings: RunSettings, run_dir: Path, checkpoint: Path | None, console: ConsoleTracker
) -> tuple[Tracker, ...]:
    files = JsonlTracker(run_dir, settings.resume is not None, settings.accept_damage, console.warn)
    if checkpoint is None and settings.resume is not None:  # it begins anew
        files.load_state_dict({})
    return files, console, _logger(settings, "train", console.say, console.warn)


def _logger(
    settings: RunSettings | EvalRunSettings, job_type: str, say: Callable[[str], None], warn: Callable[[str], None]
) -> Tracker:
    """The tracker besides the run's files and the console. `job_type` is the command."""
    offered = {
        "run_dir": Path(settings.run_dir),
        "config": dataclasses.asdict(settings) | {"code": dataclasses.asdict(code_version())},
        "choices": _choices(),
        "job_type": job_type,
        "say": say,
        "warn": warn,
    }
    tracker: Tracker = make("logger", settings.parts["logger"], offered)
    return tracker


def _choices() -> dict[str, str]:
    """The choice in each config group, if Hydra started the run."""
    if not HydraConfig.initialized():
        return {}
    chosen = HydraConfig.get().runtime.choices
    return {str(group): str(choice) for group, choice in chosen.items() if not str(group).startswith("hydra/")}


def _reference(settings: RunSettings, bench: Bench) -> Any:
    """Always the start's weights, never a checkpoint's: a second copy, or the model with its adapters off."""
    if settings.model.adapted and settings.model.adapter is None:  # new adapters changed nothing
        return AdapterOff(bench.model)
    return _load(settings.model, bench.device, settings).requires_grad_(False).eval()


def evaluate_model(settings: EvalRunSettings) -> EvalResult:
    """Greedy accuracy and pass@k of a model; `samples.jsonl` and `summary.json` go into the run's folder."""
    tracker = _logger(settings, "eval", print, to_stderr)
    summary: dict[str, Any] = {"status": "failed"}
    try:
        result, seconds, engine, costs = _evaluated(settings)
        tracker.log(Record(0, result.metrics, result.examples))
        asked = {"checkpoint": settings.checkpoint, "model": settings.model.path, "k": settings.eval.k}
        problems = len({example.prompt_id for example in result.examples})
        code = dataclasses.asdict(code_version())
        found = {"split": settings.eval.split, "problems": problems, "seconds": seconds, **result.metrics}
        summary = {"status": "completed", **asked, **found, **costs, "engine": engine, "code": code}
        write_summary(Path(settings.run_dir), summary)
    finally:
        tracker.close(summary)
    return result


def _evaluated(settings: EvalRunSettings) -> tuple[EvalResult, float, Mapping[str, Any], Mapping[str, float]]:
    """Evaluate and write the samples. Returns the evaluation, the seconds that both took, the engine's facts, and how
    much KV memory was saved."""
    bench = set_up(settings, settings.model)
    start = time.perf_counter()
    with torch.autocast(bench.device.type, torch.bfloat16, enabled=settings.model.autocast == "bfloat16"):
        search = rule_of("search", settings.parts["search"])
        found = search_with(bench, search, settings.eval, settings.sampling, settings.seed)
        result = evaluate_with(bench, settings.eval, settings.sampling, settings.seed, settings.eval.split)
    result = EvalResult({**result.metrics, **found.metrics}, result.examples + found.examples)
    write_samples(Path(settings.run_dir), result.examples)
    stats = bench.engine.stats()
    saved = {name: value for name, value in stats.details.items() if name.startswith("engine/kv_saving")}
    costs = {"engine/kv_peak_bytes": float(stats.kv_peak_bytes), **saved}
    return result, time.perf_counter() - start, bench.engine.facts(), costs
