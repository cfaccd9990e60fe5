"""Kernels of a decode step in bfloat16 on a GPU that is not there: tensors have shapes and a device, and no memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import small_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_cli.engine.attention import Rows
from grpo_cli.engine.cache import KvArena, Region
from grpo_cli.engine.compiled import Functions
from grpo_cli.engine.decoder import EAGER, Decoder
from grpo_cli.engine.keeper import KeepAll
from grpo_cli.engine.pieces import PromptPages, sides

SHAPE: dict[str, Any] = dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
ROWS, PROMPTS = 64, 4


class Kernels(TorchDispatchMode):
    """Counts what is launched, but for what compiled regions launch, and casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.regions = 0
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        name = func._schema.name.partition("::")[2]
        if not (self._inside or views or name.startswith(("empty", "new_empty", "_unsafe_view", "device"))):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            self.regions, self._inside = self.regions + 1, True
            try:
                return function(*operands)
            finally:
                self._inside = False

        return run


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where PyTorch is without CUDA, nobody changes its current device; who does nothing for tensors without memory
    stands in."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[1] = guards[1], guards[1] or guards[14]
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        guards[1] = before


def launched(layers: int, several: bool, compiled: bool) -> Kernels:
    """By one step of 64 rows of four prompts, each with one page or with up to three."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = small_model("qwen3", num_hidden_layers=layers, **SHAPE)
    torch.set_default_dtype(torch.float32)
    kernels, decoder = Kernels(), Decoder(model)
    if compiled:
        decoder._to_compile = Functions(*map(kernels.region, (EAGER.before, EAGER.after, EAGER.join)), compiled=True)
    decoder = decoder.in_its_precision().for_steps(watched=False)
    own, prompts = Region(ROWS, 3, 128), Region(PROMPTS, 2, 128)
    for row in range(ROWS):
        own.take(row, 1 + row % 3 if several else 1)
    for entry in range(PROMPTS):
        prompts.take(entry, 2 if several else 1)
    kv = KvArena(decoder.layout(), own, prompts, 1 << 20, None, decoder.device)
    kv.make_room(0, 0)
    places = np.where(prompts.pages < 0, -1, kv.prompt_place(prompts.pages))
    looked_at = PromptPages(places, prompts.used, prompts.count * 128 - 28, 128)
    own_side, prompt_side = sides(decoder.layout().by_token)
    entries, row = np.arange(ROWS) % PROMPTS, torch.zeros(ROWS, dtype=torch.long, device="cuda")
    pieces = prompt_side(entries, np.ones(ROWS, bool), looked_at, 4, None, decoder.device)
    step = Rows(row, row, row, row, 128, own_side(own.pages[:, : 3 if several else 1], 128, decoder.device), pieces)
    with kernels:
        assert decoder.step(step, kv, KeepAll()).shape == (ROWS, 2048)
    return kernels


@pytest.mark.parametrize("several", [False, True])
def test_kernels_of_a_layer_are_few(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves and what joins the answers are compiled. Beside them: keys and values are written, prompts' questions
    laid out (rows' own too where a row has several pages), and two calls of FlashAttention."""
    with gpu(monkeypatch):
        two, four = (launched(layers, several, compiled=True) for layers in (2, 4))
    a_layer = ["index_copy_"] * 2 + ["index_select"] * (1 + several) + ["_flash_attention_forward"] * 2
    assert sorted(four.names) == sorted(two.names + 2 * a_layer)
    assert four.regions - two.regions == 2 * 3
    assert len(a_layer) <= 15
    before_and_after = [name for name in two.names if name not in a_layer]
    assert len(before_and_after) <= 32


def test_no_weight_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything else in a layer: what is not of the step's precision is taken there within a compiled region."""
    with gpu(monkeypatch):
        names = launched(2, several=False, compiled=True).names
    first, last = (place for place, name in enumerate(names) if name == "index_copy_"), names[::-1].index("index_copy_")
    assert "_to_copy" not in names[next(first) : len(names) - last]
