"""The length of each rollout: predicted for schedulers, and learned from the rollouts that have ended."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from grpo_cli.history import of_kind
from grpo_cli.rules.ridge import RidgeHead, fit_ridge, narrowed
from grpo_cli.support.errors import UserError
from grpo_cli.types import Request, Rollout

Decay = Annotated[float, Field(gt=0, le=1)]


@runtime_checkable
class Predictor(Protocol):
    """Predicts how many tokens follow a request's first `prefix_tokens`, and learns from finished rollouts."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens that a request must have before its length is predicted; 0 predicts before any."""

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        """Return the remaining tokens after the prefix, one number per request, or None when it cannot tell.

        `hidden` is the policy's last hidden state after the prefix, None when `prefix_tokens` is 0.
        """

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> Mapping[str, float]:
        """Learn from one `generate`'s rollouts; return metrics of the predictions that were used for it.

        Held-out rollouts are excluded, so after an evaluation `finished` is empty and `hidden` None.
        """

    def state(self) -> Mapping[str, Any]:
        """Return what it has learned, as tensors and plain values, for a checkpoint."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""


class LengthMeans:
    """Means of lengths, of each prompt and of all. Each `add` multiplies the weight of earlier lengths by `decay`."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._prompts: dict[str, tuple[float, float]] = {}  # id: (weight, weighted sum)
        self._all = (0.0, 0.0)

    def mean(self, prompt_id: str) -> float | None:
        """Return this prompt's mean if it was seen, else that of all; None before anything was added."""
        weight, total = self._prompts.get(prompt_id, self._all)
        return total / weight if weight else None

    def seen(self, prompt_id: str) -> bool:
        return prompt_id in self._prompts

    def add(self, lengths: Iterable[tuple[str, int]]) -> None:
        """Add one `generate`'s lengths, each with its prompt's id."""
        by_prompt: dict[str, list[int]] = {}
        for prompt_id, length in lengths:
            by_prompt.setdefault(prompt_id, []).append(length)
        for prompt_id, values in by_prompt.items():
            self._prompts[prompt_id] = self._added(self._prompts.get(prompt_id, (0.0, 0.0)), values)
        if by_prompt:
            self._all = self._added(self._all, [value for values in by_prompt.values() for value in values])

    def _added(self, old: tuple[float, float], values: Sequence[int]) -> tuple[float, float]:
        return self._decay * old[0] + len(values), self._decay * old[1] + sum(values)

    def state(self) -> dict[str, Any]:
        return {"prompts": {name: list(pair) for name, pair in self._prompts.items()}, "all": list(self._all)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._prompts = {name: (float(weight), float(total)) for name, (weight, total) in state["prompts"].items()}
        weight, total = state["all"]
        self._all = (float(weight), float(total))


def kendall_tau(first: Sequence[int | float], second: Sequence[int | float]) -> float:
    """Kendall's tau-b: 1 if both rank everything alike, -1 if in reverse; corrected for ties.

    0 where it is undefined because one of them ranks nothing (all values equal, or fewer than two).
    Knight's algorithm: sorted by `first`, the pairs that disagree are the inversions of `second`.
    """
    pairs = sorted(zip(first, second, strict=True))
    inversions = 0
    seen: list[int | float] = []
    for place, (_, value) in enumerate(pairs):
        inversions += place - bisect_right(seen, value)
        insort(seen, value)
    all_pairs = _pairs([len(pairs)])
    tied_first = _pairs(Counter(first).values())
    tied_second = _pairs(Counter(second).values())
    untied = (all_pairs - tied_first) * (all_pairs - tied_second)
    if untied == 0:
        return 0.0
    agreeing_less_inverted = all_pairs - tied_first - tied_second + _pairs(Counter(pairs).values()) - 2 * inversions
    return float(agreeing_less_inverted / untied**0.5)


def _pairs(counts: Iterable[int]) -> int:
    return sum(count * (count - 1) // 2 for count in counts)


class Predictions:
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
    """Return the key of a request; with the seed, since an evaluation has a greedy sample besides sample 0."""
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

    All samples of a prompt get one prediction, so it can order prompts but not the samples of one.
    """

    prefix_tokens = 0

    def __init__(self, *, decay: Decay) -> None:
        self._means = LengthMeans(decay)
        self._answers = Predictions()

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


class GivenLengths(NoPredictor):
    """Given lengths, by `key_of`: in a worker of `engine=ray`, those of the trainer's predictor."""

    def __init__(self, given: Mapping[tuple[str, int, int], float]) -> None:
        self._given = given

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        known = [self._given[key_of(request)] for request in requests if key_of(request) in self._given]
        return known if len(known) == len(requests) else None

    def load_state(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""


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
    ) -> None:
        if min_rollouts > replay:
            raise UserError(
                f"predictor.min_rollouts={min_rollouts} must be from 2 to predictor.replay={replay}, the most rollouts "
                "that are kept to learn from"
            )
        self.prefix_tokens = prefix_tokens
        self._min_rollouts = min_rollouts
        self._replay = replay
        self._means = LengthMeans(decay)
        self._answers = Predictions()
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
        """Return the features of each request: hidden state, log of prompt length and mean length, temperature."""
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
