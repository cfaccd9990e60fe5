"""Attention of a decode step over tables of blocks: each backend is its definition, and a row's bits depend on nothing
but its own keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import require_c
from torch import Tensor

from grpo_cli.engine.attention import by_triton, in_c, reference
from grpo_cli.engine.kv_cache import BLOCK, KvLayout, PagedCache, blocks_for, table_of
from grpo_cli.engine.sampling import row_sampling
from grpo_cli.engine.sequence import Rows
from grpo_cli.settings import Sampling

CPU = torch.device("cpu")
# By dtype, of the largest number: what is lost by computing in another order, and by rounding once to it.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def by(backend: str) -> Any:
    if backend == "c":
        require_c("decode")
    return {"c": in_c, "triton": by_triton, "reference": reference}[backend]


BACKENDS = pytest.mark.parametrize("backend", ["c", "reference"])


class Case:
    """Rows with `held` keys of their own, prompts of `prompts` tokens that some rows see, in blocks in disorder."""

    def __init__(
        self, held: list[int], prompts: list[int], shape: tuple[int, int, int], dtype: torch.dtype = torch.float32,
        seed: int = 0, device: str = "cpu", by_token: bool = False,
    ) -> None:  # fmt: skip
        heads, group, dim = shape
        random, drawn = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.held, rows = held, len(held)
        free = iter(random.permutation(256).tolist())
        ends = [n + 1 for n in held]
        own, shared = ([[next(free) for _ in range(blocks_for(n))] for n in of] for of in (ends, prompts))
        self.entries = [int(random.integers(-1, len(prompts))) for _ in held]  # -1: none
        self.own, self.of_prompts = own, [shared[entry] if entry >= 0 else [] for entry in self.entries]
        self.seen = [prompts[entry] if entry >= 0 else 0 for entry in self.entries]
        layout = KvLayout(1, heads, dim, dtype, by_token, group)
        self.cache = PagedCache(layout, 256, torch.device(device))

        def numbers(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=drawn).to(device, dtype)

        for view in (*self.cache.keys, *self.cache.values):  # blocks may hold anything beyond their rows
            view.fill_(torch.nan)
            for blocks, n in zip([*own, *shared], [*held, *prompts], strict=True):
                for token in range(n):
                    view[blocks[token // BLOCK], :, token % BLOCK] = numbers(heads, dim)
        self.q = numbers(rows, heads * group, dim)
        self.k, self.v = numbers(rows, heads, dim), numbers(rows, heads, dim)

    def rows(self, some: list[int] | None = None) -> Rows:
        some = list(range(len(self.held))) if some is None else some
        to = [self.own[row][self.held[row] // BLOCK] for row in some]
        counts = (torch.tensor([of[row] for row in some]) for of in (self.held, self.seen))
        tables = (torch.from_numpy(table_of([of[row] for row in some])) for of in (self.own, self.of_prompts))
        (held, seen), (own, prompt) = counts, tables
        nothing, by = torch.zeros(len(some), dtype=torch.long), row_sampling([Sampling.plain(9)] * len(some), CPU)
        rows = nothing, nothing, held, torch.tensor(to), seen, nothing, nothing.double(), own, prompt
        return Rows(by, *(x.to(self.q.device) for x in rows))

    def found(self, backend: str, some: list[int] | None = None, note: Any = None) -> Tensor:
        at = slice(None) if some is None else some
        attend = by(backend)(self.rows(some), self.cache, 0.3, note)
        return attend(0, self.q[at], self.k[at], self.v[at])

    def wanted(self) -> tuple[Tensor, Tensor]:
        """From the definition, row by row, in float64; and what each key receives, [R, H, n]."""
        columns, out = [max(map(len, tables)) * BLOCK for tables in (self.of_prompts, self.own)], []
        received = torch.zeros(len(self.held), self.k.shape[1], sum(columns), dtype=torch.float64)
        for row, held in enumerate(self.held):
            sides = ((self.of_prompts[row], self.seen[row]), (self.own[row], held))
            keys, values = (
                torch.cat([*(view[0][at].double().transpose(0, 1).flatten(1, 2)[:, :n] for at, n in sides),
                           new[row, :, None].double()], 1)
                for view, new in ((self.cache.keys, self.k), (self.cache.values, self.v))
            )  # fmt: skip
            q = self.q[row].double().view(len(keys), -1, self.q.shape[2])
            weights, seen = (q @ keys.mT * 0.3).softmax(-1), self.seen[row]
            received[row, :, :seen] = weights.mean(1)[:, :seen]
            received[row, :, columns[0] : columns[0] + held + 1] = weights.mean(1)[:, seen:]
            out.append((weights @ values).flatten())
        return torch.stack(out), received

    def is_right(self, backend: str) -> None:
        """Check what a backend finds, the attention that it notes, and what it writes."""
        (wanted, received), notes = self.wanted(), list[Tensor]()
        for note in (None, lambda layer, paid: notes.append(paid)):
            assert self.close(self.found(backend, note=note), wanted)
        assert len(notes) == 1 and notes[0].dtype == torch.float32 and self.close(notes[0], received)
        for row, count in enumerate(self.held):
            block, inside = self.own[row][count // BLOCK], count % BLOCK
            assert torch.equal(self.cache.keys[0][block, :, inside], self.k[row])
            assert torch.equal(self.cache.values[0][block, :, inside], self.v[row])

    def close(self, found: Tensor, wanted: Tensor) -> bool:
        worst = (found.double() - wanted).abs().max()
        return bool(worst <= CLOSE[self.q.dtype] * max(1.0, wanted.abs().max().item()))


@BACKENDS
@given(
    held=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([2, 24, 40, 64, 96, 128, 256])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_attention_over_blocks_is_its_definition_and_writes_the_new_key(
    backend: str, held: list[int], prompts: list[int], shape: Any, dtype: torch.dtype, seed: int
) -> None:
    Case(held, prompts, shape, dtype, seed).is_right(backend)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_scores_and_more_keys_than_are_weighted_at_a_time(backend: str, dtype: torch.dtype) -> None:
    """C weights 256 at a time: the largest score among the last ones makes what came before smaller. And scores of up
    to several thousand, where all weight is on the largest one."""
    case, other = Case([900, 3, 520], [600], (2, 3, 64), dtype, 3), Case([9, 20, 0, 33], [30], (1, 2, 64), dtype, 7)
    case.k.mul_(4)
    case.is_right(backend)
    other.q.mul_(1000)
    other.is_right(backend)


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.triton)]
)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("rows", "longest", "shape"),
    [(3, 140, (2, 7, 64)), (9, 140, (8, 2, 128)), (9, 140, (4, 1, 80)), (1, 20, (1, 17, 256)), (43, 9, (12, 1, 2))],
)
def test_the_kernel_computes_the_same(device: str, exact: bool, rows: int, longest: int, shape: Any) -> None:
    """One program for a row and head, and several whose parts are joined. Triton's interpreter multiplies bfloat16 as
    if its bits were integers, so there float16 stands in."""
    half = torch.bfloat16 if device == "cuda" else torch.float16
    held = torch.randint(0, longest, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    case = Case(held, [70, 3, 100], shape, torch.float32 if exact else half, 2, device, by_token=True)
    wanted, _ = case.wanted()
    found = case.found("triton").double()
    assert (found - wanted).norm() < (1e-5 if exact else 8e-3) * wanted.norm()
    for row, count in enumerate(held):
        assert torch.equal(case.cache.keys[0][case.own[row][count // BLOCK], :, count % BLOCK], case.k[row])
