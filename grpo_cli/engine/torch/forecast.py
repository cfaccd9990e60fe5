"""How long rollouts are expected to become, and what those that run will hold at their fullest moment."""

from __future__ import annotations

import numpy as np

from grpo_cli.engine.torch.sequence import Sequence


class Forecast:
    """From what has ended in this `generate`, and from what a predictor says of each.

    A rollout that ended says less than it seems, since short ones end first: so the mean is of all tokens made, also by
    those that go on, per rollout that ended; to begin with, as if one of half the most tokens had. `full`: memory has
    run out, and no rollout has ended since.
    """

    def __init__(self, prefix: int, most: int) -> None:
        """`prefix`: how many tokens everyone has made before lengths are predicted; `most`: the most of any."""
        self.full = False
        self._prefix, self._most = prefix, most
        self._ended, self._tokens = 1, most / 2

    def ended(self, tokens: int) -> None:
        self._ended += 1
        self._tokens += tokens
        self.full = False

    def length(self, sequence: Sequence, made: int, in_flight: int) -> int:
        """Tokens in the end of one that has made so many, where all that run have made `in_flight`. Who has outlived
        what was expected is expected to go on for half as long again.

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
    """Rows that run, or are about to, and the tokens that there are for all of them at their fullest moment."""

    def __init__(self, made: list[int], lengths: list[int], room: int, page: int) -> None:
        self._made, self._lengths, self._room, self._page = made, lengths, room, page

    @property
    def fits(self) -> bool:
        """Half of everybody's last page is empty on average."""
        wanted = fullest(np.array(self._made, dtype=np.int64), np.array(self._lengths, dtype=np.int64))
        return wanted + len(self._made) * self._page // 2 <= self._room

    def admits(self, made: int, length: int, prompt: int) -> bool:
        """Whether one more fits, with so many tokens of a prompt beside; then it belongs to them."""
        more = RunningRows([*self._made, made], [*self._lengths, length], self._room - prompt, self._page)
        if more.fits:
            self._made, self._lengths, self._room = more._made, more._lengths, more._room
        return more.fits


def fullest(made: np.ndarray, lengths: np.ndarray) -> int:
    """Most tokens that are held at a time by rows that have made so many and end at their lengths, a token a step.

    >>> fullest(np.array([0, 2]), np.array([4, 4]))  # in two steps 2 and 4, in four 4 and nothing
    6
    """
    left = np.sort(lengths - made)
    order = np.argsort(lengths - made)
    after = np.cumsum(made[order][::-1])[::-1] + left * np.arange(len(left), 0, -1)
    return int(after.max(initial=0))
