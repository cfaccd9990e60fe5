"""A stand-in for a GPU graph."""

from __future__ import annotations

from collections.abc import Callable

from grpo_cli.engine.cuda_graph import TurnOutput


class Again:
    """A capture that, like a graph, repeats a function that it was given once, and overwrites its results."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], TurnOutput]) -> Callable[[], TurnOutput]:
        hidden, tokens, logprobs = (result.clone() for result in run())
        self.captured += 1

        def replay() -> TurnOutput:
            self.replayed += 1
            for mine, its in zip((hidden, tokens, logprobs), run(), strict=True):
                mine.copy_(its)
            return hidden, tokens, logprobs

        return replay
