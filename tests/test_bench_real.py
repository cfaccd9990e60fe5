"""What `scripts/bench/real.py` makes of its figures. No clock is judged."""

from __future__ import annotations

import pytest
import real
from test_bench_rollout import case

pytestmark = pytest.mark.study


def line(*rounds: dict[str, float], arm: str = "infinite") -> real.Line:
    return real.Line(arm, case(threads=1), list(rounds))


def test_ratios_are_of_the_processor_where_there_is_one_thread_and_of_rounds():
    # 5 completions of one prompt, 25 tokens: 20 of them in steps, 4 rows in each of 5 steps.
    figures = {"tokens_per_second": 10.0, "tokens_per_cpu_second": 40.0, "tokens": 25.0, "steps": 5.0}
    assert real.derived(case(threads=1), figures) == {"rate": 40.0, "rows": 4.0}
    assert real.derived(case(threads=2), figures)["rate"] == 10.0
    training = {"seconds": 8.0, "cpu_seconds": 4.0}
    assert real.derived(case(threads=1), training) == {"rate": 0.25}
    assert real.derived(case(threads=2), training) == {"rate": 0.125}
    assert real.derived(case(threads=1), {"step_ms": 3.0}) == {}


def test_what_is_wanted_is_asked_of_the_arms_that_ran():
    slow, fast = line({"rate": 2.0}), line({"rate": 6.0})
    groups = {
        "rollout: autocast, 16 rows": {"ours": slow, "vLLM": line()},
        "rollout: bfloat16, 16 rows": {"ours": fast, "generate": slow},
        "train: float32": {
            "ours": line({"rate": 1.0, "peak_bytes": 3.0 * 2**30}),
            "TRL": line({"rate": 0.5, "peak_bytes": 2.0 * 2**30}),
        },
    }
    asked = {check.words: (round(check.found, 3), check.holds) for t in groups for check in real.wanted_of(groups, t)}
    assert asked == {
        "rollout: autocast, 16 rows: speed over bfloat16": (0.333, False),
        "rollout: bfloat16, 16 rows: speed over generate": (3.0, True),
        "train: float32: speed over TRL": (2.0, False),
        "train: float32: peak, GiB": (3.0, True),
        "train: float32: peak over TRL's": (1.5, False),
    }
