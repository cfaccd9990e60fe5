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


@runtime_checkable
class Predictor(Protocol):
    """A predictor of the tokens after a request's first `prefix_tokens`; it learns from finished rollouts."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens that a request must have before its length is predicted; 0 predicts before any."""

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        """Return the remaining tokens after the prefix, one number per request, or None without a prediction.

        `hidden` is the policy's last hidden state after the prefix, None when `prefix_tokens` is 0.
        """

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None:
        """Learn from one `generate`'s rollouts. Held-out ones are left out, so after an evaluation there is none."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what it has learned, as tensors and plain values, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""


class NoPredictor:
    """No prediction."""

    prefix_tokens = 0

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        return None

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "none")


class MeanLength:
    """The mean length so far: of the prompt if it was seen before, else of all prompts; nothing before the first.

    All samples of a prompt get one prediction, so it can order prompts but not the samples of one. Each `learn`
    multiplies the weight of earlier lengths by `decay`: of all, and of each prompt that it has.
    """

    prefix_tokens = 0

    def __init__(self, *, decay: Annotated[float, Field(gt=0, le=1)]) -> None:
        self._decay = decay
        self._prompts: dict[str, list[float]] = {}  # id: weight and weighted sum
        self._all = [0.0, 0.0]

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        if not self._all[0]:
            return None
        means = (total / weight for weight, total in (self._prompts.get(one.prompt.id, self._all) for one in requests))
        return [min(mean, float(one.sampling.max_new_tokens)) for mean, one in zip(means, requests, strict=True)]

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None:
        by_prompt: dict[str, list[int]] = {}
        for rollout in finished:
            by_prompt.setdefault(rollout.request.prompt.id, []).append(len(rollout))
        for prompt_id, lengths in by_prompt.items():
            self._prompts[prompt_id] = self._with(lengths, self._prompts.get(prompt_id, [0.0, 0.0]))
        if finished:
            self._all = self._with([len(rollout) for rollout in finished], self._all)

    def _with(self, lengths: Sequence[int], old: Sequence[float]) -> list[float]:
        return [self._decay * old[0] + len(lengths), self._decay * old[1] + sum(lengths)]

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "mean", "prompts": dict(self._prompts), "all": self._all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "mean")
        self._prompts, self._all = dict(state["prompts"]), state["all"]


class PrefixHead:
    """The remaining length by the policy's own hidden state after the first `prefix_tokens` tokens.

    A ridge regression on that state and the prompt's length predicts log(1 + remaining). (The public code of Infinite
    Sampling has a BERT over the first tokens' text.) It is refitted after each `generate`, in some 20 milliseconds,
    with the shrinkage of the least generalised cross-validation error, from rollouts that are longer than the prefix.
    On a CPU in float64: the same rollouts give the same predictions.
    """

    SHRINKAGES = 10.0 ** np.arange(-4, 3)  # as shares of the number of rollouts

    def __init__(
        self, *, prefix_tokens: Annotated[int, Field(ge=1)], min_rollouts: Annotated[int, Field(ge=2)], replay: int
    ) -> None:
        if min_rollouts > replay:
            raise UserError(
                f"predictor.min_rollouts={min_rollouts} must be from 2 to predictor.replay={replay}, the most rollouts "
                "that are kept to learn from"
            )
        self.prefix_tokens, self._min_rollouts, self._replay = prefix_tokens, min_rollouts, replay
        self._features: Float[np.ndarray, "N F"] = np.zeros((0, 0), dtype=np.float32)
        self._targets: Float[np.ndarray, "N"] = np.zeros(0)
        self._head: RidgeHead | None = None

    def predict(self, requests: Sequence[Request], hidden: Float[Tensor, "R H"] | None) -> Sequence[float] | None:
        if self._head is None or hidden is None:
            return None
        remaining = np.expm1(self._head(_features(requests, hidden)))
        limits = [max(1, request.sampling.max_new_tokens - self.prefix_tokens) for request in requests]
        return [float(tokens) for tokens in np.clip(remaining, 1.0, limits)]

    def learn(self, finished: Sequence[Rollout], hidden: Float[Tensor, "R H"] | None) -> None:
        """Refit; `hidden` has the row that `predict` used for each rollout."""
        longer = [i for i, rollout in enumerate(finished) if len(rollout) > self.prefix_tokens]
        if hidden is not None and longer:
            seen = _features([finished[i].request for i in longer], hidden[longer])
            remaining = np.array([len(finished[i]) - self.prefix_tokens for i in longer], dtype=np.float64)
            before = self._features.reshape(-1, seen.shape[1])
            self._features = np.concatenate([before, seen])[-self._replay :]
            self._targets = np.concatenate([self._targets, np.log1p(remaining)])[-self._replay :]
            self._fit()

    def _fit(self) -> None:
        if len(self._targets) >= self._min_rollouts:
            self._head = fit_ridge(self._features.astype(np.float64), self._targets, self.SHRINKAGES)

    def state_dict(self) -> dict[str, Any]:
        features, targets = torch.tensor(self._features), torch.tensor(self._targets)
        return {"kind": "prefix", "features": features, "targets": targets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        of_kind(state, "predictor", "prefix")
        self._features, self._targets = state["features"].numpy().copy(), state["targets"].numpy().copy()
        self._fit()


def _features(requests: Sequence[Request], hidden: Float[Tensor, "R H"]) -> Float[np.ndarray, "R F"]:
    lengths = np.log1p([[len(request.prompt.token_ids)] for request in requests])
    states = np.nan_to_num(hidden.detach().to("cpu", torch.float64).numpy(), posinf=0.0, neginf=0.0)
    return np.concatenate([narrowed(states), lengths], axis=1).astype(np.float32)
