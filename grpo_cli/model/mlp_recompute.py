"""Saves memory in the backward pass: results of elementwise operations are recomputed, not stored.

The backward pass of a layer's products needs their inputs, most of which come from a norm, an activation or a cast that
saves its own inputs anyway. Instead of such a result we save a reference to the node that made it, and the backward
pass repeats the operation on what the node has saved: the same bits, for one pass over memory. Llama-shaped models
only: others store everything, as they may write over what would be needed. What cannot be recomputed is stored. Inside
gradient checkpointing, which stores nothing itself, it does nothing. On a CPU with memory to spare, a small pass stores
everything too, which takes less time and changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_cli.model.anatomy import backbone, is_llama_shaped, is_of_a_known_family, without_mask
from grpo_cli.support.memory import give_back_freed, is_little

# Autograd nodes by operation. None saves its own result: a reference cycle through its note would leak it.
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TBackward0")
_MUL, _SILU, _CAST, _LEAF = "MulBackward0", "SiluBackward0", "ToCopyBackward0", "torch::autograd::AccumulateGrad"
_AT_MOST_FREED = 1 << 27  # bytes saved or restored before freed memory is returned to the system


# Set while a plan is made, on fake tensors of the CPU: whether passes store little.
_SPARES: ContextVar[bool | None] = ContextVar("_SPARES", default=None)


@contextmanager
def sparing(spares: bool) -> Iterator[None]:
    """Make passes store little, or everything, whatever their size."""
    token = _SPARES.set(spares)
    try:
        yield
    finally:
        _SPARES.reset(token)


def last_states(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    """The backbone's last hidden states; for the backward pass only what cannot be recomputed elementwise is stored.

    Autocast's weight cache is off: each weight is used once here.
    """
    states: Tensor
    inputs |= without_mask(model)
    kind = input_ids.device.type
    # Another architecture may write over what a note would be recomputed from.
    if not is_llama_shaped(model) or _has_room(model, input_ids):
        states = backbone(model)(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
        return states
    hooks = _Hooks()
    precision = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        with torch.autocast(kind, *precision, cache_enabled=False):
            states = backbone(model)(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    hooks.tidy_up()  # before the head's pass, which comes next and is the peak
    return states


def _has_room(model: Any, input_ids: Tensor) -> bool:
    """Whether this machine has room for all that a pass would store."""
    if (spares := _SPARES.get()) is not None:
        return not spares
    if input_ids.device.type != "cpu" or not is_of_a_known_family(model):
        return False
    return is_little(stored_bytes(backbone(model).config, input_ids.numel()))


def stored_bytes(config: Any, tokens: int) -> int:
    """Return roughly what a pass would store for its backward pass, counted for float32."""
    return 4 * tokens * config.num_hidden_layers * (11 * config.hidden_size + 4 * config.intermediate_size)


@dataclass(frozen=True)
class _Note:
    """Stands for a tensor: the node that made it."""

    node: Any


@dataclass(frozen=True)
class _Kept:
    """A tensor, or what it was cast from if the cast made it larger."""

    tensor: Tensor
    dtype: torch.dtype


class _Hooks:
    """The saved-tensor hooks. `_last` caches the latest recomputed product: a norm's result goes into several
    consecutive matrix products."""

    def __init__(self) -> None:
        self._last: tuple[int, Tensor] | None = None
        self._narrow: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._passed, self._is_much = 0, False

    def pack(self, tensor: Tensor) -> Tensor | _Note | _Kept:
        node: Any = tensor.grad_fn
        source = _source(node)
        if source is None or source.name() == _LEAF:
            return tensor.detach()
        if source.name() in (_MUL, _SILU, _CAST) and _can_be_made(source):
            return _Note(node)
        kept = _Kept(self._narrowed(tensor) if node.name() == _CAST else tensor.detach(), tensor.dtype)
        self._pass(kept.tensor)
        return kept

    def unpack(self, kept: Tensor | _Note | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, _Note):
            return self._made(kept.node)
        self._pass(kept.tensor)
        return kept.tensor.to(kept.dtype)

    def _narrowed(self, tensor: Tensor) -> Tensor:
        """The input of the cast that made this, if it was smaller, shared by all operations that save it."""
        node: Any = tensor.grad_fn
        before, place = node.next_functions[0]
        dtype = before._input_metadata[place].dtype
        if dtype.itemsize >= tensor.dtype.itemsize:
            return tensor.detach()
        return self._narrow.setdefault(node._sequence_nr(), tensor.detach().to(dtype))

    def _pass(self, tensor: Tensor) -> None:
        """Returns freed memory to the system now and then. Most of it would never be reused: glibc's aligned
        allocations ask for more than their size, so that none fits where one of the same size has been."""
        if tensor.device.type == "cpu":
            self._passed += tensor.nbytes
            if self._passed > _AT_MOST_FREED:
                self._is_much, self._passed = True, 0
                give_back_freed()

    def tidy_up(self) -> None:
        """Return freed memory now, and again when the backward pass begins, unless little was saved."""
        if self._is_much:
            give_back_freed()
            self._passed = _AT_MOST_FREED

    def _made(self, node: Any) -> Tensor:
        """Recomputes the result of a node that `_can_be_made`."""
        name = node.name()
        if name == _LEAF:
            leaf: Tensor = node.variable.detach()
            return leaf
        if name == _MUL:
            return self._product(node)
        if name == _SILU:
            return F.silu(node._saved_self)
        before, (result,) = self._made(node.next_functions[0][0]), node._input_metadata
        if name == _CAST:
            return before.to(result.dtype)
        return before.t() if name == "TBackward0" else before.reshape(tuple(result.shape))

    def _product(self, node: Any) -> Tensor:
        number = node._sequence_nr()
        if self._last is None or self._last[0] != number:
            self._last = number, self._factor(node, 0) * self._factor(node, 1)
        return self._last[1]

    def _factor(self, node: Any, place: int) -> Tensor:
        if not _keeps_factor(node, place):
            return self._made(node.next_functions[place][0])
        factor: Tensor = node._saved_other if place else node._saved_self
        return factor


def _keeps_factor(node: Any, place: int) -> bool:
    """A product saves a factor if the other one needs a gradient."""
    return node.next_functions[1 - place][0] is not None


def _source(node: Any) -> Any:
    """The node whose result this is a view of."""
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node


def _can_be_made(node: Any) -> bool:
    if node is None:
        return False
    name = node.name()
    if name == _MUL:
        return all(_keeps_factor(node, i) or _can_be_made(node.next_functions[i][0]) for i in (0, 1))
    return name in (_SILU, _LEAF) or (name in (*_VIEWS, _CAST) and _can_be_made(node.next_functions[0][0]))
