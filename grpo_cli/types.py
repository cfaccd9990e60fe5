"""The values that pass through a run; nothing here acts on them.

Each is frozen, and its type says which stage it has reached:
prompt -> request -> rollout (-> request, for the rest of a partial one) -> group -> scored group ->
batch -> verdict -> selection (`select.py`) -> update (`learner/learner.py`) -> record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from grpo_cli.settings import Sampling


class Finish(StrEnum):
    """The reason for which a rollout ended."""

    EOS = "eos"
    STOP = "stop"  # one of `sampling.stop`
    LENGTH = "length"
    PARTIAL = "partial"  # stopped from outside, and can be resumed

    @property
    def complete(self) -> bool:
        """True if the model ended it itself, rather than being cut off."""
        return self in (Finish.EOS, Finish.STOP)


@dataclass(frozen=True)
class Prompt:
    """A problem: what the model reads, and what its answer is judged against."""

    id: str
    token_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True)
class Request:
    """One rollout to be made. Its tokens are a function of the weights and of this value alone.

    `held_out` marks one made to measure: nothing may be learned from it, not even how long such rollouts are.
    The last `resumed_tokens` of the prompt are the rollout's own, sampled before, so a length predictor learns nothing
    from the rest. The last `turn_tokens` of them belong to a turn that has not ended, where a stop string may have
    begun.
    """

    prompt: Prompt
    sample: int
    seed: int
    sampling: Sampling
    held_out: bool = False
    resumed_tokens: int = 0
    turn_tokens: int = 0


# In place of a version, and of the number of updates by which a token is older. GIVEN: copied from a demonstration or a
# prefix, so no policy sampled it. ENVIRONMENT: an observation, which is read but never trained on.
GIVEN, ENVIRONMENT = -1, -2


@dataclass(frozen=True)
class Span:
    """`count` consecutive tokens of a rollout, sampled from the weights after `version` updates."""

    version: int
    count: int


@dataclass(frozen=True)
class Rollout:
    """One completion, or an episode of several turns. `token_ids` ends with the end-of-sequence token when `finish` is
    `EOS`.

    `sampler_logprobs` has one entry per token: the log-probability under the distribution the token was really sampled
    from (temperature, truncation and evicted KV entries included), and NaN for a token that no policy sampled. `spans`
    has the version of the weights that sampled each token, or GIVEN or ENVIRONMENT. An engine marks the environment's
    tokens only, with version 0 for its own (empty: all are); `collect.resuming` sets the versions.
    """

    request: Request
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    finish: Finish
    spans: tuple[Span, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def key(self) -> tuple[str, int]:
        """The prompt's id and the sample number, which tell a rollout from the others of its step."""
        return self.request.prompt.id, self.request.sample

    @property
    def is_partial(self) -> bool:
        """True if it has not ended: it was stopped, or has not begun."""
        return self.finish is Finish.PARTIAL

    @property
    def parts(self) -> tuple[tuple[bool, tuple[int, ...]], ...]:
        """The tokens, cut where the model and its environment take turns: whether each part is the environment's.

        >>> from grpo_cli.settings import Sampling
        >>> one = Request(Prompt("p", (5,), ""), 0, 0, Sampling.plain(9))
        >>> spans = (Span(3, 1), Span(4, 1), Span(ENVIRONMENT, 2))
        >>> Rollout(one, (7, 8, 1, 2), (-1.0, -1.0) + (float("nan"),) * 2, Finish.PARTIAL, spans).parts
        ((False, (7, 8)), (True, (1, 2)))
        """
        parts: list[tuple[bool, tuple[int, ...]]] = []
        start = 0
        for span in self.spans or (Span(0, len(self)),) * (len(self) > 0):
            theirs, tokens = span.version == ENVIRONMENT, self.token_ids[start : start + span.count]
            start += span.count
            if parts and parts[-1][0] == theirs:
                tokens = parts.pop()[1] + tokens
            parts.append((theirs, tokens))
        return tuple(parts)

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """The model's turns."""
        return tuple(tokens for theirs, tokens in self.parts if not theirs)

    @property
    def turn_tokens(self) -> int:
        """Tokens of the current turn, or of the one that just ended: those after the environment's last answer."""
        parts = self.parts
        return len(parts[-1][1]) if parts and not parts[-1][0] else 0

    @property
    def num_sampled(self) -> int:
        """Tokens without the environment's."""
        return sum(map(len, self.turns))


@dataclass(frozen=True)
class Group:
    """All rollouts of one prompt, in the order of their sample number. Group sizes may differ."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def whole(self) -> bool:
        """True if every rollout is finished."""
        return all(not rollout.is_partial for rollout in self.rollouts)

    @property
    def partial(self) -> Group:
        """The group with only the rollouts that are not finished."""
        return Group(self.prompt, tuple(one for one in self.rollouts if one.is_partial))


# Beyond it (either side of 0) float64 cannot represent every integer, and many squares overflow float32.
LARGEST_REWARD = 2.0**53


@dataclass(frozen=True)
class Reward:
    """A rollout's reward. `total` is trained on; `parts` are logged, each by its name.

    `weights` has each part's weight in the total; a part without one is only logged. Empty: not known. A reward is not
    `judged` where its judge has failed; its rollout is not trained on.
    Evaluation counts an answer as right whose part `answer_part` is at least 1, or the total where there is no such
    part.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    answer_part: str = "correct"
    weights: Mapping[str, float] = field(default_factory=dict)
    judged: bool = True

    @property
    def answer(self) -> float:
        """The grade of the answer without what format or length add; the total where the answer is not rewarded."""
        rewarded = not self.weights or bool(self.weights.get(self.answer_part))
        return self.parts.get(self.answer_part, self.total) if rewarded else self.total

    @property
    def solved(self) -> bool:
        """True if the answer is right, as graded."""
        return self.parts.get(self.answer_part, self.total) >= 1.0


@dataclass(frozen=True)
class ScoredGroup:
    """A group and the reward of each of its rollouts."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]

    def take(self, indices: Sequence[int]) -> ScoredGroup:
        """Return the group with only the rollouts at `indices`, in that order."""
        return replace(
            self, rollouts=tuple(self.rollouts[i] for i in indices), rewards=tuple(self.rewards[i] for i in indices)
        )

    @cached_property
    def totals(self) -> np.ndarray:
        """Return the total rewards, float64, one per rollout."""
        totals = np.array([reward.total for reward in self.rewards], dtype=np.float64)
        totals.setflags(write=False)
        return totals

    @property
    def rewards_differ(self) -> bool:
        """True if rewards differ: compared as they are, since the floating-point deviation of equal ones need not be 0
        (that of three times 0.1 is 1.4e-17)."""
        return bool((self.totals != self.totals[:1]).any())

    @cached_property
    def solved(self) -> int:
        """Return how many of the rollouts have the right answer."""
        return sum(reward.solved for reward in self.rewards)


@dataclass(frozen=True)
class Batch:
    """Rollouts as prefix trees: each prompt once, and the tokens of all completions one after the other.

    Every field of N has a number for each token of the completions (a log-probability is predicted from the token
    before), row after row. Outside `response_mask`, at an environment's tokens, it is 0; `sampler_logprobs` is also 0
    at tokens that no policy sampled. `loss_mask` is the part of the response that is trained on (a correction may take
    tokens away) and `weights` multiplies each token's loss. `old_logprobs is None` means that the learner has not moved
    since the step began: its own detached log-probabilities are the old policy's. Advantages are 0 until the rows that
    are trained on are chosen. `token_ages` are the numbers of updates by which tokens are older than the step, `GIVEN`
    of one that nobody sampled; None: all are of the current weights.
    """

    prompts: tuple[tuple[int, ...], ...]
    group: Int[Tensor, "B"]  # the place of each row's prompt among them
    lengths: Int[Tensor, "B"]  # tokens of each row's completion
    token_ids: Int[Tensor, "N"]
    response_mask: Bool[Tensor, "N"]
    loss_mask: Bool[Tensor, "N"]
    weights: Float[Tensor, "N"]
    sampler_logprobs: Float[Tensor, "N"]
    old_logprobs: Float[Tensor, "N"] | None
    ref_logprobs: Float[Tensor, "N"] | None
    advantages: Float[Tensor, "N"]
    token_ages: Int[Tensor, "N"] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def trained_mask(self) -> Bool[Tensor, "N"]:
        """The tokens that are trained on: those with a weight in the policy loss, even if their advantage is 0."""
        return self.loss_mask & (self.weights != 0)

    @property
    def sampled_mask(self) -> Bool[Tensor, "N"]:
        """The response tokens that were sampled: the only ones with a mismatch."""
        return self.response_mask if self.token_ages is None else self.response_mask & (self.token_ages != GIVEN)

    @property
    def prompt_lengths(self) -> Int[Tensor, "B"]:
        return torch.tensor([len(prompt) for prompt in self.prompts], device=self.group.device)[self.group]

    @property
    def positions(self) -> Int[Tensor, "N"]:
        """The place of each token in its own prompt and completion."""
        ends = self.prompt_lengths + self.lengths
        return torch.arange(len(self.token_ids), device=ends.device) + self.per_token(ends - self.lengths.cumsum(0))

    def sums(self, values: Shaped[Tensor, "N"]) -> Float[Tensor, "B"]:
        """Return the sum of each row's values."""
        values = values if values.is_floating_point() else values.float()
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True, initial=0)

    def running(self, values: Shaped[Tensor, "N"]) -> Float[Tensor, "N"]:
        """Return the sum of a row's values up to and with each token."""
        sums = self.sums(values)
        return values.cumsum(0) - self.per_token(sums.cumsum(0) - sums)

    def left(self, mask: Bool[Tensor, "N"]) -> Float[Tensor, "N"]:
        """Return how many of a row's tokens in the mask there are from each token on."""
        return self.per_token(self.sums(mask)) - self.running(mask) + mask.int()

    def any(self, mask: Bool[Tensor, "N"]) -> Bool[Tensor, "B"]:
        """Return which rows have a token of the mask."""
        return self.sums(mask) > 0

    def per_token(self, values: Shaped[Tensor, "B"]) -> Shaped[Tensor, "N"]:
        """Return each row's value at all of its tokens."""
        return values.repeat_interleave(self.lengths, output_size=len(self.token_ids))


@dataclass(frozen=True)
class Verdict:
    """The result of a correction of a batch.

    `weights` have no gradient and are 0 where nothing is trained, `mask` holds the tokens left to train on, and
    `reasons` are those of rows that add nothing to the policy loss, empty for others.
    """

    weights: Float[Tensor, "N"]
    mask: Bool[Tensor, "N"]
    reasons: tuple[str, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Totals:
    """Counts over a whole update, whatever micro-batches it is cut into: the divisors of the loss."""

    sequences: int
    tokens: int
    max_new_tokens: int


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss (shares add up to the loss) and its share of each metric's mean."""

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Float[Tensor, ""]]


@dataclass(frozen=True)
class EngineStats:
    """The cost of the last `generate`. Bytes are exact, from shapes; a decode step is one batched forward."""

    decode_steps: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    slots: int = 0
    slot_utilisation: float = 0.0
    kv_peak_bytes: int = 0
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """One rollout in readable form: a row of `rollouts.jsonl` and of the W&B table.

    `turns` are the texts of the model and the environment, each part with whether it is the environment's; None for a
    completion of one turn. `token_ids`, `logprobs` (None for a token that was given) and `environment` (from where to
    where tokens are not the model's) are for other runs to train on, if they are wanted.
    """

    prompt_id: str
    sample: int
    prompt: str
    reply: str
    answer: str
    reward: float
    solved: bool
    parts: Mapping[str, float]
    length: int
    finish: str
    kept: bool
    reason: str
    advantage: float | None
    turns: tuple[tuple[bool, str], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None
    environment: tuple[tuple[int, int], ...] | None = None

    def row(self) -> dict[str, Any]:
        """Return the dictionary that is written, with tokens only if they were requested."""
        return {name: value for name, value in vars(self).items() if value is not None or name not in _MAY_LACK}


FOR_RUNS = ("token_ids", "logprobs", "environment")  # the fields that are not for people
_MAY_LACK = ("turns", *FOR_RUNS)


@dataclass(frozen=True)
class Record:
    """The record of a step: named numbers (see `metric_names.py`) and a few rollouts to read."""

    step: int
    metrics: Mapping[str, float]
    examples: tuple[Example, ...] = ()
