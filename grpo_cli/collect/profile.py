"""What is known of problems before training: a file of answers, and the sizes of groups that it suggests."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_cli.history import History
from grpo_cli.types import Prompt


def read_history(file: str | None, prompts: Sequence[Prompt]) -> History:
    return History()
