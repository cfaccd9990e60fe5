"""Groups as plain values and tensors, for checkpoints: a scored one at 12 bytes per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from grpo_cli.history import of_kind
from grpo_cli.settings import Sampling
from grpo_cli.types import Finish, Group, Prompt, Request, Reward, Rollout, ScoredGroup, Span


def to_plain(group: Group | ScoredGroup) -> dict[str, Any]:
    """Return the group with all its rollouts' tokens concatenated. Log-probabilities of a scored one are in float32, in
    which they were sampled."""
    tokens = [token for rollout in group.rollouts for token in rollout.token_ids]
    logprobs = [logprob for rollout in group.rollouts for logprob in rollout.sampler_logprobs]
    rewards = {"rewards": [_earned(reward) for reward in group.rewards]} if isinstance(group, ScoredGroup) else {}
    return {
        "prompt": (group.prompt.id, list(group.prompt.token_ids), group.prompt.answer),
        "token_ids": torch.tensor(tokens, dtype=torch.int64),
        "logprobs": torch.tensor(logprobs, dtype=torch.float32 if rewards else torch.float64),
        "rollouts": [_fate(rollout) for rollout in group.rollouts],
        **rewards,
    }


def _earned(reward: Reward) -> tuple[float, dict[str, float], str, dict[str, float], bool]:
    parts, weights = ({name: float(one) for name, one in of.items()} for of in (reward.parts, reward.weights))
    return float(reward.total), parts, reward.answer_part, weights, reward.judged


def _fate(rollout: Rollout) -> dict[str, Any]:
    request = rollout.request
    return {
        "sample": request.sample,
        "seed": str(request.seed),  # 64 bits, of which a tensor has one for the sign
        "sampling": asdict(request.sampling),
        "length": len(rollout),
        "finish": rollout.finish.value,
        "spans": [(span.version, span.count) for span in rollout.spans],
    }


def from_plain(state: Mapping[str, Any]) -> Any:
    """Return the group that `to_plain` was called with."""
    name, ids, answer = state["prompt"]
    prompt, fates = Prompt(name, tuple(ids), answer), state["rollouts"]
    tokens = [state[name].split([fate["length"] for fate in fates]) for name in ("token_ids", "logprobs")]
    rollouts = list[Rollout]()
    for fate, own, logprobs in zip(fates, *tokens, strict=True):
        request = Request(prompt, fate["sample"], int(fate["seed"]), Sampling(**fate["sampling"]))
        spans, finish = tuple(Span(*span) for span in fate["spans"]), Finish(fate["finish"])
        rollouts.append(Rollout(request, tuple(own.tolist()), tuple(logprobs.tolist()), finish, spans))
    if "rewards" not in state:
        return Group(prompt, tuple(rollouts))
    return ScoredGroup(prompt, tuple(rollouts), tuple(Reward(*reward) for reward in state["rewards"]))


class HoldsGroups:
    """A base of collectors that hold groups for later steps; the checkpoint has them under the name `held`."""

    kind: ClassVar[str]
    held: ClassVar[str] = "held"
    _held: tuple[Any, ...] = ()

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, self.held: [to_plain(group) for group in self._held]}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._held = tuple(from_plain(group) for group in of_kind(state, "collector", self.kind)[self.held])
