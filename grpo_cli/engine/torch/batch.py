"""This step's arrays: one row for each running sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from grpo_cli.engine.gpu.compiled import bucket
from grpo_cli.engine.kv.cache import BLOCK, table_of
from grpo_cli.engine.sequence import Sequence
from grpo_cli.engine.step.rows import Drawing, Rows
from grpo_cli.engine.step.sample import drawing_of
from grpo_cli.model.transfer import send


class RunningBatch:
    """Lays out the rows of a step. Tables and sampling settings are sent again only after `changed`.

    With `fills` (a block and a slot that nobody has) rows come in few numbers and tables in few widths; `most` bounds
    the latter.
    """

    def __init__(
        self, device: torch.device, natively: bool, fills: tuple[int, int] | None, most: tuple[int, int]
    ) -> None:
        self._device, self._natively, self._fills, self._most = device, natively, fills, most
        self._tables: list[Tensor] | None = (
            None  # of own blocks, of prompts' blocks, and how many of their keys are seen
        )
        self._drawing: Drawing | None = None

    def changed(self, sequences: bool = True) -> None:
        """Some sequences have other blocks, or (with `sequences`) others run."""
        self._tables = None
        if sequences:
            self._drawing = None

    def rows(self, running: Seq[Sequence]) -> Rows:
        """What the decoder reads and draws by for one more token of each sequence."""
        count = len(running) if self._fills is None else bucket(len(running))
        missing = count - len(running)
        block, slot = self._fills or (0, 0)
        numbers = [
            (s.tokens[s.made - 1], s.prompt_length + s.made - 1, s.held, s.blocks[s.held // BLOCK], s.slot)
            for s in running
        ]
        columns = np.array([*numbers, *[(0, 0, 0, block, slot)] * missing], dtype=np.int64).T
        # The last token of a sequence is drawn, and nothing after it.
        uniform = np.array([*(_uniform(s) for s in running), *[0.0] * missing])
        if self._tables is None:
            self._tables = self._made(running, missing)
        if self._drawing is None:
            settings = [sequence.request.sampling for sequence in running]
            self._drawing = drawing_of([*settings, *settings[:1] * missing], self._device, self._natively)
        tokens, positions, held, write_to, slots, drawn = send(self._device, *np.ascontiguousarray(columns), uniform)
        own, prompt, seen = self._tables
        return Rows(tokens, positions, held, write_to, seen, slots, drawn, own, prompt, self._drawing)

    def _made(self, running: Seq[Sequence], missing: int) -> list[Tensor]:
        own: list[Seq[int]] = [sequence.blocks for sequence in running]
        prompts: list[Seq[int]] = [() if s.prompt is None else s.prompt.blocks for s in running]
        seen = [0 if s.prompt is None else s.prompt.length for s in running]
        tables = [self._table(some, missing, most) for some, most in zip((own, prompts), self._most, strict=True)]
        return send(self._device, *tables, np.array([*seen, *[0] * missing], dtype=np.int64))

    def _table(self, blocks: Seq[Seq[int]], missing: int, most: int) -> np.ndarray:
        width = max(map(len, blocks))
        if self._fills is not None:
            width = min(1 << (width - 1).bit_length() if width else 0, most)
        return table_of([*blocks, *[()] * missing], width=width)


def _uniform(sequence: Sequence) -> float:
    found = sequence.uniforms
    assert found is not None, "a running sequence has its numbers"
    return float(found[min(sequence.made, len(found) - 1)])
