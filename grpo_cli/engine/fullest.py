"""The moments at which a generation holds most, each run once on made-up tokens: for who watches what is allocated.

A decode step and its batch of prompts, and not a whole rollout: what lies there between two of them is known by shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.attention import Rows
from grpo_cli.engine.generation import PREFILL_TOKENS, Generation
from grpo_cli.engine.padding import TILE, round_up
from grpo_cli.engine.pieces import own_pieces, prompt_pieces


def fullest_moments(
    generation: Generation, lengths: Sequence[int], grown: Callable[[Sequence[Tensor]], None]
) -> Iterator[str]:
    """Run each and name it, `prefill` or `decode`, when it is over; `lengths` are those of the rollouts. `grown` is
    given the arena's blocks when they are new.

    One `prefill`, the largest batch of prompts that run together with the first token of all that then begin; then
    the decode steps of `fullest`.
    """
    entries = _prefill(generation, grown)
    yield "prefill"
    kv, capacity = generation.kv, generation.slots.capacity
    most = max(1, (kv.reach() - kv.prompts.used * kv.prompts.tokens) // kv.rows.tokens)
    for ages in fullest(
        [min(length, capacity) for length in lengths], generation.slots.count, generation.refills, kv.rows.tokens, most
    ):
        _decode(generation, ages, entries, grown)
        yield "decode"


def parked_bytes(generation: Generation, lengths: Sequence[int]) -> int:
    """KV cache of those that wait after their prefix: all that go on after the token that its last key comes with."""
    sizes = generation.sizes
    return sizes.room.probes * sum(length > sizes.prefix + 1 for length in lengths) * sizes.kv.parked_bytes


def _prefill(generation: Generation, grown: Callable[[Sequence[Tensor]], None]) -> int:
    """Returns how many prompts are held from now on: all that the first rollouts need, in one batch or several."""
    pool, slots, kv = generation.prompts, generation.slots, generation.kv
    prompts = {s.request.prompt.id: len(s.request.prompt.token_ids) for s in generation.waiting[: slots.count]}
    names = list(prompts)
    while len(names) > 1 and not kv.make_room(len(names), sum(kv.prompts.pages_for(prompts[n]) for n in names)):
        names.pop()
    pages = sum(kv.prompts.pages_for(prompts[name]) for name in names)
    assert kv.make_room(1, pages), "there is room for one sequence"
    grown(kv.blocks)
    widths: dict[int, int] = {}
    for name in names:
        width = round_up(prompts[name], TILE)
        widths[width] = min(widths.get(width, 0) + 1, max(1, PREFILL_TOKENS // width))
    width = max(widths, key=lambda width: width * widths[width])
    done = generation.decoder.prefill([[0] * width] * widths[width], False)
    some = [name for name in names if round_up(prompts[name], TILE) == width][: widths[width]]
    pool.put(some, done.keys, done.values, done.logits, [prompts[name] for name in some])
    del done
    for name in names:
        if name not in some:
            pool.hold(name, prompts[name])
    first = torch.zeros(slots.count, dtype=torch.long)
    slots.record(first, pool.logits([pool.entry(some[0])]).expand(slots.count, -1), torch.zeros(1, dtype=torch.long))
    return len(names)


def _decode(generation: Generation, ages: np.ndarray, entries: int, grown: Callable[[Sequence[Tensor]], None]) -> None:
    """One step of rows that hold so many keys of their own with the one that it brings."""
    kv, slots, rows = generation.kv, generation.slots, len(ages)
    pages = [kv.rows.pages_for(int(age)) for age in ages]
    assert kv.make_room(sum(pages), 0), "what is fullest has room"
    grown(kv.blocks)
    for slot, count in enumerate(pages):
        kv.rows.take(slot, count)
    first, device = torch.zeros(rows, dtype=torch.long), kv.device
    own = own_pieces(kv.rows.pages[:rows, : max(pages)], kv.rows.tokens, device)
    of_prompts = np.arange(rows) % entries
    multiple = generation.decoder.padding.columns
    prompt = prompt_pieces(of_prompts, np.ones(rows, bool), generation.prompts.places(), multiple, None, device)
    width = kv.rows.tokens if max(pages) > 1 else min(kv.rows.tokens, round_up(int(max(ages)), TILE))
    step = Rows(first, first, first, first, width, own, prompt)
    hidden = generation.decoder.step(step, kv, slots.keeper)
    slots.record(first, generation.decoder.logits(hidden), torch.zeros(1, dtype=torch.long))
    for slot in range(rows):
        kv.rows.drop(slot)
    kv.close()


def fullest(lengths: Sequence[int], slots: int, refills: bool, page: int, most: int) -> list[np.ndarray]:
    """Moments of a rollout that may be its fullest, as the keys that each row holds: the first, when most rows run, and
    the one with most pages, `most` at any time.

    >>> [ages.tolist() for ages in fullest([10, 20, 30, 300], slots=4, refills=False, page=16, most=99)]
    [[1, 1, 1, 1], [299]]
    >>> [ages.tolist() for ages in fullest([40, 20, 30], slots=2, refills=True, page=16, most=99)]
    [[1, 1], [39, 20]]
    """
    waiting = [max(1, int(length) - 1) for length in reversed(lengths)]
    ages = ends = np.zeros(0, dtype=np.int64)
    found: list[np.ndarray] = []
    best = 0
    while waiting or len(ages):
        if refills or not len(ages):
            while waiting and len(ages) < slots and (-(-(ages + 1) // page)).sum() < most:
                ages, ends = np.append(ages, 0), np.append(ends, waiting.pop())
        ages = ages + 1
        pages = int((-(-ages // page)).sum())
        if not found or best <= pages <= most:
            found[1:] = [ages.copy()] if found else []
            found, best = found or [ages.copy()], pages
        going_on = ages < ends
        ages, ends = ages[going_on], ends[going_on]
    return found
