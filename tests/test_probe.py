"""`advantage=probe`: others' states predict a rollout's reward, on what earlier steps have shown."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from small import advantages_of, small_model
from test_config import refusal
from test_readout import Counted
from test_resume import rows as records
from test_resume import trained
from test_train import NO_EXAM, Recorder, make_trainer, settings_for

from grpo_cli.config.instantiate import function
from grpo_cli.methods import pods
from grpo_cli.methods.poise import Poise, described
from grpo_cli.rules.ridge import WIDTH, ProbeRows, RidgeProbe, correlation, narrowed
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import (
    ENVIRONMENT,
    AdvantageInputs,
    Finish,
    Prompt,
    Readout,
    Request,
    Reward,
    Rollout,
    ScoredGroup,
    Span,
)

PROMPT = Prompt("p", (5, 6), "")


def probe(**changed: Any) -> Poise:
    rule = function("advantage", made.part("advantage", "probe", **{"min_rollouts": 4} | changed))
    assert isinstance(rule, Poise)
    return rule


def group_of(rewards: Any, name: str = "p") -> ScoredGroup:
    prompt = replace(PROMPT, id=name)
    requests = [Request(prompt, sample, sample, Sampling.plain(4)) for sample in range(len(rewards))]
    rollouts = tuple(Rollout(request, (7, 8, 9, 1), (-1.0,) * 4, Finish.EOS, 4) for request in requests)
    return ScoredGroup(prompt, rollouts, tuple(Reward(float(reward)) for reward in rewards))


def readout_of(features: Any) -> Readout:
    """Two tokens of prompt and four of response, whose entropies are all 0: constant features are ignored."""
    features = torch.as_tensor(features, dtype=torch.float32)
    return Readout(-torch.ones(len(features), 6), torch.zeros(len(features), 6), features=features)


def asked(
    rule: Poise, rewards: Any, features: Any, kept: Any = None, baseline: Any = None, name: str = "p"
) -> list[float]:
    everyone = tuple(range(len(rewards)))
    kept, baseline = (tuple(some) if some is not None else everyone for some in (kept, baseline))
    totals = torch.tensor(rewards, dtype=torch.float64)
    readout = None if features is None else readout_of(features)
    inputs = AdvantageInputs(group_of(rewards, name), kept, baseline, readout)
    return list(advantages_of(rule, totals[list(kept)], totals[list(baseline)], inputs).tolist())


def taught(rule: Poise, rows: int = 40, width: int = 2, seed: int = 0) -> Poise:
    """One step in which the reward is 0.2 + 0.5 x of the first feature, and the others are noise."""
    rng = np.random.default_rng(seed)
    features = rng.random((rows, width))
    asked(rule, (0.2 + 0.5 * features[:, 0]).tolist(), features.tolist())
    rule.observe(0, [])
    return rule


# The ridge


def test_the_ridge_is_the_closed_form() -> None:
    rng = np.random.default_rng(1)
    features, targets = rng.standard_normal((30, 4)) * [1, 10, 0.1, 1] + 3, rng.random(30)
    probe_ = RidgeProbe(window=2, least=30, ridge=0.05, layer=None)
    probe_.add([ProbeRows(("a",) * 30, features, targets, np.full(30, np.nan))])
    centred = (features - features.mean(0)) / features.std(0)
    weights = np.linalg.solve(centred.T @ centred + 0.05 * 30 * np.eye(4), centred.T @ (targets - targets.mean()))
    found = probe_.predict(features)
    assert found == pytest.approx(centred @ weights + targets.mean(), abs=1e-12)


def test_a_window_of_steps_is_learnt_from_and_before_enough_rows_nothing_is_said() -> None:
    probe_ = RidgeProbe(window=2, least=6, ridge=0.1, layer=None)
    for step in range(4):
        assert np.isnan(probe_.predict(np.ones((1, 2)))).all() == (step < 2)
        probe_.add([ProbeRows(("a", "b", "c"), np.random.default_rng(step).random((3, 2)), np.arange(3.0), np.ones(3))])
        assert probe_.rows == min(3 * (step + 1), 6)
    probe_.add([])
    assert probe_.rows == 6, "a step that trained on nothing is none of them"


def test_wide_states_are_looked_at_in_a_few_directions() -> None:
    states = np.random.default_rng(0).standard_normal((3, 2 * WIDTH))
    assert narrowed(states).shape == (3, WIDTH) and np.array_equal(narrowed(states), narrowed(states))
    assert narrowed(states[:, :WIDTH]) is not None and narrowed(states[:, :9]).shape == (3, 9)


def test_the_correlation_is_over_what_was_predicted() -> None:
    predicted, targets = np.array([np.nan, 1.0, 2.0, 4.0]), np.array([9.0, 1.0, 0.0, 1.0])
    assert correlation(predicted, targets) == pytest.approx(np.corrcoef([1, 2, 4], [1, 0, 1])[0, 1])
    assert correlation(predicted, np.ones(4)) is None and correlation(np.full(4, np.nan), targets) is None


def test_entropies_are_those_of_the_models_own_tokens() -> None:
    """Mean, deviation, and mean of the last quarter, rounded up; what an environment said is left out."""
    group = group_of([0.0])
    spans = (Span(0, 1), Span(ENVIRONMENT, 1), Span(0, 2))
    rollout = replace(group.rollouts[0], spans=spans)
    entropies = torch.tensor([[9.0, 9.0, 1.0, 9.0, 2.0, 6.0]])
    found = described(Readout(-torch.ones(1, 6), entropies, features=torch.ones(1, 2)), [rollout])[0]
    assert found.tolist() == pytest.approx([1, 1, 3, math.sqrt(14 / 3), 6])
    empty = replace(rollout, token_ids=(), sampler_logprobs=(), spans=())
    assert (
        described(Readout(-torch.ones(1, 6), entropies, features=torch.ones(1, 2)), [empty])[0, 2:].tolist() == [0] * 3
    )


# The baseline


def test_the_others_features_predict() -> None:
    """g(x, .) = 0.2 + 0.5 x, to the ridge's shrinkage: of 1, 0 and 0.5 the others predict 0.325, 0.575 and 0.45."""
    rule = taught(probe(ridge=1e-9))
    found = asked(rule, [1.0, 0.0, 0.0], [[1.0, 0.3], [0.0, 0.1], [0.5, 0.9]])
    assert found == pytest.approx([1 - 0.325, -0.575, -0.45], abs=1e-5)
    half = taught(probe(ridge=1e-9, mix=0.5))
    found = asked(half, [1.0, 0.0, 0.0], [[1.0, 0.3], [0.0, 0.1], [0.5, 0.9]])
    assert found == pytest.approx([1 - 0.325 / 2, -(0.575 + 0.5) / 2, -(0.45 + 0.5) / 2], abs=1e-5)


def test_predictions_are_kept_between_0_and_1_after_their_mean() -> None:
    rows = [[9.0, 0.0], [-1.0, 0.0], [-9.0, 0.0]]
    found = asked(taught(probe(ridge=1e-9)), [1.0, 0.0, 1.0], rows)
    assert found == pytest.approx([1.0, -0.2, 0.0], abs=1e-4)
    free = asked(taught(probe(ridge=1e-9, clip=False)), [1.0, 0.0, 1.0], rows)
    assert free == pytest.approx([1 + 2.3, -0.2, 1 - 2.2], abs=1e-4)


def test_the_rejected_are_no_others_and_only_the_kept_are_answered() -> None:
    rule = taught(probe(ridge=1e-9))
    rows = [[1.0, 0.0], [0.0, 0.0], [0.5, 0.0], [0.2, 0.0]]
    found = asked(rule, [1.0, 0.0, 0.0, 1.0], rows, kept=[3], baseline=[0, 2, 3])
    assert found == pytest.approx([1 - (0.7 + 0.45) / 2], abs=1e-5)
    assert asked(rule, [1.0, 0.0], rows[:2], kept=[1], baseline=[1]) == [0.0], "nothing to compare with"


@pytest.mark.parametrize("features", [None, [[1.0, 0.0]] * 3])
def test_until_it_knows_enough_it_is_rloo(features: Any) -> None:
    rewards = [1.0, 0.25, 0.0]
    assert asked(probe(min_rollouts=99), rewards, features) == pytest.approx([0.875, -0.25, -0.625])
    if features is None:
        assert asked(taught(probe()), rewards, None) == pytest.approx([0.875, -0.25, -0.625]), "before all is made"


# A policy of 9 strings, whose gradient is exact: two tokens of 3, each place with logits of its own.

LOGITS = np.array([[0.3, -0.2, 0.1], [0.0, 0.5, -0.4]])
STRINGS = list(itertools.product(range(3), repeat=2))
P = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
CHANCES = np.array([P[0, a] * P[1, b] for a, b in STRINGS])
SLOPES = np.array([[(np.arange(3) == token) - P[place] for place, token in enumerate(one)] for one in STRINGS])
REWARDS = np.array([1.0, 0, 0, 1, 0, 1, 0, 0, 1])
FEATURES = np.array([[a == b, b] for a, b in STRINGS], dtype=float)


def expected_gradient(features: Any) -> Any:
    """Over all 81 pairs of strings; `features` says what the pair (i, j) is read as."""
    rule = probe(ridge=0.01)
    asked(rule, REWARDS.tolist(), FEATURES.tolist())
    rule.observe(0, [])
    total = np.zeros((2, 3))
    for i, j in itertools.product(range(9), repeat=2):
        advantages = asked(rule, REWARDS[[i, j]].tolist(), FEATURES[features(i, j)].tolist())
        mean = sum(a * SLOPES[place] for a, place in zip(advantages, (i, j), strict=True)) / 2
        total += CHANCES[i] * CHANCES[j] * mean
    return total


def test_crossing_keeps_the_gradient_and_a_rollouts_own_states_do_not() -> None:
    exact = (CHANCES * REWARDS) @ SLOPES.reshape(9, 6)
    assert expected_gradient(lambda i, j: [i, j]).ravel() == pytest.approx(exact, abs=1e-7)
    swapped = expected_gradient(lambda i, j: [j, i]).ravel()  # then each is predicted from its own
    assert np.abs(swapped - exact).max() > 0.01


# From step to step


def test_a_step_is_learnt_after_its_advantages_and_judged_before() -> None:
    rule = probe(ridge=1e-9)
    assert rule.observe(0, []) == {"probe/rows": 0.0}
    rows, rewards = [[x, x * x] for x in (0.1, 0.4, 0.8, 0.3, 0.9)], [0.0, 1.0, 1.0, 0.0, 1.0]
    first = asked(rule, rewards, rows)
    assert asked(rule, rewards, rows) == first, "what is seen now is not known yet"
    assert rule.observe(1, []) == {"probe/rows": 10.0}, "nothing was predicted"
    assert asked(rule, rewards, rows) != first
    metrics = rule.observe(2, [])
    assert metrics["probe/rows"] == 15.0 and 0.5 < metrics["probe/correlation"] <= 1.0


def test_its_state_comes_back_and_what_is_of_other_problems_goes() -> None:
    rule, other = taught(probe()), probe()
    asked(rule, [1.0, 0.0, 1.0], [[0.1, 0.2], [0.3, 0.4], [0.9, 0.9]], name="q")
    rule.observe(1, [])
    other.load_state_dict(rule.state_dict())
    rows = [[0.3, 0.7], [0.6, 0.2]]
    assert asked(other, [1.0, 0.0], rows) == asked(rule, [1.0, 0.0], rows)
    other.forget(lambda problem: problem == "p")
    assert other.observe(2, [])["probe/rows"] == 3.0 + 2.0
    fresh = probe()
    fresh.load_state_dict(rule.state_dict())
    fresh.forget(lambda problem: True)
    assert asked(fresh, [1.0, 0.0], rows) == [1.0, -1.0]


def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = ["advantage=probe", "advantage.min_rollouts=8", "advantage.window=2", "train.prompts=6"]
    words += ["train.checkpoint_every=3", "sampling.max_new_tokens=40", "task.min_terms=2"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    trained(whole, *words, "train.steps=5")
    trained(folder, *words, "train.steps=3")
    trained(folder, *words, "train.steps=5", f"resume={folder}")
    assert records(folder) == records(whole)
    assert any("probe/correlation" in row for row in records(whole)[4:]), "it has been asked after the checkpoint"
    assert records(whole)[-1]["probe/rows"] == 48.0


def test_a_step_makes_one_pass_more_for_it(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = replace(settings_for(tmp_path, steps=2), eval=NO_EXAM, m=2)
    trainer = make_trainer(settings, advantage=probe(), downsample=pods.maxvar, trackers=(recorder,))
    counted = Counted(trainer)
    trainer.fit()
    assert (counted.readouts, counted.others) == ([12, 12], []), "of all, whose rewards are the group's"
    assert [record.metrics["probe/rows"] for record in recorder.records[1:]] == [12.0, 24.0]


# What cannot be


def test_rewards_beyond_0_and_1_are_refused_with_the_clip() -> None:
    with pytest.raises(UserError, match=r"predicts rewards from 0 to 1, and one is 1.5: use advantage.clip=false"):
        asked(probe(), [1.5, 0.0], [[0.0], [1.0]])
    assert asked(probe(clip=False), [1.5, 0.0], [[0.0], [1.0]]) == [1.5, -1.5]


def test_one_rollout_of_a_problem_is_refused() -> None:
    assert "n=1 leaves advantage=probe nothing to compare with" in refusal("advantage=probe", "n=1")


def test_groups_that_come_again_are_refused() -> None:
    said = refusal("advantage=probe", "replay=fifo", "correction=decoupled")
    assert "learns from each step's rewards" in said and "use replay=none, or advantage=rloo" in said


@pytest.mark.parametrize("group", ["advantage=probe", "collector=arrol"])
def test_more_rollouts_than_a_window_ever_has_are_refused(group: str) -> None:
    name = group.partition("=")[0]
    said = refusal(group, "n=4", "train.prompts=4", f"{name}.window=2", f"{name}.min_rollouts=33")
    assert f"{name}.min_rollouts=33 is more than the 32 rollouts of {name}.window=2 steps" in said


def test_another_width_or_layer_is_refused() -> None:
    rule = probe()
    rule.load_state_dict(taught(probe(), width=3).state_dict())
    with pytest.raises(UserError, match="has learnt from 6 features, and this model has 5; resume with the model"):
        asked(rule, [1.0, 0.0], [[0.0, 1.0], [1.0, 1.0]])
    with pytest.raises(UserError, match="has learnt from advantage.layer=null, and this run has advantage.layer=2"):
        probe(layer=2).load_state_dict(rule.state_dict())


def test_a_checkpoint_without_it_or_of_another_rule_is_refused() -> None:
    with pytest.raises(UserError, match="holds nothing for advantage=probe"):
        probe().load_state_dict(None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("advantage.ridge=0",), "advantage.ridge=0"),
        (("advantage.mix=1.5",), "advantage.mix=1.5"),
        (("advantage.window=0",), "advantage.window=0"),
        (("advantage.min_rollouts=1",), "advantage.min_rollouts=1"),
    ],
)
def test_numbers_out_of_range_are_refused(words: tuple[str, ...], said: str) -> None:
    assert said in refusal("advantage=probe", *words)


def test_a_layer_that_is_not_there_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    settings = replace(settings_for(tmp_path, steps=1), eval=NO_EXAM)
    with pytest.raises(UserError, match=r"layer=3 cannot be read: the model's are 1 to 2"):
        make_trainer(settings, model=small_model(), advantage=probe(layer=3))
