"""An environment that answers a wrong number by "That is wrong. Try again."."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from grpo_cli.tasks.answers import equal, extract_answer


class Again:
    """The environment."""

    def reset(self, **row: Any) -> None:
        self._answer = Fraction(row["answer"])

    def respond(self, turn: str) -> str | None:
        return None if equal(extract_answer(turn).value, self._answer) else "That is wrong. Try again."
