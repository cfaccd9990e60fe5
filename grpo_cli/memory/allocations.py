"""Tracks every tensor allocated under it by purpose, and the peak.

It sees each PyTorch operation, on real tensors as well as on fake ones, which have shapes but no memory. So the same
code measures a run and predicts one. A kernel's internal workspace is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_DEVICE = torch.ops.prim.device.default
LOGITS, ACTIVATIONS, GRADIENTS = "logits", "activations", "gradients"


class Allocations(TorchDispatchMode):
    """Live bytes by kind. Tensors whose last dimension is the vocabulary count as logits, what a parameter holds as
    gradients, and everything else as activations, unless `mark` says otherwise.
    """

    def __init__(self, model: Any) -> None:
        """Weights and buffers are not counted."""
        super().__init__()
        parameters = list(model.parameters())
        self._vocabulary = int(model.config.vocab_size)
        self._live: Counter[str] = Counter()
        self._held: dict[int, tuple[str | None, int]] = {}  # kind and bytes by storage; None for what does not count
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._peak: Counter[str] = Counter()
        self.leave_out([*parameters, *model.buffers()])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in parameters
            if parameter.requires_grad
        ]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under it, and not to say so at every operation takes less time."""
        return False

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these."""
        for tensor in tensors:
            self._place(tensor, None)

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Set the kind of a tensor."""
        self._place(tensor, kind)
        self._look()

    def take_peak(self) -> Mapping[str, int]:
        """Bytes by kind at the peak since the last call."""
        peak, self._peak = self._peak, self._live.copy()
        return {kind: size for kind, size in peak.items() if size}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE:  # two of three calls: autograd asks it of every fake tensor, which knows it
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        fresh = False
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _storage(tensor)[0] not in self._held:
                self._place(tensor, LOGITS if tensor.shape[-1:] == (self._vocabulary,) else ACTIVATIONS)
                fresh = True
        if fresh:
            self._look()
        return result

    def _place(self, tensor: Tensor, kind: str | None) -> None:
        key, size, storage = _storage(tensor)
        if key in self._held:
            before, size = self._held[key]
            self._count(before, -size)
        else:
            self._watchers[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._held[key] = kind, size
        self._count(kind, size)

    def _gone(self, key: int) -> None:
        kind, size = self._held.pop(key)
        del self._watchers[key]
        self._count(kind, -size)

    def _count(self, kind: str | None, size: int) -> None:
        if kind is not None:
            self._live[kind] += size

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.mark(parameter.grad, GRADIENTS)

    def _look(self) -> None:
        if self._live.total() > self._peak.total():
            self._peak = self._live.copy()


def _storage(tensor: Tensor) -> tuple[int, int, Any]:
    """Its identity, its bytes, and the object that lives as long: for oneDNN's packed weights the tensor itself."""
    if tensor.is_mkldnn:
        return id(tensor), tensor.numel() * tensor.element_size(), tensor
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), storage
