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

from grpo_cli.engine.kv.cache import BLOCK, blocks_for, round_up
from grpo_cli.engine.kv.keeper import KeepAll
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.step.rows import Rows
from grpo_cli.engine.step.sample import draw, drawing_of, rows_at_once
from grpo_cli.engine.step.weights import adapters_of
from grpo_cli.engine.torch.generation import PREFILL_TOKENS, Generation


def fullest_moments(generation: Generation, lengths: Sequence[int], on_cpu: bool) -> Iterator[tuple[str, int]]:
    """Run each moment and yield its name and the bytes of keys and values; `lengths` are those of the rollouts.
    `on_cpu`: where the generation would be; tensors are on a CPU in any case.

    One `prefill`, of the largest batch of prompts that run together and the first tokens that follow; then a `decode`
    for each step of `course`.
    """
    cache, decoder, sizes = generation.cache, of_few_blocks(generation.decoder), generation.sizes
    prompts = {s.request.prompt.id: s.prompt_length for s in generation.waiting}
    tokens = {name: BLOCK * blocks_for(length) for name, length in prompts.items()}
    first = generation.waiting[: sizes.room.slots]
    rows = _prefill(
        generation, decoder, [s.prompt_length for s in {s.request.prompt.id: s for s in first}.values()], on_cpu
    )
    each = cache.layout.bytes_per_token
    yield "prefill", each * min(rows * BLOCK + sum(tokens.values()), cache.count * BLOCK)
    names = [sequence.request.prompt.id for sequence in generation.waiting]
    held = [min(length, sizes.slots.capacity + 1) for length in lengths]
    shape = (sizes.room.slots, generation.refills, BLOCK, cache.count * BLOCK)
    found = course(held, names, tokens, *shape, all_prompts=sizes.room.probes)
    for ages in found.moments:
        _decode(generation, decoder, ages, max(map(blocks_for, prompts.values())), on_cpu)
        yield "decode", each * found.peak


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


def _draw(generation: Generation, logits: Tensor, on_cpu: bool) -> None:
    """A CPU draws from few rows of lower-precision logits at a time: one such part allocates what all would, but for
    the tokens. A GPU converts all rows at once."""
    if on_cpu and logits.dtype != torch.float32:
        logits = logits[: rows_at_once(logits)]
    by = drawing_of([generation.sequences[0].request.sampling] * len(logits), logits.device)
    draw(logits if on_cpu else logits.float(), torch.zeros(len(logits), dtype=torch.float64), by)


def _prefill(generation: Generation, decoder: Decoder, lengths: Sequence[int], on_cpu: bool) -> int:
    """Returns how many rows begin."""
    widths: dict[int, int] = {}
    for length in lengths:
        width = round_up(length, BLOCK)
        widths[width] = min(widths.get(width, 0) + 1, max(1, PREFILL_TOKENS // width))
    width = max(widths, key=lambda width: width * widths[width])
    logits = decoder.prefill([[0] * width] * widths[width], False).logits
    rows = min(generation.sizes.room.slots, len(generation.waiting))
    _draw(generation, logits[:1].expand(rows, -1), on_cpu)
    return rows


def _decode(generation: Generation, decoder: Decoder, ages: np.ndarray, prompt_blocks: int, on_cpu: bool) -> None:
    """One step of rows that hold `ages` keys of their own, including the new one."""
    rows = len(ages)
    first, uniform = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.float64)
    own, prompt = (torch.zeros(rows, k, dtype=torch.long) for k in (blocks_for(int(max(ages))), prompt_blocks))
    by = drawing_of([generation.sequences[0].request.sampling] * rows, first.device)
    hidden = decoder.step(Rows(*[first] * 6, uniform, own, prompt, by), generation.cache, KeepAll())
    _draw(generation, decoder.logits(hidden), on_cpu)


@dataclass(frozen=True)
class Course:
    """The keys that each row holds at the first step and at the fullest one, and the most tokens of all blocks."""

    moments: tuple[np.ndarray, ...]
    peak: int


def course(
    lengths: Sequence[int],
    names: Sequence[str],
    prompt_tokens: Mapping[str, int],
    slots: int,
    refills: bool,
    page: int,
    most: int,
    all_prompts: bool = False,
) -> Course:
    """The course of rollouts of these lengths, started in order, within `most` tokens of keys and values. A rollout's
    prompt, by name, is held from its first rollout's start (or the very start) to its last one's end.

    >>> words = dict(slots=4, refills=False, page=16, most=999)
    >>> found = course([10, 20, 30, 300], "aabb", {"a": 16, "b": 32}, **words)
    >>> [ages.tolist() for ages in found.moments], found.peak
    ([[1, 1, 1, 1], [299]], 336)
    >>> found = course([40, 20, 30], "aaa", {"a": 16}, **words | dict(slots=2, refills=True))
    >>> [ages.tolist() for ages in found.moments]
    [[1, 1], [39, 20]]
    """
    waiting, left, opened = list(range(len(lengths)))[::-1], Counter(names), set(names) if all_prompts else set[str]()
    running, ages, moments = list[int](), np.zeros(0, dtype=np.int64), list[np.ndarray]()
    peak = fullest = 0

    def wanted() -> int:
        return page * int((-(-np.maximum(ages, 1) // page)).sum()) + sum(prompt_tokens[name] for name in opened)

    while waiting or running:
        while waiting and len(running) < slots and (refills or not ages.any()):
            new = page + (0 if names[waiting[-1]] in opened else prompt_tokens[names[waiting[-1]]])
            if running and wanted() + new > most:
                break
            running.append(waiting.pop())
            opened.add(names[running[-1]])
            ages = np.append(ages, 0)
        peak = max(peak, wanted())
        ends = np.array([lengths[index] - 1 for index in running])
        # After the first step, all of them at once until a row ends or needs a page: nothing changes in between.
        steps = int(np.minimum(page - ages % page, ends - ages).min()) if moments else 1
        ages = ages + max(1, steps)
        peak = max(peak, wanted())
        if not moments or fullest <= wanted() <= most:
            moments = [*(moments[:1] or [ages]), *([ages] if moments else [])]
            fullest = wanted()
        stays = ages < ends
        for index, going_on in zip(running, stays.tolist(), strict=True):
            left[names[index]] -= not going_on
        opened -= {name for name in opened if not left[name]}
        running, ages = [index for index, on in zip(running, stays.tolist(), strict=True) if on], ages[stays]
    return Course(tuple(moments), min(peak, most))
