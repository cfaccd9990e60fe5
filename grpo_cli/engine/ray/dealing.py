"""Which worker makes which rollouts: a `Deal` hands out the requests of one `generate` in portions.

A prompt's samples stay together, since they share its keys, unless they are more than a worker's share. Where lengths
are known the longest go first. A worker's first portion is most of its fair share, so that its slots are refilled for
long; what is left goes in ever smaller portions to whoever asks, so that a slow worker takes fewer. Requests that were
not delivered by a worker that is lost are dealt again, before all others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from grpo_cli.types import Request

# Of a worker's fair share its first portion, before anybody knows how fast the workers are and afterwards, and then of
# its share of what is left. A portion's end, when slots fall empty one after the other, is paid once for each; more
# would leave nothing to even out by.
FIRST, FIRST_KNOWN, LATER = 0.75, 0.9, 0.5
# A portion that takes so many times as long as was to be expected by the longest that ended goes to another worker too.
PATIENCE = 2.0

_numbers = count()  # of portions, so that late answers are never taken for those of another `generate`


@dataclass(frozen=True)
class Portion:
    """`indices` of requests, and what is expected of them together."""

    number: int
    indices: tuple[int, ...]
    weight: float


@dataclass
class _Held:
    portion: Portion
    since: float
    copied: bool = False  # asked of another worker too


class Deal:
    """Each request is delivered once, whatever becomes of workers. `at_once`: a worker runs a portion as one batch, so
    that a second one would cost as long as the first. `known_speeds`: the workers' have been measured.

    `speeds` are those of the workers that there are, by their numbers; only their ratios count.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        lengths: Sequence[float] | None,
        workers: int,
        at_once: bool,
        known_speeds: bool = False,
    ) -> None:
        self._weights = list(lengths) if lengths else [float(r.sampling.max_new_tokens) for r in requests]
        self._total = sum(self._weights)
        self._prompts = [request.prompt.id for request in requests]
        bundles = self._bundles(range(len(requests)), self._total / workers)
        if lengths:
            bundles.sort(key=lambda bundle: -max(self._weights[index] for index in bundle))
        self._queue = deque(bundles)
        self._undealt = self._total
        first = FIRST_KNOWN if known_speeds else FIRST
        self._first, self._later = (1.0, 1.0) if at_once or workers == 1 else (first, LATER)
        self._left = set(range(len(requests)))
        self._held: dict[int, _Held] = {}
        self._served = set[int]()  # workers that had a portion
        self._longest: tuple[float, float] | None = None  # seconds that a portion took, and its weight
        self.again = 0  # requests that were dealt a second time

    def _bundles(self, indices: Sequence[int], most: float) -> list[tuple[int, ...]]:
        """Of one prompt each, and not more than `most` together."""
        of: dict[str, list[int]] = {}
        for index in indices:
            of.setdefault(self._prompts[index], []).append(index)
        return [piece for bundle in of.values() for piece in self._pieces(bundle, most)]

    def _pieces(self, bundle: Sequence[int], most: float) -> Iterator[tuple[int, ...]]:
        """In its order, about equal, as few as will do."""
        weight = sum(self._weights[index] for index in bundle)
        parts = min(len(bundle), -int(-weight // most)) if most > 0 else 1
        for part in range(parts):
            start, end = len(bundle) * part // parts, len(bundle) * (part + 1) // parts
            yield tuple(bundle[start:end])

    @property
    def open(self) -> bool:
        """Whether something is still to be delivered."""
        return bool(self._left)

    def next(self, worker: int, speeds: Mapping[int, float], now: float) -> Portion | None:
        """What `worker`, which has nothing to do, does next; None if there is nothing."""
        assert worker not in self._held, "a worker has one portion at a time"
        indices = self._dealt(worker, speeds) if self._queue else self._copied(worker, now)
        if not indices:
            return None
        portion = Portion(next(_numbers), indices, sum(self._weights[index] for index in indices))
        self._held[worker] = _Held(portion, now)
        self._served.add(worker)
        return portion

    def _dealt(self, worker: int, speeds: Mapping[int, float]) -> tuple[int, ...]:
        share = speeds[worker] / sum(speeds.values())
        mine = self._undealt * share * self._later
        if worker not in self._served:
            mine = max(mine, self._total * share * self._first)
        taken: list[int] = []
        weight = 0.0
        while self._queue:
            bundle = sum(self._weights[index] for index in self._queue[0])
            if taken and weight + bundle / 2 > mine:
                break
            taken += self._queue.popleft()
            weight += bundle
        self._undealt -= weight
        return tuple(taken)

    def _copied(self, worker: int, now: float) -> tuple[int, ...]:
        """What the slowest worker has not delivered, if it has taken very long."""
        late = [held for held in self._held.values() if not held.copied and now - held.since > self._patience(held)]
        if not late:
            return ()
        slowest = min(late, key=lambda held: held.since)
        slowest.copied = True
        indices = tuple(index for index in slowest.portion.indices if index in self._left)
        self.again += len(indices)
        return indices

    def _patience(self, held: _Held) -> float:
        """Seconds. A smaller portion than the longest may take as long: by its longest reply."""
        if self._longest is None:
            return math.inf
        seconds, weight = self._longest
        return PATIENCE * seconds * max(1.0, held.portion.weight / weight)

    def deliver(self, index: int) -> bool:
        """Whether it is the first answer to this request."""
        first = index in self._left
        self._left.discard(index)
        return first

    def end(self, worker: int, now: float) -> None:
        """A worker has done its portion; what it did not deliver is dealt again."""
        held = self._held.pop(worker)
        self._give_back(held)
        self._longest = max(self._longest or (0.0, 0.0), (now - held.since, held.portion.weight))

    def lose(self, worker: int) -> None:
        """A worker is gone, or does not go on with its portion."""
        if held := self._held.pop(worker, None):
            self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        elsewhere = {index for other in self._held.values() for index in other.portion.indices}
        missing = [index for index in held.portion.indices if index in self._left and index not in elsewhere]
        if missing:
            self.again += len(missing)
            self._undealt += sum(self._weights[index] for index in missing)
            # In small pieces: whoever asks first takes its share of them.
            self._queue.extendleft(reversed(self._bundles(missing, self._total)))

    def holder(self, worker: int) -> int | None:
        """The number of the portion that a worker has."""
        held = self._held.get(worker)
        return None if held is None else held.portion.number
