"""A decode step's operations in C: each is its definition, a row's bits depend on nothing else, and without a working
compiler steps run in PyTorch's."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import made
import pytest
import torch
import torch.nn.functional as F
from small import make_engine, require_c, small_model, some_requests
from test_attention import CLOSE, Case
from test_learner import make_batch
from torch import Tensor

from grpo_cli.learner.learner import Learner
from grpo_cli.native import library as loader
from grpo_cli.native.library import WRONG, library
from grpo_cli.native.ops import draw, norm, rotate, silu, tree_attention_is_exact
from grpo_cli.settings import Sampling
from grpo_cli.support.meter import Meter
from grpo_cli.support.threads import computing_with

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def compiled() -> None:
    require_c("decode")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - wanted.double()).abs().max() <= CLOSE[dtype] * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("width", [8, 100, 576])
@pytest.mark.parametrize(("dtypes", "scale"), [("bbbb", 1.0), ("fbfb", 1.0), ("ffff, first", 1e-3)])
def test_norms_add_what_came_and_round_as_the_modules_do(width: int, dtypes: str, scale: float) -> None:
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
def test_rotation_is_that_of_complex_numbers_over_rows_that_lie_apart(dim: int, dtype: torch.dtype) -> None:
    all_heads = numbers(5, 7, dim, dtype=dtype)
    x, angle, before = all_heads[:, 1:4], numbers(5, dim // 2, seed=1), all_heads.clone()
    turn = torch.polar(torch.ones(5, 1, dim // 2).double(), angle[:, None].double())
    pairs = torch.complex(*x.double().chunk(2, -1)) * turn
    rotate(x, torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([-angle.sin(), angle.sin()], -1)[:, None])
    assert close(x, torch.cat([pairs.real, pairs.imag], -1), dtype)
    assert torch.equal(all_heads[:, 4:], before[:, 4:]) and torch.equal(all_heads[:, :1], before[:, :1])


def test_the_exponential_over_all_of_its_range() -> None:
    """Seen through SiLU: from where it is -0 to where it is the number itself, and where it is none."""
    gate = torch.cat([torch.linspace(-120, 120, 100_001), torch.tensor([torch.inf, torch.nan, 0.0])])[None]
    out, wanted = silu(gate, torch.ones_like(gate)), F.silu(gate.double())
    assert out[0, -2].isnan() and out[0, -3] == torch.inf
    error = (out[0, :-3] - wanted[0, :-3]).abs() / wanted[0, :-3].abs().clamp(min=1e-30)
    assert error[gate[0, :-3] > -80].max() < 4e-7
    assert out[0, :-3][gate[0, :-3] <= -80].abs().max() < 1e-30


@pytest.mark.parametrize("numbers_of", [(torch.nan, 1.0, 2.0), (torch.inf, 1.0, 2.0), (-torch.inf,) * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_from_what_is_no_distribution_ends_and_says_so(numbers_of: Any, temperature: float) -> None:
    logits = torch.tensor([numbers_of, (0.0, 3.0, 1.0)])
    tokens, logprobs = draw(logits, torch.tensor([0.5, 0.1], dtype=torch.float64), torch.full((2,), temperature))
    assert 0 <= int(tokens[0]) < 3 and not logprobs[0].isfinite()
    assert temperature or (int(tokens[1]), float(logprobs[1])) == (1, 0.0)


# ---- bits


def test_a_row_has_the_same_bits_alone_and_among_others_and_with_any_number_of_threads() -> None:
    case = Case([5, 31, 16, 90, 0, 40], [20, 48, 1], (2, 3, 64), torch.float32, 1)
    together = case.found("c")
    hidden, delta, by = numbers(300, 576), numbers(300, 576, seed=1), (numbers(576, seed=2), 1e-5)
    logits, uniform = numbers(9, 1000) * 3, torch.rand(9, dtype=torch.float64)
    normed = norm(hidden.clone(), delta, *by, torch.float32)
    drawn = draw(logits, uniform, torch.ones(9))
    for threads in (1, 2, 3):
        with computing_with(threads):
            assert torch.equal(case.found("c"), together)
            assert torch.equal(norm(hidden.clone(), delta, *by, torch.float32), normed)
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


def change(name: str, right: str, wrong: str) -> None:
    """Replace a place of a source, which is in it once."""
    source = loader.SOURCES / f"{name}.c"
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    library.cache_clear()


def compiler(script: str, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one on the path."""
    (anew / "bin").mkdir()
    (anew / "bin" / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (anew / "bin" / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(anew / "bin"))


def engine_says(warned: list[str]) -> Any:
    engine = make_engine(small_model(), warn=warned.append)
    assert len(list(engine.generate(some_requests(prompts=1, n=2, tokens=4)))) == 2
    return engine.facts()["native"]


def learner_says(warned: list[str], **train: Any) -> Any:
    settings = made.model(""), Sampling.plain(4), made.train(**train), made.optim()
    learner = Learner(small_model(), made.loss(), *settings, Meter(), warned.append)
    assert learner.update(make_batch(), 0).moved
    return learner.native


REFUSE = 'for word; do test "$word" = -fopenmp && echo "error: unsupported option" >&2 && exit 1; done'


def test_without_openmp_one_thread_is_used(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(f'{REFUSE}\nPATH="{os.environ["PATH"]}" exec {shutil.which("cc")} "$@"', anew, monkeypatch)
    warned: list[str] = []
    with computing_with(2):
        assert engine_says(warned) is True and not warned
    assert b"GOMP_parallel" not in Path(library("decode")._name).read_bytes()


@pytest.mark.parametrize("mode", [0o700, 0o722])
def test_a_library_that_others_could_have_written_is_made_again(mode: int, small: Path) -> None:
    library("small")
    (made,) = (small / "cache" / "grpo-cli").iterdir()
    number = made.stat().st_ino
    made.chmod(mode)
    library.cache_clear()
    library("small")
    (again,) = (small / "cache" / "grpo-cli").iterdir()
    assert (again.stat().st_ino == number) == (mode == 0o700) and stat.S_IMODE(again.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", ["relative", "another user's", "a file", "read-only"])
def test_where_no_library_can_be_kept_one_is_made_each_time(
    place: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small)
    if place == "relative":
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    elif place == "another user's":
        monkeypatch.setattr(loader.os, "getuid", lambda: os.stat(small).st_uid + 1)
    elif place == "a file":
        (small / "cache").write_text("not a folder")
    else:
        monkeypatch.setattr(loader.os, "access", lambda path, mode: mode != os.W_OK)
    library("small")
    assert not list(small.rglob("*.so"))


def test_two_processes_compile_at_once_and_an_interrupted_one_leaves_nothing_that_is_loaded(small: Path) -> None:
    set_up = f"l.FLAGS, l.SOURCES = {loader.FLAGS}, l.Path('{loader.SOURCES}')"
    compiling = f"from grpo_cli.native import library as l; {set_up}; print(l.library('small')._name)"
    (small / "cache" / "grpo-cli" / "tmp_of_one_that_was_killed").mkdir(parents=True, mode=0o700)
    (small / "cache" / "grpo-cli").chmod(0o700)
    command = [sys.executable, "-c", compiling]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert names == set(map(str, (small / "cache" / "grpo-cli").glob("*.so")))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "there is no C compiler"),
        ("echo 'decode.c:1: error: no such machine' >&2; exit 1", "cannot compile it: decode.c:1: error: no such m"),
        ("noexec", "cannot be loaded: failed to map segment"),
    ],
)
def test_a_compiler_that_fails_is_said_once(
    script: str | None, said: str, anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one that is not there. Updates do without, too."""
    if script == "noexec":
        monkeypatch.setattr(loader.ctypes, "CDLL", Mock(side_effect=OSError("failed to map segment")))
    elif script is None:
        monkeypatch.setenv("PATH", str(anew))
    else:
        compiler(script, anew, monkeypatch)
    for says, setting in ((engine_says, "engine.native=false"), (learner_says, "train.native=false")):
        warned: list[str] = []
        assert said.replace("decode.c", "") in says(warned).replace("decode.c", "")
        assert len(warned) == (script is not None) and all(said in w and setting in w for w in warned)


@pytest.mark.usefixtures("anew")
def test_functions_that_compute_something_else_are_not_used() -> None:
    warned = list[str]()
    change("tree", "(*grad - common)", "(*grad + common)")
    assert learner_says(warned) == WRONG
    assert len(warned) == 1 and "train.native=false" in warned[0]
