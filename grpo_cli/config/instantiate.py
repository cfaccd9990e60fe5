"""Parts of the configuration to objects and rules, tried before any weights are read.

A part gets the arguments of its YAML and, of the objects that are to be had (model, tokenizer, seed, ...), those that
its signature names. A misspelt argument is a UserError, and a rule that does not answer as it must is found on a
made-up group.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import hydra.utils
import numpy as np
import torch
from hydra.errors import InstantiationException

from grpo_cli.config.overrides import RENAMED
from grpo_cli.downsample import choose
from grpo_cli.errors import UserError, closest
from grpo_cli.interfaces import Rules
from grpo_cli.learner.batch import corrected
from grpo_cli.settings import Sampling
from grpo_cli.types import Batch, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Totals, Verdict


def make(name: str, part: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """What the group `name` describes. `_partial_` parts are functions with their settings filled in, called later."""
    words = {key: value for key, value in part.items() if not key.startswith("_")}
    factory = _factory(name, part)
    signature = inspect.signature(factory.func)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for word in words:
        if word not in signature.parameters and not takes_any:
            known = [key for key in signature.parameters if key not in offered]
            now = RENAMED.get(f"{name}.{word}")
            meant = f"; it is called {now}" if now else closest(word, known)
            raise UserError(f"{name}.{word}: {part['_target_']} takes no {word}{meant}")
    if part.get("_partial_"):
        return factory
    given = {key: value for key, value in offered.items() if key in signature.parameters and key not in words}
    try:
        signature.bind(**words, **given)
    except TypeError as error:
        raise UserError(
            f"{name}: {part['_target_']} cannot be made: {error}; give it as {name}.<argument>=..."
        ) from error
    return factory(**given)


def _factory(name: str, part: Mapping[str, Any]) -> Any:
    try:
        return hydra.utils.instantiate({**part, "_partial_": True, "_convert_": "all"})
    except InstantiationException as error:
        reason = " ".join(str(error.__cause__ or error).splitlines()[:2])
        raise UserError(
            f"{name}._target_={part['_target_']} cannot be had: {reason}; "
            "write it as module.name, with the module in the current folder or installed"
        ) from error


def function(name: str, part: Mapping[str, Any], called_with: tuple[str, ...]) -> Any:
    """A part that is a function with its settings filled in, once it is known to take the arguments it will get."""
    factory = make(name, {**part, "_partial_": True}, {})
    rule = partial(factory.func, *factory.args, **factory.keywords)  # Hydra's own partial checks every call again
    try:
        inspect.signature(rule).bind(*called_with)
    except TypeError as error:
        raise UserError(
            f"{name}._target_={part['_target_']} cannot be called as {name}({', '.join(called_with)}): {error}; "
            f"what else it needs is given as {name}.<argument>=..."
        ) from error
    return rule


def build_rules(parts: Mapping[str, Mapping[str, Any]], n: int, m: int) -> Rules:
    """The rules of a run, each tried once on a made-up group of its size, so that a bad answer is found at once."""
    rules = Rules(
        downsample=function("downsample", parts["downsample"], ("group", "keep", "rng")),
        advantage=function("advantage", parts["advantage"], ("kept_rewards", "group_rewards")),
        correction=make("correction", parts["correction"], {}),
        loss=function("loss", parts["loss"], ("logprobs", "batch", "totals")),
    )
    group = _made_up_group(n)
    kept = group.take(choose(rules.downsample, group, m, np.random.default_rng(0)))
    rewards = [torch.tensor(scored.totals, dtype=torch.float32) for scored in (kept, group)]
    advantages = rules.advantage(*rewards)
    _expect("advantage", advantages, (m,))
    logprobs = torch.full((m, 4), -1.0, requires_grad=True)
    batch = _made_up_batch(advantages, logprobs.detach())
    verdict = rules.correction(batch.sampler_logprobs, logprobs.detach(), batch.response_mask)
    if not isinstance(verdict, Verdict) or len(verdict.reasons) != m:
        raise UserError(f"correction: asked for a Verdict on {m} rollouts, the answer was {verdict!r}")
    _expect("correction", verdict.weights, (m, 4))
    _expect("correction", verdict.mask, (m, 4))
    output = rules.loss(logprobs, corrected(batch, verdict), Totals(m, 3 * m, 3))
    _expect("loss", output.loss, ())
    if not output.loss.requires_grad:
        raise UserError("loss: the answer has no gradient with respect to the log-probabilities; do not detach them")
    return rules


def _made_up_group(n: int) -> ScoredGroup:
    prompt = Prompt("rehearsal", (0,), "0")
    requests = [Request(prompt, sample, sample, Sampling(max_new_tokens=3)) for sample in range(n)]
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
        ref_logprobs=logprobs * response,
        advantages=advantages,
        lengths=torch.full((rows,), 4),
    )


def _expect(name: str, answer: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(answer, torch.Tensor) or tuple(answer.shape) != shape:
        found = f"shape {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else repr(answer)
        raise UserError(f"{name}: asked for a tensor of shape {shape}, the answer was {found}")
    if not torch.isfinite(answer.detach().float()).all():
        raise UserError(f"{name}: the answer to a made-up group is not finite: {answer.tolist()}")
