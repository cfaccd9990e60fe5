"""A GPU that is not there: fake tensors on `cuda`, which have shapes, types and devices, and who watches what is.

What would go wrong shows as an error (tensors of two devices or types, a result that is asked for), and what would be
slow as a number: kernels, casts of weights, and waits, which are all those crossings after which the host goes on only
when the device has done all that it was given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.layers import Compiled

CUDA = torch.device("cuda")
ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique", "equal", "bincount", "is_nonzero")
FREE = ("empty", "new_empty", "detach", "alias", "lift", "_unsafe_view", "device", "_pin_memory", "_fused_sdp_choice")
FUSED = ("rms_norm",)  # which on a GPU is one kernel, and of several only where there is none


class Watched(TorchDispatchMode):
    """Counts, by the name of the operation. `waits` has also what waits for an event; `kernels` has none of what is
    launched by compiled regions."""

    def __init__(self, fake: FakeTensorMode, host: bool) -> None:
        super().__init__()
        self._fake, self._host = fake, host
        self.kernels: list[str] = []
        self.waits: list[str] = []
        self.casts = 0
        self.weights: set[int] = set()
        self._inside = False  # a compiled region
        self._one = {torch.ops.prim.device.default}  # operations that are not made of others
        self._pinned: list[Any] = []  # kept alive, so that nobody else has their memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        leaves = tree_leaves((args, kwargs))
        if self._host and not any(isinstance(leaf, FakeTensor) or _names_gpu(leaf) for leaf in leaves):
            with unset_fake_temporarily():
                out = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
            self._pinned += [out] if name == "_pin_memory" else []
            return out
        if func not in self._one:
            with self:  # in inference mode what is made of others comes whole
                parts = func.decompose(*args, **kwargs) if name not in FUSED else NotImplemented
            if parts is not NotImplemented:
                return parts
            self._one.add(func)
        out = args[0].clone() if name == "_pin_memory" else self._done(func, args, kwargs)
        if name == "_pin_memory" or kwargs.get("pin_memory"):
            self._pinned.append(out)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._waits(name, given, out, args, kwargs):
            self.waits.append(name)
        changed = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        on_device = any(_on_gpu(tensor) for tensor in (*given, *tree_leaves(out)))
        if on_device and not changed and not self._inside and not name.startswith(FREE):
            self.kernels.append(name)
        if name == "_to_copy" and _memory(given[0]) in self.weights and out.dtype != given[0].dtype:
            self.casts += 1
        return out

    def _done(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As fake tensors have it; where the host has memory, what comes there is 1."""
        if not self._host:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        faked = tree_map_only(_on_host, self._fake.from_tensor, (args, kwargs))
        out = func(*faked[0], **faked[1])
        if func is not torch.ops.aten._to_copy.default or out.device.type != "cpu":
            return out
        with unset_fake_temporarily():
            return torch.ones(out.shape, dtype=out.dtype)

    def decoder(self, model: Any) -> Decoder:
        """As on a GPU by default: the halves of its layers are compiled."""
        return replace(Decoder.of(model), compiled=Compiled(self._region))

    def _region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            self._inside = True
            try:
                return function(*operands)
            finally:
                self._inside = False

        return run

    def _waits(self, name: str, given: list[Any], out: Any, args: Any, kwargs: Any) -> bool:
        if not any(map(_on_gpu, given)) and not (isinstance(out, FakeTensor) and _on_gpu(out)):
            return False
        if name in ("index", "index_put_", "index_put"):
            # Places that lie on the host have to be brought, and true ones to be counted.
            return any(one.dtype == torch.bool or not _on_gpu(one) for one in given[1:] if one.dtype not in FLOATS)
        if name in ("_to_copy", "copy_"):
            source, target = (given[0], out) if name == "_to_copy" else (given[1], given[0])
            beside = [one for one in (source, target) if not _on_gpu(one)]
            pinned = all(_memory(one) in map(_memory, self._pinned) for one in beside)
            non_blocking = kwargs.get("non_blocking", False) or args[2:] == (True,)
            return bool(beside) and not (pinned and non_blocking)
        return name.startswith(ASKS)


FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def _on_host(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)


def _names_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "cuda"


def _on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def _memory(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch, host: bool = False) -> Iterator[Watched]:
    """A GPU, which draws token 5. `host`: what lies on the host has memory, and what is computed there is."""
    fake = FakeTensorMode()
    watched = Watched(fake, host)

    def values(tensor: torch.Tensor) -> np.ndarray:
        found = np.zeros(tensor.shape, np.float32)
        found[0] = np.full(tensor.shape[1], 5, np.int32).view(np.float32)
        return found

    if not host:
        monkeypatch.setattr(FakeTensor, "numpy", values, raising=False)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    with _guarded(), fake, watched:
        yield watched


@contextmanager
def _guarded() -> Iterator[None]:
    """PyTorch without CUDA has nobody who would change the current device; who does so for tensors without memory, by
    doing nothing, stands in."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14
    before = guards[cuda]
    guards[cuda] = before or guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


def model_of(watched: Watched, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Any:
    """A Qwen3 without weights, with four queries for a key."""
    config = AutoConfig.for_model("qwen3", num_key_value_heads=8, tie_word_embeddings=True, **changed)
    with CUDA:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    watched.weights = set(map(_memory, model.parameters()))
    return model
