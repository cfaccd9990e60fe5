"""Less kept for the backward pass: results of elementwise operations are recomputed, not stored.

A layer's products need their inputs again, and most of these come out of a norm, an activation or a cast, which keep
their own inputs anyway. In place of such a result stays a note of the node that made it, and the backward pass makes it
again by the same operation from what that node keeps: the same bits, for a pass over memory. Works for any model; what
it cannot make again is kept. Inside gradient checkpointing, which keeps nothing itself, it does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_cli.model.anatomy import backbone
from grpo_cli.support.memory import give_back_freed

# Nodes by what they do with their inputs. None of them keeps its own result, which a note of it would keep for ever.
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TBackward0")
_MUL, _SILU, _CAST, _LEAF = "MulBackward0", "SiluBackward0", "ToCopyBackward0", "torch::autograd::AccumulateGrad"
_AT_MOST_FREED = 1 << 27  # bytes that are kept, or used again, before what was freed meanwhile is given back


def last_states(model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
    """The backbone's last hidden states; the backward pass keeps only what no elementwise operation can make again.

    Autocast, where it is on, keeps no copies of the weights: each is used once here.
    """
    hooks, kind = _Hooks(), input_ids.device.type
    precision = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        with torch.autocast(kind, *precision, cache_enabled=False):
            states: Tensor = backbone(model)(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    hooks.tidy_up()  # for the head, whose pass comes next and is the fullest
    return states


@dataclass(frozen=True)
class _Note:
    """In place of a tensor: the node that made it."""

    node: Any


@dataclass(frozen=True)
class _Kept:
    """A tensor, or where a cast has made it larger what it was cast from."""

    tensor: Tensor
    dtype: torch.dtype


class _Hooks:
    """What is kept and what comes of it. `_last` is what was made last: a norm's result goes into several products, one
    after the other."""

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
        """The input of the cast that made this, if that was smaller; the same one for all operations that keep it."""
        node: Any = tensor.grad_fn
        before, place = node.next_functions[0]
        dtype = before._input_metadata[place].dtype
        if dtype.itemsize >= tensor.dtype.itemsize:
            return tensor.detach()
        return self._narrow.setdefault(node._sequence_nr(), tensor.detach().to(dtype))

    def _pass(self, tensor: Tensor) -> None:
        """Between what is kept and what comes to be lies what was freed, and most of it is never used again: glibc's
        aligned allocations ask for more than their size, so that none fits where one of the same size has been."""
        if tensor.device.type == "cpu":
            self._passed += tensor.nbytes
            if self._passed > _AT_MOST_FREED:
                self._is_much, self._passed = True, 0
                give_back_freed()

    def tidy_up(self) -> None:
        """Give back now, and again as soon as the backward pass is here; where little was kept that is not worth it."""
        if self._is_much:
            give_back_freed()
            self._passed = _AT_MOST_FREED

    def _made(self, node: Any) -> Tensor:
        """The result of a node, which `_can_be_made`."""
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
    """A product keeps a factor where the other one wants a gradient."""
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
