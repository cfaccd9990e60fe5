"""How often the judges of mathematics are right, how fast they are, and whether hostile replies can hold them up.

Right and fast: on all solutions of GSM8K as they are, and with their final number changed, in the forms that replies
take. Held up: on a hundred expressions made to take a lifetime, nest deeply or look like code. Exits with 1 when a
bound is missed. `--gsm8k` is a folder with train.jsonl and test.jsonl; without it only the hostile part is run.

    python scripts/bench/judge.py --gsm8k data/gsm8k --json out.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import Check, Figures, finish, parsed, parser, show

from grpo_cli.tasks.answers import gold_answer
from grpo_cli.tasks.judges import Completion, Judge, Numbers
from grpo_cli.tasks.math_judge import MathJudge

AGREEMENT, PER_SECOND, HOSTILE = 0.995, 2000, 100
FORMS = ("#### {}", "The final answer is $\\boxed{{{}}}$.", "The answer is {}.", "<answer>{}</answer>")
HOSTILE_GOLD = r"\frac{x+1}{7}"


def hostile_expressions() -> list[str]:
    """A hundred: towers of powers, factorials, sums and integrals without end, deep nests, long rows, code, noise."""
    towers = [f"{base}^{{{base}^{{{base}^{{{base}}}}}}}" for base in (*range(2, 20), "e", r"\pi", "x", "1.5")]
    factorials = [f"{10**n}!" for n in range(6, 14)] + ["((4!)!)!", r"\binom{10^9}{5\cdot10^8}"]
    endless = [rf"\{kind}^{{10^{{{n}}}}} i^{{i}}" for kind in ("sum_{i=1}", "prod_{i=1}") for n in range(6, 12)]
    endless += [rf"\int \{f}(\sin(\sin(x^x))) dx" for f in ("sin", "cos", "tan", "log")]
    endless += [rf"\lim_{{x\to {a}}} x^{{x^{{x^x}}}}" for a in ("0", "1", r"\infty")]
    endless += [f"(x+y+z+w)^{{{n}}}" for n in (50, 200, 1000)] + [f"(1+x)^{{{n}}}" for n in (1000, 10_000)]
    endless += [rf"\begin{{pmatrix}}1&2\\3&4\end{{pmatrix}}^{{{10**n}}}" for n in (6, 9, 12)]
    endless += [r"\tan(10^{100000})", r"\sqrt[1000000]{2^{1000001}}", r"\frac{10^{10000000}}{3}"]
    nests = ["(" * 200 + "1" + ")" * 200, r"\sqrt{" * 60 + "2" + "}" * 60, r"\frac{1}{1+" * 40 + "x" + "}" * 40]
    nests += [r"\sin(" * 80 + "x" + ")" * 80, "^".join("x" * 120), "x+" * 250 + "1", "1/" * 200 + "1", "{" * 250]
    nests += [r"\left(" * 60, "x_{" * 150, r"\begin{cases}" * 30]
    noise = ["__import__('os').system('true')", r"\text{__import__('os').system('true')}", "lambda: 0", "}{"]
    noise += ["\\" * 100, "\x00", "#" * 300, "_" * 300, "1" * 500, "1/0", r"\frac{0}{0}", r"\infty-\infty", r"\log(0)"]
    noise += [r"\underbrace{" * 40, r"\{" + ",".join(f"x^{{{i}}}" for i in range(60)) + r"\}"]
    some = [*towers, *factorials, *endless, *nests, *noise]
    return [*some, *(f"-{text}" for text in some)][:HOSTILE]


def replies_of(folder: Path) -> tuple[list[Completion], list[Completion]]:
    """Every solution of GSM8K with its own answer, and with another number, each in one of the forms in turn."""
    right, wrong = [], []
    lines = [line for name in ("train", "test") for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
    for i, solution in enumerate(json.loads(line)["answer"] for line in lines):
        worked, _, shown = solution.rpartition("#### ")
        gold = gold_answer(solution)
        assert gold is not None, f"solution {i} has no answer"
        other = (str(gold + 1), str(gold - 10), f"1{shown.lstrip('-')}", f"{shown}.5", f"{shown}0", str(-gold))[i % 6]
        if gold == 0 and i % 6 >= 4:
            other = "7"
        form = FORMS[i % len(FORMS)]
        for answer, replies in ((shown, right), (other, wrong)):
            replies.append(Completion(str(i), worked + form.format(answer), (), str(gold), True, 1, None))
    return right, wrong


def agreement(judge: Judge, right: Sequence[Completion], wrong: Sequence[Completion]) -> Figures:
    found = [parts["correct"] for parts in judge(right)], [parts["correct"] for parts in judge(wrong)]
    agreed = [value == 1.0 for value in found[0]] + [value == 0.0 for value in found[1]]
    return {"replies": len(agreed), "agreement": sum(agreed) / len(agreed)}


def per_second(make: Callable[[], Judge], replies: Sequence[Completion], processes: int) -> float:
    """Replies judged a second by so many processes, each with its share; the starts are left out."""
    shares = [replies[i::processes] for i in range(processes)]
    context = get_context("fork")
    barrier = context.Barrier(processes + 1)
    workers = [context.Process(target=_judge_share, args=(make, share, barrier)) for share in shares]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.join()
    return len(replies) / seconds


def _judge_share(make: Callable[[], Judge], replies: Sequence[Completion], barrier: Any) -> None:
    judge = make()
    judge(replies[:1])
    barrier.wait()
    judge(replies)
    barrier.wait()


def held_up(limit: float, expressions: Sequence[str]) -> Figures:
    """Each hostile expression by itself, so that its own time shows."""
    judge = MathJudge("correct", limit, 1)
    seconds, over, right = [], 0, 0
    questions = count()
    for expression in expressions:
        while judge([Completion("", "\\boxed{y}", (), f"z_{{{next(questions)}}}", True, 1, None)])[0]["over_limit"]:
            pass  # until a worker has started and answers
        start = time.perf_counter()
        (parts,) = judge([Completion("", f"\\boxed{{{expression}}}", (), HOSTILE_GOLD, True, 1, None)])
        seconds.append(time.perf_counter() - start)
        over += int(parts["over_limit"])
        right += int(parts["correct"])
    found = {"expressions": len(seconds), "limit_seconds": limit, "longest_seconds": max(seconds)}
    return found | {"over_limit": over, "called_right": right}


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    made.add_argument("--limit", type=float, default=1.0, help="seconds that a comparison may take")
    args = parsed(made, words)
    size = 4 if args.quick else None
    checks, result = [], {}
    if args.gsm8k is not None:
        right, wrong = (replies[:size] for replies in replies_of(args.gsm8k))
        makers: dict[str, Callable[[], Judge]] = {
            "numbers": lambda: Numbers("correct"),
            "math": lambda: MathJudge("correct", args.limit, 1),
        }
        for name, make in makers.items():
            speeds = {f"per_second_{n}": per_second(make, right, n) for n in (1, 2)}
            found = result[name] = agreement(make(), right, wrong) | speeds
            checks.append(Check(f"{name} agrees with gold", found["agreement"], least=AGREEMENT))
            checks.append(Check(f"{name}, replies a second by two", found["per_second_2"], least=PER_SECOND))
        columns = {"replies": ("replies", "g"), "agreement": ("agreement", ".3%")}
        columns |= {f"a second by {n}": (f"per_second_{n}", ",.0f") for n in (1, 2)}
        show("judges of mathematics", result, columns)
    found = result["hostile"] = held_up(args.limit, hostile_expressions()[:size])
    print(f"hostile: {found['over_limit']} of {found['expressions']} reached the limit of {args.limit:g} s")
    checks.append(Check("the longest took, in seconds", found["longest_seconds"], most=args.limit + 1.0))
    checks.append(Check("hostile ones called right", found["called_right"], most=0))
    return finish(args, result, checks, "math-verify")


if __name__ == "__main__":
    sys.exit(main())
