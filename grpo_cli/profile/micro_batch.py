"""`train.micro_batch_tokens=auto`: the size of a pass, chosen by the memory that is free at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from grpo_cli.config.auto import AUTO
from grpo_cli.config.prepare import Prepared
from grpo_cli.engine.batching import Sampler
from grpo_cli.model.anatomy import has_dropout
from grpo_cli.profile import advice
from grpo_cli.profile.estimate import Estimator, StepShape, most_tokens, with_tokens
from grpo_cli.profile.from_settings import estimator_of, process_alone, shapes_of, step_of
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.formatting import gib
from grpo_cli.support.memory import free_bytes

SHARE = 0.9  # of free memory: predictions are meant to be within a tenth of what a run takes


Settings = TypeVar("Settings", bound=RunSettings)


def decided(
    run: Prepared[Settings], device: torch.device, say: Callable[[str], None], room: int | None = None
) -> Prepared[Settings]:
    """The run with auto replaced by a number, which is reported: the largest with which the passes over rollouts of
    full length fit `room` bytes, by default what is free. Generation is not considered.

    UserError if not even one sequence fits.
    """
    if run.settings.train.micro_batch_tokens != AUTO:
        return run
    other = process_alone(device)  # already allocated, so not part of what is free
    room = int(SHARE * free_bytes(device)) + other if room is None else room
    sampler, estimator, step = _updates(_with(run, 1), device, other)
    all_of_them = most_tokens(step)
    found = estimator.micro_batch(with_tokens(step, all_of_them), room)
    if found is None:
        least = estimator.predict(step)
        parts = advice.breakdown(least.fullest, least.phases[least.fullest], sampler)
        raise UserError(
            f"train.micro_batch_tokens=auto: not one sequence fits. It takes at least {gib(least.peak)}, and "
            f"{gib(room)} are free for it:\n" + "\n".join(parts) + f"\n  {advice.NOTHING_FITS}"
        )
    count = found or all_of_them
    say(_said(count, found == 0, estimator, step, room))
    return _with(run, count)


def foresee(run: Prepared[Any], say: Callable[[str], None]) -> None:
    """Warn before a run on a GPU if its updates are predicted not to fit, and name the key that makes them fit. Not on
    a CPU, whose memory can swap, nor for a resumed run, which has fitted before."""
    device = run.device
    if device.type != "cuda" or run.settings.resume is not None:
        return
    try:
        _, estimator, step = _updates(run, device, 0)
        peak, room = estimator.predict(step).peak, free_bytes(device)
        least = peak if peak <= room else estimator.predict(with_tokens(step, 1)).peak
    except (UserError, RuntimeError):
        return  # not an ordinary model: the run itself will show
    if peak > room:
        fits = "train.micro_batch_tokens=auto makes them fit" if least <= SHARE * room else advice.NOTHING_FITS
        say(f"updates are expected to take {gib(peak)}, and {gib(room)} of the GPU are free: {fits}")


def _updates(run: Prepared[Any], device: torch.device, other: int) -> tuple[Sampler, Estimator, StepShape]:
    """A step with rollouts of full length, without their generation."""
    shapes = shapes_of(run.settings.model, device)
    sampler, step = step_of(run, has_dropout(shapes.model))
    step = replace(step, engine=None, evaluation=None).at_full_length()
    return sampler, estimator_of(run.settings, shapes, device, other), step


def _said(count: int, all_at_once: bool, estimator: Estimator, step: StepShape, room: int) -> str:
    peak = estimator.predict(with_tokens(step, count)).peak
    what = "all of a step at once" if all_at_once else "the most that fit"
    return (
        f"train.micro_batch_tokens=auto is {count}: {what}; updates are expected to take {gib(peak)} of {gib(room)}. "
        f"Elsewhere train.micro_batch_tokens={count} gives the same run"
    )


def _with(run: Prepared[Settings], tokens: int) -> Prepared[Settings]:
    train = replace(run.settings.train, micro_batch_tokens=tokens)
    return replace(run, settings=replace(run.settings, train=train))
