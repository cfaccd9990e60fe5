"""Strings after which a rollout ends, in addition to the model's own tokens for it: `sampling.stop`.

The engine knows tokens only, so it is lent a function that turns them into text, and asks it of the last few tokens of
each running row after every step. The token that completes a string is the rollout's last: its tokens, their number and
their log-probabilities are those that were sampled, and a longer run would have had the same ones up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from grpo_cli.engine.torch.transcripts import Transcripts
from grpo_cli.types import Request

Decode = Callable[[Sequence[int]], str]


class NeverStop:
    """No request has a stop string: nothing is looked at."""

    def hits(self, transcripts: Transcripts, sequences: Sequence[int], requests: Sequence[Request]) -> list[int]:
        return []


class StopStrings:
    """Looks for each request's own strings: a short text is decoded per row and step, of tokens that are here."""

    def __init__(self, longest: int, decode: Decode) -> None:
        # A token is at least a byte, so these many hold the longest string; a decoder may drop the first one's space.
        self._tokens = longest + 1
        self._decode = decode

    def hits(self, transcripts: Transcripts, sequences: Sequence[int], requests: Sequence[Request]) -> list[int]:
        """Those of `sequences`, each of which has a new token, whose text now ends their rollout."""
        found = []
        for sequence in sequences:
            request = requests[sequence]
            text = self._decode(transcripts.tail(request, sequence, self._tokens))
            if any(string in text for string in request.sampling.stop):
                found.append(sequence)
        return found


def stop_of(stops: Iterable[Sequence[str]], decode: Decode | None) -> StopStrings | NeverStop:
    """What looks for these requests' strings; nothing does if there are none."""
    longest = max((len(string.encode()) for strings in stops for string in strings), default=0)
    if not longest:
        return NeverStop()
    assert decode is not None, "an engine that is given stop strings is given the means to read"
    return StopStrings(longest, decode)
