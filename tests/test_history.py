"""What a run remembers of its problems: figures and copies."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from bank import group_of, problems
from hypothesis import given

from grpo_cli.history import KEPT, UNSEEN, History, Visit

COUNTS = st.lists(st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=12)


@given(counts=COUNTS, decay=st.floats(0, 1), prior=st.floats(0.01, 5))
def test_figures_are_those_of_the_last_visits(counts, decay, prior):
    history, last = History(), counts[-KEPT:]
    for step, (solved, tried) in enumerate(counts):
        history.observe(step, [group_of(problems(1)[0], solved, tried)])
    weights = [decay**age for age in reversed(range(len(last)))]
    a, b = history.beta("q0", decay, prior)
    assert a == pytest.approx(prior + sum(w * solved for w, (solved, _) in zip(weights, last, strict=True)))
    assert a + b == pytest.approx(2 * prior + sum(w * tried for w, (_, tried) in zip(weights, last, strict=True)))
    rate = history.rate("q0", decay)
    assert (not counts) == (len(history) == 0)
    again = History({"q7": [Visit(0, 1, 1)]})
    again.load_state_dict(history.state_dict())
    assert again.visits("q0") == history.visits("q0") and not again.visits("q7")
    shares = [w * solved / tried for w, (solved, tried) in zip(weights, last, strict=True)]
    assert rate == pytest.approx(sum(shares) / sum(weights) if shares else UNSEEN) and -1e-9 <= rate <= 1 + 1e-9
