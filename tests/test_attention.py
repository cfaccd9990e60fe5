"""Attention of a decode step over tables of blocks: each backend is its definition, and a row's bits depend on nothing
but its own keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import make_engine, small_model
from torch import Tensor

from grpo_cli.engine.attention import Attention, by_triton, no_triton, paged_attention, reference
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.kv_cache import BLOCK, KvLayout, PagedCache, blocks_for, table_of
from grpo_cli.engine.running_batch import Rows
from grpo_cli.engine.sampling import drawing_of
from grpo_cli.methods.h2o import H2o
from grpo_cli.methods.rkv import Rkv
from grpo_cli.native.library import NoNative, library
from grpo_cli.settings import Sampling

CPU = torch.device("cpu")
# By dtype, of the largest number: what is lost by computing in another order, and by rounding once to it.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def in_c(rows: Rows, cache: PagedCache, scale: float) -> Attention:
    try:
        library("decode")
    except NoNative as error:
        pytest.skip(str(error))
    return paged_attention("c", rows, cache, scale)


Backend = Callable[[Rows, PagedCache, float], Attention]
BACKENDS = pytest.mark.parametrize("backend", [in_c, reference])


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
        own, shared = (
            [[next(free) for _ in range(blocks_for(n))] for n in of] for of in ([n + 1 for n in held], prompts)
        )
        self.entries = [int(random.integers(-1, len(prompts))) for _ in held]  # -1: none
        self.own, self.of_prompts = own, [shared[entry] if entry >= 0 else [] for entry in self.entries]
        self.seen = [prompts[entry] if entry >= 0 else 0 for entry in self.entries]
        layout = KvLayout(1, heads, dim, dtype, by_token, group)
        self.cache = PagedCache(layout, 256, torch.device(device))

        def numbers(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=drawn).to(device, dtype)

        for view in (*self.cache.keys, *self.cache.values):
            view.copy_(numbers(*view.shape))
        self.q = numbers(rows, heads * group, dim)
        self.k, self.v = numbers(rows, heads, dim), numbers(rows, heads, dim)

    def rows(self, some: list[int] | None = None) -> Rows:
        some = list(range(len(self.held))) if some is None else some
        to = [self.own[row][self.held[row] // BLOCK] for row in some]
        counts = (torch.tensor([of[row] for row in some]) for of in (self.held, self.seen))
        tables = (torch.from_numpy(table_of([of[row] for row in some])) for of in (self.own, self.of_prompts))
        (held, seen), (own, prompt) = counts, tables
        nothing, by = torch.zeros(len(some), dtype=torch.long), drawing_of([Sampling.plain(9)] * len(some), CPU)
        rows = nothing, nothing, held, torch.tensor(to), seen, nothing, nothing.double(), own, prompt
        return Rows(*(x.to(self.q.device) for x in rows), by)

    def found(self, backend: Backend, some: list[int] | None = None) -> Tensor:
        at = slice(None) if some is None else some
        return backend(self.rows(some), self.cache, 0.3)(0, self.q[at], self.k[at], self.v[at])[0]

    def wanted(self) -> Tensor:
        """From the definition, row by row, in float64."""
        out = []
        for row, held in enumerate(self.held):
            sides = ((self.of_prompts[row], self.seen[row]), (self.own[row], held))
            keys, values = (
                torch.cat([*(view[0][at].double().transpose(0, 1).flatten(1, 2)[:, :n] for at, n in sides),
                           new[row, :, None].double()], 1)
                for view, new in ((self.cache.keys, self.k), (self.cache.values, self.v))
            )  # fmt: skip
            q = self.q[row].double().view(len(keys), -1, self.q.shape[2])
            out.append(((q @ keys.mT * 0.3).softmax(-1) @ values).flatten())
        return torch.stack(out)

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
    backend: Backend, held: list[int], prompts: list[int], shape: Any, dtype: torch.dtype, seed: int
) -> None:
    case = Case(held, prompts, shape, dtype, seed)
    wanted = case.wanted()
    assert case.close(case.found(backend), wanted)
    for row, count in enumerate(held):
        block, inside = case.own[row][count // BLOCK], count % BLOCK
        assert torch.equal(case.cache.keys[0][block, :, inside], case.k[row])
        assert torch.equal(case.cache.values[0][block, :, inside], case.v[row])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_keys_than_are_weighted_at_a_time(backend: Backend, dtype: torch.dtype) -> None:
    """256 at a time, and the largest score among the last ones, so that what came before is made smaller."""
    case = Case([900, 3, 520], [600], (2, 3, 64), dtype, 3)
    case.k.mul_(4)
    wanted = case.wanted()
    assert case.close(case.found(backend), wanted)


@BACKENDS
def test_what_blocks_hold_beyond_their_rows_is_never_read(backend: Backend) -> None:
    case = Case([5, 31, 16, 40], [20, 48], (2, 3, 64), torch.float32, 4)
    before, kept = case.found(backend), torch.zeros(256, BLOCK, dtype=torch.bool)
    for blocks, count in zip([*case.own, *case.of_prompts], [*(n + 1 for n in case.held), *case.seen], strict=True):
        for token in range(count):
            kept[blocks[token // BLOCK], token % BLOCK] = True
    for view in (*case.cache.keys, *case.cache.values):
        view.masked_fill_(~kept[:, None, :, None], torch.nan)
    assert torch.equal(case.found(backend), before)


@BACKENDS
def test_scores_that_no_exponential_can_hold(backend: Backend) -> None:
    """Scores of up to several thousand: all weight is on the largest one."""
    case = Case([9, 20, 0, 33], [30], (1, 2, 64), torch.float32, 7)
    case.q.mul_(1000)
    wanted = case.wanted()
    assert case.close(case.found(backend), wanted)


@pytest.mark.bits
@BACKENDS
def test_a_row_has_the_same_bits_in_any_company(backend: Backend) -> None:
    case = Case([5, 31, 16, 90, 0, 40], [20, 48, 1], (2, 3, 24), torch.float32, 5)
    together = case.found(backend)
    for some in ([0], [3, 0], [1, 2, 4], [5, 4, 3, 2, 1, 0]):
        assert torch.equal(case.found(backend, some), together[some])


def test_the_reference_returns_the_weights_of_prompt_keys_and_then_of_own_ones() -> None:
    case = Case([3], [5], (1, 1, 8), torch.float32, 1)
    case.entries, case.of_prompts, case.seen = [0], [[200]], [5]
    _, weights = reference(case.rows(), case.cache, 0.3)(0, case.q, case.k, case.v)
    assert weights is not None and weights.shape == (1, 1, 1, 2 * BLOCK)
    assert (weights[0, 0, 0] > 0).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 16, 17, 18, 19]
    assert float(weights.sum()) == pytest.approx(1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "shape"), [(3, (2, 7, 64)), (9, (8, 2, 128)), (9, (4, 1, 80))])
def test_the_kernel_computes_the_same(dtype: torch.dtype, rows: int, shape: tuple[int, int, int]) -> None:
    held = torch.randint(0, 140, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    case = Case(held, [70, 3, 100], shape, dtype, 2, "cuda", by_token=True)
    wanted = case.wanted()
    found = case.found(by_triton).double()
    assert (found - wanted).norm() < (1e-5 if dtype == torch.float32 else 8e-3) * wanted.norm()
    for row, count in enumerate(held):
        assert torch.equal(case.cache.keys[0][case.own[row][count // BLOCK], :, count % BLOCK], case.k[row])


@pytest.mark.parametrize(
    ("device", "dim", "said"),
    [("cpu", 64, "the model is on cpu"), ("cuda", 264, "the model's have 264"), ("cuda", 64, "")],
)
def test_a_reason_against_the_kernel_is_named(device: str, dim: int, said: str) -> None:
    found = no_triton(torch.device(device), dim)
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
