"""What is known of every sequence: its tokens, what they were drawn with, and how many keys it has held.

A GPU is a step ahead of what is known here (`generation.py`). A sequence that turns out to have ended is computed once
more meanwhile, and what that gives is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from grpo_cli.model.transfer import Fetched


@dataclass(frozen=True)
class StepTokens:
    """The tokens that a step has drawn, on their way; entry i of each array is of its row i, as it was then.

    What is fetched are tokens, log-probabilities and, where prompt keys can be evicted, how many a slot has left.
    """

    sequences: np.ndarray
    made: np.ndarray  # tokens, with this one
    held: np.ndarray  # keys in the slot
    sees_prompt: np.ndarray  # in the pool, so that none of its keys lies in the slot
    fetched: Fetched


class Transcripts:
    """Of sequences that may make so many tokens each (`limits`)."""

    def __init__(self, limits: Seq[int], eos_token_ids: Seq[int]) -> None:
        self._limits, self._eos = np.array(limits), np.array(eos_token_ids, dtype=np.int64)
        self._tokens = np.zeros((len(limits), max(limits)), dtype=np.int64)
        self._logprobs = np.zeros(self._tokens.shape, dtype=np.float32)
        self._made, self._kept = np.zeros((2, len(limits)), dtype=np.int64)
        self._over = np.zeros(len(limits), dtype=bool)

    def note(self, drawn: StepTokens) -> tuple[list[int], list[int]]:
        """Write down what has arrived. Returns the sequences that it is news of, and those of them that end with it."""
        tokens, logprobs, *prompt_kept = drawn.fetched.read()
        new = ~self._over[drawn.sequences]
        who, made, tokens = drawn.sequences[new], drawn.made[new], tokens[new]
        self._tokens[who, made - 1], self._logprobs[who, made - 1] = tokens, logprobs[new]
        self._made[who] = made
        of_prompt = np.where(drawn.sees_prompt, 0, prompt_kept[0]) if prompt_kept else 0
        self._kept[who] = np.maximum(self._kept[who], (drawn.held - of_prompt)[new])
        ended = (tokens[:, None] == self._eos).any(1) | (made >= self._limits[who])
        self._over[who[ended]] = True
        return who.tolist(), who[ended].tolist()

    def end(self, sequences: Seq[int]) -> None:
        """They end with the token that was noted last."""
        self._over[list(sequences)] = True

    def has_ended(self, sequence: int) -> bool:
        return bool(self._over[sequence])

    def tail(self, sequence: int, count: int) -> list[int]:
        """Its last tokens, as many as it has of so many."""
        made = int(self._made[sequence])
        return self._tokens[sequence, max(0, made - count) : made].tolist()

    def of(self, sequence: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Its tokens and their log-probabilities."""
        made = self._made[sequence]
        return tuple(self._tokens[sequence, :made].tolist()), tuple(self._logprobs[sequence, :made].tolist())

    def kept(self, sequence: int) -> int:
        """Most response keys that it has held, in the layer and head that held most."""
        return int(self._kept[sequence])
