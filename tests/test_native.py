"""A decode step's operations in C: each is its definition, a row's bits depend on nothing else, and without a working
compiler steps run in PyTorch's."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import made
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small import make_engine, require_c, small_model, some_requests
from test_attention import CLOSE, Case
from test_learner import make_batch
from torch import Tensor

from grpo_cli.learner.learner import Learner
from grpo_cli.model import flash
from grpo_cli.native import library as loader
from grpo_cli.native import ops
from grpo_cli.native.library import WRONG, NoNative, library
from grpo_cli.native.ops import Trees, draw, flat, norm, rotate, silu, tree_attention, tree_attention_is_exact
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter
from grpo_cli.support.threads import computing_with


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - wanted.double()).abs().max() <= CLOSE[dtype] * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("width", [8, 100, 576])
@pytest.mark.parametrize(("dtypes", "scale"), [("bbbb", 1.0), ("fbfb", 1.0), ("ffff, first", 1e-3)])
def test_norms_add_what_came_and_round_as_the_modules_do(width, dtypes, scale):
    of = {"f": torch.float32, "b": torch.bfloat16}
    hidden, delta, weight, out = (of[letter] for letter in dtypes[:4])
    x, more = numbers(5, width, dtype=hidden) * scale, numbers(5, width, seed=1, dtype=delta) * scale
    by, first = 1 + numbers(width, seed=2, dtype=weight) / 4, dtypes.endswith("first")
    added = x.clone() if first else x + more
    found = norm(x, None if first else more, by, 1e-5, out)
    assert torch.equal(x, added)
    scaled = added.double() * (added.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert close(found, scaled.to(hidden).double() * by.double(), out)


@pytest.mark.parametrize(("dim", "dtype"), [(2, torch.float32), (24, torch.bfloat16), (128, torch.float32)])
def test_rotation_is_that_of_complex_numbers_over_rows_that_lie_apart(dim, dtype):
    all_heads = numbers(5, 7, dim, dtype=dtype)
    x, angle, before = all_heads[:, 1:4], numbers(5, dim // 2, seed=1), all_heads.clone()
    turn = torch.polar(torch.ones(5, 1, dim // 2).double(), angle[:, None].double())
    pairs = torch.complex(*x.double().chunk(2, -1)) * turn
    rotate(x, torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([-angle.sin(), angle.sin()], -1)[:, None])
    assert close(x, torch.cat([pairs.real, pairs.imag], -1), dtype)
    assert torch.equal(all_heads[:, 4:], before[:, 4:]) and torch.equal(all_heads[:, :1], before[:, :1])


def test_the_exponential_over_all_of_its_range():
    """Seen through SiLU: from where it is -0 to where it is the number itself, and where it is none."""
    gate = torch.cat([torch.linspace(-120, 120, 100_001), torch.tensor([torch.inf, torch.nan, 0.0])])[None]
    out, wanted = silu(gate, torch.ones_like(gate)), F.silu(gate.double())
    assert out[0, -2].isnan() and out[0, -3] == torch.inf
    error = (out[0, :-3] - wanted[0, :-3]).abs() / wanted[0, :-3].abs().clamp(min=1e-30)
    assert error[gate[0, :-3] > -80].max() < 4e-7
    assert out[0, :-3][gate[0, :-3] <= -80].abs().max() < 1e-30


@pytest.mark.parametrize("numbers_of", [(torch.nan, 1.0, 2.0), (torch.inf, 1.0, 2.0), (-torch.inf,) * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_from_what_is_no_distribution_ends_and_says_so(numbers_of, temperature):
    logits = torch.tensor([numbers_of, (0.0, 3.0, 1.0)])
    tokens, logprobs = draw(logits, torch.tensor([0.5, 0.1], dtype=torch.float64), torch.full((2,), temperature))
    assert 0 <= int(tokens[0]) < 3 and not logprobs[0].isfinite()
    assert temperature or (int(tokens[1]), float(logprobs[1])) == (1, 0.0)


def test_a_row_has_the_same_bits_alone_and_among_others_and_with_any_number_of_threads():
    case = Case([5, 31, 16, 90, 0, 40], [20, 48, 1], (2, 3, 64), torch.float32, 1)
    together = case.found("c")
    hidden, delta, by = numbers(300, 576), numbers(300, 576, seed=1), (numbers(576, seed=2), 1e-5)
    logits, uniform = numbers(9, 1000) * 3, torch.rand(9, dtype=torch.float64)
    normed = norm(hidden.clone(), delta, *by, torch.float32)
    drawn = draw(logits, uniform, torch.ones(9))
    for threads in (1, 3):
        with computing_with(threads):
            assert torch.equal(case.found("c"), together)
            for row in (0, 4, 8):
                one = hidden[row : row + 1].clone()
                assert torch.equal(norm(one, delta[row : row + 1], *by, torch.float32)[0], normed[row])
                alone = draw(logits[row : row + 1], uniform[row : row + 1], torch.ones(1))
                assert [x[0] for x in alone] == [x[row] for x in drawn]


# ---- where it cannot be made


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache and a copy of the sources, and after the test the library as it was."""
    before = library("decode")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "FLAGS", ("-O0", *loader.FLAGS[1:]))  # a second in place of ten
    monkeypatch.setattr(loader, "SOURCES", Path(shutil.copytree(loader.SOURCES, tmp_path / "sources")))
    library.cache_clear()
    tree_attention_is_exact.cache_clear()
    yield tmp_path
    library.cache_clear()
    tree_attention_is_exact.cache_clear()
    del before


@pytest.fixture
def small(anew: Path) -> Path:
    """A source that is quickly compiled, and starts threads."""
    text = "#include <stdint.h>\nvoid small(int64_t n) {\n#pragma omp parallel\n    n++;\n}\n"
    (loader.SOURCES / "small.c").write_text(text)
    return anew


def engine_says(warned: list[str]) -> Any:
    engine = make_engine(small_model(), warn=warned.append)
    assert len(list(engine.generate(some_requests(prompts=1, n=2, tokens=4)))) == 2
    return engine.facts()["native"]


def learner_says(warned: list[str], autocast: str = "none") -> Any:
    settings = made.model("", autocast=autocast), Sampling.plain(4), made.train(), made.optim()
    learner = Learner(small_model(), made.loss(), *settings, Meter(), warned.append)
    assert learner.update(make_batch(), 0).stepped
    return learner.native


@pytest.mark.parametrize("mode", [0o700, 0o722])
def test_a_library_that_others_could_have_written_is_made_again(mode, small):
    library("small")
    (made,) = (small / "cache" / "grpo-cli").iterdir()
    number = made.stat().st_ino
    made.chmod(mode)
    library.cache_clear()
    library("small")
    (again,) = (small / "cache" / "grpo-cli").iterdir()
    assert (again.stat().st_ino == number) == (mode == 0o700) and stat.S_IMODE(again.stat().st_mode) == 0o700


def test_in_another_users_folder_no_library_is_kept(small, monkeypatch):
    monkeypatch.setattr(loader.os, "getuid", lambda: os.stat(small).st_uid + 1)
    library("small")
    assert not list(small.rglob("*.so"))


def test_two_processes_compile_at_once_and_an_interrupted_one_leaves_nothing_that_is_loaded(small):
    """Neither compiles before both have begun."""
    cache, compiler = small / "cache" / "grpo-cli", small / "cc"
    cache.mkdir(parents=True, mode=0o700)
    (cache / "tmp_of_one_that_was_killed").mkdir()
    waiting = f"touch {small}/$PPID.begun; until [ $(ls {small}/*.begun | wc -l) = 2 ]; do sleep 0.1; done"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *small.c*) {waiting};; esac\nexec {shutil.which("cc")} "$@"\n')
    compiler.chmod(0o755)
    words = f"l.FLAGS, l.SOURCES, l.COMPILERS = {loader.FLAGS}, l.Path('{loader.SOURCES}'), ['{compiler}']"
    code = f"from grpo_cli.native import library as l; {words}; print(l.library('small')._name)"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (first, second), (kept,) = ([one.communicate()[0].strip() for one in both], cache.glob("*.so"))
    assert first == second == str(kept)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "there is no C compiler"),
        ("#!/bin/sh\necho 'error: no such machine' >&2; exit 1", "cannot compile it: error: no such machine"),
    ],
)
def test_a_compiler_that_fails_is_said_once(script, said, anew, monkeypatch):
    """But for one that is not there. Updates do without, too."""
    monkeypatch.setenv("PATH", str(anew))
    if script:
        (anew / "cc").write_text(script)
        (anew / "cc").chmod(0o755)
    for says, setting in ((engine_says, "engine.native=false"), (learner_says, "train.native=false")):
        warned: list[str] = []
        assert said in says(warned)
        assert len(warned) == (script is not None) and all(said in w and setting in w for w in warned)


def test_a_compiler_that_takes_too_long_is_not_waited_for_again(small, monkeypatch):
    monkeypatch.setenv("PATH", str(small), prepend=os.pathsep)
    monkeypatch.setattr(loader, "COMPILE_SECONDS", 0.5)
    for name in loader.COMPILERS:
        (small / name).write_text(f"#!/bin/sh\necho . >> {small}/calls\nexec sleep 60\n")
        (small / name).chmod(0o755)
    with pytest.raises(NoNative, match="timed out"):
        library("small")
    assert (small / "calls").read_text() == ".\n"


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("code", "wrong", "autocast"),
    [
        ("(*grad - common)", "(*grad + common)", "none"),
        (", *(const Vec *)(from", ", (float)(1 + of->bf16) * *(const Vec *)(from", "bfloat16"),
    ],
)
def test_functions_that_compute_something_else_are_not_used(code, wrong, autocast):
    source, warned = loader.SOURCES / "tree.c", list[str]()
    text = source.read_text()
    assert text.count(code) == 1
    source.write_text(text.replace(code, wrong))
    assert learner_says(warned, autocast) == WRONG
    assert len(warned) == 1 and "train.native=false" in warned[0]


# Attention of packed trees


UNEVEN = ((40, 30, 7), (33, 64), (5,))


@pytest.fixture(autouse=True)
def dirty_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of its threads holds NaN before it is used, none of which may reach a result."""
    for name in ("decode", "tree"):
        require_c(name)
    room = ops._scratch

    def dirty(*shapes: Any) -> Any:
        (scratch, *others) = room(*shapes)
        return scratch.fill_(torch.nan), *others

    monkeypatch.setattr(ops, "_scratch", dirty)


def runs_of(trees: Trees, heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and a gradient."""
    generator, tokens = torch.Generator().manual_seed(0), sum(map(sum, trees))
    return [torch.randn(tokens, count * heads, dim, generator=generator).to(dtype) for count in (group, 1, 1, group)]


def in_c(trees: Trees, runs: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The output, and gradients of queries, keys and values."""
    inputs = [x.clone().requires_grad_() for x in runs[:3]]
    out = tree_attention(*inputs, flat(trees), scale)[0]
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


def all_close(found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return all(close(one, other, dtype) for one, other in zip(found, wanted, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    trees=st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=4), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([1, 8, 24, 64, 80, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_c_and_the_reference_are_the_definition(trees, heads, group, dim, dtype):
    runs, scale = runs_of(trees, heads, group, dim, dtype), dim**-0.5
    wanted = by_hand(trees, runs, scale)
    assert all_close(in_c(trees, runs, scale), wanted, dtype)
    inputs = [x.clone().requires_grad_() for x in runs[:3]]
    out = ops.reference(*inputs, trees, scale)
    assert all_close([out.detach(), *torch.autograd.grad(out, inputs, runs[3])], wanted, dtype)


def written_out(q: Tensor, k: Tensor, at: flash.Spans, scale: float) -> Iterator[tuple[slice, slice, Tensor]]:
    """The scores of each span, as the flash kernel takes them."""
    ends = list(zip(at.queries.tolist(), at.keys.tolist(), strict=True))
    for (q0, k0), (q1, k1) in zip(ends, ends[1:], strict=False):
        assert 0 < q1 - q0 <= at.most_queries and 0 < k1 - k0 <= at.most_keys
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k1 - k0 - q1 + q0)
        yield slice(q0, q1), slice(k0, k1), scores.masked_fill(later, -torch.inf) if at.causal else scores


def kernel_forward(q: Tensor, k: Tensor, v: Tensor, at: flash.Spans, scale: float) -> Any:
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
    for qs, ks, scores in written_out(q, k, at, scale):
        lse[:, qs] = scores.logsumexp(-1)
        out[qs] = mixed(scores.softmax(-1), v[ks])
    return out, lse


def mixed(shares: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(len(shares) // v.shape[1], 1))


def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: flash.Spans, scale: float
) -> Any:
    """By autograd, with the sums of exponentials of all calls as constants, whose gradient is that of `out`'s share."""
    assert lse.is_contiguous(), "kernels read it as if it were"
    q, k, v = inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    total = torch.zeros(())
    for qs, ks, scores in written_out(q, k, at, scale):
        shares, of_sums = (scores - lse[:, qs, None]).exp(), (grad[qs] * out[qs]).sum(-1).t()
        total = total + (grad[qs] * mixed(shares, v[ks])).sum() - (of_sums * shares.sum(-1)).sum()
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("trees", [UNEVEN, ((7,), (3,)), ((6, 14, 10),)], ids=["trees", "sequences", "one tree"])
def test_two_calls_of_a_flash_kernel_are_merged_to_the_definition(trees, monkeypatch):
    monkeypatch.setattr(flash, "_forward", kernel_forward)
    monkeypatch.setattr(flash, "_backward", kernel_backward)
    q, k, v, grad = runs = runs_of(trees, 2, 3, 16)
    out, logs = flash.forward(q, k, v, flat(trees), 0.25)
    found = [out, *flash.backward(grad, q, k, v, out, logs, flat(trees), 0.25)]
    assert all_close(found, by_hand(trees, runs, 0.25), torch.float32)


def test_long_sequences_and_large_scores_are_right_too():
    """Scores of some hundreds, whose exponentials are no numbers."""
    trees = ((900, 300, 5), (1300,))
    runs = runs_of(trees, 1, 2, 64)
    assert all_close(in_c(trees, runs, 0.125), by_hand(trees, runs, 0.125), torch.float32)
    runs[0] *= 30
    found, wanted = in_c(trees, runs, 1.0), by_hand(trees, runs, 1.0)
    assert float(runs[0].abs().max()) > 100 and all(bool(x.isfinite().all()) for x in found)
    assert float((found[0].double() - wanted[0]).abs().max()) < 1e-3


def test_no_bit_depends_on_threads_or_on_other_trees():
    runs = runs_of(UNEVEN, 3, 3, 64)
    together = in_c(UNEVEN, runs, 0.125)
    for threads in (1, 2, 3, 8):
        with computing_with(threads):
            assert all(map(torch.equal, in_c(UNEVEN, runs, 0.125), together))
    first = [x[:77] for x in runs]
    assert all(torch.equal(a, b[:77]) for a, b in zip(in_c(UNEVEN[:1], first, 0.125), together, strict=True))


def test_what_is_not_a_number_stays_so():
    runs = runs_of([(3, 2, 2)], 1, 1, 8)
    runs[0][4, 0, 0] = torch.nan  # a query of the first branch
    out, dq, dk, _ = in_c([(3, 2, 2)], runs, 1.0)
    hurt = out.isnan().any(-1).flatten().tolist()
    assert hurt == [False, False, False, False, True, False, False]
    assert bool(dq[4].isnan().any()) and bool(dk[0].isnan().any()) and not bool(dk[5:].isnan().any())
