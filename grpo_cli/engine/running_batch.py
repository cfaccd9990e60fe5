"""This step's arrays: one row for each running sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_cli.engine.kv_cache import BLOCK, table_of
from grpo_cli.engine.sampling import Drawing, drawing_of
from grpo_cli.engine.sequence import Sequence
from grpo_cli.model.transfer import send

# Compiled functions have fixed shapes, and compiling one takes a minute: so rows come in few numbers.
LEAST_ROWS = 16


def bucket(rows: int) -> int:
    """Return the number of rows, rounded up.

    >>> bucket(1), bucket(16), bucket(17)
    (16, 16, 32)
    """
    return max(LEAST_ROWS, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class Rows:
    """The inputs of a decode step: what its rows read, where they write, and how they sample. A table has any block
    where a row has none."""

    tokens: Int[Tensor, "R"]
    positions: Int[Tensor, "R"]
    held: Int[Tensor, "R"]  # keys of their own before this step
    write_to: Int[Tensor, "R"]  # the block of the new key
    seen: Int[Tensor, "R"]  # keys of their prompt
    slots: Int[Tensor, "R"]  # of an eviction policy's statistics
    uniform: Float[Tensor, "R"]
    own: Int[Tensor, "R K"]
    prompt: Int[Tensor, "R P"]
    drawing: Drawing


class RunningBatch:
    """Lays out the rows of a step. What has not `changed` is not sent again.

    With `fills` (a block and a slot that nobody has) rows come in few numbers, and tables are `most` blocks wide.
    """

    def __init__(
        self, device: torch.device, natively: bool, fills: tuple[int, int] | None, most: tuple[int, int]
    ) -> None:
        self._device, self._natively, self._fills, self._most = device, natively, fills, most
        self.changed()

    def changed(self) -> None:
        """Others run, or some have lost blocks."""
        self._own, self._filled = np.zeros((0, 0), dtype=np.int64), list[int]()
        self._sent: Tensor | None = None
        self._of_prompts: list[Tensor] = []  # their table, and how many of their keys are seen
        self._drawing: Drawing | None = None

    def rows(self, running: Seq[Sequence]) -> Rows:
        """Lay out what the decoder reads and samples by for one more token of each sequence."""
        count = len(running) if self._fills is None else bucket(len(running))
        missing = count - len(running)
        block, slot = self._fills or (0, 0)
        numbers = [
            (s.tokens[s.made - 1], s.prompt_length + s.made - 1, s.held, s.blocks[s.held // BLOCK], s.slot)
            for s in running
        ]
        columns = np.array([*numbers, *[(0, 0, 0, block, slot)] * missing], dtype=np.int64).T
        uniform = np.array([*(_uniform(s) for s in running), *[0.0] * missing])
        to_send = [*np.ascontiguousarray(columns), uniform, *self._grown_tables(running, count)]
        tokens, positions, held, write_to, slots, drawn, *own = send(self._device, *to_send)
        self._sent = own[0] if own else self._sent
        assert self._sent is not None, "running sequences have blocks"
        if not self._of_prompts:
            blocks = [[] if s.prompt is None else s.prompt.blocks for s in running]
            seen = np.array([0 if s.prompt is None else s.prompt.length for s in running] + [0] * missing)
            table = table_of([*blocks, *[[]] * missing], width=None if self._fills is None else self._most[1])
            self._of_prompts = send(self._device, table, seen)
        if self._drawing is None:
            settings = [sequence.request.sampling for sequence in running]
            self._drawing = drawing_of([*settings, *settings[:1] * missing], self._device, self._natively)
        prompt, seen_there = self._of_prompts
        return Rows(tokens, positions, held, write_to, seen_there, slots, drawn, self._sent, prompt, self._drawing)

    def _grown_tables(self, running: Seq[Sequence], count: int) -> list[np.ndarray]:
        """Return the table of own blocks, if it is another one than before."""
        lengths = [len(sequence.blocks) for sequence in running]
        if lengths == self._filled:
            return []
        width = max(lengths) if self._fills is None else self._most[0]
        if self._own.shape != (count, width):
            self._own, self._filled = np.zeros((count, width), dtype=np.int64), [0] * len(running)
        for row, (sequence, length) in enumerate(zip(running, lengths, strict=True)):
            if length != self._filled[row]:
                self._own[row, :length] = sequence.blocks
        self._filled = lengths
        return [self._own]


def _uniform(sequence: Sequence) -> float:
    found = sequence.uniforms
    assert found is not None, "a running sequence has its numbers"
    return float(found[min(sequence.made, len(found) - 1)])  # no token is drawn beyond the last
