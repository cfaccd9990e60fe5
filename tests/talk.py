"""An environment for tests: its reply is a hash of the dialogue so far, returned at once or after some looks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from small import EOS, VOCABULARY

from grpo_cli.types import Prompt, Reward, Rollout


class Slow(Future):
    """Is answered once it has been looked at so often."""

    def __init__(self, looks: int, text: list[str] | None) -> None:
        super().__init__()
        self._left, self._text = looks, text

    def done(self) -> bool:
        if self._left == 0:
            self.set_result(self._text)
        self._left -= 1
        return super().done()


class Talk:
    """Says 1 to 6 tokens, the end-of-sequence token among them, or in one of five cases ends the episode. It has done
    so once it was looked at `looks` times, or twice or three times as often. `asked` is how often it was asked."""

    turn_ends = ()

    def __init__(self, turns: int = 4, looks: int = 0) -> None:
        self.turns, self.looks, self.asked = turns, looks, 0

    def respond(self, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Future[list[str] | None]:
        self.asked += 1
        digest = hashlib.blake2b(repr((prompt.id, tuple(turns))).encode()).digest()
        count = digest[0] % 6 + 1
        said = None if digest[1] % 5 == 0 else [str(byte % VOCABULARY) for byte in digest[2 : 2 + count]]
        return Slow(self.looks * (1 + digest[1] % 3), said)

    def between(self, turns: Sequence[Sequence[int]], said: Sequence[str]) -> Sequence[int]:
        return [EOS] * (turns[-1][-1] != EOS) + [int(word) for word in said]

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def prompts(self, split: str) -> Any:
        raise NotImplementedError

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(float(len(rollout) % 3))
