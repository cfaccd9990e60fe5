"""Tracks every tensor allocated under it by purpose, and the peak.

It sees each PyTorch operation, on real tensors as well as on fake ones, which have shapes but no memory. So the same
code measures a run and predicts one. A kernel's internal workspace is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from grpo_cli.support.memory import storages

_DEVICE = torch.ops.prim.device.default
LOGITS, ACTIVATIONS, GRADIENTS = "logits", "activations", "gradients"


class Allocations(TorchDispatchMode):
    """Live bytes by kind. Tensors whose last dimension is the vocabulary count as logits, what a parameter holds as
    gradients, and everything else as activations, unless `mark` says otherwise.

    One layer may stand for several alike: what is allocated from the first use of one of its weights to that of another
    weight counts so many times. Peaks are then looked for only where a weight outside all `inner` layers was used last:
    bytes grow or shrink by as much from each layer to the next, so there are never more in between, and what a layer
    leaves to the next for a moment only, which must not count so often, is gone.
    """

    def __init__(self, model: Any, inner: Sequence[Any] = (), times: int = 1) -> None:
        """Weights and buffers are not counted. The middle one of three `inner` layers stands for `times` of them."""
        super().__init__()
        self._inner, self._at, self._times = bool(inner), 0, (1, 1, times, 1)
        parameters = list(model.parameters())
        self._places = dict.fromkeys(storages(parameters), 0)  # 1 to 3: of an inner layer
        for place, layer in enumerate(inner, 1):
            self._places |= dict.fromkeys(storages(layer.parameters()), place)
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
        if self._inner:
            for tensor in args:
                if isinstance(tensor, Tensor):
                    self._at = self._places.get(tensor.untyped_storage()._cdata, self._at)
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
            size *= self._times[self._at]
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
        if not self._at and self._live.total() > self._peak.total():
            self._peak = self._live.copy()


def _storage(tensor: Tensor) -> tuple[int, int, Any]:
    """Its identity, its bytes, and the object that lives as long: for oneDNN's packed weights the tensor itself."""
    if tensor.is_mkldnn:
        return id(tensor), tensor.numel() * tensor.element_size(), tensor
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), storage
