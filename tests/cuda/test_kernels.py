"""Kernels of a decode step in bfloat16 on a GPU that is not there: tensors have shapes and a device, and no memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cuda import Watched, gpu, model_of

from grpo_cli.engine.kv.cache import KvArena, Region
from grpo_cli.engine.kv.keeper import KeepAll
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.engine.kv.tiles import PromptPages, sides
from grpo_cli.engine.step.decoder import Decoder

ROWS, PROMPTS = 64, 4


def launched(layers: int, several: bool, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """By one step of 64 rows of four prompts, each with one page or with up to three."""
    with gpu(monkeypatch) as watched, torch.no_grad():
        model = model_of(watched, num_hidden_layers=layers)
        decoder = watched.decoder(model).in_its_precision().for_steps(watched=False)
        step, kv = _step(decoder, several)
        watched.kernels.clear()
        assert decoder.step(step, kv, KeepAll()).shape == (ROWS, 2048)
    return watched


def _step(decoder: Decoder, several: bool) -> tuple[Rows, KvArena]:
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
    return step, kv


@pytest.mark.parametrize("several", [False, True])
def test_kernels_of_a_layer_are_few(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves and what joins the answers are compiled. Beside them: keys and values are written, prompts' questions
    laid out (rows' own too where a row has several pages), and two calls of FlashAttention."""
    two, four = (launched(layers, several, monkeypatch) for layers in (2, 4))
    a_layer = ["index_copy_"] * 2 + ["index_select"] * (1 + several) + ["_flash_attention_forward"] * 2
    assert sorted(four.kernels) == sorted(two.kernels + 2 * a_layer)
    assert four.regions - two.regions == 2 * 3
    assert len(a_layer) <= 15
    assert len([name for name in two.kernels if name not in a_layer]) <= 32  # before and after all layers


def test_no_weight_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything else in a layer: what is not of the step's precision is taken there within a compiled region."""
    watched = launched(2, False, monkeypatch)
    written = [place for place, name in enumerate(watched.kernels) if name == "index_copy_"]
    assert watched.casts == 0 and "_to_copy" not in watched.kernels[written[0] : written[-1]]
