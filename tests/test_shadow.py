"""`correction=shadow`: what the engine evicts is recorded, and the learner's pass hides the same keys."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from made import full, infinite, micro, prefix_head
from small import make_engine, plain_batch, small_model, some_requests
from test_config import refusal
from test_kept_sets import group_of, learner_of
from test_resume import cut_off_and_resumed, rows, trained
from test_sparsity import KINDS, Recorder, make, visible, watched
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_cli.engine.kv.eviction import Budget
from grpo_cli.engine.order.schedule import Lpt
from grpo_cli.engine.torch import views
from grpo_cli.engine.torch.generation import BEHIND
from grpo_cli.learner.batch import collate, minibatches
from grpo_cli.learner.forward import make_forward
from grpo_cli.methods.rkv import Rkv
from grpo_cli.types import Request, Rollout, Totals


def shadow(**words: Any) -> Any:
    return made.correction("shadow", **words)


def asked(prompts: int = 2, n: int = 3, tokens: int = 36) -> list[Request]:
    return [replace(request, views=True) for request in some_requests(prompts=prompts, n=n, tokens=tokens)]


def drawn(policy: Budget, requests: list[Request], **parts: Any) -> list[Rollout]:
    rollouts = list(make_engine(small_model(), sparsity=policy, **parts).generate(requests))
    return sorted(rollouts, key=lambda rollout: requests.index(rollout.request))


def seen(rollout: Rollout) -> torch.Tensor:
    """Which position sees which by the record, [layers, heads, T, T], with plain loops."""
    total = len(rollout.request.prompt.token_ids) + len(rollout)
    until = np.full((2, 2, total), total) if rollout.view is None else rollout.view.array
    mask = torch.zeros(2, 2, total, total, dtype=torch.bool)
    for layer, head, key in np.ndindex(2, 2, total):
        mask[layer, head, key : int(until[layer, head, key]), key] = True
    return mask


@pytest.mark.parametrize(("policy", "words"), KINDS)
def test_the_record_is_what_was_kept(policy: type[Budget], words: dict[str, Any]) -> None:
    """Against what an observer of the evictions saw; the last token is never fed to the engine."""
    recorder, budget, requests = Recorder(), make(policy, **words), asked()
    rollouts = drawn(watched(budget, recorder), requests, sampler=infinite(slots=4))
    for index, rollout in enumerate(rollouts):
        wanted = visible(rollout, recorder.evictions.get(index, []), budget.protect_prompt)
        torch.testing.assert_close(seen(rollout)[:, :, :-1], wanted[:, :, :-1])
    assert any(rollout.view is not None for rollout in rollouts)


@pytest.mark.parametrize(("policy", "words"), KINDS)
def test_the_ratio_to_the_sampler_is_1_and_is_not_where_everything_is_seen(
    policy: type[Budget], words: dict[str, Any]
) -> None:
    """log xi of each token is 0 within 1e-5 in float32, of all rollouts together and of a part of them."""
    rollouts = drawn(make(policy, **words), asked(prompts=3, n=4))
    model = small_model()
    learner, batch = learner_of(model, shared_prefix=True), collate([group_of(rollouts)], 0)
    for part in (batch, *minibatches(batch, 3, np.random.default_rng(0))):
        own = learner.logprobs(model, part)
        assert float((own - part.sampler_logprobs).abs().max()) <= 1e-5
    dense = learner.logprobs(model, replace(batch, seen_until=None))
    assert float((dense - batch.sampler_logprobs).abs().max()) > 0.01


def test_values_and_gradients_are_those_of_plain_attention_under_the_record() -> None:
    """Of each rollout by itself, without padding, against attention with the masks of all heads written out."""
    rollouts = drawn(make(Rkv, protect_prompt=False), asked())
    batch = collate([group_of(rollouts)], 0)
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(1))
    model = small_model()
    values = make_forward(made.train(), 1.0, False).logprobs(model, batch)
    (values * weights).sum().backward()

    plain = small_model()
    by_hand(plain, rollouts, weights).backward()
    wanted = {name: weight.grad for name, weight in plain.named_parameters()}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name], atol=5e-5, rtol=1e-3)


def by_hand(model: Any, rollouts: list[Rollout], weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the log-probabilities of all rollouts."""
    model.config._attn_implementation = "by_hand"
    total = torch.zeros(())
    for row, rollout in enumerate(rollouts):
        mask, start = seen(rollout), len(rollout.request.prompt.token_ids)

        def attend(module: Any, q: Any, k: Any, v: Any, *_: Any, scaling: float, mask: Any = mask, **__: Any) -> Any:
            heads = []
            for head in range(4):
                scores = (q[0, head] @ k[0, head // 2].T * scaling).masked_fill(
                    ~mask[module.layer_idx, head // 2], -1e30
                )
                heads.append(scores.softmax(-1) @ v[0, head // 2])
            return torch.stack(heads, dim=1)[None], None

        ALL_ATTENTION_FUNCTIONS.register("by_hand", attend)
        ids = torch.tensor([[*rollout.request.prompt.token_ids, *rollout.token_ids]])
        logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        total = total + (chosen * weights[row, start : start + len(rollout)]).sum()
    return total


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("sampler", [full(), micro(slots=5), infinite(slots=3), infinite(kv_budget=40 * 1024)])
def test_the_record_changes_no_token_and_does_not_depend_on_neighbours(
    sampler: Any, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that move, wait with their keys, or begin anew (`kv_budget`) have the record of one left alone."""
    monkeypatch.setitem(BEHIND, "cpu", behind)
    policy, requests = make(Rkv), asked(prompts=3, n=4)
    found = drawn(policy, requests, sampler=sampler)
    alone = [one for request in requests for one in drawn(policy, [request])]
    assert found == [replace(one, kept_kv=other.kept_kv) for one, other in zip(alone, found, strict=True)]
    assert any(rollout.view is not None for rollout in found)


def test_nothing_is_recorded_of_what_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "Fetched", pytest.fail)
    requests = some_requests(prompts=2, n=3, tokens=36)
    assert all(rollout.view is None for rollout in drawn(make(Rkv), requests))


def test_a_rollout_that_waited_with_its_keys_goes_on_with_its_record() -> None:
    """The predictor's prefix parks every rollout after some tokens, here after its first eviction."""
    policy, requests = make(Rkv, budget=6, buffer=2), asked(prompts=2, n=4)
    parts = dict(scheduler=Lpt(), predictor=prefix_head(prefix_tokens=12, min_rollouts=2), sampler=infinite(slots=3))
    assert [one.view for one in drawn(policy, requests, **parts)] == [one.view for one in drawn(policy, requests)]


def test_the_teacher_s_term_by_hand() -> None:
    """d = log 2 and 0 over two trained tokens of three: (2 - log 2 - 1) / 2, and the gradient of a token is (1 - exp d)
    / 2, each times the weight of 0.5."""
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -3.0]], requires_grad=True)
    dense = torch.tensor([[0.0, -1.0 + math.log(2), -2.0, 9.0]])
    batch = plain_batch([[0, 1, 1, 0]], dense_logprobs=dense)
    said = shadow(distill=0.5).term(logprobs, batch, Totals(sequences=1, tokens=2, max_new_tokens=9))
    said.loss.backward()
    assert said.loss.item() == pytest.approx(0.25 * (1 - math.log(2)))
    assert said.metrics["loss/distill"].item() == pytest.approx(0.5 * (1 - math.log(2)))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.25, 0.0, 0.0]]))


def test_the_verdict_trains_on_all_with_weight_1() -> None:
    sampler, mask = torch.tensor([[0.0, -1.0], [0.0, 0.0]]), torch.tensor([[False, True], [False, False]])
    verdict = shadow()(sampler, torch.tensor([[0.0, -9.0], [0.0, 0.0]]), mask)
    torch.testing.assert_close(verdict.weights, mask.float())
    assert verdict.reasons == ("", "empty: no response token") and bool((verdict.mask == mask).all())
    assert verdict.metrics["mismatch/ratio_mean"] == pytest.approx(math.exp(-8))


SHADOW = "correction=shadow", "sampling.max_new_tokens=24"
EVICTS = {
    "streaming": ("sparsity=streaming", "sparsity.budget=6", "sparsity.buffer=2", "sparsity.window=2"),
    "rkv": ("sparsity=rkv", "sparsity.budget=6", "sparsity.buffer=2", "sparsity.window=2"),
}


@pytest.mark.parametrize("policy", list(EVICTS))
def test_a_run_has_no_mismatch_and_goes_on_as_one_left_alone(policy: str, tmp_path: Path) -> None:
    cut_off_and_resumed(tmp_path, *SHADOW, *EVICTS[policy], "train.minibatches=2", "train.steps=4", step=4)
    steps = [row for row in rows(tmp_path / "alone") if "mismatch/ratio_mean" in row]
    assert steps and all(abs(float(row["mismatch/ratio_mean"]) - 1) <= 1e-5 for row in steps)
    assert all(float(row["mismatch/kl"]) <= 1e-8 for row in steps)
    assert float(steps[0]["engine/evictions"]) > 0
    assert all((float(row["engine/evictions"]) > 0) == (float(row["loss/distill"]) > 1e-4) for row in steps)


def test_groups_that_were_set_aside_are_recorded_after_a_resumption_too(tmp_path: Path) -> None:
    cut_off_and_resumed(
        tmp_path, *SHADOW, *EVICTS["rkv"], "collector=tail", "collector.surplus=1", "train.checkpoint_every=1", step=2
    )
    steps = [row for row in rows(tmp_path / "cut") if "mismatch/ratio_mean" in row]
    assert any(row["collect/long_step"] for row in steps)
    assert all(abs(float(row["mismatch/ratio_mean"]) - 1) <= 1e-5 for row in steps)


@pytest.mark.parametrize("more", [("sparsity.protect_prompt=false",), ("sampler=infinite", "sampler.slots=3")])
def test_an_episode_s_answers_are_evicted_and_hidden_like_what_was_drawn(more: tuple[str, ...], tmp_path: Path) -> None:
    trained(tmp_path, *EVICTS["rkv"], *more, "correction=shadow", "task=guess", "train.steps=1")
    (step,) = [row for row in rows(tmp_path) if "mismatch/ratio_mean" in row]
    assert step["turns/mean"] > 1 and step["loss/distill"] > 1e-4
    assert abs(step["mismatch/ratio_min"] - 1) <= 3e-5 and step["mismatch/kl"] <= 1e-8


def test_the_clip_may_measure_from_a_sampler_whose_view_the_learner_has(tmp_path: Path) -> None:
    words = *EVICTS["rkv"], "correction.prox=drawn", "train.steps=1"
    trained(tmp_path, *words, *SHADOW)
    assert "sparsity=rkv is not" in refusal(*words)


@pytest.mark.parametrize(
    ("words", "key", "way_out"),
    [
        ("", "sparsity=dense", "sparsity=rkv"),
        ("sparsity=rkv engine=vllm", "engine=vllm", "engine=torch"),
        ("sparsity=rkv engine=generate", "engine=generate", "engine=torch"),
        ("sparsity=rkv engine=ray engine.inner=vllm", "engine=ray", "engine=torch"),
        ("sparsity=rkv replay=fifo", "replay=fifo", "replay=none"),
        ("sparsity=rkv replay=folder replay.path=.", "replay=folder", "replay=none"),
        ("sparsity=rkv collector=dynamic collector.surplus=1 collector.hold=true", "collector=dynamic", "hold=false"),
        ("sparsity=rkv collector=partial collector.surplus=1", "collector=partial", "collector=equal"),
        ("sparsity=rkv collector=sorted", "collector=sorted", "collector=equal"),
        ("sparsity=rkv correction.distill=-1", "correction.distill=-1", "0"),
    ],
)
def test_what_cannot_work_with_shadow_masks_is_refused_with_a_way_out(words: str, key: str, way_out: str) -> None:
    said = refusal("correction=shadow", *words.split())
    assert key in said and way_out in said
