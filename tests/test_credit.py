"""What each row of a batch counts: bins of difficulty that learn, and problems that count the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import group_of
from small import plain_batch
from test_seams import Spy
from test_train import NO_EXAM, Recorder, make_trainer, settings_for

from grpo_cli.config.instantiate import function
from grpo_cli.history import History, Visit
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.methods.gdro import PromptGdro
from grpo_cli.select import Selection, row_weights
from grpo_cli.support.errors import UserError
from grpo_cli.types import Batch, GroupRequest, Prompt, Round, ScoredGroup

# Of ten bins whose scores are 1 - p for p = .05, .15, ... .95
WEIGHTS = [1.3135, 1.2315, 1.1546, 1.0826, 1.0151, 0.9518, 0.8926, 0.8370, 0.7850, 0.7362]


def gdro(**changed: Any) -> PromptGdro:
    made_rule = function("credit", made.part("credit", "gdro", **changed))
    assert isinstance(made_rule, PromptGdro)
    return made_rule


def batch(rows: int, tokens: int = 3) -> Batch:
    return plain_batch(torch.ones(rows, tokens))


def solved(name: str, right: int, tried: int) -> ScoredGroup:
    return group_of(Prompt(name, (0,), ""), right, tried)


def visited(**shares: float) -> History:
    """Each problem once, in 20 rollouts."""
    return History({name: [Visit(0, round(20 * share), 20)] for name, share in shares.items()})


def rows_of(rule: PromptGdro, problems: list[str], history: History) -> list[float]:
    """The factor of each row; all its tokens have the same."""
    factors = rule(batch(len(problems)), problems, history)
    assert torch.equal(factors, factors[:, :1].expand_as(factors))
    return factors[:, 0].tolist()


def test_scores_go_with_the_last_problem_that_they_were_learnt_of_and_not_before() -> None:
    rule = with_scores(gdro(), [1.0, *[0.0] * 9])
    rule.forget(lambda problem: True)
    assert rule.state_dict()["scores"][0] == 1.0, "before a second visit no problem has a bin"
    rule.load_state_dict(rule.state_dict() | {"bin_of": {"a": 0, "b": 1}})
    rule.forget(lambda problem: problem == "a")
    assert (rule.state_dict()["scores"][0], rule.state_dict()["bin_of"]) == (1.0, {"b": 1})
    rule.forget(lambda problem: True)
    assert rule.state_dict()["scores"] == [0.0] * 10


def with_scores(rule: PromptGdro, scores: list[float]) -> PromptGdro:
    rule.load_state_dict(rule.state_dict() | {"scores": scores})
    return rule


def test_bins_weigh_by_their_scores_and_the_mean_row_weighs_one():
    rates = {f"p{place}": 0.05 + 0.1 * place for place in range(10)}
    rule = with_scores(gdro(), [1 - rate for rate in rates.values()])
    rows = rows_of(rule, list(rates), visited(**rates))
    assert rows == pytest.approx(WEIGHTS, abs=5e-5) and np.mean(rows) == pytest.approx(1.0)
    # the mean is over rows: two of the heaviest and one of the lightest
    rows = rows_of(rule, ["p0", "p0", "p9"], visited(**rates))
    heavy, light = WEIGHTS[0], WEIGHTS[9]
    mean = (2 * heavy + light) / 3
    assert rows == pytest.approx([heavy / mean, heavy / mean, light / mean], abs=1e-4)


def test_before_anything_was_learnt_all_count_alike():
    assert rows_of(gdro(), ["a", "b", "c"], visited(a=0.0, b=1.0)) == [1.0, 1.0, 1.0]


def test_a_weight_is_capped():
    """Scores of 1 and 0 in two bins, eta 10: softmax 0.99995 and 0.00005, and a tenth of gamma."""
    rule = with_scores(gdro(bins=2, eta=10.0, gamma=0.0, cap=1.5), [1.0, 0.0])
    rows = rows_of(rule, ["hard", *["easy"] * 3], visited(hard=0.0, easy=1.0))
    heavy, light = 1 / (1 + np.exp(-10)), np.exp(-10) / (1 + np.exp(-10))
    mean = (heavy + 3 * light) / 4
    assert rows == pytest.approx([1.5, *[light / mean] * 3], rel=1e-5) and heavy / mean > 3


def test_scores_are_what_fails_by_share_of_the_step_in_the_bins_from_before_it():
    """Three problems of bin 0 fail to 1, 1/2 and 1/2, one of bin 9 to 1/4: 2/3 over 3/4, and 1/4 over 1/4."""
    rule, names = gdro(beta=0.5), ["a", "b", "c", "d"]
    history = visited(a=0.0, b=0.0, c=0.0, d=1.0)
    rule(batch(4), names, history)
    step = [solved("a", 0, 4), solved("b", 2, 4), solved("c", 4, 8), solved("d", 3, 4), solved("unasked", 0, 4)]
    history.observe(1, step)  # as the run does first: by now a problem's rate is another
    assert rule.observe(1, step) == {"credit/weight_max": 1.0}
    scores = rule.state_dict()["scores"]
    assert scores == pytest.approx([0.5 * (2 / 3) / (3 / 4), *[0.0] * 8, 0.5 * 1.0])
    assert rule.observe(1, step) == {}, "once"
    assert rule.state_dict()["scores"] == scores
    # a bin that nothing was in fades
    rule(batch(1), ["d"], visited(d=1.0))
    rule.observe(2, [solved("d", 4, 4)])
    assert rule.state_dict()["scores"] == pytest.approx([scores[0] / 2, *[0.0] * 8, scores[9] / 2])


def test_the_largest_weight_is_told():
    rule = with_scores(gdro(), [1.0, *[0.0] * 9])
    rows = rows_of(rule, ["a", "b"], visited(a=0.0, b=1.0))
    assert rows[0] > 1.2
    assert rule.observe(1, [solved("a", 0, 2)]) == {"credit/weight_max": pytest.approx(rows[0])}


def test_a_problem_leaves_its_bin_only_where_it_is_well_beyond_the_edge():
    rule = with_scores(gdro(bins=2, hysteresis=0.1), [1.0, 0.0])
    alone = {"low": "x", "high": "y"}
    for rate, heavy in [(0.45, True), (0.55, True), (0.65, False), (0.45, False), (0.35, True)]:
        rows = rows_of(rule, ["p", alone["low"], alone["high"]], visited(p=rate, x=0.0, y=1.0))
        assert (rows[0] == rows[1], rows[0] == rows[2]) == (heavy, not heavy), rate


def test_a_rate_is_of_the_last_visits_and_of_rollouts_or_of_visits():
    visits = [Visit(0, 0, 4), Visit(1, 0, 4), Visit(2, 1, 4), Visit(3, 1, 4)]
    history = History({"p": visits})
    # means of shares: 1/8 of all, 1/4 of the last two; visits with a right answer: 1/2, and both
    for changed, place in [({}, 1), ({"window": 2}, 2), ({"rate": "any"}, 5), ({"rate": "any", "window": 2}, 9)]:
        rule = gdro(**changed)
        rule(batch(1), ["p"], history)
        assert rule.state_dict()["bin_of"] == {"p": place}, changed


def test_bins_may_be_given_by_their_edges():
    rule = gdro(bins=[0.4, 0.75])
    names = {"a": 0.35, "b": 0.4, "c": 0.7, "d": 0.75, "e": 1.0}
    rule(batch(5), list(names), visited(**names))
    assert rule.state_dict()["bin_of"] == {"a": 0, "b": 1, "c": 1, "d": 2, "e": 2}
    assert rule.bin_weights().tolist() == pytest.approx([1 / 3] * 3)


def test_a_problem_that_was_never_seen_is_in_the_middle_and_remembered_as_nowhere():
    rule = with_scores(gdro(), [0.0] * 5 + [1.0] + [0.0] * 4)
    rows = rows_of(rule, ["new", "old"], visited(old=0.0))
    assert rows[0] > rows[1] and rule.state_dict()["bin_of"] == {"old": 0}


def test_it_goes_on_from_its_state_as_it_would_have():
    rule, names = gdro(), ["a", "b", "c"]
    history = visited(a=0.0, b=0.5, c=1.0)
    for step in range(1, 4):
        rule(batch(3), names, history)
        groups = [solved("a", 1, 4), solved("b", 2, 4), solved("c", step, 4)]
        history.observe(step, groups)
        rule.observe(step, groups)
    state = rule.state_dict()
    kept = copy.deepcopy(state)
    resumed = gdro()
    resumed.load_state_dict(state)
    fresh = with_scores(gdro(), state["scores"])
    # beyond the edge of its bin at 0.1, but by less than the hysteresis
    moved = History({"a": [Visit(0, 9, 100)], "b": [Visit(0, 10, 20)], "c": [Visit(0, 20, 20)]})
    assert state["bin_of"]["a"] == 1
    assert rows_of(copy.deepcopy(resumed), names, moved) == rows_of(copy.deepcopy(rule), names, moved)
    assert rows_of(fresh, names, moved) != rows_of(copy.deepcopy(rule), names, moved)
    assert rows_of(resumed, names, history) == rows_of(rule, names, history) != [1.0] * 3
    rule.observe(4, [solved("a", 0, 4)])
    assert state == kept, "it does not change later"


def test_scores_of_other_bins_are_refused():
    with pytest.raises(UserError, match=r"edges \[0.5\].*credit.bins"):
        gdro().load_state_dict({"kind": "gdro", "edges": [0.5], "scores": [0.0, 0.0], "bin_of": {}})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bins": 0}, "credit.bins=0 must be at least 1"),
        ({"bins": [0.5, 0.5]}, "edges that rise between 0 and 1"),
        ({"bins": [0.5, 1.0]}, "edges that rise between 0 and 1"),
        ({"bins": "many"}, "credit.bins=many must be a number of bins"),
    ],
)
def test_settings_that_cannot_be_had_are_refused_in_a_sentence(changed, message):
    with pytest.raises(UserError, match=message):
        gdro(**changed)


# ---- in a run


def per_problem(spy: Spy) -> list[list[float]]:
    """What the rows of each problem weighed in the loss. All tokens of a reply weigh the same, and no others do."""
    (seen,) = spy.batches
    rows = seen.weights.max(dim=1).values
    assert torch.equal(seen.weights, rows[:, None] * seen.response_mask)
    of: dict[tuple[int, ...], list[float]] = {}
    for tokens, row in zip(seen.input_ids.tolist(), rows.tolist(), strict=True):
        of.setdefault(tuple(tokens[:3]), []).append(row)  # prompts have three tokens
    return list(of.values())


class Heavier:
    """A credit that gives each row the number of its problem, from 1."""

    def __call__(self, batch: Batch, problems: Any, history: History) -> torch.Tensor:
        places = {name: place for place, name in enumerate(dict.fromkeys(problems), 1)}
        return torch.ones_like(batch.weights) * torch.tensor([float(places[name]) for name in problems])[:, None]


def test_the_factors_of_a_credit_reach_the_loss_row_by_row(tmp_path: Path):
    spy = Spy()
    settings = replace(settings_for(tmp_path, steps=1), eval=NO_EXAM)
    make_trainer(settings, loss=spy, credit=Heavier()).fit()
    assert sorted(per_problem(spy)) == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_a_run_tells_the_largest_weight_and_goes_on_from_its_checkpoint_as_it_would_have(tmp_path: Path):
    """A random model is never right, so that all bins that are met fail alike, but not equally often."""
    settings = replace(settings_for(tmp_path / "whole", steps=8, checkpoint_every=4, prompts=5), eval=NO_EXAM)
    whole, part = Recorder(), Recorder()
    rule = gdro(beta=0.9)
    make_trainer(settings, credit=rule, trackers=(whole,)).fit()
    weights = [record.metrics["credit/weight_max"] for record in whole.records if record.step]
    assert len(weights) == 8 and weights[0] == pytest.approx(1.0) and max(weights) > 1.01
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_000004"
    anew = replace(settings, run_dir=str(tmp_path / "part"))
    make_trainer(anew, credit=gdro(beta=0.9), checkpoint=checkpoint, trackers=(part,)).fit()
    assert [record.metrics["credit/weight_max"] for record in part.records if record.step] == weights[4:]


# ---- train.count_by=prompt


def two_four_and_six(collection: Collection) -> Rounds:
    prompts = collection.pick(3)
    yield Round(tuple(GroupRequest(prompt, count) for prompt, count in zip(prompts, (2, 4, 6), strict=True)))
    return None


@pytest.mark.parametrize(("count_by", "rows"), [("rollout", (1.0, 1.0, 1.0)), ("prompt", (2.0, 1.0, 2 / 3))])
def test_each_problem_has_the_same_share_of_the_loss_whatever_its_number_of_rollouts(tmp_path: Path, count_by, rows):
    """Groups of 2, 4 and 6, 4 in the mean: rows of 4/2, 4/4 and 4/6, which make 4 for each problem and 12 in all."""
    spy = Spy()
    settings = replace(settings_for(tmp_path, steps=1, count_by=count_by), eval=NO_EXAM)
    make_trainer(settings, loss=spy, collector=two_four_and_six).fit()
    found = sorted(per_problem(spy), key=len)
    for weights, row, size in zip(found, rows, (2, 4, 6), strict=True):
        assert weights == pytest.approx([row] * size)
    assert [sum(weights) for weights in found] == pytest.approx([4.0] * 3 if count_by == "prompt" else [2.0, 4.0, 6.0])


def test_a_problem_without_a_chosen_rollout_has_no_part_in_the_mean():
    none, two, six = (
        Selection(solved(name, 0, 6), tuple(range(count)), torch.zeros(count), ("",) * 6)
        for name, count in (("a", 0), ("b", 2), ("c", 6))
    )
    assert row_weights([none, two, six]).tolist() == pytest.approx([2.0] * 2 + [4 / 6] * 6)
