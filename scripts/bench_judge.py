"""How often the judges of mathematics are right, how fast they are, and whether hostile replies can hold them up.

Right and fast: on all solutions of GSM8K as they are, and with their final number changed, in the forms that replies
take. Held up: on a hundred expressions made to take a lifetime, nest deeply or look like code. Exits with 1 when a
bound is missed. `--gsm8k` is a folder with train.jsonl and test.jsonl; without it only the hostile part is run.

    python scripts/bench_judge.py outputs/bench_judge.json --gsm8k data/gsm8k
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from grpo_cli.tasks.answers import gold_answer
from grpo_cli.tasks.judges import Judge, Numbers, Reply
from grpo_cli.tasks.math_judge import MathJudge

AGREEMENT, PER_SECOND, HOSTILE = 0.995, 2000, 100
FORMS = ("#### {}", "The final answer is $\\boxed{{{}}}$.", "The answer is {}.", "<answer>{}</answer>")
HOSTILE_GOLD = r"\frac{x+1}{7}"


def hostile_expressions() -> list[str]:
    """A hundred: towers of powers, factorials, sums and integrals without end, deep nests, long rows, code, noise."""
    towers = [f"{base}^{{{base}^{{{base}^{{{base}}}}}}}" for base in (*range(2, 20), "e", r"\pi", "x", "1.5")]
    factorials = [f"{10**n}!" for n in range(6, 14)] + ["((4!)!)!", r"\binom{10^9}{5\cdot10^8}"]
    endless = [
        *(rf"\sum_{{i=1}}^{{10^{{{n}}}}} i^{{i}}" for n in range(6, 12)),
        *(rf"\prod_{{k=1}}^{{10^{{{n}}}}} k" for n in range(6, 12)),
        *(rf"\int {f}(\sin(\sin(x^x))) dx" for f in (r"\sin", r"\cos", r"\tan", r"\log")),
        *(rf"\lim_{{x\to {a}}} x^{{x^{{x^x}}}}" for a in ("0", "1", r"\infty")),
        *(f"(x+y+z+w)^{{{n}}}" for n in (50, 200, 1000)),
        *(f"(1+x)^{{{n}}}" for n in (1000, 10_000)),
        *(rf"\begin{{pmatrix}}1&2\\3&4\end{{pmatrix}}^{{{10**n}}}" for n in (6, 9, 12)),
        r"\tan(10^{100000})",
        r"\sqrt[1000000]{2^{1000001}}",
        r"\frac{10^{10000000}}{3}",
    ]
    nests = [
        "(" * 200 + "1" + ")" * 200,
        r"\sqrt{" * 60 + "2" + "}" * 60,
        r"\frac{1}{1+" * 40 + "x" + "}" * 40,
        r"\sin(" * 80 + "x" + ")" * 80,
        "^".join("x" * 120),
        "x+" * 250 + "1",
        "1/" * 200 + "1",
        "{" * 250,
        r"\left(" * 60,
        "x_{" * 150,
        r"\begin{cases}" * 30,
    ]
    noise = [
        "__import__('os').system('true')",
        r"\text{__import__('os').system('true')}",
        "lambda: 0",
        "}{",
        "\\" * 100,
        "\x00",
        "#" * 300,
        "_" * 300,
        "1" * 500,
        "1/0",
        r"\frac{0}{0}",
        r"\infty-\infty",
        r"\log(0)",
        r"\underbrace{" * 40,
        r"\{" + ",".join(f"x^{{{i}}}" for i in range(60)) + r"\}",
    ]
    some = [*towers, *factorials, *endless, *nests, *noise]
    return [*some, *(f"-{text}" for text in some)][:HOSTILE]


def replies_of(folder: Path) -> tuple[list[Reply], list[Reply]]:
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
            replies.append(Reply(str(i), worked + form.format(answer), str(gold), True, 1, None))
    return right, wrong


def agreement(judge: Judge, right: Sequence[Reply], wrong: Sequence[Reply]) -> dict[str, Any]:
    found = [parts["correct"] for parts in judge(right)], [parts["correct"] for parts in judge(wrong)]
    agreed = [value == 1.0 for value in found[0]] + [value == 0.0 for value in found[1]]
    return {"replies": len(agreed), "agreement": sum(agreed) / len(agreed)}


def per_second(make: Callable[[], Judge], replies: Sequence[Reply], processes: int) -> float:
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


def _judge_share(make: Callable[[], Judge], replies: Sequence[Reply], barrier: Any) -> None:
    judge = make()
    judge(replies[:1])
    barrier.wait()
    judge(replies)
    barrier.wait()


def held_up(limit: float) -> dict[str, Any]:
    """Each hostile expression by itself, so that its own time shows."""
    judge = MathJudge("correct", limit, 1, "zero")
    seconds, over, right = [], 0, 0
    questions = count()
    for expression in hostile_expressions():
        while judge([Reply("", "\\boxed{y}", f"z_{{{next(questions)}}}", True, 1, None)])[0]["over_limit"]:
            pass  # until a worker has started and answers
        start = time.perf_counter()
        (parts,) = judge([Reply("", f"\\boxed{{{expression}}}", HOSTILE_GOLD, True, 1, None)])
        seconds.append(time.perf_counter() - start)
        over += int(parts["over_limit"])
        right += int(parts["correct"])
    return {
        "expressions": len(seconds),
        "limit_seconds": limit,
        "longest_seconds": max(seconds),
        "over_limit": over,
        "called_right": right,
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Agreement, speed and steadfastness of the judges of mathematics.")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that a comparison may take")
    args = parser.parse_args()

    result: dict[str, Any] = {"math_verify": installed("math-verify"), "machine": platform.machine()}
    result |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    missed = False
    if args.gsm8k is not None:
        right, wrong = replies_of(args.gsm8k)
        makers: dict[str, Callable[[], Judge]] = {
            "numbers": lambda: Numbers("correct"),
            "math": lambda: MathJudge("correct", args.limit, 1, "stop"),
        }
        for name, make in makers.items():
            found = agreement(make(), right, wrong)
            found |= {f"per_second_{n}": per_second(make, right, n) for n in (1, 2)}
            result[name] = found
            missed |= found["agreement"] < AGREEMENT or found["per_second_2"] < PER_SECOND
            print(
                f"{name:<8} agrees on {found['agreement']:.3%} of {found['replies']} replies (bound {AGREEMENT:.1%}), "
                f"{found['per_second_1']:.0f} a second by one process, {found['per_second_2']:.0f} by two "
                f"(bound {PER_SECOND})"
            )
    found = result["hostile"] = held_up(args.limit)
    missed |= found["longest_seconds"] > args.limit + 1.0 or found["called_right"] > 0
    print(
        f"hostile  {found['over_limit']} of {found['expressions']} reached the limit of {args.limit:g} s and none took "
        f"longer than {found['longest_seconds']:.2f} s; {found['called_right']} were called right"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
