"""How many threads decode steps are given on a CPU: as few as are about as fast as any, of those with the same bits.

A step of a small model consists of hundreds of operations of a few microseconds, which more threads slow down: waking
them takes longer than they save. What they are worth depends on the model, the number of rows and the machine, so it is
measured; and as a measurement may end either way, only numbers are tried with which a block's bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.step.invariance import hidden_of_block, same_with_threads
from grpo_cli.support.threads import computing_with, fewer, seconds_of

_ROUNDS = 7
_WORTH = 1.2  # times the least time: more threads for less than that stand idle, or wait for another program to end
_LONG = 0.02  # seconds: a block that takes longer has work for all threads


def threads_for(decoder: Decoder, rows: int) -> int:
    """The number for steps of so many rows, at most PyTorch's."""
    most = torch.get_num_threads()
    if most == 1 or not decoder.promises_bits:
        return most
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        block = decoder.of_one_block().in_its_precision()
        seconds = _tried(block, torch.arange(rows) % decoder.vocabulary, [*fewer(most), most])
        worth = [count for count, took in seconds.items() if took <= _WORTH * min(seconds.values())]
        return next((count for count in sorted(worth) if count < most and same_with_threads(block, count)), most)


def _tried(block: Decoder, tokens: Tensor, counts: Sequence[int]) -> Mapping[int, float]:
    """The least seconds that a block took with each number of threads; if it takes long, only with the last."""
    work = partial(hidden_of_block, block, tokens)
    least = {counts[-1]: min(seconds_of(work), seconds_of(work))}
    if least[counts[-1]] > _LONG:
        return least
    for _ in range(_ROUNDS):
        for count in counts:
            with computing_with(count):
                work()  # with that many threads awake
                least[count] = min(least.get(count, math.inf), seconds_of(work))
    return least
