"""Answers that are expressions: compared as quantities and texts first, then by `math-verify` in a process to kill.

`math-verify` uses sympy, whose arithmetic can take forever on a short text and cannot be interrupted from within, so a
process that is killed is the only guard that works. Running out of time is a zero that is counted (`over_limit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require
from grpo_cli.tasks.expressions import MAX_EXPRESSION, final_expression, settled
from grpo_cli.tasks.judges import Completion
from grpo_cli.tasks.workers import DoesNotStart, Workers

ON_CRASH = ("stop", "zero")
MOST_WORKERS = 256
_REMEMBERED = 50_000  # comparisons, before all are forgotten: completions repeat within a step and between steps


class MathJudge:
    """The parts `correct`, `correct_strict` (in the form asked for), `over_limit` and `incomparable`, each 1 or 0.

    A comparison gets at most `seconds`. `on_crash` says what happens when a completion makes the judge itself fail: the
    run stops with its text, or it is wrong and counted as incomparable.
    """

    advice = f"put it into \\boxed{{}}, or let it be an expression of at most {MAX_EXPRESSION} characters"

    def __init__(self, main: str, seconds: float, workers: int, on_crash: str) -> None:
        require("math_verify", "task.reward=math", "answers that are plain numbers need none: task.reward=numbers")
        self.main = main
        self._on_crash = on_crash
        self._workers = Workers(Path(__file__).with_name("math_worker.py"), workers, seconds)
        self._known: dict[tuple[str, str], str] = {}

    def gold(self, text: str) -> str | None:
        """The last box of a worked solution, what follows its `####`, or the whole of a short text."""
        if "####" in text or "\\boxed" in text or "\\fbox" in text:
            found = final_expression(text)
            return found.expression if found and found.marked else None
        return text.strip() if len(text.strip()) <= MAX_EXPRESSION else None

    def __call__(self, completions: Sequence[Completion]) -> list[dict[str, float]]:
        found = [final_expression(completion.text) for completion in completions]
        said = zip(completions, found, strict=True)
        pairs = [(completion.answer, final.expression) if final else None for completion, final in said]
        places = {pair: completion.place for pair, completion in zip(pairs, completions, strict=True) if pair}
        verdicts = self._verdicts(places)
        results = []
        for pair, final in zip(pairs, found, strict=True):
            verdict = verdicts[pair] if pair else "different"
            results.append(
                {
                    "correct": float(verdict == "equal"),
                    "correct_strict": float(verdict == "equal" and final is not None and final.marked),
                    "over_limit": float(verdict == "over limit"),
                    "incomparable": float(verdict == "incomparable"),
                }
            )
        return results

    def _verdicts(self, pairs: Mapping[tuple[str, str], str]) -> Mapping[tuple[str, str], str]:
        """For each pair of a gold answer and an expression: equal, different, over limit or incomparable.

        `pairs` has the place that each comes from, for messages.
        """
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        unknown: list[tuple[str, str]] = []
        questions = []
        for pair in [pair for pair in pairs if pair not in self._known]:
            verdict = settled(*pair)
            if isinstance(verdict, bool):
                self._known[pair] = "equal" if verdict else "different"
            else:
                unknown.append(pair)
                questions.append({"gold": verdict[0], "answer": verdict[1]})
        try:
            replies = self._workers.ask(questions)
        except DoesNotStart as error:
            raise UserError(f"the judge of task.reward=math does not start: {error}") from error
        for pair, reply in zip(unknown, replies, strict=True):
            if "died" in reply and self._on_crash == "stop":
                raise UserError(
                    f"the judge of mathematics ended with {reply['died']} when it compared {pair[1]!r}, the answer of "
                    f"{pairs[pair]}, with {pair[0]!r}; please report this to math-verify. task.on_crash=zero counts "
                    "such replies as wrong (reward/incomparable) and goes on"
                )
            self._known[pair] = _verdict(reply)
        return self._known

    def close(self) -> None:
        """End the workers; they end by themselves with this object."""
        self._workers.close()


def _verdict(reply: Mapping[str, object]) -> str:
    if "limit" in reply:
        return "over limit"
    if "incomparable" in reply or "died" in reply:
        return "incomparable"
    return "equal" if reply["equal"] else "different"
