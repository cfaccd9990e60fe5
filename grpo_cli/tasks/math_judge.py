"""Answers that are expressions: compared as quantities and texts first, then by `math-verify` in a process to kill.

`math-verify` uses sympy, whose arithmetic can take forever on a short text and cannot be interrupted from within, so a
process that is killed is the only guard that works. Running out of time is a zero that is counted (`over_limit`), as is
a comparison that fails (`incomparable`): a model wrote what caused it.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_cli.support.extras import require
from grpo_cli.tasks.answers import MAX_ANSWER, final_answer
from grpo_cli.tasks.expressions import compare_written
from grpo_cli.tasks.judges import Completion, Judge
from grpo_cli.tasks.workers import Workers

_REMEMBERED = 50_000  # comparisons, before all are forgotten: completions repeat within a step and between steps


class MathJudge(Judge):
    """A judge with the parts `correct`, `correct_strict` (in the form asked for), `over_limit` and `incomparable`, each
    1 or 0. A comparison gets at most `seconds`."""

    advice = f"put it into \\boxed{{}}, or let it be an expression of at most {MAX_ANSWER} characters"

    def __init__(self, main: str, seconds: float, workers: int) -> None:
        require("math_verify", "task.reward=math", "answers that are plain numbers need none: task.reward=numbers")
        self.main = main
        self._workers = Workers("math", workers, seconds)
        self._known: dict[tuple[str, str], str] = {}

    def gold(self, text: str) -> str | None:
        """Return the last box of a worked solution, what follows its `####`, or the whole of a short text."""
        if "####" in text or "\\boxed" in text or "\\fbox" in text:
            found = final_answer(text)
            return found.text if found and found.mark else None
        return text.strip() if len(text.strip()) <= MAX_ANSWER else None

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        found = [final_answer(completion.reply) for completion in completions]
        pairs = [(one.answer, it.text) if it else None for one, it in zip(completions, found, strict=True)]
        self._compare({pair for pair in pairs if pair})
        judged = []
        for pair, it in zip(pairs, found, strict=True):
            verdict = self._known[pair] if pair else ""
            parts = {part: float(verdict == part) for part in ("correct", "over_limit", "incomparable")}
            judged.append(parts | {"correct_strict": parts["correct"] if it and it.mark else 0.0})
        return judged

    def _compare(self, pairs: set[tuple[str, str]]) -> None:
        """Note which part each pair of a gold answer and an answer counts for, if any."""
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        written = {pair: compare_written(*pair) for pair in pairs - self._known.keys()}
        left = {pair: {"gold": it[0], "answer": it[1]} for pair, it in written.items() if not isinstance(it, bool)}
        replies = dict(zip(left, self._workers.ask([*left.values()]), strict=True))
        for pair, verdict in written.items():
            reply = replies.get(pair, {"equal": verdict})
            failed = "over_limit" if "limit" in reply else "incomparable"
            self._known[pair] = ("correct" if reply["equal"] else "") if "equal" in reply else failed

    def close(self) -> None:
        """End the workers; they end by themselves with this object."""
        self._workers.close()
