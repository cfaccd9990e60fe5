"""The moments at which a generation holds most, each run once on made-up tokens: for who watches what is allocated.

A decode step and its batch of prompts, and not a whole rollout: what lies there between two of them is known by shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from grpo_cli.engine.attention import Rows
from grpo_cli.engine.generation import PREFILL_TOKENS, Generation
from grpo_cli.engine.padding import TILE, round_up


def fullest_moments(generation: Generation, lengths: Sequence[int]) -> Iterator[str]:
    """Run each and name it, `prefill` or `decode`, when it is over; `lengths` are those of the rollouts.

    One `prefill`, the largest batch of prompts that run together with the first token of all that then begin; then
    the decode steps of `fullest`.
    """
    _prefill(generation)
    yield "prefill"
    for rows, width in fullest(lengths, generation.slots.count, generation.slots.kv.capacity):
        _decode(generation, rows, width)
        yield "decode"


def parked_bytes(generation: Generation, lengths: Sequence[int]) -> int:
    """KV cache of those that wait after their prefix: all that go on after the token that its last key comes with."""
    sizes = generation.sizes
    return sizes.room.probes * sum(length > sizes.prefix + 1 for length in lengths) * sizes.kv.parked_bytes


def _prefill(generation: Generation) -> None:
    pool, slots = generation.prompts, generation.slots
    prompts = {s.request.prompt.id: len(s.request.prompt.token_ids) for s in generation.waiting[: slots.count]}
    widths: dict[int, int] = {}
    for length in prompts.values():
        width = round_up(length, TILE)
        widths[width] = min(widths.get(width, 0) + 1, max(1, PREFILL_TOKENS // width))
    width = max(widths, key=lambda width: width * widths[width])
    count = min(widths[width], pool.entries)
    done = generation.decoder.prefill([[0] * width] * count, False)
    pool.put([pool.claim() for _ in range(count)], done.keys, done.values, done.logits, [width] * count)
    del done
    first = torch.zeros(slots.count, dtype=torch.long)
    slots.record(first, pool.logits[first], torch.zeros(1, dtype=torch.long))


def _decode(generation: Generation, rows: int, width: int) -> None:
    """One step of so many rows that look at `width` keys of their own."""
    decoder, pool, slots = generation.decoder, generation.prompts, generation.slots
    entries = min(pool.entries, rows)
    columns = round_up(-(-rows // entries), decoder.padding.columns)
    first = torch.zeros(rows, dtype=torch.long)
    step = Rows(
        tokens=first,
        positions=first,
        lengths=first,
        width=width,
        prompt_lengths=None,
        blind=False,
        table=torch.zeros(entries, columns, dtype=torch.long),
        place=first,
        in_order=entries * columns == rows,
    )
    hidden = decoder.step(step, slots.kv, pool, slots.keeper)
    slots.record(first, decoder.logits(hidden), torch.zeros(1, dtype=torch.long))


def fullest(lengths: Sequence[int], slots: int, capacity: int) -> list[tuple[int, int]]:
    """Moments of a rollout that may be its fullest: rows that run, and keys of their own that the longest looks at.

    Where everybody has a slot, rows end and the rest get longer; where slots are refilled they stay as many.

    >>> fullest([10, 20, 30, 300], slots=4, capacity=304)
    [(4, 16), (3, 32), (2, 32), (1, 304)]
    """
    if slots < len(lengths):
        return [(slots, min(capacity, round_up(max(lengths), TILE)))]
    moments = {}
    for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        step = max(1, int(np.quantile(lengths, share, method="lower")) - 1) if share else 1
        running = sum(length > step for length in lengths)
        if running:
            moments[running] = min(capacity, round_up(step + 1, TILE))
    return sorted(moments.items(), reverse=True) or [(slots, min(capacity, TILE))]
