"""What the host knows of every sequence: its tokens, their log-probabilities, and how many keys it has held."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from grpo_cli.types import ENVIRONMENT, Request, Span


@dataclass(frozen=True)
class StepTokens:
    """The tokens that a step has drawn; entry i of each array is for its row i at that time.

    `columns` are tokens, log-probabilities and, if prompt keys can be evicted, how many a slot still has.
    """

    sequences: np.ndarray
    made: np.ndarray  # tokens, including this one
    held: np.ndarray  # keys in the slot
    sees_prompt: np.ndarray  # in the pool, so that none of its keys lies in the slot
    columns: Seq[np.ndarray]


class Turns:
    """Which positions of each sequence are an environment's, and where its current turn began. `before`: how many
    tokens of the first turn were made by earlier requests; `most`: the limit of a turn."""

    def __init__(self, places: int, before: Seq[int], most: Seq[int | None]) -> None:
        self._given = np.zeros((len(before), places), dtype=bool)
        self._starts = -np.array(before, dtype=np.int64)
        self._most = np.array([np.iinfo(np.int64).max if some is None else some for some in most])

    def given(self, sequences: np.ndarray, places: np.ndarray) -> np.ndarray:
        return self._given[sequences, places]

    def over(self, sequences: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Whether the turn has reached its token limit."""
        return made - self._starts[sequences] >= self._most[sequences]

    def answered(self, sequences: np.ndarray, made: np.ndarray) -> np.ndarray:
        """Whether the next token is already given by the environment."""
        inside = made < self._given.shape[1]
        return inside & self._given[sequences, made * inside]

    def give(self, sequence: int, start: int, end: int) -> None:
        self._given[sequence, start:end], self._starts[sequence] = True, end

    def start(self, sequence: int) -> int:
        """The position of its turn's first token, negative if an earlier request made it."""
        return int(self._starts[sequence])

    def end(self, sequence: int, place: int) -> int:
        """The first position from this one on that is not the environment's."""
        rest = self._given[sequence, place:]
        return place + len(rest) if rest.all() else place + int(rest.argmin())

    def spans(self, sequence: int, made: int) -> tuple[Span, ...]:
        given = self._given[sequence, :made]
        if not given.any():
            return ()
        starts = [0, *(np.flatnonzero(given[1:] != given[:-1]) + 1).tolist(), made]
        return tuple(Span(ENVIRONMENT * int(given[a]), b - a) for a, b in pairwise(starts))


class Transcripts:
    """Transcripts of sequences with a limit of tokens each (`limits`) and per turn (`turns`, if there are any)."""

    def __init__(self, limits: Seq[int], eos_token_ids: Seq[int], turns: Turns | None = None) -> None:
        self._limits, self._eos = np.array(limits), np.array(eos_token_ids, dtype=np.int64)
        self._tokens = np.zeros((len(limits), max(limits)), dtype=np.int64)
        self._logprobs = np.zeros(self._tokens.shape, dtype=np.float32)
        self._made, self._kept = np.zeros((2, len(limits)), dtype=np.int64)
        self._over = np.zeros(len(limits), dtype=bool)
        self.turns = turns

    def note(self, drawn: StepTokens) -> tuple[list[int], list[int]]:
        """Record a step's tokens. Returns which sequences have drawn a token, and which of those end with it, or end a
        turn."""
        tokens, logprobs, *prompt_kept = drawn.columns
        new = ~self._over[drawn.sequences]
        who, made = drawn.sequences[new], drawn.made[new]
        self._made[who] = made
        of_prompt = np.where(drawn.sees_prompt, 0, prompt_kept[0]) if prompt_kept else 0
        self._kept[who] = np.maximum(self._kept[who], (drawn.held - of_prompt)[new])
        if self.turns is not None:  # the environment's answer is recorded already
            new[new] = own = ~self.turns.given(who, made - 1)
            who, made = who[own], made[own]
        tokens = tokens[new]
        self._tokens[who, made - 1], self._logprobs[who, made - 1] = tokens, logprobs[new]
        ended = (tokens[:, None] == self._eos).any(1) | (made >= self._limits[who])
        if self.turns is not None:
            # A restarted one ends its earlier turns again, and already has their answers.
            ended = (ended | self.turns.over(who, made)) & ~self.turns.answered(who, made)
        self._over[who[ended]] = True
        return who.tolist(), who[ended].tolist()

    def end(self, sequences: Seq[int]) -> None:
        """They end with the token recorded last."""
        self._over[list(sequences)] = True

    def has_ended(self, sequence: int) -> bool:
        return bool(self._over[sequence])

    def is_full(self, sequence: int) -> bool:
        """Whether it has reached its limit of tokens."""
        return bool(self._made[sequence] >= self._limits[sequence])

    def has_room(self, sequence: int, tokens: int) -> bool:
        """Whether it can make another token after `tokens` more."""
        return bool(self._made[sequence] + tokens < self._limits[sequence])

    def go_on(self, sequence: int, reply: Seq[int]) -> None:
        """Its turn is over and was answered with these tokens."""
        assert self.turns is not None, "it has turns"
        made = int(self._made[sequence])
        after = made + len(reply)
        self._tokens[sequence, made:after], self._logprobs[sequence, made:after] = reply, np.nan
        self.turns.give(sequence, made, after)
        self._over[sequence] = False

    def read_all(self, sequence: int) -> None:
        """The last answer belongs to it, whether it has been read or not."""
        if self.turns is not None:
            self._made[sequence] = self.turns.end(sequence, int(self._made[sequence]))

    def feed(self, sequences: np.ndarray, made: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these sequences (-1: none) read a token of their environment next, as a mask, and the tokens."""
        if self.turns is None:
            return np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64)
        given = self.turns.given(sequences, made - 1) & (sequences >= 0)
        return given, self._tokens[sequences, made - 1][given]

    def last(self, sequence: int) -> int:
        """Its latest token."""
        return int(self._tokens[sequence, self._made[sequence] - 1])

    def tail(self, request: Request, sequence: int, count: int) -> list[int]:
        """The last `count` tokens of its turn, or as many as there are; some may be from before its request."""
        made = int(self._made[sequence])
        start = max(made - count, -request.in_turn if self.turns is None else self.turns.start(sequence))
        before = request.prompt.token_ids[start:] if start < 0 else ()
        return [*before, *self._tokens[sequence, max(0, start) : made].tolist()]

    def of(self, sequence: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Its tokens and their log-probabilities."""
        made = self._made[sequence]
        return tuple(self._tokens[sequence, :made].tolist()), tuple(self._logprobs[sequence, :made].tolist())

    def spans(self, sequence: int) -> tuple[Span, ...]:
        """Which of its tokens are the environment's; empty if none is."""
        if self.turns is None:
            return ()
        return self.turns.spans(sequence, int(self._made[sequence]))

    def kept(self, sequence: int) -> int:
        """The most response keys that it has held in any layer and head."""
        return int(self._kept[sequence])
