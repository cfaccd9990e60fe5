"""Intervals and quantiles of small samples: Student's for means, Wilson's for proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

NORMAL_95 = 1.959963984540054  # two-sided 95% quantile of the standard normal distribution


@cache
def student_95(freedom: int) -> float:
    """Return the two-sided 95% quantile of Student's t distribution with `freedom` degrees of freedom."""
    low, high = NORMAL_95, 12.71  # that of one degree, the largest, is 12.7062
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return P(|T| < t): a finite series in the cosine of arctan(t / sqrt(freedom)) (Abramowitz, Stegun, 26.7.3, 4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for j in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (j - 1) / j
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Return the unbiased probability that at least one of k answers is right, from n of which `correct` are.

    1 - C(n - c, k) / C(n, k), the share of k-subsets with a right answer (Chen et al. 2021, arXiv 2107.03374). The
    naive 1 - (1 - c/n)^k is biased low.
    """
    assert 1 <= k <= n and 0 <= correct <= n, (correct, n, k)
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def wilson_interval(successes: float | int, n: float | int) -> tuple[float, float]:
    """Return the 95% score interval of a share (Wilson 1927): inside [0, 1] and of sensible width even at 0 and at n.

    `n` may be an effective number of trials and need not be whole.
    """
    assert 0 <= successes <= n != 0, (successes, n)
    share, z2 = successes / n, NORMAL_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At 0 and at n the ends are exactly 0 and 1; the arithmetic misses them by a rounding.
    return 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half


def mean_interval(values: Sequence[float], trials: int = 1) -> tuple[float, float]:
    """Return the 95% interval of the mean of values in [0, 1], such as a pass@k of each problem that is sampled.

    The Wilson interval with an effective number of trials: n p(1-p) / s^2 coin flips with the mean's probability have
    a mean as uncertain as this one. Values of 0 and 1 alone thus give `wilson_interval`, also when they are all 0 or
    all 1, where a normal or a bootstrap interval would have no width. `trials` is how many coin flips a value stands
    for at most (the samples per problem); it bounds how certain nearly equal values can make us, and 1 is safe.
    """
    n = len(values)
    share = math.fsum(values) / n
    coin, spread = share * (1 - share), math.fsum((value - share) ** 2 for value in values) / n
    if coin == 0:
        flips = float(n)
    else:
        flips = n * (trials if spread * trials <= coin else coin / spread)
    return wilson_interval(min(share * flips, flips), flips)
