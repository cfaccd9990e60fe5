"""A decode step's small operations in C: each is its definition, a row's bits depend on nothing else, and where they
cannot be made steps run without."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import contents, make_engine, small_model, some_requests
from torch import Tensor

from grpo_cli.engine.step import native
from grpo_cli.engine.step.block import Norm
from grpo_cli.support import c_library
from grpo_cli.support.c_library import NoNative
from grpo_cli.support.threads import computing_with

CPU = torch.device("cpu")
# By dtype, of the largest number: what is lost by computing in another order, and by rounding once to it.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        native.library()
    except NoNative as error:
        pytest.skip(str(error))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - wanted.double()).abs().max() <= CLOSE[dtype] * max(1.0, wanted.abs().max().item()))


# ---- the other functions


@pytest.mark.parametrize("width", [8, 96, 100, 576])
@pytest.mark.parametrize("dtypes", ["ffff", "bbbb", "fbfb", "ffff, first"])
def test_norms_add_what_came_and_round_as_the_modules_do(width: int, dtypes: str) -> None:
    of = {"f": torch.float32, "b": torch.bfloat16}
    hidden, delta, weight, out = (of[letter] for letter in dtypes[:4])
    x, more = numbers(5, width, dtype=hidden), numbers(5, width, seed=1, dtype=delta)
    by = Norm(1 + numbers(width, seed=2, dtype=weight) / 4, 1e-5)
    first = dtypes.endswith("first")
    added = x.clone() if first else x + more
    found = native.norm(x, None if first else more, by, out)
    assert torch.equal(x, added)
    scaled = added.double() * (added.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert close(found, scaled.to(hidden).double() * by.weight.double(), out)


def test_a_norm_of_bfloat16_is_rounded_twice_as_in_the_modules() -> None:
    """So nearly all of its bits are theirs; rounded once, every fourth number would be another."""
    x, more, weight = (numbers(50, 576, seed=i, dtype=torch.bfloat16) for i in (0, 1, 2))
    added = x + more
    root = added.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    wanted = (added.float() * root).bfloat16() * weight[0]
    found = native.norm(x, more, Norm(weight[0], 1e-5), torch.bfloat16)
    assert (found == wanted).float().mean() > 0.99


def test_epsilon_counts_where_numbers_are_small() -> None:
    x = numbers(5, 96) * 1e-3
    wanted = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert close(native.norm(x, None, Norm(torch.ones(96), 1e-5), torch.float32), wanted, torch.float32)


@pytest.mark.parametrize("dim", [2, 24, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_pairs_of_numbers(dim: int, dtype: torch.dtype) -> None:
    """As of complex numbers, over rows that lie apart."""
    all_heads = numbers(5, 7, dim, dtype=dtype)
    x, angle = all_heads[:, 1:4], numbers(5, dim // 2, seed=1)
    turn = torch.polar(torch.ones(5, 1, dim // 2).double(), angle[:, None].double())
    pairs = torch.complex(*x.double().chunk(2, -1)) * turn
    others = all_heads[:, 4:].clone()
    cos = torch.cat([angle.cos(), angle.cos()], -1)[:, None]
    sin = torch.cat([-angle.sin(), angle.sin()], -1)[:, None]
    before = all_heads[:, :1].clone()
    native.rotate(x, cos, sin)
    assert close(x, torch.cat([pairs.real, pairs.imag], -1), dtype)
    assert torch.equal(all_heads[:, 4:], others) and torch.equal(all_heads[:, :1], before)


def test_the_exponential_over_all_of_its_range() -> None:
    """Seen through SiLU: from where it is -0 to where it is the number itself, and where it is none."""
    gate = torch.cat([torch.linspace(-120, 120, 100_001), torch.tensor([torch.inf, torch.nan, 0.0])])[None]
    out = torch.empty_like(gate)
    up = torch.ones_like(gate)
    native.library().silu(*gate.shape, gate.data_ptr(), up.data_ptr(), gate.shape[1], 0, out.data_ptr())
    wanted = F.silu(gate.double())
    assert out[0, -2].isnan() and out[0, -3] == torch.inf
    error = (out[0, :-3] - wanted[0, :-3]).abs() / wanted[0, :-3].abs().clamp(min=1e-30)
    assert error[gate[0, :-3] > -80].max() < 4e-7
    assert out[0, :-3][gate[0, :-3] <= -80].abs().max() < 1e-30


def test_logits_that_are_all_far_below_zero_are_drawn_from_as_any() -> None:
    """23 of them, which is not a multiple of what is read at a time."""
    logits = numbers(50, 23) * 3
    uniform = torch.rand(50, dtype=torch.float64)
    tokens, logprobs = native.draw(logits - 300, uniform, torch.ones(50))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("numbers_of", [(torch.nan, 1.0, 2.0), (torch.inf, 1.0, 2.0), (-torch.inf,) * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_from_what_is_no_distribution_ends_and_says_so(numbers_of: Any, temperature: float) -> None:
    logits = torch.tensor([numbers_of, (0.0, 3.0, 1.0)])
    tokens, logprobs = native.draw(logits, torch.tensor([0.5, 0.1], dtype=torch.float64), torch.full((2,), temperature))
    assert 0 <= int(tokens[0]) < 3 and not logprobs[0].isfinite()
    assert temperature or (int(tokens[1]), float(logprobs[1])) == (1, 0.0)


# ---- bits


def test_a_row_has_the_same_bits_alone_and_among_others_and_with_any_number_of_threads() -> None:
    case = Case(9, 2, 3, 64, torch.float32, 32, 32, 1)
    together = case.found()
    hidden, delta, by = numbers(300, 576), numbers(300, 576, seed=1), Norm(numbers(576, seed=2), 1e-5)
    logits, uniform = numbers(9, 1000) * 3, torch.rand(9, dtype=torch.float64)
    normed = native.norm(hidden.clone(), delta, by, torch.float32)
    drawn = native.draw(logits, uniform, torch.ones(9))
    for threads in (1, 2, 3):
        with computing_with(threads):
            assert torch.equal(case.found(), together)
            assert torch.equal(native.norm(hidden.clone(), delta, by, torch.float32), normed)
            for row in (0, 4, 8):
                one = hidden[row : row + 1].clone()
                assert torch.equal(native.norm(one, delta[row : row + 1], by, torch.float32)[0], normed[row])
                alone = native.draw(logits[row : row + 1], uniform[row : row + 1], torch.ones(1))
                assert [x[0] for x in alone] == [x[row] for x in drawn]


def test_rollouts_are_those_of_pytorchs_operations_but_for_rounding() -> None:
    model, requests = small_model(), some_requests(prompts=3, n=4, tokens=40)
    ours, plain = (make_engine(model, native=native) for native in (True, False))
    mine, theirs = contents(ours.generate(requests)), contents(plain.generate(requests))
    assert (ours.facts()["native"], plain.facts()["native"]) == (True, False)
    assert {key: one[0] for key, one in mine.items()} == {key: one[0] for key, one in theirs.items()}
    for key, (_, logprobs, _) in mine.items():
        assert logprobs == pytest.approx(theirs[key][1], abs=2e-4)
    assert mine != theirs, "they are made in two ways"


# ---- where it cannot be made


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and after the test the library as it was."""
    before = native.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    c_library.library.cache_clear()
    yield tmp_path
    c_library.library.cache_clear()
    del before


def compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one on the path."""
    folder.mkdir(exist_ok=True)
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def engine_says(warned: list[str]) -> Any:
    engine = make_engine(small_model(), warn=warned.append)
    assert len(list(engine.generate(some_requests(prompts=1, n=2, tokens=4)))) == 2
    return engine.facts()["native"]


@pytest.mark.parametrize(("march", "needs"), [("x86-64", ()), ("x86-64-v3", ("avx2",)), ("x86-64-v4", ("avx512_f",))])
def test_other_instructions_compute_the_same(
    anew: Path, monkeypatch: pytest.MonkeyPatch, march: str, needs: tuple[str, ...]
) -> None:
    has = torch.cpu.get_capabilities()
    if has["architecture"] != "x86_64" or not all(has.get(name) for name in needs):
        pytest.skip(f"this processor is not {march}")
    monkeypatch.setattr(
        c_library, "FLAGS", tuple(flag.replace("march=native", f"march={march}") for flag in c_library.FLAGS)
    )
    for dtype in (torch.float32, torch.bfloat16):
        for dim, group in ((24, 2), (64, 3), (64, 7), (128, 4), (96, 1)):
            case = Case(5, 2, group, dim, dtype, 32, 48, dim + group)
            wanted = case.wanted()
            assert close(case.found(), wanted, dtype)
        x, by = numbers(3, 100, dtype=dtype), Norm(1 + numbers(100, seed=2, dtype=dtype) / 4, 1e-5)
        scaled = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        assert close(native.norm(x, None, by, dtype), scaled.to(dtype).double() * by.weight.double(), dtype)
    logits = numbers(9, 1000) * 3
    tokens, logprobs = native.draw(logits, torch.rand(9, dtype=torch.float64), torch.ones(9))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)


def symbols() -> bytes:
    return Path(native.library()._name).read_bytes()


def serves_with_one_thread() -> None:
    """An engine with two threads uses what was made, which starts none of its own."""
    warned: list[str] = []
    with computing_with(2):
        assert engine_says(warned) is True and not warned
    assert b"GOMP_parallel" not in symbols()


def test_other_threads_than_pytorchs_are_not_used(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second OpenMP, which knows nothing of `torch.set_num_threads`."""
    assert b"GOMP_parallel" in symbols()
    source = anew / "other.c"
    source.write_text(native.SOURCE.read_text() + "\nint omp_get_max_threads(void) { return 7; }\n")
    monkeypatch.setattr(native, "SOURCE", source)
    c_library.library.cache_clear()
    serves_with_one_thread()


def test_a_compiler_without_openmp_makes_it_for_one_thread(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = 'for word; do test "$word" = -fopenmp && echo "error: unsupported option" >&2 && exit 1; done'
    real = f'PATH="{os.environ["PATH"]}" exec {shutil.which("cc")} "$@"'
    compiler(anew / "bin", f"{refuse}\n{real}", monkeypatch)
    serves_with_one_thread()


def test_it_is_compiled_once(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()
    (made,) = (anew / "cache" / "grpo-cli").iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    monkeypatch.setattr(c_library, "_keep", lambda *_: pytest.fail("it was there"))
    c_library.library.cache_clear()
    native.library()


@pytest.mark.parametrize(
    ("damage", "mode"),
    [
        (lambda whole: whole, 0o722),  # others could have written it
        (lambda whole: b"anything", 0o700),
        (lambda whole: b"", 0o700),
        (lambda whole: whole[: len(whole) // 2], 0o700),  # a bus error if it is loaded
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), 0o700),
    ],
)
def test_a_library_that_is_not_as_it_was_made_is_made_anew(
    anew: Path, damage: Callable[[bytes], bytes], mode: int
) -> None:
    native.library()
    (made,) = (anew / "cache" / "grpo-cli").iterdir()
    whole = made.read_bytes()
    made.unlink()  # what is loaded stays what it is
    made.write_bytes(damage(whole))
    made.chmod(mode)
    c_library.library.cache_clear()
    native.library()
    assert made.read_bytes() == whole and stat.S_IMODE(made.stat().st_mode) == 0o700


def test_no_library_is_kept_in_the_current_folder_or_below_another_users(
    anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(anew)
    with monkeypatch.context() as relative:
        relative.setenv("XDG_CACHE_HOME", "cache")
        native.library()
    c_library.library.cache_clear()
    monkeypatch.setattr(c_library.os, "getuid", lambda: os.stat(anew).st_uid + 1)
    native.library()
    assert [*anew.iterdir()] == []


def test_a_cache_that_cannot_be_written_is_done_without(anew: Path) -> None:
    (anew / "cache").write_text("not a folder")
    native.library()


def test_without_a_compiler_steps_run_in_pytorchs_operations(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(anew))
    warned: list[str] = []
    assert engine_says(warned) == "there is no C compiler" and warned == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'native.c:1: error: no such machine' >&2; exit 1",
            "cannot compile it: native.c:1: error: no such machine",
        ),
        ("exit 0", "made cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_said(anew: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str) -> None:
    compiler(anew / "bin", script, monkeypatch)
    warned: list[str] = []
    assert said in engine_says(warned)
    assert len(warned) == 1 and said in warned[0] and "engine.native=false" in warned[0]
