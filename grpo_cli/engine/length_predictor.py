"""The length of each rollout: predicted for schedulers, and learned from the rollouts that have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None:
        """Learn from one `generate`'s rollouts. Held-out ones are left out, so after an evaluation there is none."""

    def state(self) -> Mapping[str, Any]:
        """Return what it has learned, as tensors and plain values, for a checkpoint."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""


def accuracy(predicted: Sequence[float], true: Sequence[int]) -> dict[str, float]:
    """Return metrics of predicted lengths; empty without any."""
    if not predicted:
        return {}
    error = float(np.mean(np.abs(np.subtract(predicted, true))))
    return {"predictor/kendall_tau": kendall_tau(predicted, true), "predictor/mean_absolute_error": error}


def kendall_tau(first: Sequence[int | float], second: Sequence[int | float]) -> float:
    """Return Kendall's tau-b: 1 if both rank everything alike, -1 if in reverse; corrected for ties.

    0 where it is undefined because one of them ranks nothing (all values equal, or fewer than two).
    """
    signs = [np.greater.outer(x, x).astype(np.int8) - np.less.outer(x, x) for x in (first, second)]
    untied = float(np.count_nonzero(signs[0])) * np.count_nonzero(signs[1])
    return float((signs[0] * signs[1]).sum(dtype=np.int64) / untied**0.5) if untied else 0.0


class NoPredictor:
    """Predicts nothing."""

    prefix_tokens = 0

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        return None

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"kind": "none"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "none")


class MeanLength:
    """The mean length so far: of the prompt if it was seen before, else of all prompts; nothing before the first.

    All samples of a prompt get one prediction, so it can order prompts but not the samples of one. Each `learn`
    multiplies the weight of earlier lengths by `decay`.
    """

    prefix_tokens = 0

    def __init__(self, *, decay: Decay) -> None:
        self._decay = decay
        self._prompts: dict[str, tuple[float, float]] = {}  # id: (weight, weighted sum)
        self._all = (0.0, 0.0)

    def mean(self, prompt_id: str) -> float:
        """Return the mean length; 0 before the first rollout."""
        weight, total = self._prompts.get(prompt_id, self._all)
        return total / weight if weight else 0.0

    def seen(self, prompt_id: str) -> bool:
        return prompt_id in self._prompts

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        if not self._all[0]:
            return None
        return [min(self.mean(one.prompt.id), float(one.sampling.max_new_tokens)) for one in requests]

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None:
        by_prompt: dict[str, list[int]] = {}
        for rollout in finished:
            by_prompt.setdefault(rollout.request.prompt.id, []).append(len(rollout))
        for prompt_id, lengths in by_prompt.items():
            self._prompts[prompt_id] = self._with(lengths, self._prompts.get(prompt_id, (0.0, 0.0)))
        if finished:
            self._all = self._with([len(rollout) for rollout in finished], self._all)

    def _with(self, lengths: Sequence[int], old: tuple[float, float]) -> tuple[float, float]:
        return self._decay * old[0] + len(lengths), self._decay * old[1] + sum(lengths)

    def state(self) -> dict[str, Any]:
        prompts = {name: list(pair) for name, pair in self._prompts.items()}
        return {"kind": "mean", "prompts": prompts, "all": list(self._all)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "mean")
        self._prompts = {name: (float(weight), float(total)) for name, (weight, total) in state["prompts"].items()}
        weight, total = state["all"]
        self._all = (float(weight), float(total))


class PrefixHead:
    """Predicts the remaining length from the policy's own hidden state after the first `prefix_tokens` tokens.

    A ridge regression on the hidden state, the prompt's length, the prompt's mean length so far and the temperature
    predicts log(1 + remaining). (The public code of Infinite Sampling has a BERT over the first tokens' text.) It is
    refitted after each `generate`, in some 20 milliseconds, with the shrinkage of the least generalised
    cross-validation error, from rollouts that are longer than the prefix. On a CPU in float64: the same rollouts give
    the same predictions.
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
        self.prefix_tokens, self._min_rollouts, self._replay = prefix_tokens, min_rollouts, replay
        self._means = MeanLength(decay=decay)
        self._features: Float[np.ndarray, "N F"] = np.zeros((0, 0), dtype=np.float32)
        self._targets: Float[np.ndarray, "N"] = np.zeros(0)
        self._head: RidgeHead | None = None

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        if self._head is None or hidden is None:
            return None
        remaining = np.expm1(self._head(self._describe(requests, hidden)))
        limits = [max(1, request.sampling.max_new_tokens - self.prefix_tokens) for request in requests]
        answers: list[float] = np.clip(remaining, 1.0, limits).tolist()
        return answers

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None:
        """`hidden` has one row per rollout of `finished`, the one that `predict` saw."""
        longer = [i for i, rollout in enumerate(finished) if len(rollout) > self.prefix_tokens]
        if hidden is not None and longer:
            seen = self._describe([finished[i].request for i in longer], hidden[longer])
            remaining = np.array([len(finished[i]) - self.prefix_tokens for i in longer], dtype=np.float64)
            before = self._features.reshape(-1, seen.shape[1])
            self._features = np.concatenate([before, seen])[-self._replay :]
            self._targets = np.concatenate([self._targets, np.log1p(remaining)])[-self._replay :]
            self._fit()
        self._means.learn(finished, None)

    def _describe(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"]) -> Float[np.ndarray, "R F"]:
        """Return the features of each request: hidden state, log of prompt length and mean length, temperature."""
        states = np.nan_to_num(hidden.detach().to("cpu", torch.float64).numpy(), posinf=0.0, neginf=0.0)
        plain = [
            (
                np.log1p(len(request.prompt.token_ids)),
                np.log1p(self._means.mean(request.prompt.id)),
                float(self._means.seen(request.prompt.id)),
                request.sampling.temperature,
            )
            for request in requests
        ]
        features = np.concatenate([narrowed(states), np.array(plain)], axis=1).astype(np.float32)
        if len(self._targets) and features.shape[1] != self._features.shape[1]:
            raise UserError(
                "the checkpoint's length predictor has learnt from a model of another width; resume with that model, "
                "or start a new run"
            )
        return features

    def _fit(self) -> None:
        enough = len(self._targets) >= self._min_rollouts
        self._head = fit_ridge(self._features.astype(np.float64), self._targets, self.SHRINKAGES) if enough else None

    def state(self) -> dict[str, Any]:
        learned = {"features": torch.tensor(self._features), "targets": torch.tensor(self._targets)}
        return {"kind": "prefix", "means": self._means.state(), **learned}

    def load_state(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "prefix")
        self._means.load_state(state["means"])
        self._features, self._targets = state["features"].numpy().copy(), state["targets"].numpy().copy()
        self._fit()
