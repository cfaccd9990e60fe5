"""Attention of packed trees in C is its definition, with its gradients; bits depend on no thread and no other tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import small_model
from test_learner import make_batch
from test_native import anew  # noqa: F401
from test_passes import UNEVEN, computed
from test_passes import make_batch as uneven
from torch import Tensor

from grpo_cli.learner.forward import Padded, PaddingFree
from grpo_cli.learner.learner import Learner
from grpo_cli.model import packed, tree_attention
from grpo_cli.model.tree_attention import Forest, attention
from grpo_cli.settings import Sampling
from grpo_cli.support import c_library
from grpo_cli.support.c_library import NoNative
from grpo_cli.support.meter import NullMeter
from grpo_cli.support.threads import computing_with

Trees = Sequence[Sequence[int]]
# Of the largest number: what is lost by computing in another order, and by rounding once to bfloat16.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        c_library.library(tree_attention.SOURCE)
    except NoNative as error:
        pytest.skip(str(error))


def runs_of(trees: Trees, heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and a gradient."""
    generator, tokens = torch.Generator().manual_seed(0), sum(map(sum, trees))
    return [torch.randn(tokens, count * heads, dim, generator=generator).to(dtype) for count in (group, 1, 1, group)]


def in_c(trees: Trees, runs: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The output, and gradients of queries, keys and values."""
    inputs = [x.clone().requires_grad_() for x in runs[:3]]
    out = attention(inputs[0], inputs[1], inputs[2], Forest(trees), scale)
    return [out.detach(), *torch.autograd.grad(out, inputs, runs[3])]


def by_hand(trees: Trees, runs: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The same in float64: each branch as a sequence of its own, behind a trunk of its own."""
    q, k, v = (x.double().requires_grad_() for x in runs[:3])
    outs, begin = [], 0
    for trunk, *branches in trees:
        first, start = slice(begin, begin + trunk), begin + trunk
        outs.append(causal(q[first], k[first], v[first], 0, scale))
        for size in branches:
            own = slice(start, start + size)
            keys, values = (torch.cat([x[first], x[own]]) for x in (k, v))
            outs.append(causal(q[own], keys, values, trunk, scale))
            start += size
        begin = start
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), runs[3].double())]


def causal(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    later = torch.arange(len(k)) > before + torch.arange(len(q))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def close(found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(float((a.double() - b).abs().max()) <= CLOSE[dtype] * max(1.0, float(b.abs().max())) for a, b in pairs)


def test_a_token_that_sees_two_keys_weighs_them_by_hand() -> None:
    """Scores 0 and ln 3: weights 1/4 and 3/4. A second branch sees its trunk, and nothing of the first."""
    ln3 = torch.tensor(3.0).log()
    q = torch.tensor([0.0, 1.0, 1.0]).view(3, 1, 1)
    k = torch.stack([torch.tensor(0.0), ln3, ln3]).view(3, 1, 1)
    v = torch.tensor([4.0, 8.0, 12.0]).view(3, 1, 1)
    out = attention(q, k, v, Forest([(1, 1, 1)]), 1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0, 10.0]))


@settings(max_examples=40)
@given(
    trees=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=4), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([1, 8, 24, 64, 80, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_its_definition(trees: Trees, heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    runs = runs_of(trees, heads, group, dim, dtype)
    assert close(in_c(trees, runs, dim**-0.5), by_hand(trees, runs, dim**-0.5), dtype)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 17, 31, 33])
def test_what_fills_up_a_block_of_queries_reaches_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room that holds NaN before it is used; and what comes after the last of the logs stays as it is."""
    trees, heads, group, dim = [(size, 2)], 2, 2, 8
    runs = runs_of(trees, heads, group, dim)
    wanted = by_hand(trees, runs, 1.0)
    monkeypatch.setattr(torch, "empty", lambda *shape: torch.full(shape, torch.nan))
    q, k, v, grad = runs
    forest, out, logs = Forest(trees), torch.zeros_like(q), torch.full((heads * group + 1, len(q)), -5.0)
    forest.call("forward", 1.0, q, k, q, k, v, out, logs)
    assert (logs[-1] == -5.0).all()
    made_of = [torch.zeros_like(x) for x in (q, k, v)]
    forest.call("backward", 1.0, q, k, grad, q, k, v, out, logs, *made_of)
    assert close([out, *made_of], wanted, torch.float32)


def test_long_sequences_and_large_scores_are_right_too() -> None:
    """Scores of some hundreds, whose exponentials are no numbers."""
    trees = ((900, 300, 5), (1300,))
    runs = runs_of(trees, 1, 2, 64)
    assert close(in_c(trees, runs, 0.125), by_hand(trees, runs, 0.125), torch.float32)
    runs[0] *= 30
    found, wanted = in_c(trees, runs, 1.0), by_hand(trees, runs, 1.0)
    assert float(runs[0].abs().max()) > 100 and all(bool(x.isfinite().all()) for x in found)
    assert float((found[0].double() - wanted[0]).abs().max()) < 1e-3


def test_no_bit_depends_on_threads_or_on_other_trees() -> None:
    trees = ((40, 30, 7), (33, 64), (5,))
    runs = runs_of(trees, 3, 3, 64)
    together = in_c(trees, runs, 0.125)
    for threads in (1, 2, 3, 8):
        with computing_with(threads):
            assert all(map(torch.equal, in_c(trees, runs, 0.125), together))
    first = [x[:77] for x in runs]
    assert all(torch.equal(a, b[:77]) for a, b in zip(in_c(trees[:1], first, 0.125), together, strict=True))


def test_what_is_not_a_number_stays_so() -> None:
    runs = runs_of([(3, 2, 2)], 1, 1, 8)
    runs[0][4, 0, 0] = torch.nan  # a query of the first branch
    out, dq, dk, _ = in_c([(3, 2, 2)], runs, 1.0)
    hurt = out.isnan().any(-1).flatten().tolist()
    assert hurt == [False, False, False, False, True, False, False]
    assert bool(dq[4].isnan().any()) and bool(dk[0].isnan().any()) and not bool(dk[5:].isnan().any())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("share", [False, True])
def test_passes_with_it_give_what_padded_ones_give(family: str, share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = small_model(family), uneven(UNEVEN)
    values, gradient = computed(Padded(10_000, 64, 0.7), model, batch)
    monkeypatch.setattr(packed, "KERNELS", [])
    monkeypatch.setattr(packed, "repeat_kv", lambda *_: pytest.fail("it was computed part by part"))
    for tokens in (10_000, 30, 1):
        found = computed(PaddingFree(tokens, 5, 0.7, share=share, natively=True), model, batch)
        torch.testing.assert_close(found[0], values, atol=1e-5, rtol=0)
        assert (found[1] - gradient).norm() < 1e-5 * gradient.norm()


def learner(warned: list[str], **train: Any) -> Learner:
    settings = made.model(""), Sampling.plain(4), made.train(**train), made.optim()
    return Learner(small_model(), made.loss(), *settings, NullMeter(), warned.append)


def test_it_is_for_packed_rows_on_a_processor_unless_the_user_does_without() -> None:
    assert learner([], shared_prefix=True).native is True and learner([], padding_free=True).native is True
    assert learner([], shared_prefix=True, native=False).native is False and learner([]).native is False
    half = [x.half() for x in runs_of([(3,)], 1, 1, 8)[:3]]
    assert not tree_attention.serves(half[0], half[1], half[2])
    assert not tree_attention.serves(half[0].float(), half[1].float(), half[2])


@pytest.fixture
def retried(anew: Path) -> Iterator[Path]:  # noqa: F811
    """As `anew`, and whether it serves is found out anew too."""
    tree_attention.why_not.cache_clear()
    yield anew
    tree_attention.why_not.cache_clear()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(*grad - common)", "(*grad + common)"),
        ("best = greater(x, best);", "best = all(1e4f);"),
        ("+= y * x", "-= y * x"),
    ],
)
def test_a_compiler_whose_work_is_wrong_is_told_of_and_not_used(
    right: str, wrong: str, retried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tree_attention.SOURCE.read_text()
    assert text.count(right) == 1
    (retried / "wrong.c").write_text(text.replace(right, wrong))
    monkeypatch.setattr(tree_attention, "SOURCE", retried / "wrong.c")
    warned: list[str] = []
    found = learner(warned, shared_prefix=True).native
    assert found == "what the C compiler made computes something else than PyTorch"
    assert len(warned) == 1 and "train.native=false" in warned[0]


def test_without_a_compiler_nothing_is_said_and_updates_do_without(
    retried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(retried / "nothing"))
    warned: list[str] = []
    without = learner(warned, shared_prefix=True)
    assert without.native == "there is no C compiler" and not warned
    assert without.update(make_batch(), 0).moved


@pytest.mark.parametrize(("march", "needs"), [("x86-64", ()), ("x86-64-v3", ("avx2",)), ("x86-64-v4", ("avx512_f",))])
@pytest.mark.usefixtures("retried")
def test_other_instructions_compute_the_same(
    march: str, needs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    has = torch.cpu.get_capabilities()
    if has["architecture"] != "x86_64" or not all(has.get(name) for name in needs):
        pytest.skip(f"this processor is not {march}")
    flags = tuple(flag.replace("march=native", f"march={march}") for flag in c_library.FLAGS)
    monkeypatch.setattr(c_library, "FLAGS", flags)
    trees = ((40, 30, 7), (33, 64), (5,))
    for dtype in (torch.float32, torch.bfloat16):
        for group, dim in ((2, 24), (3, 64), (1, 80)):
            runs = runs_of(trees, 2, group, dim, dtype)
            assert close(in_c(trees, runs, 0.125), by_hand(trees, runs, 0.125), dtype)
