"""PODS end to end: what choosing does to the loss, the named runs, and a user's own rule."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import made
import numpy as np
import pytest
import torch
from made import composed
from small import VOCABULARY, scored, small_model
from typed import done, refused

from grpo_cli.config.choices import choices
from grpo_cli.config.prepare import check
from grpo_cli.learner.batch import collate, rows_of, totals
from grpo_cli.learner.forward import Padded
from grpo_cli.select import Selection, batch_advantages, select
from grpo_cli.types import ScoredGroup

EXPERIMENTS = [name for name in choices("experiment") if name != "none"]
RULES = [name for name in choices("downsample") if name not in ("all", "median", "aero")]  # any m of n


# What reaches the update


def scored_groups() -> list[ScoredGroup]:
    """Three groups of six rollouts of different lengths; every reward a different one but for two ties."""
    rng, groups = np.random.default_rng(5), list[ScoredGroup]()
    for rewards in ((0.0, 1.0, 1.0, 0.2, 0.9, 0.4), (1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (3, 1, 4, 1, 5, 9)):
        prompt, *replies = (
            tuple(rng.integers(2, VOCABULARY, length).tolist())
            for length in (3 + 4 * len(groups), *rng.permutation(np.arange(2, 14, 2)))
        )
        groups.append(scored(*rewards, name=f"p{len(groups)}", prompt=prompt, replies=replies))
    return groups


def chosen(groups: list[ScoredGroup], rule: str, keep: int, stats_over: str) -> list[Selection]:
    divided = made.advantage("grpo", stats_over=stats_over)
    return [
        select(g, [""] * len(g.rollouts), keep, made.downsample(rule), divided, np.random.default_rng(1), True)
        for g in groups
    ]


def gradients(model: Any) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def ours(selected: list[Selection], micro_batch_tokens: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients as the learner makes them."""
    model, total = small_model(), 0.0
    batch = replace(collate([s.chosen for s in selected]), advantages=batch_advantages(selected))
    way = Padded(micro_batch_tokens, 16, 1.0)
    for rows in way.cut(batch):
        part = rows_of(batch, torch.tensor(rows))
        output = made.loss()(way.logprobs(model, part), part, totals(batch, 16))
        output.loss.backward()
        total += output.loss.item()
    return total, gradients(model)


def by_hand(
    groups: list[ScoredGroup], kept: list[tuple[int, ...]], stats_over: str
) -> tuple[float, list[torch.Tensor]]:
    """GRPO's loss of these rollouts alone, each by itself through `transformers`: no batch, no padding, no others."""
    model, total, count = small_model(), torch.zeros(()), sum(map(len, kept))
    for group, indices in zip(groups, kept, strict=True):
        rewards = [reward.total for reward in group.rewards]
        compared = [rewards[i] for i in indices] if stats_over == "kept" else rewards
        mean, deviation = np.mean(compared), np.std(compared, ddof=1)
        for index in indices:
            prompt, reply = group.prompt.token_ids, group.rollouts[index].token_ids
            logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)[torch.arange(len(reply)), torch.tensor(reply)]
            ratio = (logprobs - logprobs.detach()).exp()
            total = total - (rewards[index] - mean) / (deviation + 1e-4) * ratio.mean() / count
    total.backward()
    return total.item(), gradients(model)


@pytest.mark.parametrize(("keep", "stats_over"), [(3, "kept"), (3, "group"), (6, "kept")])
@pytest.mark.parametrize("rule", RULES)
def test_loss_and_gradient_are_those_of_the_kept_rollouts_alone(rule, keep, stats_over):
    """With m equal to n they are plain GRPO's."""
    groups = scored_groups()
    selected = chosen(groups, rule, keep, stats_over)
    kept = [s.indices for s in selected]
    assert [len(indices) for indices in kept] == [keep] * 3
    if rule == "maxreward" and (keep, stats_over) == (3, "kept"):  # what a deviation of 0 does is the advantage's test
        groups, selected, kept = groups[:1] + groups[2:], selected[:1] + selected[2:], kept[:1] + kept[2:]
    found, expected = ours(selected, micro_batch_tokens=40), by_hand(groups, kept, stats_over)
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# Named runs


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_run_as_it_stands_and_pods_trains_on_a_quarter_chosen_by_variance(name):
    run = composed(f"experiment={name}")
    check(run)
    if name.startswith("pods_"):
        assert (run.n, run.m) == (64, 16) and run.parts["advantage"]["stats_over"] == "kept"
        assert run.parts["downsample"]["_target_"] == "grpo_cli.methods.pods.maxvar"


# A rule of one's own, in a real run

SMALL = ["n=4", "m=2", "train.steps=1", "train.prompts=2", "sampling.max_new_tokens=6", "eval.every=0", "logger=jsonl"]

USER_RULES = """
def ends(group, keep, rng, first=0):
    return [first, len(group.rollouts) - 1]

def twice(group, keep, rng):
    # right on the group that a rule is tried on before the run, wrong in the run
    return [0, 1] if group.prompt.id.startswith("synthetic") else [3, 3]
"""


def test_a_rule_of_one_s_own_decides_what_is_trained_on_and_stops_the_run_if_it_answers_wrongly(tmp_path, monkeypatch):
    (tmp_path / "rules_of_a_pods_user.py").write_text(USER_RULES)
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "downsample._target_=rules_of_a_pods_user.ends", "+downsample.first=1", "record.rollouts=-1")
    done("train", *words, "hydra.run.dir=run")
    (record,) = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[1:])
    assert (record["rollouts/generated"], record["rollouts/trained"]) == (8, 4)
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert [row["sample"] for row in rows if row["kept"]] == [1, 3, 1, 3]
    said = refused("train", *SMALL, "downsample._target_=rules_of_a_pods_user.twice", "hydra.run.dir=wrong")
    assert "rules_of_a_pods_user.twice returned [3, 3] for prompt train-" in said
