"""The workspace of a generation: copies of weights, keys and values, slots, and the function that runs a step.

Without graphs it lasts as long as the generation. A CUDA graph records addresses, so with graphs the workspace is kept
for the next generation that fits into it, which can replay captured steps from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    """For the requests that it was made for, or others of `sizes` that it `serves`."""

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

    def serves(self, other: Sizes) -> bool:
        """Whether it has the room and the shapes for a generation of other sizes."""
        mine, its = self.sizes, other
        if its.slots.prompt_width > mine.slots.prompt_width or its.kv.prompts > mine.kv.prompts:
            return False
        # A budget limits what is allocated, and is divided according to the sizes.
        bounded = its.room.budget is not None and its.kv != mine.kv
        slots = replace(its.slots, prompt_width=mine.slots.prompt_width)
        return slots == mine.slots and its.max_new_tokens <= mine.max_new_tokens and not bounded

    def emptied(self, sizes: Sizes) -> Workspace:
        """Reset for a generation of these sizes, with the current weights."""
        self.kv.clear()
        self.slots.clear()
        self.decoder.refresh()
        mine = self.sizes
        sizes = replace(sizes, slots=mine.slots, row_page=mine.row_page, prompt_page=mine.prompt_page)
        return replace(self, sizes=sizes)


class KeptWorkspace:
    """Holds at most one unused workspace."""

    def __init__(self) -> None:
        self._workspace: Workspace | None = None

    def put(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def take(self, padded: Decoder, sizes_of: Callable[[Decoder], Sizes]) -> Workspace | None:
        """The workspace, if it serves the sizes from `sizes_of`; otherwise it is freed before another one is made."""
        workspace, self._workspace = self._workspace, None
        if workspace is None or workspace.decoder.padding != padded.padding:
            return None
        sizes = sizes_of(workspace.decoder)
        return workspace.emptied(sizes) if workspace.serves(sizes) else None
