"""Time of selecting from many rewards, against `numpy.sort` of the same rewards in the same run.

`maxvar` has a bound: at most 3 sorts, for continuous and for binary rewards, whatever is kept. The other rules are
shown beside it. Exits with 1 when the bound is missed.

    python scripts/bench_downsample.py outputs/bench_downsample.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from grpo_cli.downsample import max_reward_indices, max_variance_indices, percentile_indices

BOUND = 3.0
RULES = {"maxvar": max_variance_indices, "maxreward": max_reward_indices, "percentile": percentile_indices}


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(rewards: np.ndarray, kept: int, repeats: int, seed: int) -> dict[str, float]:
    """Seconds of the fastest sort and of the fastest run of each rule: what they cost when nothing else disturbs.

    Taken in turns, so that a slow moment of the machine does not fall on one of them alone.
    """
    rng = np.random.default_rng(seed)
    runs: dict[str, Callable[[], object]] = {"sort": lambda: np.sort(rewards)}
    for name, rule in RULES.items():
        runs[name] = partial(rule, rewards, kept, rng)
    turns = [{name: seconds_of(run) for name, run in runs.items()} for _ in range(repeats)]
    return {name: min(turn[name] for turn in turns) for name in runs}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of selecting from many rewards, against numpy.sort of them.")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--n", type=int, default=1_000_000, help="rewards in the group")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    kinds = {"continuous": rng.standard_normal(args.n), "binary": (rng.random(args.n) < 0.3).astype(np.float64)}
    rows = []
    for kind, rewards in kinds.items():
        for kept in (16, args.n // 4, args.n // 2, args.n - 1):
            seconds = measure(rewards, kept, args.repeats, args.seed)
            ratios = {name: seconds[name] / seconds["sort"] for name in RULES}
            rows.append({"rewards": kind, "n": args.n, "m": kept, "seconds": seconds, "ratio_to_sort": ratios})
            shown = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
            print(f"{kind:<10}  m={kept:<8}  sort {1e3 * seconds['sort']:6.2f} ms  {shown}")
    worst = max(row["ratio_to_sort"]["maxvar"] for row in rows)
    print(f"maxvar costs at most {worst:.2f}x a sort (bound {BOUND:g}x)")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"bound": BOUND, "worst_maxvar_ratio": worst, "numpy": np.__version__, "machine": platform.machine()}
    args.out.write_text(json.dumps(result | {"rows": rows}, indent=2) + "\n")
    return int(worst > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
