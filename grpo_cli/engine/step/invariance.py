"""Tests whether the bits of a row of a decode step depend on its batch, and finds the padding with which they do not.

The bits of a row of a float32 product depend on the kernel, which the library chooses by the numbers of rows, columns
and threads and by the processor. MKL documents a mode in which they do not matter (`processor.py`), on Intel
processors; other libraries are consistent only from some number of rows on, or in multiples of one. So before the first
rollout the model's own first block and head are computed in many batch compositions, and the least padding is chosen
with which one row's bits are the same in all of them. The test runs what decoding runs, not single products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.kv.cache import BLOCK, PagedCache
from grpo_cli.engine.step.decoder import Decoder, Padding
from grpo_cli.engine.step.rows import Rows
from grpo_cli.engine.step.sample import draw, drawing_of
from grpo_cli.native.library import library
from grpo_cli.settings import Sampling

# Numbers of rows to test: all small ones, where kernels change, and some large ones, where work is divided differently.
# Fewer for a block with so many weights that the largest would take seconds.
ROWS = (*range(1, 34), 63, 100, 257, 512)
WORK, LEAST_OF_ROWS = 2**32, 128
HEAD_ROWS = 32  # the head is as large as several blocks


@dataclass(frozen=True)
class Invariance:
    """`holds`: with this padding a row's bits were the same in every batch tested. `packed`: with packed copies of the
    weights, which are not used if bits hold only without them."""

    padding: Padding
    holds: bool
    packed: bool


_FOUND: dict[tuple[Any, ...], Invariance] = {}
_SAME: dict[tuple[Any, ...], bool] = {}


def invariance_of(decoder: Decoder) -> Invariance:
    """The padding for this model on this machine: takes 0.05 s for the embedded model, 0.4 s at hidden size 576, and is
    cached by shapes and threads. Only float32 on a CPU is tested; elsewhere nothing is promised."""
    packed = decoder.packs
    if not decoder.promises_bits:
        return Invariance(Padding(), False, packed)
    found = _found(decoder)
    if packed and not found.holds:
        other = _found(decoder.may_pack(False))
        return other if other.holds else found
    return found


def _found(decoder: Decoder) -> Invariance:
    threads, packed = torch.get_num_threads(), decoder.packs
    asked = (threads, packed, decoder.is_native, *_shapes(decoder))
    if asked not in _FOUND:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            _FOUND[asked] = _try_out(decoder.of_one_block().in_its_precision(), packed, threads)
    return _FOUND[asked]


def _shapes(decoder: Decoder) -> tuple[Any, ...]:
    return decoder.group, decoder.dim, decoder.vocabulary, *decoder.weight_shapes()


def _try_out(decoder: Decoder, packed: bool, threads: int) -> Invariance:
    rows = next((r for r in _row_paddings(threads) if _rows_agree(decoder.padded(Padding(*r)))), None)
    return Invariance(Padding(*(rows or (1, 8 * threads))), rows is not None, packed)


def _row_paddings(threads: int) -> Iterator[tuple[int, int]]:
    """(multiple, least), the cheapest first. A single row would be a matrix-vector product everywhere."""
    yield 1, 2
    for multiple in (4, 8, 16):
        yield multiple, multiple
    for multiple in (1, 8, 16, 32):  # per thread, since products are divided by rows
        yield multiple, max(multiple, 8) * threads


def _rows_agree(decoder: Decoder) -> bool:
    """Whether a block, the last norm and the head give the first rows the same bits, however many follow."""
    most = min(max(WORK // _block_weights(decoder), LEAST_OF_ROWS), ROWS[-1])
    counts = [*ROWS, *(decoder.padding.least + count for count in ROWS[:33])]
    sizes = sorted({size for count in counts if (size := decoder.padding.padded_rows(count)) <= most})
    tokens = torch.randint(decoder.vocabulary, (most,), generator=torch.Generator().manual_seed(0))
    reference = hidden_of_block(decoder, tokens)
    few = reference[:HEAD_ROWS]
    logits = decoder.logits(few)
    if not all(torch.equal(hidden_of_block(decoder, tokens[:size]), reference[:size]) for size in sizes):
        return False
    return all(torch.equal(decoder.logits(few[:count]), logits[:count]) for count in (1, 2, 3, 9, 17))


def _block_weights(decoder: Decoder) -> int:
    return sum(math.prod(shape) for shape in decoder.weight_shapes())


def hidden_of_block(decoder: Decoder, tokens: Tensor) -> Float[Tensor, "N H"]:
    """The block with attention replaced by a function of each row's own query, key and value."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q + (k + v).repeat_interleave(decoder.group, dim=1)).flatten(1)

    return decoder.blocks(tokens, torch.arange(len(tokens)) % 64, attend)


def computes_the_same(decoder: Decoder, plain: Decoder) -> bool:
    """True if a decoder whose small operations run in C finds what one without finds, but for rounding. Found once for
    the same shapes, precision and library."""
    asked = (library("decode"), decoder.layout().dtype, decoder.dtype, decoder.is_native, *_shapes(decoder))
    if asked not in _SAME:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = zip(*(_found_by(one.of_one_block().in_its_precision()) for one in (decoder, plain)), strict=True)
            most = 1e-4 if decoder.layout().dtype == torch.float32 else 0.05
            _SAME[asked] = all(bool((one - other).abs().max() <= most * other.abs().max()) for one, other in found)
    return _SAME[asked]


def _found_by(decoder: Decoder) -> list[Tensor]:
    """A block's output, the log-probabilities of the tokens that are drawn, and attention over two blocks of each."""
    count, layout = 9, decoder.layout()
    hidden = hidden_of_block(decoder, torch.arange(count) % decoder.vocabulary)
    cache, numbers = PagedCache(layout, 4 * count, decoder.device), torch.Generator().manual_seed(1)
    for memory in cache.memory:
        memory.copy_(torch.randn(memory.shape, generator=numbers))
    own, prompt = torch.arange(4 * count).view(2, count, 2)
    some, by = torch.full((count,), BLOCK + 5), drawing_of([Sampling.plain(1)] * count, decoder.device)
    uniform = torch.rand(count, generator=numbers, dtype=torch.float64)
    rows = Rows(
        some, some, some, own[:, 1], some, some, uniform, own, prompt, replace(by, natively=decoder.is_native[0])
    )
    heads = (layout.heads * layout.group, layout.heads, layout.heads)
    asked = (torch.randn(count, n, layout.dim, generator=numbers).to(layout.dtype) for n in heads)
    attended, _ = decoder.attention(rows, cache)(0, *asked)
    logits = torch.randn(count, 99, generator=numbers)
    return [hidden.float(), attended.float(), draw(logits, uniform, rows.drawing)[1]]


def rounding_warning(found: Invariance, threads: int) -> str:
    """What it means for a run that bits depend on the batch."""
    return (
        f"float32 products depend on the number of rows here ({threads} threads), even padded to "
        f"{found.padding.least} rows: a rollout is the same to rounding only, and not bit for bit, under another "
        "sampler, scheduler or number of slots (engine.invariant in summary.json). Resuming and repeating a run are "
        "not affected"
    )
