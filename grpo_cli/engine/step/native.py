"""A decode step on a CPU around its products, in C (`native.c`): a few calls for each layer in place of some forty.

The C file is compiled by the machine's compiler when an engine first needs it, which takes four seconds, and kept in
the user's cache under a name that says what it was made from: source, compiler and processor. Without a compiler, or
where the functions compute anything else than PyTorch does, steps run in PyTorch's operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.gpu.compiled import Functions
from grpo_cli.engine.gpu.flash import join
from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.rows import Rows, Watch
from grpo_cli.engine.kv.tiles import Pieces
from grpo_cli.engine.step.block import Block, Norm, is_silu
from grpo_cli.engine.step.weights import Split

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
THREADS = "-fopenmp"
MOST_DIM = 256  # numbers of a head, as in native.c
PRECISIONS = (torch.float32, torch.bfloat16)


class NoNative(Exception):
    """Why steps run in PyTorch's operations; `is_fault`: though there is a C compiler."""

    def __init__(self, reason: str, is_fault: bool = True) -> None:
        super().__init__(reason)
        self.is_fault = is_fault


@cache
def library() -> ctypes.CDLL:
    """The functions of native.c, by the first compiler whose work serves. NoNative where there are none. A compiler
    without OpenMP, or with another than PyTorch's, makes them for one thread."""
    reason = NoNative("there is no C compiler", is_fault=False)
    compilers = [*filter(None, map(shutil.which, COMPILERS))] if os.name == "posix" else []
    for threads, compiler in product((True, False), compilers):
        try:
            return _made_by(compiler, threads)
        except NoNative as error:
            reason = error
    raise reason


def _made_by(compiler: str, threads: bool) -> ctypes.CDLL:
    source, flags = SOURCE.read_text(encoding="utf-8"), (*FLAGS, *([THREADS] * threads))
    # What the compiler predefines says which compiler it is, and which instructions this processor has.
    defined = _run(compiler, *FLAGS[:2], "-dM", "-E", "-x", "c", os.devnull)
    made_from = hashlib.sha256("\0".join([source, *flags, defined]).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "grpo-cli"
    kept = folder / f"native-{made_from[:32]}.so"
    try:
        if _is_ours(kept):
            made = ctypes.CDLL(str(kept))
        else:
            with tempfile.TemporaryDirectory() as place:
                new = Path(place) / kept.name
                _run(compiler, *flags, "-o", str(new), str(SOURCE), "-lm")
                made = ctypes.CDLL(str(kept if _keep(new, kept) else new))
    except OSError as error:
        raise NoNative(f"what {compiler} made cannot be loaded: {error}") from error
    if threads and not _has_our_threads(made):
        raise NoNative(f"the OpenMP of {compiler} is not PyTorch's, whose number of threads would not hold")
    kinds = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
    for name, arguments in re.findall(r"^void (\w+)\(([^)]*)\) \{", source, re.MULTILINE):
        function, words = getattr(made, name), [argument.split() for argument in arguments.split(",")]
        function.argtypes = [ctypes.c_void_p if "*" in " ".join(word) else kinds[word[0]] for word in words]
        function.restype = None
    return made


def _has_our_threads(made: ctypes.CDLL) -> bool:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        return bool(made.omp_get_max_threads() == threads + 1)
    finally:
        torch.set_num_threads(threads)


def _keep(new: Path, kept: Path) -> bool:
    """Whether a copy could be kept; else it is made again next time."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(kept.parent):
            return False
        here = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(new, here)
        here.chmod(0o700)
        here.replace(kept)
    except OSError:
        return False
    return True


def _is_ours(path: Path) -> bool:
    """Whether it exists and nobody else could have written it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=120).stdout
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip())
        raise NoNative(f"{command[0]} cannot compile it: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNative(f"{command[0]} cannot compile it: {error}") from error


def _half(x: Tensor) -> int:
    assert x.dtype in PRECISIONS, "float32 or bfloat16"
    return x.dtype == torch.bfloat16


def norm(
    hidden: Float[Tensor, "N H"], delta: Float[Tensor, "N H"] | None, by: Norm, dtype: torch.dtype
) -> Float[Tensor, "N H"]:
    """Add `delta` to `hidden`, in place, and return its norm."""
    out = torch.empty(hidden.shape, dtype=dtype)
    added = (0, 0) if delta is None else (delta.data_ptr(), _half(delta))
    weight = by.weight.data_ptr(), _half(by.weight), by.epsilon
    library().norm(*hidden.shape, hidden.data_ptr(), _half(hidden), *added, *weight, out.data_ptr(), _half(out))
    return out


def rotate(x: Float[Tensor, "N heads D"], cos: Float[Tensor, "N 1 D"], sin: Float[Tensor, "N 1 D"]) -> None:
    """Rotary position embedding in place, as `block.rotate`."""
    of = x.data_ptr(), x.stride(0), _half(x), cos.data_ptr(), sin.data_ptr(), _half(cos)
    library().rotate(*x.shape, *of)


# A layer's input, and what is still to be added to it.
Sum = tuple[Float[Tensor, "N H"], Float[Tensor, "N H"] | None]


def before(
    block: Block, hidden: Tensor | Sum, cos: Tensor, sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As `before_attention`; adds up the sum in place."""
    hidden, delta = _parts(hidden)
    x, dim = norm(hidden, delta, block.input_norm, dtype), cos.shape[-1]
    if type(block.qkv) is Split and block.q_norm is None:
        together = block.qkv.product(x).view(len(x), -1, dim)
        q, k, v = together.split([size // dim for size in block.qkv.sizes], 1)
        rotate(together[:, : q.shape[1] + k.shape[1]], cos, sin)
        return q, k, v
    q, k, v = (each.view(len(x), -1, dim) for each in block.qkv(x))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q).to(v.dtype), block.k_norm(k).to(v.dtype)
    for each in (q, k):
        rotate(each, cos, sin)
    return q, k, v


def after(block: Block, hidden: Tensor | Sum, attended: Tensor, dtype: torch.dtype) -> Sum:
    """As `after_attention`, over the memory of `hidden`."""
    hidden, _ = _parts(hidden)
    gate, up = block.gate_up(norm(hidden, block.o_proj(attended), block.post_norm, dtype))
    gated = torch.empty(gate.shape, dtype=gate.dtype)
    where = gate.data_ptr(), up.data_ptr(), gate.stride(0), _half(gate), gated.data_ptr()
    library().silu(*gate.shape, *where)
    return hidden, block.down_proj(gated)


def last(by: Norm, hidden: Tensor | Sum) -> Float[Tensor, "N H"]:
    x, delta = _parts(hidden)
    return norm(x, delta, by, x.dtype)


def _parts(hidden: Tensor | Sum) -> Sum:
    return hidden if isinstance(hidden, tuple) else (hidden, None)


def serves(block: Block, last: Any) -> bool:
    """Whether all of a model with such blocks can run here."""
    norms = [block.input_norm, block.post_norm, last]
    return all(type(norm) is Norm for norm in norms) and is_silu(block.activation)


FUNCTIONS = Functions(before, after, join, last)


class NativeAttention:
    """As `StepAttention`, for a step of whose attention only the queries are watched."""

    def __init__(self, rows: Rows, kv: KvArena, group: int, scale: float, watch: Watch) -> None:
        own, prompt, layout = rows.own, rows.prompt, kv.layout
        assert isinstance(own, Pieces) and isinstance(prompt, Pieces), "the layout is not by token"
        count, self._dtype, self._scale = len(rows.tokens), layout.dtype, scale
        self._shape = count, layout.heads * group * layout.dim
        pages, of_prompt = own.pages, prompt.pages
        held, seen = (pages, rows.lengths, rows.write_to.contiguous()), (of_prompt, prompt.seen)
        of = [count, layout.heads, group, layout.dim, layout.dtype == torch.bfloat16]
        of += [*(x.data_ptr() for x in held), pages.shape[1], kv.rows.tokens]
        of += [*(x.data_ptr() for x in seen), of_prompt.shape[1], kv.prompts.tokens]
        self._kept = held, seen  # for as long as their addresses are used
        self._see = watch.see
        self._step = (ctypes.c_int64 * len(of))(*of)
        by_layer = zip(kv.row_keys, kv.row_values, kv.prompt_keys, kv.prompt_values, strict=True)
        self._pages = [[views.data_ptr() for views in layer] for layer in by_layer]
        watch.prepare(rows)

    def __call__(
        self, layer: int, q: Float[Tensor, "R HG D"], k: Float[Tensor, "R H D"], v: Float[Tensor, "R H D"]
    ) -> Float[Tensor, "R HGD"]:
        dtype = self._dtype
        if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out = torch.empty(self._shape, dtype=dtype)
        asked = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        library().attend(self._step, self._scale, *asked, *self._pages[layer], out.data_ptr())
        self._see(layer, q, None)
        return out


def draw(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], temperature: Float[Tensor, "R"]
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """As `SamplingTable.draw`, without truncation."""
    logits, uniform = logits.contiguous(), uniform.contiguous()
    assert uniform.dtype == torch.float64 and temperature.dtype == torch.float32, "as they are drawn and kept"
    tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
    of = logits.data_ptr(), _half(logits), temperature.data_ptr(), uniform.data_ptr()
    library().draw(*logits.shape, *of, tokens.data_ptr(), logprobs.data_ptr())
    return tokens, logprobs
