"""Every tensor that comes to be under it, by what it is for, and the most that there was at one time.

It sees each operation of PyTorch, on real tensors as on fake ones, which have shapes and no memory. So the same code
tells what a run does take and what one would take. What a kernel needs inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

LOGITS, ACTIVATIONS, GRADIENTS = "logits", "activations", "gradients"


class Allocations(TorchDispatchMode):
    """Live bytes by kind. Tensors whose last dimension is the vocabulary are logits, gradients are those that a
    parameter holds, and the rest are activations, unless `mark` says otherwise."""

    def __init__(self, model: Any) -> None:
        """Weights, and whatever else is there already and is looked at, do not count."""
        super().__init__()
        self._vocabulary = int(model.config.vocab_size)
        self._live: Counter[str] = Counter()
        self._kinds: dict[int, str | None] = {}  # by storage; None for what does not count
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._peak: Counter[str] = Counter()
        self.leave_out([*model.parameters(), *model.buffers()])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count these for nothing."""
        for tensor in tensors:
            self._place(tensor, None)

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Say what a tensor is for."""
        self._place(tensor, kind)
        self._look()

    def take_peak(self) -> Mapping[str, int]:
        """Bytes by kind at the fullest moment since the last call."""
        peak, self._peak = self._peak, self._live.copy()
        return {kind: size for kind, size in peak.items() if size}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        fresh = False
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _storage(tensor)[0] not in self._kinds:
                self._place(tensor, LOGITS if tensor.shape[-1:] == (self._vocabulary,) else ACTIVATIONS)
                fresh = True
        if fresh:
            self._look()
        return result

    def _place(self, tensor: Tensor, kind: str | None) -> None:
        key, size, storage = _storage(tensor)
        if key not in self._kinds:
            self._watchers[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        elif self._kinds[key] is not None:
            self._live[str(self._kinds[key])] -= size
        self._kinds[key] = kind
        if kind is not None:
            self._live[kind] += size

    def _gone(self, key: int, size: int) -> None:
        kind = self._kinds.pop(key)
        del self._watchers[key]
        if kind is not None:
            self._live[kind] -= size

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.mark(parameter.grad, GRADIENTS)

    def _look(self) -> None:
        if self._live.total() > self._peak.total():
            self._peak = self._live.copy()


def _storage(tensor: Tensor) -> tuple[int, int, Any]:
    """What tells it from others, its bytes, and what is there for as long. A packed weight (oneDNN's) is its own."""
    if tensor.is_mkldnn:
        return id(tensor), tensor.numel() * tensor.element_size(), tensor
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), storage
