"""Prepares a command, once: settings checked, `auto` resolved, rules made and tried, a device picked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from grpo_cli.collect.equal import at_once
from grpo_cli.config.auto import decided
from grpo_cli.config.check import check
from grpo_cli.config.instantiate import Factory
from grpo_cli.interfaces import Rules
from grpo_cli.learner.optimizer import check_optimizer
from grpo_cli.settings import EvalRunSettings, RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import SHARE, keep_freed, part_of_gpu
from grpo_cli.support.processor import flush_denormals, why_no_gpu

Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)


@dataclass(frozen=True)
class Prepared(Generic[Settings]):
    """A command before its model is loaded. `made` are the rules of a run, or the search of an evaluation."""

    settings: Settings
    parts: Mapping[str, Factory]
    made: Any
    device: torch.device

    @property
    def rules(self) -> Rules:
        rules: Rules = self.made
        return rules

    @property
    def at_once(self) -> int:
        """The most rollouts that a step of a training requests at a time."""
        settings: Any = self.settings
        return at_once(self.rules.collector, settings.n, settings.train.prompts)


def prepare(settings: Settings, say: Callable[[str], None] = print, fast: bool | None = None) -> Prepared[Settings]:
    """UserError with everything that can be refused before a model is read. `say` gets what `auto` became; `fast` as in
    `config.auto`."""
    parts, made = check(settings)
    device = pick_device(settings.device)
    if isinstance(settings, RunSettings):
        keep_freed(settings.fit_bytes)
        check_optimizer(settings.optim, device)
    return Prepared(decided(settings, say, fast), parts, made, device)


def pick_device(word: str) -> torch.device:
    """`auto`, `cpu` or `cuda`. A sweep's job that shares a GPU is limited to its share of the memory."""
    flush_denormals()  # called before anything computes
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "cpu"
    if word == "cuda":
        if not torch.cuda.is_available():
            found = f"PyTorch finds no GPU here ({why_no_gpu()})"
            raise UserError(f"device=cuda was asked for, but {found}; use device=auto or device=cpu")
        # Threads of autograd take up the context with their first product, and PyTorch warns of it.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS", UserWarning)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(part_of_gpu(float(os.environ.get(SHARE, "1")), total))
    return torch.device(word)
