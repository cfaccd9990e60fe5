"""A stand-in for a GPU graph."""

from __future__ import annotations

from collections.abc import Callable

from grpo_cli.engine.cuda_graph import StepOutput


class Again:
    """A capture that, like a graph, repeats a function that it was given once, and overwrites its results. Capturing
    runs it once."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], StepOutput]) -> tuple[StepOutput, Callable[[], StepOutput]]:
        first = run()
        results = tuple(result.clone() for result in first)
        self.captured += 1

        def replay() -> StepOutput:
            self.replayed += 1
            for mine, its in zip(results, run(), strict=True):
                mine.copy_(its)
            return results

        return first, replay
