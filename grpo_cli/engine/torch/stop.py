"""Strings after which a rollout ends, in addition to the model's own tokens for it: `sampling.stop`.

The engine knows only tokens, so it is given a function that decodes them, and applies it to the last few tokens of each
running row after every step. The token that completes a string is the rollout's last: its tokens and log-probabilities
are those that were sampled, and an unstopped rollout would begin with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from grpo_cli.engine.torch.transcripts import Transcripts
from grpo_cli.types import Request

Decode = Callable[[Sequence[int]], str]


class NeverStop:
    """No request has a stop string: nothing is decoded."""

    def hits(self, transcripts: Transcripts, sequences: Sequence[int], requests: Sequence[Request]) -> list[int]:
        return []


class StopStrings:
    """Looks for each request's own strings, decoding a short text per row and step."""

    def __init__(self, longest: int, decode: Decode) -> None:
        # A token is at least a byte, so these hold the longest string; a decoder may drop the first one's space.
        self._tokens = longest + 1
        self._decode = decode

    def hits(self, transcripts: Transcripts, sequences: Sequence[int], requests: Sequence[Request]) -> list[int]:
        """Those of `sequences`, each with a new token, whose text now contains a stop string."""
        found = []
        for sequence in sequences:
            request = requests[sequence]
            text = self._decode(transcripts.tail(request, sequence, self._tokens))
            if any(string in text for string in request.sampling.stop):
                found.append(sequence)
        return found


def stop_of(stops: Iterable[Sequence[str]], decode: Decode | None) -> StopStrings | NeverStop:
    """The checker for these requests' stop strings."""
    longest = max((len(string.encode()) for strings in stops for string in strings), default=0)
    if not longest:
        return NeverStop()
    assert decode is not None, "stop strings need a decoder"
    return StopStrings(longest, decode)
