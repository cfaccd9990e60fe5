"""Which response keys a slot holds, and so how many it must have room for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dense:
    """Every key is kept until the rollout ends."""

    def capacity(self, max_new_tokens: int) -> int:
        """Response keys a slot must have room for. The last token is never fed back, so it needs no key."""
        return max(1, max_new_tokens - 1)
