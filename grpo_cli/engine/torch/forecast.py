"""Expected lengths of rollouts, and the peak memory of the running ones."""

from __future__ import annotations

import numpy as np

from grpo_cli.engine.torch.sequence import Sequence


class Forecast:
    """Forecasts lengths from the rollouts that ended in this `generate`, and from a predictor's.

    The mean length of finished rollouts is biased, since short ones finish first. So the mean is of all tokens made,
    including unfinished rollouts', per finished rollout; it starts as if one of half the limit had finished. `full`:
    memory ran out, and no rollout has ended since.
    """

    def __init__(self, prefix: int, most: int) -> None:
        """`prefix`: the tokens that every rollout has made before lengths are predicted; `most`: the limit."""
        self.full = False
        self._prefix, self._most = prefix, most
        self._ended, self._tokens = 1, most / 2

    def ended(self, tokens: int) -> None:
        self._ended += 1
        self._tokens += tokens
        self.full = False

    def length(self, sequence: Sequence, made: int, in_flight: int) -> int:
        """The expected final length of a sequence that has made `made` tokens, when all running ones have made
        `in_flight`. One that exceeds its expected length is expected to continue for half the mean.

        >>> from grpo_cli.settings import Sampling
        >>> from grpo_cli.types import Prompt, Request
        >>> one = Sequence(0, Request(Prompt("p", (5,), ""), 0, 0, Sampling.plain(64)))
        >>> forecast = Forecast(prefix=0, most=64)
        >>> before = forecast.length(one, 0, 8)
        >>> forecast.ended(8)
        >>> before, forecast.length(one, 0, 8), forecast.length(one, 40, 8)
        (40, 24, 52)
        """
        mean = (self._tokens + in_flight) / self._ended
        expected = mean if sequence.predicted is None else self._prefix + sequence.predicted
        return min(self._most, max(round(expected), made + max(1, round(mean / 2))))


class RunningRows:
    """Rows that run or are about to, and the room in tokens for their peak."""

    def __init__(self, made: list[int], lengths: list[int], room: int, page: int) -> None:
        self._made, self._lengths, self._room, self._page = made, lengths, room, page

    @property
    def fits(self) -> bool:
        """Whether the peak fits; on average half of each row's last page is empty."""
        wanted = fullest(np.array(self._made, dtype=np.int64), np.array(self._lengths, dtype=np.int64))
        return wanted + len(self._made) * self._page // 2 <= self._room

    def admits(self, made: int, length: int, prompt: int) -> bool:
        """Add one more row, with `prompt` tokens for its prompt, if it fits; returns whether it did."""
        more = RunningRows([*self._made, made], [*self._lengths, length], self._room - prompt, self._page)
        if more.fits:
            self._made, self._lengths, self._room = more._made, more._lengths, more._room
        return more.fits


def fullest(made: np.ndarray, lengths: np.ndarray) -> int:
    """The most tokens held at a time by rows that have made `made` and end at `lengths`, one token per step.

    >>> fullest(np.array([0, 2]), np.array([4, 4]))  # in two steps 2 and 4, in four 4 and nothing
    6
    """
    left = np.sort(lengths - made)
    order = np.argsort(lengths - made)
    after = np.cumsum(made[order][::-1])[::-1] + left * np.arange(len(left), 0, -1)
    return int(after.max(initial=0))
