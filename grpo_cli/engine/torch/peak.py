"""The moments at which a generation holds most, each run once on made-up tokens, to measure what is allocated.

A decode step and its batch of prompts, and not a whole rollout: what is allocated between two of them is known from
shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.kv.cache import grown
from grpo_cli.engine.kv.padding import TILE, round_up
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.engine.kv.tiles import sides
from grpo_cli.engine.torch.generation import PREFILL_TOKENS, Generation


def fullest_moments(
    generation: Generation, lengths: Sequence[int], grown_to: Callable[[Sequence[Tensor]], None]
) -> Iterator[str]:
    """Run each and name it, `prefill` or `decode`, when it is over; `lengths` are those of the rollouts. `grown_to` is
    given the arena's blocks when they are new.

    One `prefill`, the largest batch of prompts that run together with the first token of all that then begin; then
    the decode steps of `course`.
    """
    kv = generation.kv
    entries = _prefill(generation, grown_to)
    yield "prefill"
    names = [sequence.request.prompt.id for sequence in generation.waiting]
    pages = {s.request.prompt.id: kv.prompts.pages_for(len(s.request.prompt.token_ids)) for s in generation.waiting}
    held = [min(length, generation.slots.capacity + 1) for length in lengths]
    shape = (generation.slots.count, generation.refills, kv.rows.tokens, kv.most_tokens, len(kv.blocks))
    tokens = {name: count * kv.prompts.tokens for name, count in pages.items()}
    found = course(held, names, tokens, *shape, all_prompts=generation.sizes.room.probes)
    if found.tokens > kv.tokens:
        kv.reserve(found.tokens)
        grown_to(kv.blocks)
    for ages in found.moments:
        _decode(generation, ages, entries)
        yield "decode"
    kv.peak = max(found.peak * kv.layout.bytes_per_token, kv.nbytes)


def parked_bytes(generation: Generation, lengths: Sequence[int]) -> int:
    """KV cache of those that wait after their prefix: all that go on after the token that its last key comes with."""
    sizes = generation.sizes
    return sizes.room.probes * sum(length > sizes.prefix + 1 for length in lengths) * sizes.kv.parked_bytes


def _prefill(generation: Generation, grown_to: Callable[[Sequence[Tensor]], None]) -> int:
    """Returns how many prompts are held from now on: all that the first rollouts need, in one batch or several."""
    pool, slots, kv = generation.prompts, generation.slots, generation.kv
    prompts = {s.request.prompt.id: len(s.request.prompt.token_ids) for s in generation.waiting[: slots.count]}
    names, rows = list(prompts), min(slots.count, len(generation.waiting))

    def pages() -> int:
        return sum(kv.prompts.pages_for(prompts[name]) for name in names)

    while not kv.has_room(rows, pages()):
        rows, names = max(1, rows // 2), names[: max(1, len(names) // 2)]
    kv.make_room(rows, pages())
    grown_to(kv.blocks)
    widths: dict[int, int] = {}
    for name in names:
        width = round_up(prompts[name], TILE)
        widths[width] = min(widths.get(width, 0) + 1, max(1, PREFILL_TOKENS // width))
    width = max(widths, key=lambda width: width * widths[width])
    done = generation.decoder.prefill([[0] * width] * widths[width], False)
    some = [name for name in names if round_up(prompts[name], TILE) == width][: widths[width]]
    pool.put(some, done.keys, done.values, done.logits, [prompts[name] for name in some])
    for name in names:
        if name not in some:
            pool.hold(name, prompts[name], done.logits.new_zeros(done.logits.shape[1]))
    del done
    first = torch.zeros(slots.count, dtype=torch.long)
    slots.draw(first, pool.logits([pool.entry(some[0])]).expand(slots.count, -1), first.double())
    return len(names)


def _decode(generation: Generation, ages: np.ndarray, entries: int) -> None:
    """One step of rows that hold so many keys of their own with the one that it brings."""
    kv, slots, rows = generation.kv, generation.slots, len(ages)
    pages = [kv.rows.pages_for(int(age)) for age in ages]
    for slot, count in enumerate(pages):
        kv.rows.take(slot, count)
    first, device = torch.zeros(rows, dtype=torch.long), kv.device
    own_side, prompt_side = sides(kv.layout.by_token)
    own = own_side(kv.rows.pages[:rows, : max(pages)], kv.rows.tokens, device)
    of_prompts = np.arange(rows) % entries
    multiple = generation.decoder.padding.columns
    prompt = prompt_side(of_prompts, np.ones(rows, bool), generation.prompts.places(), multiple, None, device)
    width = kv.rows.tokens if max(pages) > 1 else min(kv.rows.tokens, round_up(int(max(ages)), TILE))
    hidden = generation.decoder.step(Rows(first, first, first, first, width, own, prompt), kv, slots.keeper)
    slots.draw(first, generation.decoder.logits(hidden), first.double())
    for slot in range(rows):
        kv.rows.drop(slot)
    kv.close()


@dataclass(frozen=True)
class Course:
    """How memory goes while rollouts are made: the keys that each row holds at the first step and at the fullest ones,
    the tokens that the arena comes to, and the most including the second copy while it grows."""

    moments: tuple[np.ndarray, ...]
    tokens: int
    peak: int


def course(
    lengths: Sequence[int],
    names: Sequence[str],
    prompt_tokens: Mapping[str, int],
    slots: int,
    refills: bool,
    page: int,
    most: int,
    blocks: int,
    all_prompts: bool = False,
) -> Course:
    """Of rollouts of these lengths, one after the other, in at most `most` tokens of keys and values. A rollout is of
    the prompt of its name, which is held from the first one's start (or the very start) to the last one's end.

    >>> words = dict(slots=4, refills=False, page=16, most=999, blocks=4)
    >>> found = course([10, 20, 30, 300], "aabb", {"a": 16, "b": 32}, **words)
    >>> [ages.tolist() for ages in found.moments], found.tokens
    ([[1, 1, 1, 1], [299]], 360)
    >>> found = course([40, 20, 30], "aaa", {"a": 16}, **words | dict(slots=2, refills=True))
    >>> [ages.tolist() for ages in found.moments]
    [[1, 1], [39, 20]]
    """
    waiting, left, opened = list(range(len(lengths)))[::-1], Counter(names), set(names) if all_prompts else set[str]()
    running, ages, moments = list[int](), np.zeros(0, dtype=np.int64), list[np.ndarray]()
    tokens = peak = fullest = 0

    def wanted() -> int:
        return page * int((-(-np.maximum(ages, 1) // page)).sum()) + sum(prompt_tokens[name] for name in opened)

    def grow() -> None:
        nonlocal tokens, peak
        if wanted() > tokens:
            beside, tokens = -(-tokens // blocks), grown(tokens, wanted(), most)
            peak = max(peak, tokens + beside)

    while waiting or running:
        while waiting and len(running) < slots and (refills or not ages.any()):
            new = page + (0 if names[waiting[-1]] in opened else prompt_tokens[names[waiting[-1]]])
            if running and wanted() + new > most:
                break
            running.append(waiting.pop())
            opened.add(names[running[-1]])
            ages = np.append(ages, 0)
        grow()
        ages = ages + 1
        grow()
        if not moments or fullest <= wanted() <= most:
            moments = [*(moments[:1] or [ages]), *([ages] if moments else [])]
            fullest = wanted()
        stays = ages < np.array([lengths[index] - 1 for index in running])
        for index, going_on in zip(running, stays.tolist(), strict=True):
            left[names[index]] -= not going_on
        opened -= {name for name in opened if not left[name]}
        running, ages = (
            [index for index, going_on in zip(running, stays.tolist(), strict=True) if going_on],
            ages[stays],
        )
    return Course(tuple(moments), tokens, peak)
