"""What all eviction policies share: statistics of past steps, and the cut of full sequences down to a budget."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.attention import Attention
from grpo_cli.engine.eviction import Budget, Candidates
from grpo_cli.engine.kv_cache import BLOCK, KvLayout, PagedCache, blocks_for, table_of
from grpo_cli.engine.sequence import Rows, Sequence
from grpo_cli.model.transfer import send


def statistics(
    policy: Budget, layout: KvLayout, slots: int, blocks: tuple[int, int], device: torch.device
) -> tuple[Float[Tensor, "L S W H G D"] | None, Float[Tensor, "L S H T"] | None]:
    """Build what a policy needs of past steps for S sequences: the queries of the last `window` steps, that of position
    p at p modulo window, and the attention that each key has received. Each is None unless the policy needs it.
    """
    own, prompt = (BLOCK * count for count in blocks)
    made = partial(torch.zeros, layout.layers, slots, device=device)
    # What an earlier sequence left is overwritten before it is read: none is cut down before `window` steps.
    sizes = policy.window, layout.heads, layout.group, layout.dim
    # Summed over the steps since a key was added, mean over a group's queries. The prompt's keys come first, and start
    # from what its own queries paid.
    width = own if policy.protect_prompt else prompt + own
    return (
        made(*sizes, dtype=layout.dtype) if policy.needs_queries else None,
        made(layout.heads, width, dtype=torch.float32) if policy.needs_received else None,
    )


class Evictor:
    """Eviction down to `budget` keys once a sequence holds `budget + buffer`, in all layers and heads at once.

    The moment depends only on its own length, not on neighbours. Temporary copies are of a few sequences at a
    time: at most one layer's share of all slots. Statistics are kept of `slots` sequences at a time; each is a tensor
    [layers, slots, ...].
    """

    def __init__(
        self, policy: Budget, layout: KvLayout, slots: int, blocks: tuple[int, int], scale: float, device: torch.device
    ) -> None:
        """Make room for the statistics; `blocks` are the most of a sequence's own and of its prompt."""
        self.policy, self._scale, self._device = policy, scale, device
        self._at_once = max(1, slots // layout.layers)
        self._prompt_width = 0 if policy.protect_prompt else BLOCK * blocks[1]
        self._queries, self._received = statistics(policy, layout, slots, blocks, device)
        self._statistics = [one for one in (self._queries, self._received) if one is not None]
        self.evictions = 0

    def of_prompt(self, sequence: Sequence) -> int:
        """Return how many keys of its prompt can be evicted."""
        return 0 if self.policy.protect_prompt else sequence.seen

    def _is_due(self, sequence: Sequence) -> bool:
        """True if it must be cut down before the next key comes.

        If the prompt's keys are candidates too and alone fill the budget, nothing is evicted before the sequence has
        made `window` tokens: as in the releases, a score needs the queries of its own last `window` steps.
        """
        policy = self.policy
        full = sequence.held + self.of_prompt(sequence) >= policy.budget + policy.buffer
        return full and sequence.held >= policy.window

    def left(self, sequence: Sequence) -> int:
        """Return how many keys of its own it has when the next one comes."""
        return self.policy.budget if self._is_due(sequence) else sequence.held

    def begin(self, sequence: Sequence) -> None:
        """Prepare the slot of a sequence that begins, or restore it if it was paused."""
        if self._received is not None:
            self._received[:, sequence.slot] = 0.0
            if self._prompt_width and sequence.prompt is not None and sequence.prompt.received is not None:
                length = sequence.prompt.length
                self._received[:, sequence.slot, :, :length] = sequence.prompt.received[..., :length]
        for own, kept in zip(self._statistics, sequence.statistics, strict=bool(sequence.statistics)):
            own[:, sequence.slot] = kept
        sequence.statistics = ()

    def pause(self, sequence: Sequence) -> None:
        """Keep the statistics of a sequence whose slot another one takes."""
        sequence.statistics = tuple(one[:, sequence.slot].clone() for one in self._statistics)

    def of_step(self, rows: Rows, attend: Attention) -> Attention:
        """Return the attention of a step over these rows, to which `add_attention` adds; it records the queries that
        the policy needs."""
        self._slots, self._own = rows.slots, BLOCK * rows.own.shape[1]
        if self._queries is None:
            return attend
        queries, write_at = self._queries, rows.slots * self.policy.window + rows.positions % self.policy.window

        def seen(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            places = queries[layer].flatten(0, 1)
            places.index_copy_(0, write_at, q.to(places.dtype).reshape(-1, *places.shape[1:]))
            return attend(layer, q, k, v)

        return seen

    def add_attention(self, layer: int, attention: Float[Tensor, "R H n"]) -> None:
        """Record the attention that the keys of each row's prompt and then its own received."""
        assert self._received is not None, "the policy needs it"
        received, of_prompt = self._received[layer], attention.shape[2] - self._own
        received.narrow(2, self._prompt_width, self._own).index_add_(0, self._slots, attention[..., of_prompt:])
        if self._prompt_width:
            received.narrow(2, 0, of_prompt).index_add_(0, self._slots, attention[..., :of_prompt])

    def make_room(self, running: Seq[Sequence], cache: PagedCache) -> None:
        """Cut down the sequences that are due."""

        def shape(sequence: Sequence) -> tuple[int, int]:
            return sequence.held, self.of_prompt(sequence)

        due = sorted(filter(self._is_due, running), key=shape)
        self.evictions += len(due)
        for _, alike in groupby(due, shape):
            some = list(alike)
            for first in range(0, len(some), self._at_once):
                self.evict(some[first : first + self._at_once], cache)

    def evict(self, sequences: Seq[Sequence], cache: PagedCache) -> Int[Tensor, "L R H B"]:
        """Cut down sequences that hold alike, and return which of the candidates stay."""
        policy, own, prompt = self.policy, sequences[0].held, self.of_prompt(sequences[0])
        mine = table_of([sequence.blocks for sequence in sequences])
        theirs = table_of([s.prompt.blocks for s in sequences if s.prompt is not None and prompt])
        sinks = np.array([max(0, policy.sinks - policy.protect_prompt * one.prompt_length) for one in sequences])
        slots = np.array([sequence.slot for sequence in sequences])
        at, shared, rows, protected = send(self._device, mine, theirs, slots, sinks)

        def held(views: Seq[Tensor]) -> Float[Tensor, "L R H T D"]:
            own_keys = cache.read(views, at, own)
            return torch.cat([cache.read(views, shared, prompt), own_keys], dim=3) if prompt else own_keys

        received = queries = None
        if self._received is not None:
            of_prompt, of_own = self._received[:, rows].tensor_split([self._prompt_width], dim=-1)
            received = torch.cat([of_prompt[..., :prompt], of_own[..., :own]], dim=-1)
        if self._queries is not None:
            queries = self._queries[:, rows].permute(0, 1, 3, 4, 2, 5)
        candidates = Candidates(held(cache.keys), policy.window, self._scale, queries, received)
        kept = policy.choose(candidates, protected)
        index = kept[..., None].expand(*kept.shape, candidates.keys.shape[-1])
        chosen = [each.gather(3, index) for each in (candidates.keys, held(cache.values))]
        cache.write(mine[:, : blocks_for(policy.budget)], *chosen)
        if self._received is not None and received is not None:
            left = torch.zeros_like(self._received[:, rows])
            left[..., self._prompt_width : self._prompt_width + policy.budget] = received.gather(-1, kept)
            self._received[:, rows] = left
        needed = blocks_for(policy.budget + 1)
        for sequence in sequences:
            sequence.held = policy.budget
            cache.give_back(sequence.blocks[needed:])
            del sequence.blocks[needed:]
            if prompt and sequence.prompt is not None:
                sequence.prompt.users -= 1
                sequence.prompt = None
        return kept
