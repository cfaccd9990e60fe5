"""Attention by page tables: the same answers as by products, whatever the pages; and the same by its kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import make_engine, small_model
from torch import Tensor

from grpo_cli.engine.gpu.paged import PagedAttention, paged_attention, reason_against
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

    def answers(self, by_token: bool) -> tuple[Tensor, list[Tensor]]:
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
            found = PagedAttention(step, kv, 0.3, KeepAll())(0, q, k, v)
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
    expected, held = case.answers(by_token=False)
    found, held_so = case.answers(by_token=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(held_so, held, strict=True))


def test_three_keys_by_hand() -> None:
    """Scores ln 1, ln 2, ln 5 of values 8, 4, 1.6: (8 + 8 + 8) / 8."""
    one = torch.ones(1, 1, 1)
    keys, values = (torch.tensor(numbers).log().view(4, 1, 1) for numbers in ([1.0, 1, 2, 1], [1.0, 1, 1, 1]))
    values += torch.tensor([8.0, 0.0, 4.0, 0.0]).view(4, 1, 1)  # a prompt of one key on page 0, a row's one on page 1
    table, count = (torch.tensor(numbers) for numbers in ([[1]], [1]))
    own = keys.clone(), values.clone(), table, 2, count, torch.tensor([3])
    found = paged_attention(one, one * torch.tensor(5.0).log(), one * 1.6, *own, keys, values, table * 0, 2, count, 1.0)
    torch.testing.assert_close(found, 3 * one)
    assert own[1].flatten().tolist() == pytest.approx([8, 0, 4, 1.6]), "the new value is written"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "group", "dim"), [(3, 2, 7, 64), (64, 8, 2, 128), (300, 4, 1, 80)])
def test_the_kernel_computes_the_same(dtype: torch.dtype, rows: int, heads: int, group: int, dim: int) -> None:
    """Rows by few and many programs, with prompts and own keys or without, in pages of 48 and 16 tokens."""
    random = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cuda").to(dtype)

    held, prompt_held = torch.randint(0, 140, (2, rows), generator=random, device="cuda")
    held[0] = prompt_held[0] = 0
    pages, prompt_pages = (torch.randperm(rows * k, generator=random, device="cuda").view(rows, k) for k in (3, 9))
    write_at = pages.gather(1, held[:, None] // 48)[:, 0] * 48 + held % 48
    q, k, v = drawn(rows, heads * group, dim), drawn(rows, heads, dim), drawn(rows, heads, dim)
    own, prompt = ([drawn(rows * tokens, heads, dim) for _ in "kv"] for tokens in (144, 144))
    given = [q, k, v, *own, pages, 48, held, write_at, *prompt, prompt_pages, 16, prompt_held, 0.3]
    on_cpu = [x.cpu().float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    expected = paged_attention(*(x.cpu() if isinstance(x, Tensor) else x for x in on_cpu))
    found = paged_attention(*given).cpu().float()
    assert (found - expected).norm() < (1e-5 if dtype == torch.float32 else 8e-3) * expected.norm()
    assert torch.equal(own[0].cpu().float(), on_cpu[3]) and torch.equal(own[1].cpu().float(), on_cpu[4])


@pytest.mark.parametrize(
    ("device", "dim", "said"),
    [("cpu", 64, "the model is on cpu"), ("cuda", 264, "the model's have 264"), ("cuda", 64, "")],
)
def test_a_reason_against_it_is_named(device: str, dim: int, said: str) -> None:
    found = reason_against(torch.device(device), dim)
    assert (said in found) if said else not found


def test_a_policy_that_needs_attention_weights_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    words: dict[str, Any] = dict(budget=12, buffer=4, window=4, sinks=2, protect_prompt=True, per_head=True)
    for policy, warned in ((Rkv(**words, kernel=3, importance=0.5, threshold=0.5), False), (H2o(**words), True)):
        engine = make_engine(small_model(), sparsity=policy, compile=False, warn=said.append)
        with monkeypatch.context() as patched:
            patched.setattr(Decoder, "device", torch.device("cuda"))
            for _ in range(2):
                engine._pad()
        assert len(said) == warned
