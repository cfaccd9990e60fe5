"""Strings after which a rollout ends, besides the model's own tokens for it: `sampling.stop`.

The engine knows tokens only, so it is lent a function that turns them into text, and asks it of the last few tokens of
each running row after every step. The token that completes a string is the rollout's last: its tokens, their number and
their log-probabilities are those that were sampled, and a longer run would have had the same ones up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from grpo_cli.engine.slots import Slots

Decode = Callable[[Sequence[int]], str]


class NeverStop:
    """No request has a stop string: nothing is looked at."""

    def hits(self, slots: Slots, rows: Sequence[int]) -> list[int]:
        return []


class StopStrings:
    """Looks for each request's own strings. One look at the device per step, and a short text decoded per row."""

    def __init__(self, longest: int, decode: Decode) -> None:
        # A token is at least a byte, so these many hold the longest string; a decoder may drop the first one's space.
        self._tokens = longest + 1
        self._decode = decode

    def hits(self, slots: Slots, rows: Sequence[int]) -> list[int]:
        """Those of `rows`, which have just drawn a token, whose text now ends their rollout."""
        found = []
        for row, tail in zip(rows, slots.tails(rows, self._tokens), strict=True):
            sequence = slots.sequences[row]
            assert sequence is not None, "a row that drew a token has a sequence"
            text = self._decode(tail)
            if any(string in text for string in sequence.request.sampling.stop):
                found.append(row)
        return found


def stop_of(stops: Iterable[Sequence[str]], decode: Decode | None) -> StopStrings | NeverStop:
    """What looks for these requests' strings; nothing does if there are none."""
    longest = max((len(string.encode()) for strings in stops for string in strings), default=0)
    if not longest:
        return NeverStop()
    assert decode is not None, "an engine that is given stop strings is given the means to read"
    return StopStrings(longest, decode)
