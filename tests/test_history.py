"""What a run remembers of its problems, whatever they were: figures, copies, and what was seen before training."""

from __future__ import annotations

import io
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from bank import group_of, problems
from hypothesis import given

from grpo_cli.history import KEPT, PROFILED, UNSEEN, History, Marked, Solved, Visit

COUNTS = st.lists(
    st.integers(1, 9).flatmap(lambda tried: st.tuples(st.integers(0, tried), st.just(tried))), max_size=12
)


def visited(counts: list[tuple[int, int]], profile: tuple[int, int] | None = None) -> History:
    history = History() if profile is None else History({"q0": [Visit(PROFILED, *profile)]})
    for step, (solved, tried) in enumerate(counts):
        history.observe(step, [group_of(problems(1)[0], solved, tried)])
    return history


@given(counts=COUNTS, decay=st.floats(0, 1), prior=st.floats(0.01, 5))
def test_figures_are_those_of_the_last_visits(counts: list[tuple[int, int]], decay: float, prior: float) -> None:
    history, last = visited(counts), counts[-KEPT:]
    weights = [decay**age for age in reversed(range(len(last)))]
    a, b = history.beta("q0", decay, prior)
    assert a == pytest.approx(prior + sum(w * solved for w, (solved, _) in zip(weights, last, strict=True)))
    assert a + b == pytest.approx(2 * prior + sum(w * tried for w, (_, tried) in zip(weights, last, strict=True)))
    rate = history.rate("q0", decay)
    assert (history.outcome("q0") is None) == (not counts) == (len(history) == 0)
    shares = [w * solved / tried for w, (solved, tried) in zip(weights, last, strict=True)]
    assert rate == pytest.approx(sum(shares) / sum(weights) if shares else UNSEEN) and -1e-9 <= rate <= 1 + 1e-9


@given(counts=COUNTS, profile=st.none() | st.just((3, 8)), more=COUNTS)
def test_what_is_put_back_is_what_was_and_goes_on_alike(
    counts: list[tuple[int, int]], profile: tuple[int, int] | None, more: list[tuple[int, int]]
) -> None:
    first, again = visited(counts, profile), History({"q7": [Visit(PROFILED, 1, 1)]})
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    state = first.state_dict()
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert again.state_dict() == state and again.visits("q7") == () and "q7" not in again.profile
    for step, (solved, tried) in enumerate(more, len(counts)):
        for history in (first, again):
            history.observe(step, [group_of(problems(1)[0], solved, tried)])
    assert first.state_dict() == again.state_dict()
    assert (first.state_dict() == state) == (not more), "what was kept does not change"


@pytest.mark.parametrize(
    ("solved", "outcome"), [(0, Solved.NONE), (1, Solved.MIXED), (3, Solved.MIXED), (4, Solved.ALL)]
)
def test_an_outcome_is_of_the_last_visit(solved: int, outcome: Solved) -> None:
    assert visited([(2, 4), (solved, 4)]).outcome("q0") is outcome


CHANGES = st.lists(st.tuples(st.sampled_from(["set", "remove", "mark"]), st.integers(0, 4), st.integers(0, 9)))


@given(begun=st.dictionaries(st.integers(0, 4), st.integers(0, 9)), changes=CHANGES)
def test_a_marked_mapping_is_told_as_it_was_whatever_has_changed(begun: dict[int, int], changes: list[Any]) -> None:
    marked = Marked(begun)
    told, expected = marked.mark(), dict(begun)
    for change, key, value in changes:
        if change == "set":
            marked[key] = value
        elif change == "remove" and key in marked:
            del marked[key]
        elif change == "mark":
            told, expected = marked.mark(), dict(marked)
        assert told() == expected


def test_a_mark_tells_a_history_as_it_was() -> None:
    history = visited([(2, 4)])
    told, state = history.mark(), history.state_dict()
    history.observe(1, [group_of(prompt, 1, 4) for prompt in problems(2)])
    assert told() == state != history.state_dict() and len(history) == 2


def test_a_profile_is_a_visit_and_stays_known_when_it_is_no_longer_one_of_the_last() -> None:
    history = visited([], (6, 8))
    assert history.rate("q0", 0.7) == 0.75 and history.visits("q0") == (Visit(PROFILED, 6, 8),)
    assert len(history) == 0, "the run itself has visited none"
    history = visited([(0, 8)] * KEPT, (6, 8))
    assert history.rate("q0", 1.0) == 0.0 and len(history) == 1
    assert dict(history.profile) == {"q0": Visit(PROFILED, 6, 8)}
    assert dict(visited([(6, 8)]).profile) == {}
