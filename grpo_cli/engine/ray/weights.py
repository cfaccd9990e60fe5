"""Sends a model to workers: its modules without numbers, and its numbers as arrays that Ray's store shares between the
processes of a node without copies. Workers read no files."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo_cli.support.errors import UserError


def hollow(model: nn.Module) -> nn.Module:
    """A copy in eval mode, without gradients and without the numbers of parameters and buffers, which `fill` sets.
    UserError for quantised weights."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise UserError(
                f"{name} is quantised (model.quantize), and engine=ray sends weights as plain numbers: leave "
                "model.quantize out, or use engine=torch"
            )
    # Tensors in the memo are not copied, and tied ones stay tied.
    memo: dict[int, Any] = {id(tensor): _hollow(tensor) for _, tensor in _tensors(model)}
    return copy.deepcopy(model, memo).eval()


def numbers(model: nn.Module, trained: bool) -> dict[str, np.ndarray]:
    """The bytes of all trained tensors, or of all others. On a CPU they are the model's own memory: put them into the
    store at once."""
    tensors = {name: tensor.detach() for name, tensor in _tensors(model) if tensor.requires_grad == trained}
    return {name: tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}


@torch.no_grad()
def fill(model: nn.Module, given: Mapping[str, np.ndarray], device: torch.device) -> None:
    """Set the numbers of some tensors of a (formerly) `hollow` model. On a CPU they share the memory of `given`, which
    may be read-only; on a GPU addresses are kept."""
    own = dict(_tensors(model))
    for name, array in given.items():
        mine = own[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            tensor = torch.from_numpy(array).view(mine.dtype).view(mine.shape)
        if mine.device == device and device.type != "cpu":
            mine.copy_(tensor)
        else:
            mine.data = tensor.to(device)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once, persistent or not."""
    return chain(model.named_parameters(), model.named_buffers())


def _hollow(tensor: Tensor) -> Tensor:
    """Of the same shape, in the memory of one number."""
    one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(one, requires_grad=False) if isinstance(tensor, nn.Parameter) else one
