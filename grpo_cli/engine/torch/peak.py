"""Runs the moments at which a generation holds most, once each on made-up tokens, to measure what is allocated.

Single decode steps and one batch of prompts, not a whole rollout: what is allocated in between follows from shapes. And
three blocks, since all blocks of the models that can be served are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.kv.cache import grown
from grpo_cli.engine.kv.padding import TILE, round_up
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.engine.kv.tiles import sides
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.step.sample import rows_at_once
from grpo_cli.engine.step.weights import adapters_of
from grpo_cli.engine.torch.generation import PREFILL_TOKENS, Generation
from grpo_cli.engine.torch.slots import Slots


def fullest_moments(
    generation: Generation, lengths: Sequence[int], grown_to: Callable[[Sequence[Tensor]], None], on_cpu: bool
) -> Iterator[str]:
    """Run each moment and yield its name afterwards; `lengths` are those of the rollouts. `grown_to` gets the arena's
    blocks when they are reallocated. `on_cpu`: where the generation would be; tensors are on a CPU in any case.

    One `prefill`, of the largest batch of prompts that run together and the first tokens that follow; then a `decode`
    for each step of `course`.
    """
    kv, decoder = generation.kv, of_few_blocks(generation.decoder)
    entries = _prefill(generation, decoder, grown_to, on_cpu)
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
        _decode(generation, decoder, ages, entries, on_cpu)
        yield "decode"
    kv.peak = max(found.peak * kv.layout.bytes_per_token, kv.nbytes)


def parked_bytes(generation: Generation, lengths: Sequence[int]) -> int:
    """KV bytes of sequences that wait after their prefix: all that are longer than it."""
    sizes = generation.sizes
    return sizes.room.probes * sum(length > sizes.prefix + 1 for length in lengths) * sizes.kv.parked_bytes


def of_few_blocks(decoder: Decoder) -> Decoder:
    """The same with three blocks, the middle one of which stands for all between the first and the last: it attends as
    often as they do, with keys and values of its own each time, since a prefill keeps those. Adapters that are used as
    they are leave more behind, as autocast keeps their casts: then all blocks run."""
    blocks = decoder._blocks_of_model
    adapted = [module for module in decoder._layers[0].modules() if hasattr(module, "lora_A")]
    if len(blocks) <= 3 or decoder.keeps_adapters_apart or any(adapters_of(module) is None for module in adapted):
        return decoder
    few = decoder._with(_blocks_of_model=blocks[:3])

    def run(tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor], functions: Any = None) -> Tensor:
        def often(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if index == 1 and functions is None:
                for _ in blocks[3:]:
                    attend(index, q, _like(k), _like(v))
            return attend(index, q, k, v)

        return few.blocks(tokens, positions, often, functions)

    return few._with(blocks=run)


def _like(x: Tensor) -> Tensor:
    """A tensor of this shape in as much memory as this one's."""
    memory = x.new_empty(x.untyped_storage().nbytes() // x.itemsize)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _draw(slots: Slots, logits: Tensor, on_cpu: bool) -> None:
    """A CPU draws from few rows of lower-precision logits at a time: one such part allocates what all would, but for
    the tokens. A GPU converts all rows at once."""
    if on_cpu and logits.dtype != torch.float32:
        logits = logits[: rows_at_once(logits)]
    rows = torch.zeros(len(logits), dtype=torch.long)
    slots.draw(rows, logits if on_cpu else logits.float(), rows.double())


def _prefill(
    generation: Generation, decoder: Decoder, grown_to: Callable[[Sequence[Tensor]], None], on_cpu: bool
) -> int:
    """Returns how many prompts are held from now on: all that the first rollouts need."""
    pool, slots, kv = generation.prompts, generation.slots, generation.kv
    slots.draw_as(generation.waiting[0].request.sampling)
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
    logits = decoder.prefill([[0] * width] * widths[width], False).logits
    for name in names:  # to write a layer's keys into its pages takes less than the pass did
        pool.hold(name, prompts[name], logits.new_zeros(logits.shape[1]))
    del logits
    _draw(slots, pool.logits([pool.entry(names[0])]).expand(slots.count, -1), on_cpu)
    return len(names)


def _decode(generation: Generation, decoder: Decoder, ages: np.ndarray, entries: int, on_cpu: bool) -> None:
    """One step of rows that hold `ages` keys of their own, including the new one."""
    kv, slots, rows = generation.kv, generation.slots, len(ages)
    pages = [kv.rows.pages_for(int(age)) for age in ages]
    for slot, count in enumerate(pages):
        kv.rows.take(slot, count)
    first, device = torch.zeros(rows, dtype=torch.long), kv.device
    own_side, prompt_side = sides(kv.layout.by_token)
    own = own_side(kv.rows.pages[:rows, : max(pages)], kv.rows.tokens, device)
    of_prompts = np.arange(rows) % entries
    multiple = decoder.padding.columns
    prompt = prompt_side(of_prompts, np.ones(rows, bool), generation.prompts.places(), multiple, None, device)
    width = kv.rows.tokens if max(pages) > 1 else min(kv.rows.tokens, round_up(int(max(ages)), TILE))
    hidden = decoder.step(Rows(first, first, first, first, width, own, prompt), kv, slots.keeper)
    _draw(slots, decoder.logits(hidden), on_cpu)
    for slot in range(rows):
        kv.rows.drop(slot)
    kv.close()


@dataclass(frozen=True)
class Course:
    """Memory over a generation: the keys that each row holds at the first step and at the fullest one, the final tokens
    of the arena, and their peak including the second copy while it grows."""

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
    """The course of rollouts of these lengths, started in order, within `most` tokens of keys and values. A rollout's
    prompt, by name, is held from its first rollout's start (or the very start) to its last one's end.

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
        ends = np.array([lengths[index] - 1 for index in running])
        # After the first step, all of them at once until a row ends or needs a page: nothing changes in between.
        steps = int(np.minimum(page - ages % page, ends - ages).min()) if moments else 1
        ages = ages + max(1, steps)
        for _ in range(min(max(1, steps), 2)):  # twice, if there is not room for all: both copies are then full
            grow()
        if not moments or fullest <= wanted() <= most:
            moments = [*(moments[:1] or [ages]), *([ages] if moments else [])]
            fullest = wanted()
        stays = ages < ends
        for index, going_on in zip(running, stays.tolist(), strict=True):
            left[names[index]] -= not going_on
        opened -= {name for name in opened if not left[name]}
        running, ages = [index for index, on in zip(running, stays.tolist(), strict=True) if on], ages[stays]
    return Course(tuple(moments), tokens, peak)
