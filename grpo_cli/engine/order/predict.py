"""Predictions of rollouts' lengths, for schedulers; a wrong one costs time and changes no token.

Predicted is how long a slot stays busy, so a rollout cut off at its limit counts with that length, and no prediction
exceeds the limit.

Every predictor remembers its predictions; `learn` first compares them with the true lengths, then learns. `state` is
plain values and tensors, so that a resumed run plans like the original.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.engine.order.lengths import Decay, LengthMeans, kendall_tau, read_trace
from grpo_cli.history import of_kind
from grpo_cli.interfaces import facts
from grpo_cli.rules.ridge import RidgeHead, fit_ridge, narrowed
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count
from grpo_cli.types import Request, Rollout


class _Answers:
    """The predictions for the current `generate`, each judged once."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int, int], float] = {}

    def remember(self, requests: Sequence[Request], answers: Sequence[float] | None) -> None:
        self._answers = dict(zip(map(key_of, requests), answers or (), strict=answers is not None))

    def judge(self, finished: Sequence[Rollout], prefix_tokens: int) -> dict[str, float]:
        """Metrics of the predictions for `finished`; empty if there were none."""
        judged = [
            (self._answers[key_of(rollout.request)], len(rollout) - prefix_tokens)
            for rollout in finished
            if key_of(rollout.request) in self._answers
        ]
        self._answers = {}
        if not judged:
            return {}
        predicted, true = zip(*judged, strict=True)
        return {
            "predictor/kendall_tau": kendall_tau(predicted, true),
            "predictor/mean_absolute_error": float(np.mean(np.abs(np.subtract(predicted, true)))),
        }


def key_of(request: Request) -> tuple[str, int, int]:
    """The key of a request; with the seed, since an evaluation has a greedy sample besides sample 0."""
    return request.prompt.id, request.sample, request.seed


class NoPredictor:
    """Predicts nothing."""

    prefix_tokens = 0

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        return None

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> Mapping[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"kind": "none"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "none")


class MeanLength:
    """The mean length so far: of the prompt if it was seen before, else of all prompts; nothing before the first.

    All samples of a prompt get one prediction, so it can order prompts but not the samples of one. Means are kept of
    the `max_prompts` most recent prompts.
    """

    prefix_tokens = 0

    def __init__(self, *, decay: Decay, max_prompts: Count) -> None:
        self._means = LengthMeans(decay, max_prompts)
        self._answers = _Answers()

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        means = [(self._means.mean(request.prompt.id), request.sampling.max_new_tokens) for request in requests]
        known = [min(mean, float(limit)) for mean, limit in means if mean is not None]
        answers = known if len(known) == len(requests) else None  # all are known, or none
        self._answers.remember(requests, answers)
        return answers

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> Mapping[str, float]:
        metrics = self._answers.judge(finished, self.prefix_tokens)
        self._means.add((rollout.request.prompt.id, len(rollout)) for rollout in finished)
        return metrics

    def state(self) -> dict[str, Any]:
        return {"kind": "mean", **self._means.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "mean")
        self._means.load_state(state)


class Told(NoPredictor):
    """Repeats given lengths, by `key_of`: in a worker of `engine=ray`, those of the trainer's predictor, sent with the
    orders."""

    def __init__(self, told: Mapping[tuple[str, int, int], float]) -> None:
        self._told = told

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        lengths = [self._told[key_of(request)] for request in requests if key_of(request) in self._told]
        return lengths if len(lengths) == len(requests) else None

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""


@facts(of_whole_rollouts=True)
class Oracle:
    """Replays known lengths, as the best possible predictor would. For studies.

    `lengths` is the `rollouts.jsonl` of an earlier run with the same seed and settings that recorded all its rollouts
    (`record.rollouts=-1`). A prompt that comes for the k-th time gets the lengths of its k-th recorded step. Held-out
    requests, and requests none of whose prompts were recorded, get no prediction. Raises UserError if only some of the
    requests were recorded.
    """

    prefix_tokens = 0

    def __init__(self, lengths: str | Path) -> None:
        self._source = str(lengths)
        by_step: dict[str, dict[int, dict[int, int]]] = {}
        for row in read_trace(lengths):
            by_step.setdefault(row.prompt_id, {}).setdefault(row.step, {})[row.sample] = row.length
        self._recorded = {prompt_id: [steps[step] for step in sorted(steps)] for prompt_id, steps in by_step.items()}
        self._replayed: Counter[str] = Counter()
        self._answers = _Answers()

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        answers = None
        if any(request.prompt.id in self._recorded and not request.held_out for request in requests):
            answers = [float(self._length(request)) for request in requests]
        self._answers.remember(requests, answers)
        return answers

    def _length(self, request: Request) -> int:
        name, times = request.prompt.id, self._replayed[request.prompt.id]
        recorded = self._recorded.get(name, [])
        if times >= len(recorded) or request.sample not in recorded[times]:
            raise UserError(
                f"predictor.lengths: {self._source} has no length of sample {request.sample} of prompt {name} for time "
                f"{times + 1} (recorded: {len(recorded)} times). Record an earlier run of the same seed, n and steps "
                "with record.rollouts=-1, or choose another predictor"
            )
        return recorded[times][request.sample]

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> Mapping[str, float]:
        metrics = self._answers.judge(finished, self.prefix_tokens)
        self._replayed.update({r.request.prompt.id for r in finished} & self._recorded.keys())
        return metrics

    def state(self) -> dict[str, Any]:
        return {"kind": "oracle", "replayed": dict(self._replayed)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "oracle")
        self._replayed = Counter({name: int(times) for name, times in state["replayed"].items()})


class PrefixHead:
    """Predicts the remaining length from the policy's own hidden state after the first `prefix_tokens` tokens.

    Infinite Sampling also predicts from the first tokens, but (in its public code) by a separate BERT over their text.
    Here a ridge regression on the hidden state, the prompt's length, the prompt's mean length so far and the
    temperature predicts log(1 + remaining). It is refitted after each `generate` on the last `replay` rollouts, with
    the shrinkage of the least generalised cross-validation error: uninformative features fall back to the mean. It
    predicts nothing before `min_rollouts` rollouts, and learns nothing from rollouts that end within the prefix.

    A fit costs some 20 milliseconds whatever the model's width, as at most `ridge.WIDTH` directions of the hidden state
    are used (fixed random ones where it is wider). On a CPU in float64: the same rollouts give the same predictions.
    """

    SHRINKAGES = 10.0 ** np.arange(-4, 3)  # as shares of the number of rollouts

    def __init__(
        self,
        *,
        prefix_tokens: Annotated[int, Field(ge=1)],
        min_rollouts: Annotated[int, Field(ge=2)],
        replay: int,
        decay: Decay,
        max_prompts: Count,
    ) -> None:
        if min_rollouts > replay:
            raise UserError(
                f"predictor.min_rollouts={min_rollouts} must be from 2 to predictor.replay={replay}, the most rollouts "
                "that are kept to learn from"
            )
        self.prefix_tokens = prefix_tokens
        self._min_rollouts = min_rollouts
        self._replay = replay
        self._means = LengthMeans(decay, max_prompts)
        self._answers = _Answers()
        self._features: Float[np.ndarray, "N F"] | None = None
        self._targets: Float[np.ndarray, "N"] = np.zeros(0)
        self._head: RidgeHead | None = None

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        answers = None
        if self._head is not None and hidden is not None:
            remaining = np.expm1(self._head(self._describe(requests, hidden)))
            limits = [request.sampling.max_new_tokens - self.prefix_tokens for request in requests]
            answers = np.clip(remaining, 1.0, np.maximum(limits, 1)).tolist()
        self._answers.remember(requests, answers)
        return answers

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> Mapping[str, float]:
        """`hidden` has one row per rollout of `finished`, the one that `predict` saw."""
        metrics = self._answers.judge(finished, self.prefix_tokens)
        longer = [i for i, rollout in enumerate(finished) if len(rollout) > self.prefix_tokens]
        if hidden is not None and longer:
            seen = self._describe([finished[i].request for i in longer], hidden[longer])
            remaining = np.array([len(finished[i]) - self.prefix_tokens for i in longer], dtype=np.float64)
            kept = seen if self._features is None else np.concatenate([self._features, seen])
            self._features = kept[-self._replay :]
            self._targets = np.concatenate([self._targets, np.log1p(remaining)])[-self._replay :]
            self._fit()
        self._means.add((rollout.request.prompt.id, len(rollout)) for rollout in finished)
        return metrics

    def _describe(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"]) -> Float[np.ndarray, "R F"]:
        """The features of each request: hidden state, log of prompt length and mean length, temperature."""
        states = np.nan_to_num(hidden.detach().to("cpu", torch.float64).numpy(), posinf=0.0, neginf=0.0)
        states = narrowed(states)
        plain = []
        for request in requests:
            mean = self._means.mean(request.prompt.id)
            plain.append(
                (
                    np.log1p(len(request.prompt.token_ids)),
                    np.log1p(mean if mean is not None else 0.0),
                    float(self._means.seen(request.prompt.id)),
                    request.sampling.temperature,
                )
            )
        features = np.concatenate([states, np.array(plain)], axis=1).astype(np.float32)
        if self._features is not None and features.shape[1] != self._features.shape[1]:
            raise UserError(
                "the checkpoint's length predictor has learnt from a model of another width; resume with that model, "
                "or start a new run"
            )
        return features

    def _fit(self) -> None:
        assert self._features is not None, "there is nothing to fit before something was learnt"
        if len(self._targets) >= self._min_rollouts:
            self._head = fit_ridge(self._features.astype(np.float64), self._targets, self.SHRINKAGES)

    def state(self) -> dict[str, Any]:
        features = np.zeros((0, 0), dtype=np.float32) if self._features is None else self._features
        return {
            "kind": "prefix",
            "means": self._means.state(),
            "features": torch.from_numpy(features.copy()),
            "targets": torch.from_numpy(self._targets.copy()),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "prefix")
        self._means.load_state(state["means"])
        self._features, self._head = None, None
        self._targets = state["targets"].numpy().copy()
        if len(self._targets):
            self._features = state["features"].numpy().copy()
            self._fit()
