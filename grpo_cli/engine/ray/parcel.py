"""A model on its way to workers: its modules without numbers, and its numbers as arrays that a store shares between
processes without copying them again.

What is trained goes out anew after each update, the rest once. Nothing is read from files by a worker: it needs no
access to the trainer's folders.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo_cli.support.errors import UserError


@dataclass(frozen=True)
class TensorBytes:
    """A tensor's bytes, and how to read them: NumPy has no bfloat16."""

    bytes: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def skeleton(model: nn.Module) -> bytes:
    """The modules with all that they are but the numbers of their parameters and buffers.

    Raises UserError for weights that are more than numbers: quantised ones.
    """
    from ray.cloudpickle import Pickler

    hollow = {id(tensor) for _, tensor in _tensors(model)}

    class Stripping(Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return (_hollow, (*_make(obj),)) if id(obj) in hollow else super().reducer_override(obj)

    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise UserError(
                f"{name} is quantised (model.quantize), and engine=ray sends weights as plain numbers: leave "
                "model.quantize out, or use engine=torch"
            )
    file = io.BytesIO()
    Stripping(file).dump(model)
    return file.getvalue()


def from_skeleton(data: bytes, device: torch.device) -> Any:
    """A model of that make on `device`, in eval mode and without gradients; `fill` gives it its numbers.

    `data` is what this run's own trainer has made: it is code, and trusted as the trainer is.
    """
    with device:
        return pickle.loads(data).eval()


def fixed_numbers(model: nn.Module) -> dict[str, TensorBytes]:
    """All that training does not change."""
    return {name: _numbers(tensor) for name, tensor in _tensors(model) if not tensor.requires_grad}


def moving_numbers(model: nn.Module) -> dict[str, TensorBytes]:
    """All that it does. Arrays of tensors on a CPU are these tensors' own memory: to be put away at once."""
    return {name: _numbers(tensor) for name, tensor in _tensors(model) if tensor.requires_grad}


@torch.no_grad()
def fill(model: nn.Module, numbers: Mapping[str, TensorBytes]) -> None:
    """Give some of its tensors their numbers. On a CPU nothing is copied: the tensors lie in the memory of `numbers`,
    which may be read-only, as long as they keep them."""
    own = dict(_tensors(model))
    for name, given in numbers.items():
        mine, tensor = own[name], _tensor(given)
        assert mine.shape == tensor.shape and mine.dtype == tensor.dtype, f"{name} is another tensor here"
        if mine.device.type == "cpu":
            mine.data = tensor
        else:
            mine.copy_(tensor)


def nbytes(numbers: Mapping[str, TensorBytes]) -> int:
    return sum(one.bytes.nbytes for one in numbers.values())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each once, whether a saved folder has them or not."""
    return chain(model.named_parameters(), model.named_buffers())


def _make(tensor: Tensor) -> tuple[bool, tuple[int, ...], torch.dtype]:
    return isinstance(tensor, nn.Parameter), tuple(tensor.shape), tensor.dtype


def _hollow(is_parameter: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In the place of a tensor, without its numbers: memory that is not touched takes none."""
    tensor = torch.empty(shape, dtype=dtype)
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _numbers(tensor: Tensor) -> TensorBytes:
    there = tensor.detach().cpu().contiguous()
    return TensorBytes(there.view(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _tensor(numbers: TensorBytes) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)  # nobody writes to it
        return torch.from_numpy(numbers.bytes).view(numbers.dtype).view(numbers.shape)
