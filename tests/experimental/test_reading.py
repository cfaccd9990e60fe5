"""What the policy's own pass reads in rollouts, and the rules that go by it: probe, arrol, lookahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from bank import Scripted, collection_of
from small import make_engine, small_model, some_requests
from test_config import refusal
from test_resume import rows as records
from test_resume import trained
from tiny_hf import FAMILIES

from grpo_cli.collect.epochs import Epochs
from grpo_cli.config.instantiate import make, ready
from grpo_cli.experimental import arrol as arrol_module
from grpo_cli.experimental import latr, poise
from grpo_cli.experimental.arrol import Arrol
from grpo_cli.experimental.given import num_given
from grpo_cli.experimental.poise import Poise
from grpo_cli.experimental.reading import POOLED, PolicyReading, read
from grpo_cli.experimental.ridge_probe import ProbeRows, RidgeProbe
from grpo_cli.interfaces import Runtime
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import (
    ENVIRONMENT,
    EngineStats,
    Finish,
    Prompt,
    Request,
    Reward,
    Rollout,
    ScoredGroup,
    Span,
)

EOS = 99
BENCH = Runtime(torch.device("cpu"), None, None, 0, Scripted(), Scripted(), (EOS,))


def bench_of(model: Any) -> Runtime:
    return replace(BENCH, model=model)


# ---- what is read


@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_as_one_reads_it_in_the_whole_models_answer(family: str) -> None:
    """Row by row, from logits and hidden states as transformers gives them; an environment's tokens are passed over."""
    model = small_model(family, num_hidden_layers=3).train()
    rollouts = list(make_engine(small_model()).generate(some_requests(prompts=2, n=3, tokens=14, temperature=0.7)))
    spans = (Span(0, 2), Span(ENVIRONMENT, 2), Span(0, 3))
    rollouts.append(replace(rollouts[0], token_ids=(5, 6, 7, 8, 9, 3, 4), sampler_logprobs=(0.0,) * 7, spans=spans))
    rollouts.append(replace(rollouts[0], token_ids=(), sampler_logprobs=(), spans=()))
    found = read(bench_of(model), rollouts, tokens=True)
    assert model.training, "as it was"
    assert not any(module._forward_hooks for module in model.modules())
    for row, one in enumerate(rollouts):
        prompt = one.request.prompt.token_ids
        model.eval()
        with torch.no_grad():
            said = model(input_ids=torch.tensor([[*prompt, *one.token_ids]]), output_hidden_states=True)
        model.train()
        own = [len(prompt) + place for place in range(len(one)) if not one.spans[1:] or place not in (2, 3)]
        probs = (said.logits[0][[place - 1 for place in own]] / 0.7).double().softmax(-1)
        assert found.entropies[row] == pytest.approx((-(probs * probs.log()).sum(-1)).numpy(), abs=1e-5)
        top, ids = probs.topk(2, dim=-1)
        assert found.top_ids[row].tolist() == ids.tolist()
        assert found.top_probs[row] == pytest.approx(top.numpy(), abs=1e-5)
        states = said.hidden_states[2][0]  # two thirds of three layers
        ends = [states[list(range(len(prompt)))[-POOLED:]], states[own[-POOLED:]]]
        wanted = torch.cat([end.mean(0) if len(end) else torch.zeros(end.shape[1]) for end in ends])
        assert found.features[row] == pytest.approx(wanted.numpy(), abs=1e-5)
    assert read(bench_of(model), rollouts).entropies == (), "what nobody wants is not read"


def test_the_ridge_is_the_closed_form_on_a_window_of_steps() -> None:
    rng = np.random.default_rng(1)
    features, targets = rng.standard_normal((30, 4)) * [1, 10, 0.1, 1] + 3, rng.random(30)
    probe = RidgeProbe(window=2, least=30, ridge=0.05, layer=None)
    probe.add([ProbeRows(rng.random((29, 4)), rng.random(29), np.ones(29))])
    assert np.isnan(probe.predict(features)).all()
    for rows in (slice(0, 20), slice(20, 30)):
        probe.add([ProbeRows(features[rows], targets[rows], np.full(len(targets[rows]), np.nan))])
    centred = (features - features.mean(0)) / features.std(0)
    weights = np.linalg.solve(centred.T @ centred + 0.05 * 30 * np.eye(4), centred.T @ (targets - targets.mean()))
    assert probe.predict(features) == pytest.approx(centred @ weights + targets.mean(), abs=1e-12)
    other = RidgeProbe(window=2, least=30, ridge=0.05, layer=None)
    other.load(probe.state(), "advantage")
    assert other.predict(features).tolist() == probe.predict(features).tolist()
    with pytest.raises(UserError, match="advantage.layer=null"):
        RidgeProbe(window=2, least=30, ridge=0.05, layer=1).load(probe.state(), "advantage")


# ---- advantage=probe


def probe(**changed: Any) -> Poise:
    rule = made.advantage("probe", **{"min_rollouts": 4} | changed)
    rule.setup(BENCH)
    return rule


def group_of(rewards: Any, name: str = "p") -> ScoredGroup:
    requests = [Request(Prompt(name, (5, 6), ""), sample, sample, Sampling.plain(4)) for sample in range(len(rewards))]
    rollouts = tuple(Rollout(request, (7, 8, 9, 1), (-1.0,) * 4, Finish.EOS) for request in requests)
    return ScoredGroup(requests[0].prompt, rollouts, tuple(Reward(float(reward)) for reward in rewards))


def asked(rule: Poise, monkeypatch: Any, rewards: Any, features: Any, kept: Any = None) -> list[float]:
    """Entropies are all 0: a constant feature is ignored."""
    reading = PolicyReading(np.array(features, dtype=float), (np.zeros(4),) * len(rewards))
    monkeypatch.setattr(poise, "read", lambda *words, **named: reading)
    return list(rule(group_of(rewards), range(len(rewards)) if kept is None else kept).tolist())


def taught(rule: Poise, monkeypatch: Any, rewards: Any = None, features: Any = None) -> Poise:
    """One step in which the reward is 0.2 + 0.5 x of the first feature, and the other is noise."""
    features = np.random.default_rng(0).random((40, 2)) if features is None else features
    asked(rule, monkeypatch, (0.2 + 0.5 * features[:, 0]).tolist() if rewards is None else rewards, features.tolist())
    rule.observe(0, [])
    return rule


def test_the_others_features_predict_a_rollouts_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """g(x, .) = 0.2 + 0.5 x: of 1, 0 and 0.5 the others predict 0.325, 0.575 and 0.45. The rejected are no others, and
    until enough is known the baseline is the mean of the others' rewards."""
    rows = [[1.0, 0.3], [0.0, 0.1], [0.5, 0.9]]
    rule = taught(probe(ridge=1e-9), monkeypatch)
    assert asked(rule, monkeypatch, [1.0, 0.0, 0.0], rows) == pytest.approx([1 - 0.325, -0.575, -0.45], abs=1e-5)
    kept = asked(rule, monkeypatch, [1.0, 0.0], [rows[0], rows[2]], kept=[0])
    assert kept == pytest.approx([1 - 0.45], abs=1e-5)
    half = taught(probe(ridge=1e-9, mix=0.5), monkeypatch)
    found = asked(half, monkeypatch, [1.0, 0.0, 0.0], rows)
    assert found == pytest.approx([1 - 0.325 / 2, -(0.575 + 0.5) / 2, -(0.45 + 0.5) / 2], abs=1e-5)
    fresh = asked(probe(min_rollouts=99), monkeypatch, [1.0, 0.25, 0.0], rows)
    assert fresh == pytest.approx([0.875, -0.25, -0.625])


# ---- collector=arrol

PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(40)]


class Growing(Scripted):
    """Sample s of a problem has s + 1 tokens: the numbers 10, 11, ... Those of 12 and more are right."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.sample >= 11)

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        for request in requests:
            size, start, most = (
                request.sample + 1 - request.resumed_tokens,
                10 + request.resumed_tokens,
                request.sampling.max_new_tokens,
            )
            tokens = tuple(range(start, start + min(size, most)))
            finish = Finish.EOS if size <= most else Finish.LENGTH
            yield Rollout(request, tokens, (-1.0,) * len(tokens), finish)

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, slots=1, slot_utilisation=1.0)


def arrol(**changed: Any) -> Arrol:
    rule = ready("collector", "arrol", made.OFFERED, **{"warmup": 0, "min_rollouts": 4} | changed)
    assert isinstance(rule, Arrol)
    rule.setup(BENCH)
    return rule


def test_wrong_ones_are_given_up_once_they_are_told_from_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The features say how long a rollout will be. What is given up is not judged, and at least two stay."""
    looked: list[list[int]] = []

    def of_samples(runtime: Any, rollouts: Sequence[Rollout], **words: Any) -> PolicyReading:
        assert all(one.finish is Finish.PARTIAL and len(one) == 5 for one in rollouts)
        looked.append([one.request.sample for one in rollouts])
        return PolicyReading(np.array([[float(one.request.sample), 1.0] for one in rollouts]))

    monkeypatch.setattr(arrol_module, "read", of_samples)
    rule = arrol(keep=0.4)
    for step in range(4):
        engine = Growing()
        order, sampling = Epochs(PROBLEMS, 3, 7), Sampling.plain(20)
        collection = collection_of(engine, order, n=16, prompts=3, step=step, sampling=sampling)
        groups = collection.run(rule)
        metrics = rule.observe(step, groups)
        dropped = 3 * 16 - sum(len(group.rollouts) for group in groups)
        assert len(engine.judged) == 48 - dropped
        assert looked[-1] == [*range(5, 16)] * 3 and (dropped > 0) == (step > 0)
        assert all(len(one) == one.request.sample + 1 for group in groups for one in group.rollouts)
    assert metrics["prune/kept"] == pytest.approx(1 - dropped / 33)
    solved = [
        reward.total
        for group in groups
        for one, reward in zip(group.rollouts, group.rewards, strict=True)
        if len(one) > 5
    ]
    assert np.mean(solved) > 5 / 11, "a larger share than without"


# ---- collector=lookahead

LONGEST = 24


class Spelled(Growing):
    """The tokens of sample s: `apart` times s + their place. All have LONGEST of them."""

    apart = 100

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for request in requests:
            places = range(request.resumed_tokens, request.resumed_tokens + request.sampling.max_new_tokens)
            tokens = tuple(place + self.apart * request.sample for place in places)
            yield Rollout(request, tokens, (-1.0,) * len(tokens), Finish.LENGTH)


def test_siblings_share_exactly_their_prefix_and_those_that_stay_close_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The root hesitates at tokens 2 and 5. At the first look, after four tokens, a branch begins at 2, at the second
    one at 5, and nothing at 5 in the branch, which has had its own token there in the chunk that it was born in. Where
    every sample writes the same, one of a branch's first three tokens is another: 1/3, less than 0.4."""

    def hesitates(runtime: Any, rollouts: Sequence[Rollout], **words: Any) -> PolicyReading:
        ids = tuple(np.array([[token, 7] for token in one.token_ids]) for one in rollouts)
        sure = [[(0.45, 0.4) if place in (2, 5) else (1.0, 0.0) for place in range(len(one))] for one in rollouts]
        return PolicyReading(np.zeros((len(rollouts), 0)), (), ids, tuple(map(np.array, sure)))

    def grown(engine: Spelled) -> tuple[Any, Any]:
        words = {"chunk": 4, "prune_after": [3], "hand_over": 12}
        rule = make("collector", made.part("collector", "lookahead", **words))
        rule.setup(BENCH)
        sampling = Sampling.plain(LONGEST)
        collection = collection_of(engine, Epochs(PROBLEMS, 1, 7), n=4, prompts=1, sampling=sampling)
        (group,) = collection.run(rule)
        return group.rollouts, collection.metrics()

    monkeypatch.setattr(latr, "read", hesitates)
    (root, at_2, at_5, plain), metrics = grown(Spelled())
    assert root.token_ids[:6] == (0, 1, 2, 3, 4, 5) and num_given(root) == num_given(plain) == 0
    assert at_2.token_ids[:5] == (0, 1, 7, 103, 104) and num_given(at_2) == 3
    assert at_5.token_ids[:8] == (0, 1, 2, 3, 4, 7, 206, 207) and num_given(at_5) == 6
    assert np.isnan(at_5.sampler_logprobs).tolist() == [True] * 6 + [False] * 18
    assert len({one.request.seed for one in (root, at_2, at_5, plain)}) == 4
    assert (metrics["collect/branches"], metrics["collect/pruned"]) == (2.0, 0.0)
    alike = Spelled()
    alike.apart = 0
    rollouts, metrics = grown(alike)
    assert len(rollouts) == 4 and metrics["collect/pruned"] >= 1


# ---- whole runs


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = ["collector=arrol", "collector.at=3", "collector.warmup=0", "collector.min_rollouts=4"]
    words += ["collector.window=2", "advantage=probe", "advantage.min_rollouts=4"]
    words += ["train.prompts=4", "sampling.max_new_tokens=32"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    trained(whole, *words, "train.steps=3")
    trained(folder, *words, "train.steps=2")
    trained(folder, *words, "train.steps=3", f"resume={folder}")
    assert records(folder) == records(whole)
    last = records(whole)[-1]
    assert last["prune/kept"] < 1 and last["probe/rows"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["collector=arrol", "collector.keep=0.1", "n=4"], "collector.keep=0.1"),
        (["collector=arrol", "task=guess"], "task.turns=1"),
        (["advantage=probe", "advantage.min_rollouts=1000000"], "advantage.min_rollouts=1000000"),
        (["collector=lookahead", "sparsity=snapkv"], "sparsity=dense"),
        (["collector=lookahead", "collector.since=[0,10]"], "collector.since="),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    assert said in refusal(*words)
