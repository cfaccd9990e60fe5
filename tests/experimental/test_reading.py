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
from small import advantages_of, make_engine, small_model, some_requests
from test_resume import rows as records
from test_resume import trained

from grpo_cli.collect.epochs import Epochs
from grpo_cli.config.instantiate import make, ready
from grpo_cli.experimental import arrol as arrol_module
from grpo_cli.experimental import latr, poise
from grpo_cli.experimental.given import num_given
from grpo_cli.experimental.reading import POOLED, PolicyReading, read
from grpo_cli.experimental.ridge_probe import ProbeRows, RidgeProbe
from grpo_cli.interfaces import Runtime
from grpo_cli.settings import Sampling
from grpo_cli.types import (
    ENVIRONMENT,
    EngineStats,
    Finish,
    Prompt,
    Request,
    Rollout,
    Span,
)

EOS = 99
BENCH = Runtime(torch.device("cpu"), None, None, 0, Scripted(), Scripted(), (EOS,))


# ---- what is read


def test_all_is_as_one_reads_it_in_the_whole_models_answer() -> None:
    """Row by row, from logits and hidden states as transformers gives them; an environment's tokens are passed over."""
    model = small_model("qwen3", num_hidden_layers=3)
    rollouts = list(make_engine(small_model()).generate(some_requests(prompts=2, n=2, tokens=14, temperature=0.7)))
    spans = (Span(0, 2), Span(ENVIRONMENT, 2), Span(0, 3))
    rollouts.append(replace(rollouts[0], token_ids=(5, 6, 7, 8, 9, 3, 4), sampler_logprobs=(0.0,) * 7, spans=spans))
    rollouts.append(replace(rollouts[0], token_ids=(), sampler_logprobs=(), spans=()))
    found = read(replace(BENCH, model=model), rollouts, tokens=True)
    for row, one in enumerate(rollouts):
        prompt = one.request.prompt.token_ids
        with torch.no_grad():
            said = model(input_ids=torch.tensor([[*prompt, *one.token_ids]]), output_hidden_states=True)
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


def test_the_ridge_is_the_closed_form_on_a_window_of_steps() -> None:
    rng = np.random.default_rng(1)
    features, targets = rng.standard_normal((30, 4)) * [1, 10, 0.1, 1] + 3, rng.random(30)
    probe = RidgeProbe(window=2, least=30, ridge=0.05, layer=None)
    probe.add([ProbeRows(rng.random((29, 4)), rng.random(29), np.ones(29))])
    for rows in (slice(0, 20), slice(20, 30)):
        probe.add([ProbeRows(features[rows], targets[rows], np.full(len(targets[rows]), np.nan))])
    centred = (features - features.mean(0)) / features.std(0)
    weights = np.linalg.solve(centred.T @ centred + 0.05 * 30 * np.eye(4), centred.T @ (targets - targets.mean()))
    assert probe.predict(features) == pytest.approx(centred @ weights + targets.mean(), abs=1e-12)


# ---- advantage=probe


def test_the_others_features_predict_a_rollouts_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step in which the reward is 0.2 + 0.5 x of the first feature, and the other is noise: of 1, 0 and 0.5 the
    others predict 0.325, 0.575 and 0.45. Until enough is known the baseline is the mean of the others' rewards."""
    known: list[Any] = []
    flat = (np.zeros(4),) * 40  # entropies: a constant feature is ignored
    monkeypatch.setattr(poise, "read", lambda *given, **named: PolicyReading(known[-1], flat[: len(known[-1])]))

    def advantages(rule: Any, rewards: Any, features: Any) -> list[float]:
        known.append(np.array(features, dtype=float))
        return advantages_of(rule, rewards)

    rule, fresh = made.advantage("probe", min_rollouts=4, ridge=1e-9), made.advantage("probe", min_rollouts=99)
    rule.setup(BENCH)
    fresh.setup(BENCH)
    features, rows = np.random.default_rng(0).random((40, 2)), [[1.0, 0.3], [0.0, 0.1], [0.5, 0.9]]
    advantages(rule, (0.2 + 0.5 * features[:, 0]).tolist(), features)
    rule.observe(0, [])
    assert advantages(rule, [1.0, 0.0, 0.0], rows) == pytest.approx([1 - 0.325, -0.575, -0.45], abs=1e-5)
    assert advantages(fresh, [1.0, 0.25, 0.0], rows) == pytest.approx([0.875, -0.25, -0.625])


# ---- collector=arrol

PROBLEMS = [Prompt(f"q{i}", (i, 1), "") for i in range(40)]


class Growing(Scripted):
    """Sample s of a problem has s + 1 tokens: the numbers 10, 11, ... Those of 12 and more are right."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.sample >= 11)

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        for request in requests:
            size, most = request.sample + 1 - request.resumed_tokens, request.sampling.max_new_tokens
            tokens = tuple(10 + request.resumed_tokens + place for place in range(min(size, most)))
            finish = Finish.EOS if size <= most else Finish.LENGTH
            yield Rollout(request, tokens, (-1.0,) * len(tokens), finish)

    def stats(self) -> EngineStats:
        return EngineStats(decode_steps=1, slots=1, slot_utilisation=1.0)


def test_wrong_ones_are_given_up_once_they_are_told_from_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The features say how long a rollout will be. What is given up is not judged, and at least two stay."""
    looked: list[list[int]] = []

    def of_samples(runtime: Any, rollouts: Sequence[Rollout], **words: Any) -> PolicyReading:
        assert all(one.finish is Finish.PARTIAL and len(one) == 5 for one in rollouts)
        looked.append([one.request.sample for one in rollouts])
        return PolicyReading(np.array([[float(one.request.sample), 1.0] for one in rollouts]))

    monkeypatch.setattr(arrol_module, "read", of_samples)
    rule = ready("collector", "arrol", made.OFFERED, warmup=0, min_rollouts=4, keep=0.4)
    rule.setup(BENCH)
    for step in range(3):
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
    solved = [reward.total for g in groups for one, reward in zip(g.rollouts, g.rewards, strict=True) if len(one) > 5]
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
