"""Attention by FlashAttention's operation: the same answers as by products, whatever the pages."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import flash as operation
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import contents, make_engine, small_model, some_requests
from torch import Tensor

from grpo_cli.engine.gpu import flash
from grpo_cli.engine.kv.cache import KvArena, KvLayout, Region
from grpo_cli.engine.kv.keeper import KeepAll
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.engine.kv.tiles import PromptPages, sides
from grpo_cli.engine.step.attention import StepAttention
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.methods.h2o import H2o
from grpo_cli.methods.rkv import Rkv

CPU, DIM = torch.device("cpu"), 8


class Case:
    """Rows with keys of their own and prompts that they see or not, in pages of some sizes, with a hole or without."""

    def __init__(self, draw: Any) -> None:
        self.heads, self.group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        self.page, self.prompt_page = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        self.prompts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
        self.held = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
        rows = len(self.held)
        self.entries = np.array(draw(st.lists(st.integers(0, len(self.prompts) - 1), min_size=rows, max_size=rows)))
        self.sees = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
        self.hole, self.fixed = draw(st.booleans()), draw(st.sampled_from([None, rows]))
        self.spare = draw(st.integers(0, 1))  # pages of everybody that nothing is in

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def answers(self, by_token: bool, rows_to: int) -> tuple[Tensor, list[Tensor]]:
        """Of all rows, and the keys that each holds afterwards."""
        self._generator = torch.Generator().manual_seed(0)
        rows, kv = len(self.held), self._arena(by_token)
        own_side, prompt_side = sides(by_token)
        places = np.where(kv.prompts.pages < 0, -1, kv.prompt_place(kv.prompts.pages))
        looked_at = PromptPages(places, kv.prompts.used, np.array(self.prompts), self.prompt_page)
        prompt = prompt_side(self.entries, self.sees, looked_at, 4, self.fixed, CPU)
        most, held = int(kv.rows.count[:rows].max()), torch.tensor(self.held)
        own = own_side(kv.rows.pages[:rows, :most], self.page, CPU)
        write_to = torch.from_numpy(kv.rows.pages[np.arange(rows), np.array(self.held) // self.page])
        step = Rows(held, held, held, write_to, self.page, own, prompt)
        q, k, v = (self.drawn(rows, heads, DIM) for heads in (self.heads * self.group, self.heads, self.heads))
        if by_token:
            more = [torch.cat([x, torch.full((rows_to - rows, *x.shape[1:]), torch.nan)]) for x in (q, k, v)]
            found = flash.FlashAttention(step, kv, self.group, 0.3, KeepAll(), rows_to, flash.join)(0, *more)
        else:
            found = StepAttention(step, kv, self.group, 0.3, KeepAll())(0, q, k, v)
        return found, [kv.read(row, count + 1)[0] for row, count in enumerate(self.held)]

    def _arena(self, by_token: bool) -> KvArena:
        rows = len(self.held)
        layout = KvLayout(1, self.heads, DIM, torch.float32, by_token)
        own, prompts = Region(rows + 1, 22, self.page), Region(len(self.prompts), 21, self.prompt_page)
        own.take(rows, 1)
        for row, count in enumerate(self.held):
            own.take(row, own.pages_for(count + 1) + self.spare)
        for entry, count in enumerate(self.prompts):
            prompts.take(entry, prompts.pages_for(count) + self.spare)
        kv = KvArena(layout, own, prompts, 1 << 20, None, CPU)
        kv.make_room(0, 0)
        kv.put_prompts(range(len(self.prompts)), *self.drawn(2, 1, len(self.prompts), self.heads, 20, DIM))
        for row, count in enumerate(self.held):
            kv.restore(row, *self.drawn(2, 1, self.heads, count, DIM))
        own.drop(rows)
        if not self.hole:
            kv.close()
        return kv


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_it_answers_as_products_do_whatever_the_pages(data: Any) -> None:
    case = Case(data.draw)
    rows = len(case.held)
    expected, held = case.answers(by_token=False, rows_to=rows)
    with patch.object(flash, "_forward", operation.forward):
        found, held_so = case.answers(by_token=True, rows_to=rows + 2)
    torch.testing.assert_close(found[:rows], expected, atol=1e-5, rtol=1e-5)
    assert not found[rows:].any(), "who is there for the shape alone hears nothing"
    assert all(torch.equal(one, other) for one, other in zip(held_so, held, strict=True))


def tokens(rollouts: Any) -> dict[Any, Any]:
    return {name: words[0] for name, words in contents(rollouts).items()}


def test_a_policy_that_looks_at_weights_attends_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, Any] = dict(budget=12, buffer=4, window=4, sinks=2, protect_prompt=True, per_head=True)
    calls = operation.force(monkeypatch)
    for policy, asked in ((Rkv(**words, kernel=3, importance=0.5, threshold=0.5), True), (H2o(**words), False)):
        list(make_engine(small_model(), sparsity=policy).generate(some_requests(tokens=20)))
        assert bool(calls) == asked
        calls.clear()


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "missing", "said"),
    [
        ("cpu", torch.bfloat16, 64, "", "the model is on cpu"),
        ("cuda", torch.float32, 64, "", "rollouts are made in float32"),
        ("cuda", torch.bfloat16, 60, "", "the model's have 60"),
        ("cuda", torch.bfloat16, 264, "", "the model's have 264"),
        ("cuda", torch.bfloat16, 64, "kernels", "has none that takes lengths"),
        ("cuda", torch.bfloat16, 64, "operation", "has none that takes lengths"),
        ("cuda", torch.bfloat16, 64, "", ""),
    ],
)
def test_a_reason_against_it_is_named(
    device: str, dtype: torch.dtype, dim: int, missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: missing != "kernels")
    if missing == "operation":
        monkeypatch.setattr(flash, "OPERATION", "_flash_attention_of_old")
    found = flash.reason_against(torch.device(device), dtype, dim)
    assert (said in found) if said else not found


def test_a_gpu_that_goes_without_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    engine = make_engine(small_model(), compile=False, warn=said.append)
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    for _ in range(2):
        engine._pad()
    assert said == [
        "decode steps do not use FlashAttention, and are slower: it multiplies in 16 bits, and rollouts are made "
        "in float32"
    ]
