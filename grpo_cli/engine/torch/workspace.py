"""The workspace of a generation: copies of weights, keys and values, slots, and the function that runs a step.

A CUDA graph records addresses, so graphs last as long as the generation too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from grpo_cli.engine.batching import Capped, Sampler
from grpo_cli.engine.gpu.graph import Capture, FixedTurns, Turn, TurnOutput
from grpo_cli.engine.kv.cache import KvArena
from grpo_cli.engine.kv.eviction import Budget, Dense, watches
from grpo_cli.engine.kv.keeper import keeper_of
from grpo_cli.engine.kv.rows import Rows
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.torch.sizes import Sizes
from grpo_cli.engine.torch.slots import Slots
from grpo_cli.types import Request


@dataclass(frozen=True)
class Workspace:
    """What a generation of certain requests runs in."""

    decoder: Decoder
    sizes: Sizes
    kv: KvArena
    slots: Slots
    turn: Turn
    fixed: bool

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        sampler: Sampler | Capped,
        sparsity: Dense | Budget,
        requests: Sequence[Request],
        capture: Capture | None,
        prefix: int = 0,
    ) -> Workspace:
        """With `capture`, steps have fixed shapes and are captured (see `graph.py`). `prefix` is that of `Sizes`."""
        decoder, fixed = decoder.in_its_precision().for_steps(watches(sparsity)), capture is not None
        sizes = Sizes.of(decoder, sampler, sparsity, requests, prefix, one_page=fixed)
        kv, keeper = sizes.arena(fixed), keeper_of(sparsity, sizes.slots)
        natively = decoder.is_native[0]
        slots = Slots(sizes.slots, decoder.padding, sizes.max_new_tokens, keeper, kv, fixed, natively)

        def turn(rows: Rows, uniform: Float[Tensor, "R"]) -> TurnOutput:
            hidden = decoder.step(rows, kv, keeper)
            return hidden, *slots.draw(slice(0, len(uniform)), decoder.logits(hidden), uniform)

        if capture is None:
            return cls(decoder, sizes, kv, slots, turn, fixed)
        captured = FixedTurns(turn, capture, keeper.repeated, lambda: (kv.tokens, slots.asked))
        return cls(decoder, sizes, kv, slots, captured, fixed)
