"""Tries the rules of a run on one synthetic group before its model is loaded, to find what they return wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.equal import equal
from grpo_cli.history import History
from grpo_cli.interfaces import Curriculum, Engine, Rules, SetUp, Task
from grpo_cli.learner.batch import collate, corrected, rows_of, totals, verdict_on
from grpo_cli.rules.advantage import advantages
from grpo_cli.rules.downsample import choose
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError, own_code_unless_ours
from grpo_cli.support.facts import name_of
from grpo_cli.types import EngineStats, Finish, LossOutput, Prompt, Request, Reward, Rollout, Verdict

# Rollouts of a problem, which take seconds if there are more; of a synthetic step, if its groups are not larger.
MOST_TRIED, ENOUGH = 4096, 1024


def try_rules(rules: Rules, n: int, m: int, prompts: int) -> None:
    """UserError for a rule that cannot be used. One that has `setup` waits for its run."""
    rules, size = copy.deepcopy(rules), min(n, MOST_TRIED + n % 2)  # as odd as n, which rules may require
    tried = {group for group, rule in vars(rules).items() if not isinstance(rule, SetUp)}
    if "collector" in tried:
        _step(size, max(1, min(prompts, ENOUGH // size))).run(rules.collector)
    [group] = _step(size, 1).run(equal)
    keep = size if m == n else min(m, size - 1)
    kept = list(range(size - keep, size))
    if "downsample" in tried:
        kept = choose(rules.downsample, group, keep, np.random.default_rng(0))
    batch = rows_of(collate([group]), torch.tensor(kept))
    if "advantage" in tried:
        found = advantages(rules.advantage, group, kept)
        batch = replace(batch, advantages=batch.per_token(found.new_zeros(len(kept)) if found.dim() > 1 else found))
    if "correction" in tried:
        with own_code_unless_ours(f"correction {name_of(rules.correction)}", rules.correction):
            verdict: Any = verdict_on(rules.correction, batch, batch.sampler_logprobs)
        if not isinstance(verdict, Verdict) or verdict.weights.shape != batch.weights.shape:
            raise UserError(f"correction {name_of(rules.correction)} returned {verdict!r:.60}: return a Verdict")
        batch = corrected(batch, verdict)
    if "loss" in tried:
        reference = batch.sampler_logprobs if rules.loss.needs_reference else None
        logprobs, name = batch.sampler_logprobs.clone().requires_grad_(), f"loss {name_of(rules.loss)}"
        with own_code_unless_ours(name, getattr(rules.loss, "func", rules.loss)):
            output: Any = rules.loss(logprobs, replace(batch, ref_logprobs=reference), totals(batch, 1))
        if not isinstance(output, LossOutput) or output.loss.dim():
            raise UserError(f"{name} returned {output!r:.60}: return a LossOutput with a scalar")
        if not output.loss.isfinite() or not output.loss.requires_grad:
            raise UserError(f"{name} is {output.loss.item()} on a synthetic batch: return a finite one with a gradient")


def _step(n: int, prompts: int) -> StepCollection:
    parts: dict[str, Any] = dict.fromkeys(("engine", "task", "curriculum"), _MadeUp())  # type: ignore[abstract]
    return StepCollection(n=n, prompts=prompts, sampling=Sampling.plain(8), seed=0, step=0, history=History(), **parts)


class _MadeUp(Engine, Task, Curriculum):
    """Engine, task and curriculum of a synthetic step, whose every second answer is right."""

    reads_stop_strings = False

    def pick(self, step: int, count: int, without: Set[str]) -> Sequence[Prompt]:
        return [Prompt(f"synthetic-{len(without) + place}", (0,), "0") for place in range(count)]

    def generate(self, requests: Sequence[Request], enough: Any = None) -> Iterator[Rollout]:
        return (Rollout(request, (0,), (-1.0,), Finish.EOS) for request in requests)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(float(rollout.request.sample % 2))

    def stats(self) -> EngineStats:
        return EngineStats()
