"""The program behind `workers.py`: compares LaTeX expressions with `math-verify`, or makes problems of `reasoning-gym`
and scores answers to them.

It runs as a script, so that it can be killed, and imports nothing of this package. Messages on its pipe are JSON
objects; a reply may have `limit` (out of memory or depth), or `incomparable` with the reason. Only the LaTeX grammar is
used: math-verify's other reader hands text to a parser that evaluates it. What math-verify calls equal has to have
equal values too: it rounds, drops the left side of an equation, and takes (1,2) for {1,2}.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from random import Random
from typing import Any

BLOCK = 500  # problems of one data set of reasoning-gym, which makes all of some at once
MEMORY = 4 * 2**30  # bytes of address space
Handler = Callable[[Any], dict[str, Any]]
LIBRARIES = ("latex2sympy2_extended", "math_verify", "mpmath", "sympy")


def serve(prepare: Callable[[], Handler], seconds: float, pipe: Connection) -> None:
    """Reply with what `prepare` makes until the pipe is closed. One question may take `seconds`."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY)
    try:
        answer = prepare()
    except Exception as error:
        pipe.send_bytes(json.dumps({"died": f"{type(error).__name__}: {error}"[:300]}).encode())
        raise
    reply: dict[str, Any] = {"ready": True}
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(json.dumps(reply).encode())
            question = json.loads(pipe.recv_bytes())
            # the system ends this process if its parent is gone
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 3)
            try:
                reply = answer(question)
            except (MemoryError, RecursionError) as error:
                reply = {"limit": type(error).__name__}
            except Exception as error:  # libraries raise many kinds, at text that a model wrote and at a wrong config
                reply = {"incomparable": f"{type(error).__name__}: {error}"[:300]}


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def comparisons() -> Handler:
    """Return the handler that finds whether `reference` and `answer` are `equal`."""
    from math_verify import verify

    def equal(reference: str, answer: str) -> bool:
        one, other = _parsed_reference(reference), _parsed(answer)
        if one is None or other is None or not verify(one, other, timeout_seconds=None, raise_on_error=True):
            return False
        return _alike(one, other)

    equal("x+1", "1+x")  # the first comparison loads a grammar: not on a question's time
    # The libraries' caches would keep huge numbers until a small question has no memory left; sympy's own
    # `clear_cache` does not know all of them.
    found = (it for it in gc.get_objects() if isinstance(it, type(_parsed_reference)))
    caches = [cache for cache in found if cache.__module__.partition(".")[0] in LIBRARIES]

    def answer(question: Any) -> dict[str, Any]:
        try:
            return {"equal": equal(question["reference"], question["answer"])}
        finally:
            for cache in caches:
                cache.cache_clear()

    return answer


def _parsed(text: str) -> Any:
    """Return the expression, with decimals as the fractions that they are; None for what is none."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
    from sympy import Float, I, Product, Rational, Sum, Symbol

    try:
        found = latex2sympy(
            text,
            is_real=True,
            normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none"),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        exact: dict[Any, Any] = {number: Rational(str(number)) for number in found.atoms(Float)}
        if not found.has(Sum, Product):
            exact[Symbol("i", real=True)] = I
        return found.xreplace(exact)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the grammar raises just this, and what it stumbles over, for text that is no expression
        return None


_parsed_reference = lru_cache(maxsize=16)(_parsed)  # the replies to one question come one after the other


def _alike(one: Any, other: Any) -> bool:
    """True if two expressions have equal values, at some point where they have variables."""
    from sympy import And, Eq, Interval, MatrixBase, Or, Set, Tuple
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import BooleanAtom

    logic, compound = (Relational, And, Or), (Set, Tuple, MatrixBase, And, Or, BooleanAtom)
    both = (one, other)
    if isinstance(one, Eq) and isinstance(other, Eq) and one.lhs == other.lhs:
        return _alike(one.rhs, other.rhs)
    if all(isinstance(it, Relational) for it in both):  # one is a multiple of the other
        a, b, c, d = (_at(it.lhs - it.rhs, place) for place in (0, 1) for it in both)
        return bool(abs(a * d - b * c) <= abs(a * d) / 10**25)
    if not all(isinstance(it, logic) for it in both):
        both = _bare(one), _bare(other)
        if any(isinstance(it, logic) for it in both):  # x > 3 is the interval from 3 on
            both = tuple(it.as_set() if isinstance(it, logic) and len(it.free_symbols) == 1 else it for it in both)
    one, other = (it.as_immutable() if isinstance(it, MatrixBase) else it for it in both)
    if one == other:
        return True
    if isinstance(one, (*compound, Relational)) or isinstance(other, (*compound, Relational)):
        if one.func != other.func or len(one.args) != len(other.args) or isinstance(one, BooleanAtom):
            return False
        if isinstance(one, (Interval, Tuple, MatrixBase)):
            return all(map(_alike, one.args, other.args))
        ways = (both, both[::-1])
        return all(any(_alike(part, it) for it in there.args) for here, there in ways for part in here.args)
    # What evaluates to 0 without a digit to trust is 0.
    return all(it == 0 or (it.is_Float and it._prec == 1) for it in _at(one - other, 0).as_real_imag())


def _bare(it: Any) -> Any:
    """Return the value in `x = value`, in `2 + 3 = 5` and in a set of one; else the expression as it is."""
    from sympy import Eq, FiniteSet, Symbol
    from sympy.core.function import AppliedUndef

    if isinstance(it, FiniteSet) and len(it.args) == 1:
        return _bare(it.args[0])
    named = isinstance(it, Eq) and isinstance(it.lhs, (Symbol, AppliedUndef))
    return it.rhs if named or (isinstance(it, Eq) and not it.free_symbols and _alike(*it.args)) else it


def _at(expression: Any, place: int) -> Any:
    """Return the value to 40 digits where each variable has a value of its own, between 1 and 2."""
    from sympy import Rational

    names = sorted(expression.free_symbols, key=str)
    values = {name: 1 + Rational(zlib.crc32(f"{name} {place}".encode()), 2**32) for name in names}
    return expression.doit().evalf(40, subs=values)


def problems() -> Handler:
    """Return what answers with reasoning-gym: `check` tests a task's config, `index` makes a problem, and with `reply`
    (null: none) scores it. Only scorers that do not execute a reply get one (`REFUSED`)."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    @lru_cache(maxsize=32)
    def dataset(task: str, config: str, seed: str) -> Any:
        number = Random(f"{task}/{seed}").getrandbits(31)  # the library adds a problem's place to it
        return reasoning_gym.create_dataset(task, seed=number, size=BLOCK, **json.loads(config))

    @lru_cache(maxsize=64)  # the replies to one question come one after the other
    def entry(task: str, config: str, seed: str, place: int) -> Any:
        return dataset(task, config, seed)[place]

    def answer(asked: Any) -> dict[str, Any]:
        config = json.dumps(asked["config"])
        if "check" in asked:
            if asked["check"] not in DATASETS:
                return {"names": sorted(DATASETS)}
            dataset(asked["check"], config, "tried")
            return {}
        block, place = divmod(asked["index"], BLOCK)
        which = (asked["task"], config, f"{asked['seed']}/{block}")
        found = entry(*which, place)
        if "reply" in asked:
            return {"score": float(dataset(*which).score_answer(asked["reply"], found))}
        oracle = found["answer"]
        return {"question": str(found["question"]), "answer": "" if oracle is None else str(oracle)}

    return answer


if __name__ == "__main__":
    serve({"math": comparisons, "gym": problems}[sys.argv[1]], float(sys.argv[2]), Connection(int(sys.argv[3])))
