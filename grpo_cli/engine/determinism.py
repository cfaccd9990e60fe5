"""Tests whether the bits of a row of a decode step depend on its batch, finds the padding with which they do not, and
compares C with PyTorch.

The bits of a row of a float32 product depend on the kernel, which the library chooses by the numbers of rows, columns
and threads and by the processor. MKL documents a mode in which they do not matter (`processor.py`), on Intel
processors; other libraries are consistent only from some number of rows on, or in multiples of one. So before the first
rollout the model's own first block and head are computed in many batch compositions, and the least padding is chosen
with which one row's bits are the same in all of them. The test runs what decoding runs, not single products.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.decoder import Decoder, Padding
from grpo_cli.engine.kv_cache import BLOCK, PagedCache
from grpo_cli.engine.layers import EAGER
from grpo_cli.engine.sampling import draw, row_sampling
from grpo_cli.engine.sequence import Rows
from grpo_cli.native.library import library
from grpo_cli.settings import Sampling

# Numbers of rows to test: all small ones, where kernels change, and some large ones, where work is divided differently.
# A block with many weights is tested with fewer, since the largest would take seconds; always with more than padding
# makes of one row.
ROWS = (*range(1, 34), 63, 100, 257, 512)
WORK, LEAST_OF_ROWS = 2**32, 128
HEAD_ROWS = 32  # the head is as large as several blocks


# By shapes, precision and threads: the padding that was found (None: none).
_FOUND: dict[Hashable, Padding | None] = {}
# By library, shapes and precision: whether C agrees with PyTorch.
_AGREES: dict[Hashable, bool] = {}


def batch_invariant(decoder: Decoder) -> tuple[Decoder, bool]:
    """Return the decoder with the padding for its model on this machine, and True if with it a row's bits were the same
    in every batch tested; it packs weights unless bits hold only without. Takes 0.05 s for the embedded model, 0.4 s at
    hidden size 576. Only float32 in C is tested; elsewhere nothing is promised."""
    for some in (decoder, replace(decoder, may_pack=False)) if decoder.promises_bits else ():
        if padding := _padding(some):
            return replace(some, padding=padding), True
    return replace(decoder, padding=Padding()), False


def _padding(decoder: Decoder) -> Padding | None:
    """Find the padding by the first block, once for each shape and number of threads."""
    key = (torch.get_num_threads(), decoder.packs, decoder.layout, decoder.dtype, decoder.model.config.vocab_size)
    if (key := (*key, *(weight.shape for weight in decoder.model.model.layers[0].parameters()))) not in _FOUND:
        # The cheapest first. A single row would be a matrix-vector product everywhere; large products are divided by
        # rows among threads.
        paddings = [(1, 2), (4, 4), (8, 8), (16, 16)]
        paddings += [(rows, max(rows, 8) * torch.get_num_threads()) for rows in (1, 8, 16, 32)]
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            block = replace(decoder, layers=decoder.layers[:1]).prepared()
            tried = (replace(block, padding=Padding(*numbers)) for numbers in paddings)
            _FOUND[key] = next((each.padding for each in tried if _rows_agree(each)), None)
    return _FOUND[key]


def _rows_agree(decoder: Decoder) -> bool:
    """True if a block, the last norm and the head give the first rows the same bits, however many follow."""
    weights = sum(weight.numel() for weight in decoder.model.model.layers[0].parameters())
    counts = [*ROWS, *(decoder.padding.least + count for count in ROWS[:33])]
    most = max(min(max(WORK // weights, LEAST_OF_ROWS), ROWS[-1]), counts[-1])
    sizes = sorted({size for count in counts if (size := decoder.padding.padded_rows(count)) <= most})
    tokens = torch.randint(decoder.model.config.vocab_size, (most,), generator=torch.Generator().manual_seed(0))
    reference = _hidden_of_block(decoder, tokens)
    few = reference[: decoder.padding.least + HEAD_ROWS]
    logits = decoder.logits(few)
    if not all(torch.equal(_hidden_of_block(decoder, tokens[:size]), reference[:size]) for size in sizes):
        return False
    return all(torch.equal(decoder.logits(few[:count]), logits[:count]) for count in (1, 2, 3, 9, 17))


def _hidden_of_block(decoder: Decoder, tokens: Tensor) -> Float[Tensor, "N H"]:
    """Compute the block with attention replaced by a function of each row's own query, key and value."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q + (k + v).repeat_interleave(decoder.layout.group, dim=1)).flatten(1)

    return decoder.run(tokens, torch.arange(len(tokens)) % 64, attend, decoder.functions)


def computes_the_same(native: Decoder) -> bool:
    """True if C, whose compiler may be faulty, finds what PyTorch's operations find, but for rounding."""
    key = (library("decode"), native.layout, native.dtype, native.precision)
    if key not in _AGREES:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            block = replace(native, layers=native.layers[:1])
            found = zip(_found_by(block.prepared()), _found_by(replace(block, functions=EAGER).prepared()), strict=True)
            most = 1e-4 if native.precision == torch.float32 else 0.05
            _AGREES[key] = all(bool((one - other).abs().max() <= most * other.abs().max()) for one, other in found)
    return _AGREES[key]


def _found_by(decoder: Decoder) -> tuple[Tensor, ...]:
    """Return a block's output; of attention over two blocks of each row and of its prompt, the sums and what each key
    receives; and log-probabilities drawn."""
    rows, layout, numbers = 9, decoder.layout, torch.Generator().manual_seed(1)
    hidden = _hidden_of_block(decoder, torch.arange(rows) % decoder.model.config.vocab_size)
    cache = PagedCache(layout, 4 * rows, decoder.device)
    for memory in cache.memory:
        memory.copy_(torch.randn(memory.shape, generator=numbers))
    own, prompt = torch.arange(4 * rows).view(2, rows, 2)
    some, uniform = torch.full((rows,), BLOCK + 5), torch.rand(rows, generator=numbers, dtype=torch.float64)
    sampling = row_sampling([Sampling.plain(1)] * rows, decoder.device, decoder.is_native)
    step = Rows(sampling, some, some, some, own[:, 1], some, some, uniform, own, prompt)
    heads = layout.heads * layout.group, layout.heads, layout.heads
    q, k, v = (torch.randn(rows, count, layout.dim, generator=numbers).to(layout.dtype) for count in heads)
    paid = list[Tensor]()
    attend = decoder.backend(step, cache, decoder.scale, lambda _, received: paid.append(received))
    attended = attend(0, q, k, v)
    return hidden.float(), attended.float(), *paid, draw(torch.randn(rows, 99, generator=numbers), uniform, sampling)[1]
