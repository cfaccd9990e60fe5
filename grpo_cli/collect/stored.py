"""A scored group as plain values and tensors, for stores and checkpoints, at 12 bytes per token and 4 more for
each id that truncation left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from grpo_cli.settings import Sampling
from grpo_cli.types import Finish, KeptSets, Prompt, Request, Reward, Rollout, ScoredGroup, Span


def to_plain(group: ScoredGroup) -> dict[str, Any]:
    """The group with all its rollouts' tokens concatenated, log-probabilities in float32, in which they were drawn."""
    tokens = [token for rollout in group.rollouts for token in rollout.token_ids]
    logprobs = [logprob for rollout in group.rollouts for logprob in rollout.sampler_logprobs]
    return {
        "prompt": (group.prompt.id, list(group.prompt.token_ids), group.prompt.answer),
        "token_ids": torch.tensor(tokens, dtype=torch.int64),
        "logprobs": torch.tensor(logprobs, dtype=torch.float32),
        "rollouts": [_fate(rollout) for rollout in group.rollouts],
        "rewards": [
            (float(reward.total), _floats(reward.parts), reward.answer_part, _floats(reward.weights))
            for reward in group.rewards
        ],
    }


def _floats(named: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in named.items()}


def _fate(rollout: Rollout) -> dict[str, Any]:
    request = rollout.request
    return {
        "sample": request.sample,
        "seed": str(request.seed),  # 64 bits, of which a tensor has one for the sign
        "sampling": asdict(request.sampling),
        "context": plain_context(request),
        "length": len(rollout),
        "finish": rollout.finish.value,
        "kept_kv": rollout.kept_kv,
        "spans": [(span.version, span.count) for span in rollout.spans],
        "kept": plain_sets(rollout),
    }


def plain_context(request: Request) -> tuple[str, list[int]] | None:
    """What was read in place of the problem's prompt, if anything was."""
    return None if request.problem is None else (request.prompt.id, list(request.prompt.token_ids))


def request_of(problem: Prompt, state: Mapping[str, Any]) -> Request:
    """The request of a stored rollout; older stores know no contexts."""
    asked = Request(problem, state["sample"], int(state["seed"]), sampling_of(state["sampling"]))
    if (context := state.get("context")) is None:
        return asked
    name, token_ids = context
    return replace(asked, prompt=Prompt(name, tuple(token_ids), problem.answer), problem=problem)


def plain_sets(rollout: Rollout) -> tuple[torch.Tensor, ...] | None:
    """What truncation left of each token: ids and counts, int32."""
    return None if rollout.kept is None else tuple(torch.from_numpy(one.copy()) for one in rollout.kept.arrays)


def sets_of(state: Mapping[str, Any]) -> KeptSets | None:
    """The inverse, from what is kept of a rollout; older stores say nothing of it."""
    kept = state.get("kept")
    return None if kept is None else KeptSets(*(one.numpy().tobytes() for one in kept))


def sampling_of(state: Mapping[str, Any]) -> Sampling:
    """The inverse of `asdict`; older stores lack some settings."""
    return Sampling(**{"max_turn_tokens": None, "kept_set": False, **state, "stop": tuple(state["stop"])})


def from_plain(state: Mapping[str, Any]) -> ScoredGroup:
    """The inverse of `to_plain`."""
    prompt = prompt_of(state)
    lengths = [fate["length"] for fate in state["rollouts"]]
    parts = zip(state["rollouts"], state["token_ids"].split(lengths), state["logprobs"].split(lengths), strict=True)
    return ScoredGroup(
        prompt,
        tuple(_rollout(prompt, fate, tuple(ids.tolist()), tuple(said.tolist())) for fate, ids, said in parts),
        tuple(Reward(*reward) for reward in state["rewards"]),
    )


def prompt_of(state: Mapping[str, Any]) -> Prompt:
    """The problem of a stored group."""
    name, token_ids, answer = state["prompt"]
    return Prompt(name, tuple(token_ids), answer)


def _rollout(
    prompt: Prompt, fate: Mapping[str, Any], token_ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> Rollout:
    spans = tuple(Span(*span) for span in fate["spans"])
    return Rollout(
        request_of(prompt, fate), token_ids, logprobs, Finish(fate["finish"]), fate["kept_kv"], spans, sets_of(fate)
    )


def drawn(
    stored: Sequence[Mapping[str, Any]], count: int, fresh: Sequence[ScoredGroup], rng: np.random.Generator
) -> list[ScoredGroup]:
    """`count` groups drawn without replacement, those of problems that are `fresh` last."""
    anew = {group.prompt.id for group in fresh}
    order = sorted(rng.permutation(len(stored)).tolist(), key=lambda place: stored[place]["prompt"][0] in anew)
    return [from_plain(stored[place]) for place in order[:count]]


def version_of(state: Mapping[str, Any]) -> int:
    """The oldest version that drew any of its tokens, 0 without a token."""
    versions = (version for fate in state["rollouts"] for version, _ in fate["spans"])
    return min((version for version in versions if version >= 0), default=0)
