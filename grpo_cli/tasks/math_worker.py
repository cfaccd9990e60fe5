"""The program behind `math_judge.py`: compares two LaTeX expressions per line, with `math-verify`.

It runs as a script, so that it can be killed, and imports nothing of this package. A line is a JSON object with `gold`
and `answer`; the reply has `equal`, or `limit` (out of memory or depth), or `incomparable` or `died` with the reason.
Only `math-verify`'s LaTeX grammar is used: its other reader hands text to a parser that evaluates it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MEMORY = 4 * 2**30  # bytes of address space
LIBRARIES = ("latex2sympy2_extended", "math_verify", "mpmath", "sympy")
# What arithmetic on things that do not go together raises; anything else is a crash.
INCOMPARABLE = (ArithmeticError, ValueError, TypeError, NotImplementedError)


def serve(prepare: Callable[[], Callable[[Any], dict[str, Any]]], seconds: float) -> None:
    """Answer with what `prepare` makes until the input ends. `seconds` is what one question may take by the asker's
    clock."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library's prints must not be taken for replies
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY)

    def say(reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    try:
        answer = prepare()
        say({"ready": True})
        for line in sys.stdin:
            _let_live(seconds)
            say(answer(json.loads(line)))
    except Exception as error:
        say({"died": f"{type(error).__name__}: {error}"[:300]})
        raise


def _comparisons() -> Callable[[Any], dict[str, Any]]:
    import math_verify

    _compared(math_verify, "x+1", "1+x")  # the first comparison loads a grammar: not on a question's time
    caches = _caches()

    def answer(question: Any) -> dict[str, Any]:
        reply = _compared(math_verify, question["gold"], question["answer"])
        for cache in caches:
            cache.cache_clear()
        return reply

    return answer


def _caches() -> list[Any]:
    """The libraries' caches, which would keep huge numbers until a small question has no memory left. Sympy's own
    `clear_cache` does not know all of them."""
    found = (it for it in gc.get_objects() if isinstance(it, type(_gold)))
    return [cache for cache in found if cache.__module__.partition(".")[0] in LIBRARIES]


def _let_live(seconds: float) -> None:
    """Limit the processor time that is left, so that the system ends us where the asker is gone and cannot."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 3)


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _compared(library: Any, gold: str, answer: str) -> dict[str, Any]:
    try:
        parsed = [_gold(library, gold), _parsed(library, answer)]
        equal = all(parsed) and library.verify(*parsed, timeout_seconds=None, raise_on_error=True)
    except (MemoryError, RecursionError) as error:
        return {"limit": type(error).__name__}
    except INCOMPARABLE as error:
        return {"incomparable": f"{type(error).__name__}: {error}"[:200]}
    return {"equal": bool(equal)}


@lru_cache(maxsize=16)  # the replies to one question come one after the other
def _gold(library: Any, text: str) -> list[Any]:
    return _parsed(library, text)


def _parsed(library: Any, text: str) -> list[Any]:
    """What the library reads in the expression; nothing if it cannot."""
    return library.parse(
        rf"\boxed{{{text}}}",
        extraction_config=[library.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # its own guard is an alarm, which does not interrupt the power of a big integer
        raise_on_error=True,
    )


if __name__ == "__main__":
    serve(_comparisons, float(sys.argv[1]))
