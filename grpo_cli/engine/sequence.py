"""Sequences, each a request and all that has happened to it, and the arrays of a decode step over those that run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf, nan

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.kv_cache import BLOCK, CachedPrompt, blocks_for
from grpo_cli.engine.sampling import RowSampling, row_sampling
from grpo_cli.model.transfer import send
from grpo_cli.types import ENVIRONMENT, Finish, Request, Rollout, Span

Decode = Callable[[Seq[int]], str]
# Compiled functions have fixed shapes, and compiling one takes a minute: so rows come in few numbers.
LEAST_ROWS = 16


class Status(Enum):
    WAITING = auto()  # has no blocks; one that had given its own back will read its tokens again
    RUNNING = auto()
    PAUSED = auto()  # keeps its blocks: waits for an observation, or for a predicted length
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """`index` is that of its request. `tokens` are all that are known: sampled, and observations.

        a prompt of 3 tokens, 5 made      p p p | g g g g g      the last token's key is written by the next step,
        held, while nothing was evicted               k k k k    so there is one key less than tokens made

    `computed` counts the tokens that it has sampled or read since it began; the others wait to be read. `held` counts
    its own keys, in `blocks`. It reads its prompt's keys in `prompt` until an eviction has moved some to its own.
    """

    index: int
    request: Request
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)  # observations' tokens, from where to where
    finish: Finish | None = None
    computed: int = 0
    held: int = 0
    blocks: list[int] = field(default_factory=list)
    prompt: CachedPrompt | None = None
    slot: int = -1  # while it runs
    statistics: tuple[Tensor, ...] = ()  # an eviction policy's statistics while it is paused
    predicted: float | None = None
    hidden: Tensor | None = None  # the policy's last hidden state after the predictor's prefix
    uniforms: np.ndarray = field(default_factory=lambda: np.zeros(0))  # what decides each of its tokens

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.prompt_length, self.limit = len(self.request.prompt.token_ids), sampling.max_new_tokens
        self._turn_limit = float(sampling.max_turn_tokens or inf)
        self._turn_start = -self.request.turn_tokens  # its turn's first token; negative if an earlier request made it
        # A token is at least a byte, so these hold the longest string; a decoder may drop the first one's space.
        self._tail = max((len(string.encode()) for string in sampling.stop), default=-1) + 1

    @property
    def seen(self) -> int:
        """Number of its prompt's keys that it reads."""
        return 0 if self.prompt is None else self.prompt.length

    def append(self, token: int, logprob: float) -> None:
        """Add a sampled token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.computed += 1

    def ends(self, eos: Collection[int], decode: Decode | None, in_turns: bool = False) -> bool:
        """Return True, and set `finish`, if it, or its turn, ends with the token that was sampled last."""
        if self.tokens[-1] in eos:
            self.finish = Finish.EOS
        elif self._tail and self._stops(decode):
            self.finish = Finish.STOP
        elif len(self.tokens) >= self.limit or in_turns and len(self.tokens) - self._turn_start >= self._turn_limit:
            self.finish = Finish.LENGTH
        return self.finish is not None

    def _stops(self, decode: Decode | None) -> bool:
        """True if the end of its turn contains a stop string, other than in tokens that it began with."""
        assert decode is not None, "stop strings need a decoder"
        start = max(len(self.tokens) - self._tail, self._turn_start)
        before = self.request.prompt.token_ids[start:] if start < 0 else ()
        tail = [*before, *self.tokens[max(0, start) :]]
        text, known = decode(tail), decode(tail[:-1]) if start < 0 else ""
        return any(text.count(string) > known.count(string) for string in self.request.sampling.stop)

    def has_room(self, tokens: int) -> bool:
        """True if it can make another token after so many."""
        return len(self.tokens) + tokens < self.limit

    def read(self, observation: Seq[int]) -> None:
        """Add an observation, which it reads next, and begin a turn."""
        self.finish, start = None, len(self.tokens)
        self.tokens += observation
        self.logprobs += [nan] * len(observation)
        self._turn_start = len(self.tokens)
        self.observed.append((start, self._turn_start))

    def rollout(self, finish: Finish | None = None) -> Rollout:
        """Return the rollout of what it has made so far."""
        spans, last = list[Span](), 0
        for start, end in self.observed:
            spans += [Span(0, start - last)] * (start > last) + [Span(ENVIRONMENT, end - start)]
            last = end
        if spans and last < len(self.tokens):
            spans.append(Span(0, len(self.tokens) - last))
        why = finish or self.finish
        assert why is not None, "it has ended"
        return Rollout(self.request, tuple(self.tokens), tuple(self.logprobs), why, tuple(spans))


def bucket(rows: int) -> int:
    """Return the number of rows, rounded up.

    >>> bucket(1), bucket(16), bucket(17)
    (16, 16, 32)
    """
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class Rows:
    """The inputs of a decode step: what its rows read, where they write, and how they sample. Tables are padded."""

    sampling: RowSampling
    tokens: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    held: Int[Tensor, "R"]  # keys of their own before this step
    write_to: Int[Tensor, "R"]  # the block of the new key
    seen: Int[Tensor, "R"]  # keys of their prompt
    slots: Int[Tensor, "R"]  # of an eviction policy's statistics
    uniform: Float[Tensor, "R"]
    own: Int[Tensor, "R K"]
    prompt: Int[Tensor, "R P"]


class RunningBatch:
    """The sequences that run. Each has a slot: a row of the tables of `widths` blocks, its own and its prompt's.

    With `fill`, a block that nobody has, rows come in few numbers and tables in one width; the rows that fill up a
    number have the last slot.
    """

    def __init__(
        self, slots: int, widths: tuple[int, int], device: torch.device, natively: bool, fill: int | None
    ) -> None:
        self.sequences: list[Sequence] = []
        self._own, self._prompts = (np.zeros((slots + 1, width), dtype=np.int64) for width in widths)
        self._free, self._fill = list(range(slots))[::-1], fill
        self._device, self._natively = device, natively
        self._sampling: RowSampling | None = None  # until sequences change

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        sequence.slot, prompt = self._free.pop(), [] if sequence.prompt is None else sequence.prompt.blocks
        self._own[sequence.slot, : len(sequence.blocks)] = sequence.blocks
        self._prompts[sequence.slot, : len(prompt)] = prompt
        self._sampling = None

    def remove(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self._free.append(sequence.slot)
        sequence.slot, self._sampling = -1, None

    def grow(self, sequence: Sequence, blocks: Seq[int]) -> None:
        """Give it more blocks."""
        sequence.blocks += blocks
        self._own[sequence.slot, : len(sequence.blocks)] = sequence.blocks

    def rows(self) -> Rows:
        """Lay out what the decoder reads and samples by for one more token of each sequence."""
        running = self.sequences
        numbers = [
            (s.tokens[at := s.computed - 1], s.prompt_length + at, s.held, s.blocks[s.held // BLOCK], s.seen, s.slot)
            for s in running
        ]
        missing = 0 if self._fill is None else bucket(len(running)) - len(running)
        numbers += [(0, 0, 0, self._fill or 0, 0, len(self._own) - 1)] * missing
        columns = np.array(numbers, dtype=np.int64).T.copy()
        uniforms = np.array([*[s.uniforms[s.computed] for s in running], *[0.0] * missing])
        own, prompt = self._own.shape[1], self._prompts.shape[1]
        if self._fill is None:
            own, prompt = max([len(s.blocks) for s in running]), blocks_for(max([s.seen for s in running]))
        if self._sampling is None:
            settings = [s.request.sampling for s in running]
            self._sampling = row_sampling([*settings, *settings[:1] * missing], self._device, self._natively)
        tables = self._own[columns[5], :own], self._prompts[columns[5], :prompt]
        return Rows(self._sampling, *send(self._device, *columns, uniforms, *tables))
