"""Whether a row of a decode step has the same bits in any company, and with how much padding; tried, not assumed.

A float32 product gives a row bits that depend on the kernel a library chooses, and it chooses by the numbers of rows,
columns and threads and by the processor. MKL documents a mode in which they do not matter (`processor.py`), on Intel's
processors; others are regular only from some number of rows on, or in multiples of one. So before the first rollout the
model's own first block and head are computed in many companies, and the least padding is taken with which one row's
bits are the same in all of them. What is compared is what decoding does: no product is singled out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
from grpo_cli.engine.step.attention import StepAttention
from grpo_cli.engine.step.decoder import Decoder

# Numbers of rows that are tried: all small ones, where kernels change, and some large ones, where work is shared out
# otherwise. Of a block of so many weights that the largest would take seconds, fewer.
ROWS = (*range(1, 34), 63, 100, 257, 512)
WORK, LEAST_OF_ROWS = 2**32, 128
HEAD_ROWS = 32  # the head is as large as many blocks


@dataclass(frozen=True)
class Invariance:
    """`holds`: with this padding a row's bits were the same in every company that was tried. `packed`: by packed copies
    of the weights, which are not taken where only without them bits hold."""

    padding: Padding
    holds: bool
    packed: bool


_FOUND: dict[tuple[Any, ...], Invariance] = {}


def invariance_of(decoder: Decoder) -> Invariance:
    """The padding for this model here: 0.05 s for the embedded model, 0.4 s at hidden size 576. Asked again for the
    same shapes and threads it costs nothing. Only float32 on a CPU is tried; elsewhere nothing holds."""
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
    asked = (threads, packed, decoder.group, decoder.dim, decoder.vocabulary, *decoder.weight_shapes())
    if asked not in _FOUND:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            _FOUND[asked] = _try_out(decoder.of_one_block().in_its_precision(), packed, threads)
    return _FOUND[asked]


def _try_out(decoder: Decoder, packed: bool, threads: int) -> Invariance:
    plain = unpadded(decoder.group, decoder.dim)
    rows = next((r for r in _row_paddings(threads) if _rows_agree(decoder.padded(Padding(*r)))), None)
    tiles = next((f for f in (1, 2, 4) if _companies_agree(decoder, _with_tiles(plain, f))), None)
    multiple, least = rows or (1, 8 * threads)
    found = _with_tiles(plain, tiles or 1)
    padding = Padding(multiple, least, found.columns, found.prompt_tile, found.slot_tile)
    return Invariance(padding, rows is not None and tiles is not None, packed)


def _row_paddings(threads: int) -> Iterator[tuple[int, int]]:
    """(multiple, least) from the cheapest on. One row alone is a product of a matrix and a vector everywhere."""
    yield 1, 2
    for multiple in (4, 8, 16):
        yield multiple, multiple
    for multiple in (1, 8, 16, 32):  # so many for each thread, since products are shared out by rows
        yield multiple, max(multiple, 8) * threads


def _with_tiles(plain: Padding, factor: int) -> Padding:
    return Padding(
        columns=plain.columns * factor, prompt_tile=plain.prompt_tile * factor, slot_tile=plain.slot_tile * factor
    )


def _rows_agree(decoder: Decoder) -> bool:
    """Whether a block, the last norm and the head give the first rows the same bits, however many follow them."""
    most = min(max(WORK // _block_weights(decoder), LEAST_OF_ROWS), ROWS[-1])
    counts = [*ROWS, *(decoder.padding.least + count for count in ROWS[:33])]
    sizes = sorted({size for count in counts if (size := decoder.padding.padded_rows(count)) <= most})
    tokens = torch.randint(decoder.vocabulary, (most,), generator=torch.Generator().manual_seed(0))
    reference = _hidden(decoder, tokens)
    if not all(torch.equal(_hidden(decoder, tokens[:size]), reference[:size]) for size in sizes):
        return False
    few = reference[:HEAD_ROWS]
    logits = decoder.logits(few)
    return all(torch.equal(decoder.logits(few[:count]), logits[:count]) for count in (1, 2, 3, 9, 17))


def _block_weights(decoder: Decoder) -> int:
    return sum(math.prod(shape) for shape in decoder.weight_shapes())


def _hidden(decoder: Decoder, tokens: Tensor) -> Float[Tensor, "N H"]:
    """The block without attention between rows: each row's answer is made of its own query, key and value."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q + (k + v).repeat_interleave(decoder.group, dim=1)).flatten(1)

    return decoder.blocks(tokens, torch.arange(len(tokens)) % 64, attend)


@dataclass(frozen=True)
class _Company:
    """Where the row that is looked at stands: among how many rows, of how many prompts, with what widths in tiles."""

    rows: int
    place: int
    prompts: int
    own_tiles: int
    prompt_tiles: int


def _companies() -> Iterator[_Company]:
    tiles = (1, 2, 3, 5, 8)
    for turn, rows in enumerate((2, 3, 4, 5, 8, 9, 16, 17, 33, 64)):
        for prompts in sorted({1, 2, rows} if turn % 3 == 0 else {1, rows}):
            yield _Company(rows, (3 * turn) % rows, prompts, tiles[(turn + prompts) % 5], tiles[(2 * turn) % 5])
    for tile in tiles:
        yield _Company(1, 0, 1, tile, 1)
        yield _Company(1, 0, 1, 1, tile)


def _companies_agree(decoder: Decoder, padding: Padding) -> bool:
    """Whether a row's attention has the same bits alone and in every company, prompts in a prefill included."""
    trial = _Trial(decoder, padding)
    alone = trial.answer(_Company(1, 0, 1, 1, 1))
    return trial.prefills_agree() and all(torch.equal(trial.answer(company), alone) for company in _companies())


class _Trial:
    """One row with a query, keys of its own and a prompt, to be answered in many companies."""

    OWN, PROMPT = 9, 11  # keys; fewer than a tile

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

    def answer(self, company: _Company) -> Float[Tensor, "HGD"]:
        """With a page for each tile, so that a row of more has its answer in parts."""
        rows, place, device = company.rows, company.place, torch.device("cpu")
        padding, levels = self._padding, company.own_tiles
        own, prompts = Region(rows, levels, padding.slot_tile), Region(company.prompts, 1, self._prompt_width(company))
        for row in range(rows):
            own.take(row, 1 if row == place else levels)
        for entry in range(company.prompts):
            prompts.take(entry, 1)
        kv = KvArena(self._layout, own, prompts, 1 << 30, None, device)
        kv.make_room(0, 0)
        entry = place % company.prompts
        self._fill(kv.row_keys[0], kv.row_values[0], int(own.pages[place, 0]), self._own)
        lengths = np.full(company.prompts, min(prompts.tokens, 40))
        lengths[entry] = self.PROMPT
        places = kv.prompt_place(prompts.pages)
        self._fill(kv.prompt_keys[0], kv.prompt_values[0], int(places[entry, 0]), self._prompt)
        held = torch.full((rows,), levels * padding.slot_tile - 1)
        held[place] = self.OWN
        nothing = torch.zeros(rows, dtype=torch.long)
        write_to = torch.from_numpy(own.pages[np.arange(rows), own.count - 1])
        looked_at = PromptPages(places, prompts.used, lengths, prompts.tokens)
        of_prompt = prompt_pieces(
            np.arange(rows) % company.prompts, np.ones(rows, bool), looked_at, padding.columns, None, device
        )
        own_side = own_pieces(own.pages, own.tokens, device)
        step = Rows(nothing, nothing, held, write_to, own.tokens, own_side, of_prompt)
        attention = StepAttention(step, kv, self._decoder.group, self._decoder.scale, KeepAll())
        q, k, v = (_among(one, rows, place) for one in (self._query, self._key, self._value))
        return attention(0, q, k, v)[place]

    def _prompt_width(self, company: _Company) -> int:
        return company.prompt_tiles * self._padding.prompt_tile

    def _fill(self, keys: Tensor, values: Tensor, page: int, held: Float[Tensor, "2 H n D"]) -> None:
        """Any keys and values in every page, and those of the row that is looked at in one."""
        width, count = keys.shape[2], held.shape[2]
        keys.copy_(self._noise[0, :, :width])
        values.copy_(self._noise[1, :, :width])
        keys[page, :, :count], values[page, :, :count] = held

    def prefills_agree(self) -> bool:
        """Whether a prompt's prefill is the same alone and with others of its width."""
        prompts = [[(7 * row + 3 * place) % self._decoder.vocabulary for place in range(20)] for row in range(6)]
        padded = self._decoder.padded(Padding(1, 8 * torch.get_num_threads()))
        together = padded.prefill(prompts, False)
        for count in (1, 2, 3, 5):
            some = padded.prefill(prompts[:count], False)
            if not (
                torch.equal(some.keys, together.keys[:, :count]) and torch.equal(some.logits, together.logits[:count])
            ):
                return False
        return True


def _among(one: Tensor, rows: int, place: int) -> Tensor:
    """The row at its place among random ones."""
    others = torch.randn((rows, *one.shape), generator=torch.Generator().manual_seed(rows))
    others[place] = one
    return others


def rounding_warning(found: Invariance, threads: int) -> str:
    """What it means for a run that bits are not invariant."""
    return (
        f"float32 products depend on the number of rows here ({threads} threads), even padded to "
        f"{found.padding.least} rows: a rollout is the same to rounding only, and not bit for bit, under another "
        "sampler, scheduler or number of slots (engine.invariant in summary.json). Resuming and repeating a run are "
        "not touched by this"
    )
