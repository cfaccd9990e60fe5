"""A worker of `engine=ray`: an actor with a copy of the model and an engine of its own, perhaps on another machine."""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import socket
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import grpo_cli
from grpo_cli.interfaces import Engine
from grpo_cli.support.processor import flush_denormals
from grpo_cli.types import EngineStats, Request, Rollout


@dataclass(frozen=True)
class Delivery:
    """A rollout for each request, in their order, with their cost."""

    rollouts: Sequence[Rollout]
    stats: EngineStats
    facts: Mapping[str, Any]
    warnings: Sequence[str]


class RolloutWorker:
    """Rollouts as a function of requests and weights: Ray may restart the process and repeat a call."""

    def __init__(self, device: str) -> None:
        self._device, self._version = torch.device(device), ""
        self._engine: Engine | None = None
        self._warnings: list[str] = []

    def place(self) -> Mapping[str, Any]:
        """Return where this process runs, once it does."""
        return place()

    def generate(
        self,
        references: Sequence[Any],
        requests: Sequence[Request],
        learned: Mapping[str, Any] | None,
        autocast: torch.dtype | None,
    ) -> Delivery:
        """`references` into Ray's store: to the model without numbers, its frozen numbers and `build`, which makes the
        engine; and to the trained numbers. `learned`: the state of the trainer's engine, if it predicts lengths."""
        import ray

        frozen, weights = references
        flush_denormals()
        if self._engine is None:
            self._model, untrained, build = ray.get(frozen)
            fill(self._model, untrained | ray.get(weights), self._device)
            self._engine = build(self._model, warn=self._warnings.append)
        elif self._version != weights.hex():
            fill(self._model, ray.get(weights), self._device)
            self._engine.update_weights()
        self._version = weights.hex()
        if learned is not None:
            self._engine.load_state_dict(learned)
        with torch.autocast(self._device.type, autocast) if autocast else nullcontext():
            made = {id(rollout.request): rollout for rollout in self._engine.generate(requests)}
        warned, self._warnings[:] = tuple(self._warnings), []
        rollouts = [made[id(request)] for request in requests]
        return Delivery(rollouts, self._engine.stats(), dict(self._engine.facts()), warned)


def place() -> dict[str, Any]:
    """Return where this process runs, and its software."""
    package, source = Path(grpo_cli.__file__).parent, hashlib.sha256()
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.c")]):
        source.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, grpo-cli {source.hexdigest()[:9]}",
        "threads": torch.get_num_threads(),
    }


def hollow(model: nn.Module) -> nn.Module:
    """Return a copy for generation without the numbers of parameters and buffers, which `fill` sets."""
    memo: dict[int, Any] = {}  # tensors in it are not copied, and tied ones stay tied
    for tensor in _tensors(model).values():
        one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        memo[id(tensor)] = nn.Parameter(one, requires_grad=False) if isinstance(tensor, nn.Parameter) else one
    return copy.deepcopy(model, memo).eval()


def numbers(model: nn.Module, trained: bool) -> dict[str, np.ndarray]:
    """Return the bytes of all trained tensors, or of all others. On a CPU they are the model's own memory."""
    tensors = {name: tensor.detach() for name, tensor in _tensors(model).items() if tensor.requires_grad == trained}
    return {name: tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}


def fill(model: nn.Module, given: Mapping[str, np.ndarray], device: torch.device) -> None:
    """Set tensors of a model that was `hollow`. On a CPU they share the memory of `given`; on a GPU addresses stay."""
    own = _tensors(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        for name, array in given.items():
            tensor = torch.from_numpy(array).view(own[name].dtype).view(own[name].shape)
            if own[name].is_cuda:
                own[name].copy_(tensor)
            else:
                own[name].data = tensor.to(device)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each once, persistent or not."""
    return dict(chain(model.named_parameters(), model.named_buffers()))
