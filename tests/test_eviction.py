"""What each policy thinks of a key, and which keys stay by that."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_eviction import slow_scores
from torch import Tensor

from grpo_cli.config.instantiate import ready
from grpo_cli.engine.eviction import Budget, Candidates
from grpo_cli.methods import rkv as r_kv
from grpo_cli.methods.rkv import Rkv, redundancy
from grpo_cli.methods.snapkv import SnapKv
from grpo_cli.support.errors import UserError

LAYERS, ROWS, HEADS, GROUP, COUNT, DIM = 2, 3, 2, 2, 13, 4
SCALE = DIM**-0.5
WORDS: dict[str, Any] = dict(budget=7, buffer=6, window=3, sinks=0, protect_prompt=True, per_head=True)


def candidates(window: int, count: int = COUNT) -> Candidates:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(LAYERS, ROWS, HEADS, count, DIM, generator=generator)
    queries = 2 * torch.randn(LAYERS, ROWS, HEADS, GROUP, window, DIM, generator=generator)
    return Candidates(keys, window, SCALE, queries)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("kernel", "threshold"), [(1, None), (3, None), (3, -1.0), (3, 0.2), (3, 1.0)])
def test_scores_are_what_a_loop_over_heads_finds(
    kernel: int, threshold: float | None, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of SnapKV, and of R-KV for a threshold of similarity."""
    words = WORDS | {"window": window, "budget": 12, "kernel": kernel}
    made = SnapKv(**words) if threshold is None else Rkv(**words, importance=0.3, threshold=threshold)
    these = candidates(window)
    for at_once in (1, 2 * COUNT**2, 10**9):  # in parts of one head, of two, and all in one
        monkeypatch.setitem(r_kv.SIMILARITIES_AT_ONCE, "cpu", at_once)
        scores = made.score(these)
        for place in itertools.product(range(LAYERS), range(ROWS), range(HEADS)):
            slow = slow_scores(made, these.keys[place], these.queries[place], SCALE, [])
            torch.testing.assert_close(scores[place], torch.tensor(slow), atol=2e-6, rtol=1e-5)


def test_of_three_copies_the_older_are_more_redundant() -> None:
    """Copies at 2, 5 and 7 of ten keys at right angles: the first two let off the third, which lets off the second. So
    the columns' sums are 2, 1 and 0, and the means that go into the softmax those tenths. Lengths do not matter."""
    keys = torch.diag(torch.arange(1.0, 11))
    keys[5], keys[7] = 3 * keys[2], 0.5 * keys[2]
    (found,) = redundancy(keys[None], 0.5)
    assert found[2] / found[7] == pytest.approx(math.exp(0.2)) and found[5] / found[7] == pytest.approx(math.exp(0.1))
    assert found[7] == pytest.approx(float(found[9])), "the newest copy is as good as a key of its own kind"


class Given(Budget):
    """Scores made up beforehand."""

    made_up: Tensor

    def score(self, candidates: Candidates) -> Tensor:
        return self.made_up


@settings(max_examples=40)
@given(st.data())
def test_what_stays_is_the_window_the_sinks_and_the_best_of_the_rest(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(window + 1, 12))
    most_sinks = data.draw(st.integers(0, count - window))
    budget = data.draw(st.integers(window + most_sinks, count))
    sinks = data.draw(st.lists(st.integers(0, most_sinks), min_size=ROWS, max_size=ROWS))
    places = LAYERS * ROWS * HEADS * (count - window)
    values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=places, max_size=places))  # full of ties
    policy = Given(**WORDS | dict(budget=budget, window=window, sinks=most_sinks))
    object.__setattr__(policy, "made_up", torch.tensor(values).view(LAYERS, ROWS, HEADS, count - window))
    kept = policy.choose(candidates(window, count), torch.tensor(sinks))
    assert kept.shape == (LAYERS, ROWS, HEADS, budget)
    for place in itertools.product(range(LAYERS), range(ROWS), range(HEADS)):
        scores, row = policy.made_up[place].tolist(), sinks[place[1]]
        order = sorted(range(count - window), key=lambda j: (j >= row, -scores[j], j))  # of equals the older stays
        assert kept[place].tolist() == sorted([*order[: budget - window], *range(count - window, count)])


def test_a_budget_that_cannot_work_is_refused_with_what_would() -> None:
    plain = WORDS | {"kernel": 3, "importance": 0.1, "threshold": 0.5}
    for words, complaint in (
        ({"budget": 7, "window": 5, "sinks": 3}, "sparsity.budget=7"),
        ({"buffer": 0, "kernel": 0}, "(?s)sparsity.buffer=0.*sparsity.kernel=0"),
        ({"kernel": 4}, "sparsity.kernel=4 must be odd"),
    ):
        with pytest.raises(UserError, match=complaint):
            ready("sparsity", "rkv", **plain | words)
