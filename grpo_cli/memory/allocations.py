"""Counts the bytes that operations allocate, and their peak.

It sees each PyTorch operation, on real tensors as well as on fake ones, which have shapes but no memory: a plan runs
the model's own code. A kernel's internal workspace is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_DEVICE = torch.ops.prim.device.default
LOGITS, ACTIVATIONS = "logits", "activations"


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that were made under it and live: logits (their last dimension is the vocabulary), and all
    others. A model's weights, buffers and gradients that are there before do not count."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._vocabulary = int(model.config.vocab_size)
        self._live, self._peak = Counter[str](), Counter[str]()
        self._watchers: dict[int, weakref.ref[Any]] = {}  # by storage
        for tensor in [*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters())]:
            if tensor is not None:
                self._watch(tensor, None)

    def take_peak(self) -> Mapping[str, int]:
        """Return bytes by kind at the peak since the last call."""
        peak, self._peak = self._peak, self._live.copy()
        return {kind: size for kind, size in peak.items() if size}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE:  # two of three calls: autograd needs it of every fake tensor
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._watchers:
                self._watch(tensor, LOGITS if tensor.shape[-1:] == (self._vocabulary,) else ACTIVATIONS)
        if self._live.total() > self._peak.total():
            self._peak = self._live.copy()
        return result

    def _watch(self, tensor: Tensor, kind: str | None) -> None:
        """Count a new storage under this kind (None: not at all) until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            del self._watchers[key]
            if kind is not None:
                self._live[kind] -= size

        self._watchers[key] = weakref.ref(storage, gone)
        if kind is not None:
            self._live[kind] += size
