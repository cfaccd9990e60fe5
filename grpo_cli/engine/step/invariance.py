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

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.kv.cache import KvArena, Region
from grpo_cli.engine.kv.keeper import KeepAll
from grpo_cli.engine.kv.padding import Padding, unpadded
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.engine.kv.tiles import PromptPages, own_pieces, prompt_pieces
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.native import ops
from grpo_cli.native.library import library

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
        return Invariance(unpadded(decoder.group, decoder.dim), False, packed)
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
    plain = unpadded(decoder.group, decoder.dim)
    rows = next((r for r in _row_paddings(threads) if _rows_agree(decoder.padded(Padding(*r)))), None)
    multiple, least = rows or (1, 8 * threads)
    return Invariance(replace(plain, rows=multiple, least=least), rows is not None, packed)


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


@dataclass(frozen=True)
class _Batch:
    """A batch around the tested row: its position, the numbers of rows and prompts, and widths in tiles."""

    rows: int
    place: int
    prompts: int
    own_tiles: int
    prompt_tiles: int


class _Trial:
    """One row with a query, keys of its own and a prompt, to be computed in many batches."""

    OWN, PROMPT = 9, 11  # keys, fewer than a tile

    def __init__(self, decoder: Decoder, padding: Padding) -> None:
        self._decoder, self._padding = decoder, padding
        self._layout = decoder.layout()
        generator = torch.Generator().manual_seed(1)
        heads, dim, group = self._layout.heads, self._layout.dim, decoder.group

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self._query, self._key, self._value = drawn(heads * group, dim), drawn(heads, dim), drawn(heads, dim)
        self._noise = drawn(2, heads, 8 * max(padding.slot_tile, padding.prompt_tile), dim)
        self._own = drawn(2, heads, self.OWN, dim)
        self._prompt = drawn(2, heads, self.PROMPT, dim)

    def attended(self, batch: _Batch) -> Float[Tensor, "HGD"]:
        """The tested row's attention, with a page per tile, so that a longer row is summed over pages."""
        rows, place, device = batch.rows, batch.place, torch.device("cpu")
        padding, levels = self._padding, batch.own_tiles
        own, prompts = Region(rows, levels, padding.slot_tile), Region(batch.prompts, 1, self._prompt_width(batch))
        for row in range(rows):
            own.take(row, 1 if row == place else levels)
        for entry in range(batch.prompts):
            prompts.take(entry, 1)
        kv = KvArena(self._layout, own, prompts, 1 << 30, None, device)
        kv.make_room(0, 0)
        entry = place % batch.prompts
        self._fill(kv.row_keys[0], kv.row_values[0], int(own.pages[place, 0]), self._own)
        lengths = np.full(batch.prompts, min(prompts.tokens, 40))
        lengths[entry] = self.PROMPT
        places = kv.prompt_place(prompts.pages)
        self._fill(kv.prompt_keys[0], kv.prompt_values[0], int(places[entry, 0]), self._prompt)
        held = torch.full((rows,), levels * padding.slot_tile - 1)
        held[place] = self.OWN
        nothing = torch.zeros(rows, dtype=torch.long)
        write_to = torch.from_numpy(own.pages[np.arange(rows), own.count - 1])
        looked_at = PromptPages(places, prompts.used, lengths, prompts.tokens)
        of_prompt = prompt_pieces(
            np.arange(rows) % batch.prompts, np.ones(rows, bool), looked_at, padding.columns, None, device
        )
        own_side = own_pieces(own.pages, own.tokens, device)
        step = Rows(nothing, nothing, held, write_to, own.tokens, own_side, of_prompt)
        attention = self._decoder.attention(step, kv, KeepAll())
        q, k, v = (_among(one, rows, place) for one in (self._query, self._key, self._value))
        return attention(0, q, k, v)[place]

    def _prompt_width(self, batch: _Batch) -> int:
        return batch.prompt_tiles * self._padding.prompt_tile

    def _fill(self, keys: Tensor, values: Tensor, page: int, held: Float[Tensor, "2 H n D"]) -> None:
        """Noise in every page, and the tested row's keys and values in one."""
        width, count = keys.shape[2], held.shape[2]
        keys.copy_(self._noise[0, :, :width])
        values.copy_(self._noise[1, :, :width])
        keys[page, :, :count], values[page, :, :count] = held


def computes_the_same(decoder: Decoder, plain: Decoder) -> bool:
    """Whether a decoder whose small operations run in C finds what one without finds, but for rounding. Found once for
    the same shapes, precision and library."""
    asked = (library("decode"), decoder.layout().dtype, decoder.dtype, decoder.is_native, *_shapes(decoder))
    if asked not in _SAME:
        _SAME[asked] = _finds_the_same(decoder, plain)
    return _SAME[asked]


def _finds_the_same(decoder: Decoder, plain: Decoder) -> bool:
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        decoder, plain = (one.of_one_block().in_its_precision() for one in (decoder, plain))
        tokens = torch.randint(decoder.vocabulary, (9,), generator=torch.Generator().manual_seed(0))
        hidden, batch = hidden_of_block(plain, tokens), _Batch(3, 1, 2, 3, 2)
        attended = (_Trial(one, one.padding).attended(batch) for one in (decoder, plain))
        pairs = [(hidden_of_block(decoder, tokens), hidden), (next(attended), next(attended))]
        logits, uniform = plain.logits(hidden), torch.rand(9, dtype=torch.float64)
        drawn, logprobs = ops.draw(logits, uniform, torch.ones(9))
        pairs += [(logprobs, logits.float().log_softmax(-1).gather(1, drawn[:, None])[:, 0])]
        most = 1e-4 if decoder.layout().dtype == torch.float32 else 0.05
        return all(bool((one - other).abs().max() <= most * other.abs().max()) for one, other in pairs)


def _among(one: Tensor, rows: int, place: int) -> Tensor:
    """The row at index `place` among random ones."""
    others = torch.randn((rows, *one.shape), generator=torch.Generator().manual_seed(rows))
    others[place] = one
    return others


def rounding_warning(found: Invariance, threads: int) -> str:
    """What it means for a run that bits depend on the batch."""
    return (
        f"float32 products depend on the number of rows here ({threads} threads), even padded to "
        f"{found.padding.least} rows: a rollout is the same to rounding only, and not bit for bit, under another "
        "sampler, scheduler or number of slots (engine.invariant in summary.json). Resuming and repeating a run are "
        "not affected"
    )
