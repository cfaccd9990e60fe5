"""Tries the rules on made-up rollouts before any weights are read, to find those that return something wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from grpo_cli.collect.rehearsal import MOST_REHEARSED, CollectionSize, rehearsed
from grpo_cli.config import together
from grpo_cli.config.instantiate import rules_of
from grpo_cli.config.kinds import RULES
from grpo_cli.history import History, Visit
from grpo_cli.interfaces import Loss, Rules
from grpo_cli.learner.batch import corrected, verdict_on
from grpo_cli.rules.downsample import choose
from grpo_cli.settings import RunSettings, Sampling
from grpo_cli.support.errors import UserError, gathered, own_code, refuse
from grpo_cli.support.facts import taken
from grpo_cli.types import (
    AdvantageInputs,
    Batch,
    Finish,
    LossOutput,
    Prompt,
    Request,
    Reward,
    Rollout,
    ScoredGroup,
    Totals,
    Verdict,
)


@dataclass(frozen=True)
class Tried:
    """The rules of a run, each tried once, and the most that a step of its collector may ask for."""

    rules: Rules
    size: CollectionSize


def try_rules(settings: RunSettings) -> Tried | None:
    """The rules of a run, each tried on a made-up group of its size. UserError lists what cannot be used. None if `m`
    and `n` are invalid, which is refused elsewhere."""
    rules, problems = rules_of(settings.parts), list[str]()
    if settings.resume is None:
        problems += together.undone(settings, rules)
    n, m, prompts = settings.n, settings.m, settings.train.prompts
    if not 1 <= m <= n:
        refuse(problems)
        return None
    size = CollectionSize.equal(n, prompts)
    with gathered(problems):
        size = rehearsed(rules.collector, n, prompts, settings.sampling.max_new_tokens)
        problems += together.rehearsed_problems(settings, size)
    with gathered(problems):
        tried = _try_choice(rules, n, m)
    refuse(problems)
    targets = [f"{name}._target_={settings.parts[name]['_target_']}" for name in RULES]
    own = [target for target in targets if "=grpo_cli." not in target]
    with own_code(" or ".join(own)) if own else nullcontext():
        _rehearse(rules, *tried)
    return Tried(rules, size)


def _try_choice(rules: Rules, n: int, m: int) -> tuple[ScoredGroup, ScoredGroup]:
    """A made-up group of `n` rollouts (at most MOST_REHEARSED), and the part of it that is kept for `m`."""
    size = min(n, MOST_REHEARSED)
    group, keep = _made_up_group(size), min(m, size if m == n else size - 1)
    try:
        return group, group.take(choose(rules.downsample, group, keep, np.random.default_rng(0)))
    except UserError as error:
        if size == n:
            raise
        raise UserError(f"{error} (tried on a made-up group of n={size} with m={keep})") from error


# Called in the order of a step, each with the result of the one before.
_REHEARSED = ("collector", "downsample", "advantage", "correction", "loss")


def _rehearse(rules: Rules, group: ScoredGroup, kept: ScoredGroup) -> None:
    m = len(kept.rollouts)
    of_kept, of_group = (torch.tensor(scored.totals, dtype=torch.float32) for scored in (kept, group))
    numbers = tuple(rollout.request.sample for rollout in kept.rollouts)
    inputs = AdvantageInputs(group, numbers, tuple(range(len(group.rollouts))))
    history = History({group.prompt.id: [Visit(0, 1, 2)]})
    advantage = copy.deepcopy(rules.advantage)
    advantages = advantage(of_kept, of_group, **taken(advantage, inputs=inputs, history=history))
    _expect("advantage", advantages, (m,))
    if rules.correction.rejects and taken(rules.correction, advantages=None):
        raise UserError(
            "correction: one that rejects is asked before rollouts are chosen, when nobody knows their advantages; "
            "leave out the parameter advantages, or say rejects = False"
        )
    logprobs, rng = torch.full((m, 4), -1.0, requires_grad=True), np.random.default_rng(0)
    batch = _made_up_batch(advantages, logprobs.detach())
    verdict = verdict_on(rules.correction, batch, logprobs.detach())
    if not isinstance(verdict, Verdict) or len(verdict.reasons) != m:
        raise UserError(f"correction: asked for a Verdict on {m} rollouts, the answer was {verdict!r}")
    _expect("correction", verdict.weights, (m, 4))
    _expect("correction", verdict.mask, (m, 4))
    made_up = {"group": group, "keep": m, "rng": rng, "kept_rewards": of_kept, "group_rewards": of_group}
    _rehearse_others(rules, made_up | {"batch": batch, "problems": ["rehearsal"] * m, "history": History()})
    output = _rehearsed_loss(rules.loss, logprobs, corrected(batch, verdict))
    _expect("loss", output.loss, ())
    if not output.loss.requires_grad:
        raise UserError("loss: the answer has no gradient with respect to the log-probabilities; do not detach them")


def _rehearse_others(rules: Rules, made_up: Mapping[str, Any]) -> None:
    """Call each rule of a kind that `_rehearse` does not know with the arguments of its protocol. UserError if the
    result is not of the declared type."""
    for name, kind in RULES.items():
        if name not in _REHEARSED:
            answer = copy.deepcopy(getattr(rules, name))(*[made_up[word] for word in kind.called_with])
            if not isinstance(answer, kind.answers):
                raise UserError(f"{name}: the answer to a made-up group was {answer!r}; return {kind.answers}")


def _rehearsed_loss(loss: Loss, logprobs: torch.Tensor, batch: Batch) -> LossOutput:
    """With a reference only if the loss says that it needs one, as in the run."""
    totals, compared = Totals(len(batch), 3 * len(batch), 3), replace(batch, ref_logprobs=batch.sampler_logprobs)
    if loss.needs_reference:
        return loss(logprobs, compared, totals)
    try:
        return loss(logprobs, batch, totals)
    except (TypeError, AttributeError, AssertionError) as error:  # raised by None in place of a tensor
        try:
            loss(logprobs, compared, totals)
        except (TypeError, AttributeError, AssertionError):
            raise error from None
        raise UserError(
            f"loss: without batch.ref_logprobs it ends with {type(error).__name__}: {error}. A loss that compares with "
            "the model as it was at the start says needs_reference = True, as an attribute of the function or class; "
            "then they are given"
        ) from error


def _made_up_group(n: int) -> ScoredGroup:
    prompt = Prompt("rehearsal", (0,), "0")
    requests = [Request(prompt, sample, sample, Sampling.plain(3)) for sample in range(n)]
    rollouts = tuple(Rollout(request, (0, 0, 0), (-1.0, -1.0, -1.0), Finish.EOS, 2) for request in requests)
    return ScoredGroup(prompt, rollouts, tuple(Reward(float(sample % 2)) for sample in range(n)))


def _made_up_batch(advantages: torch.Tensor, logprobs: torch.Tensor) -> Batch:
    rows = len(advantages)
    response = torch.tensor([[False, True, True, True]]).repeat(rows, 1)
    return Batch(
        input_ids=torch.zeros((rows, 4), dtype=torch.long),
        response_mask=response,
        loss_mask=response,
        weights=response.float(),
        sampler_logprobs=logprobs * response,
        policy_logprobs=None,
        ref_logprobs=None,
        advantages=advantages,
        lengths=torch.full((rows,), 4),
    )


def _expect(name: str, answer: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(answer, torch.Tensor) or tuple(answer.shape) != shape:
        found = f"shape {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else repr(answer)
        raise UserError(f"{name}: asked for a tensor of shape {shape}, the answer was {found}")
    if not torch.isfinite(answer.detach().float()).all():
        raise UserError(f"{name}: the answer to a made-up group is not finite: {answer.tolist()}")
