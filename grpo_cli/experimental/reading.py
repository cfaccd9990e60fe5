"""Reads the policy in rollouts, by a forward pass of its own: hidden states, entropies, likely tokens. `Probing` is the
base of rules that learn from these.

Nothing of a whole batch is kept: hidden states are averaged in a hook on their layer, logits come up in chunks. The
model computes without dropout, in its own precision in training, and under `model.autocast` in searches of `grpo eval`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from grpo_cli.history import of_kind
from grpo_cli.interfaces import Runtime
from grpo_cli.learner.batch import collate, rows_of
from grpo_cli.learner.forward import padded, padded_parts
from grpo_cli.model.anatomy import backbone, head, unwrapped
from grpo_cli.model.checkpointing import last_states
from grpo_cli.rules.ridge import RidgeHead, fit_ridge
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count
from grpo_cli.types import Batch, Group, Rollout

TOKENS_AT_A_TIME, LOGITS_AT_A_TIME = 16384, 512  # padding counts
POOLED = 10  # tokens at the end of a prompt and of a response that features are the mean of


@dataclass(frozen=True)
class PolicyReading:
    """The results of a pass over rollouts, in their order.

    `features` are the means of a layer's states over the last tokens of the prompt, then of the model's own.
    Of each token of its own: the entropy in nats of the distribution that it was sampled from, and the two likeliest
    tokens there, the first first. Empty unless they were wanted.
    """

    features: Float[np.ndarray, "N F"]
    entropies: tuple[Float[np.ndarray, "_"], ...] = ()
    top_ids: tuple[Int[np.ndarray, "_ 2"], ...] = ()
    top_probs: tuple[Float[np.ndarray, "_ 2"], ...] = ()


def layer_of(model: Any, number: int | None) -> Any:
    """Return layer `number` of the backbone, from 1 (None: that at two thirds, rounded up). UserError without one."""
    body = backbone(model)
    count = body.config.num_hidden_layers
    layers = next((m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if layers is None:
        raise UserError(f"no hidden states can be read in {type(unwrapped(model)).__name__}: its layers are not found")
    place = -(-2 * count // 3) if number is None else number
    if not 1 <= place <= count:
        raise UserError(f"layer={number} cannot be read: the model's are 1 to {count}; null is the one at two thirds")
    return layers[place - 1]


@torch.no_grad()
def read(
    runtime: Runtime, rollouts: Sequence[Rollout], *, layer: int | None = None, last: int = POOLED, tokens: bool = False
) -> PolicyReading:
    """Return what a pass over rollouts gives, `layer` from 1 (None: that at two thirds). UserError for states that are
    not finite, or without such a layer."""
    batch = collate([Group(one.request.prompt, (one,)) for one in rollouts])
    parts = padded_parts((batch.prompt_lengths + batch.lengths).tolist(), TOKENS_AT_A_TIME)
    temperature = rollouts[0].request.sampling.temperature or 1.0
    features: dict[int, np.ndarray] = {}
    per_token: dict[int, tuple[np.ndarray, ...]] = {}
    for rows in parts:
        part = rows_of(batch, torch.tensor(rows))
        states, pooled = _pass(runtime.model, part, layer, last)
        features |= dict(zip(rows, pooled.double().cpu().numpy(), strict=True))
        if tokens:
            per_token |= dict(zip(rows, _of_tokens(runtime.model, part, states, temperature), strict=True))
    found = np.stack([features[row] for row in range(len(batch))])
    if not np.isfinite(found).all():
        raise UserError("hidden states that are read are not finite: use model.dtype=float32, or read another layer")
    return PolicyReading(found, *zip(*(per_token[row] for row in range(len(per_token))), strict=True))


def _pass(model: Any, part: Batch, layer: int | None, last: int) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B F"]]:
    """Return the last hidden states, and the features: the layer's states are averaged as they come up."""
    device, ids, found = model.device, padded(part), list[Tensor]()
    ends = _ends(part, last, ids.shape[1]).to(device)

    def pool(module: Any, inputs: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        found.append(torch.cat([_mean(states, one) for one in ends], dim=1))

    with layer_of(model, layer).register_forward_hook(pool):
        states = last_states(model, ids.to(device))
    return states, found[0]


def _mean(states: Float[Tensor, "B T H"], over: Bool[Tensor, "B T"]) -> Float[Tensor, "B H"]:
    """Return the mean in float32, 0 over no tokens; those outside, even NaN, do not count."""
    kept = states.float().masked_fill(~over[:, :, None], 0.0)
    return kept.sum(dim=1) / over.sum(dim=1).clamp(min=1)[:, None]


def _ends(part: Batch, last: int, width: int) -> Bool[Tensor, "2 B T"]:
    """Return the last tokens of each prompt, and of each response."""
    starts, places = part.prompt_lengths[:, None], torch.arange(width)
    of_response, rows = torch.zeros(len(part), width, dtype=torch.bool), part.per_token(torch.arange(len(part)))
    of_response[rows, part.positions] = part.response_mask & (part.left(part.response_mask) <= last)
    return torch.stack([(places < starts) & (places >= starts - last), of_response])


def _of_tokens(
    model: Any, part: Batch, states: Float[Tensor, "B T H"], temperature: float
) -> list[tuple[np.ndarray, ...]]:
    """Return of each row entropies, likeliest ids and their probabilities; a chunk of logits exists at a time."""
    places = torch.stack([part.per_token(torch.arange(len(part))), part.positions - 1])
    rows, columns = places[:, part.response_mask].to(states.device)
    chosen, to_logits = states[rows, columns], head(model)
    found: list[tuple[np.ndarray, ...]] = []
    for some in chosen.split(LOGITS_AT_A_TIME):
        logs = torch.log_softmax(to_logits(some).float() / temperature, dim=1)
        probs, ids = logs.topk(2, dim=1)
        entropies = -(logs * logs.exp()).nansum(dim=1)  # a token of probability 0 adds 0
        found.append(tuple(x.cpu().numpy() for x in (entropies.double(), ids, probs.exp().double())))
    joined = [np.concatenate(values) for values in zip(*found, strict=True)]
    ends = np.cumsum(part.sums(part.response_mask).long().numpy())[:-1]
    return list(zip(*(np.split(value, ends) for value in joined), strict=True))


class ProbeRows(NamedTuple):
    """Rows of a step: features, what was true of each, and what was predicted (NaN: nothing)."""

    features: Float[np.ndarray, "N F"]
    targets: Float[np.ndarray, "N"]
    predicted: Float[np.ndarray, "N"]


@dataclass(kw_only=True)
class Probing:
    """A rule that learns a ridge on the rows of the last `window` steps, and predicts once there are `min_rollouts` of
    them. `ridge` is the shrinkage, as a share of their number; `kind` is its choice in `group`. UserError if `window`
    steps have fewer than `min_rollouts` rollouts, `n` of each of `prompts`."""

    group: ClassVar[str]
    kind: ClassVar[str]
    ridge: Annotated[float, Field(gt=0)]
    window: Count
    min_rollouts: Annotated[int, Field(ge=2)]
    layer: Count | None
    n: int
    prompts: int

    def __post_init__(self) -> None:
        most = self.window * self.n * self.prompts
        if self.min_rollouts > most:
            raise UserError(
                f"{self.group}.min_rollouts={self.min_rollouts} is more than the {most} rollouts of "
                f"{self.group}.window={self.window} steps: lower it, or raise the window"
            )
        self.steps: tuple[ProbeRows, ...] = ()
        self._head: RidgeHead | None = None

    def setup(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def rows(self) -> int:
        return sum(len(step.targets) for step in self.steps)

    def predict(self, features: Float[np.ndarray, "N F"]) -> Float[np.ndarray, "N"]:
        """Return predictions, NaN with too few rows yet."""
        return np.full(len(features), np.nan) if self._head is None else self._head(features.astype(np.float64))

    def add(self, seen: Sequence[ProbeRows]) -> None:
        """Learn from a step's rows, if there are any."""
        if seen:
            joined = ProbeRows(*map(np.concatenate, zip(*seen, strict=True)))
            self.steps = (*self.steps, joined)[-self.window :]
            self._fit()

    def _fit(self) -> None:
        self._head = None
        if self.rows >= self.min_rollouts:
            features, targets, _ = map(np.concatenate, zip(*self.steps, strict=True))
            self._head = fit_ridge(features.astype(np.float64), targets, np.array([self.ridge]))

    def state_dict(self) -> dict[str, Any]:
        steps = [{name: torch.from_numpy(own) for name, own in step._asdict().items()} for step in self.steps]
        return {"kind": self.kind, "layer": self.layer, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Put back a state. UserError if its features are of another layer than the rule reads."""
        found = of_kind(state, self.group, self.kind)
        if found["layer"] != self.layer:
            before = "null" if found["layer"] is None else found["layer"]
            raise UserError(f"the checkpoint's probe has learnt from {self.group}.layer={before}: resume with that")
        steps = ({name: own.numpy() for name, own in step.items()} for step in found["steps"])
        self.steps = tuple(ProbeRows(**step) for step in steps)
        self._fit()
