"""Accuracy, pass@1 and pass@k with 95% intervals: the same code inside training, on held-out prompts, and alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_cli.collect.episodes import Spent, play
from grpo_cli.collect.requests import group_rollouts, requests_for, score_all
from grpo_cli.collect.resuming import unstarted
from grpo_cli.engine.common import together
from grpo_cli.interfaces import Engine, Runtime, Search, Task
from grpo_cli.settings import EvalRunSettings, ExamSettings, RunSettings, SampleSettings, Sampling, SplitExamSettings
from grpo_cli.support.errors import UserError, own_code_unless_ours
from grpo_cli.support.facts import name_of
from grpo_cli.support.intervals import mean_interval, pass_at_k, wilson_interval
from grpo_cli.support.meter import ReportProgress, uncounted
from grpo_cli.tracking.examples import example
from grpo_cli.types import EngineStats, Example, Prompt, Rollout, ScoredGroup

MOST_UNJUDGED = 0.1  # an outage of the judge is no accuracy


@dataclass(frozen=True)
class EvalResult:
    """Metrics by name, every rollout in readable form, and the cost of all rounds."""

    metrics: Mapping[str, float]
    examples: tuple[Example, ...]
    stats: EngineStats = EngineStats()


def evaluate(
    engine: Engine,
    task: Task,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    k: int,
    seed: int,
    count: ReportProgress = uncounted,
) -> EvalResult:
    """Return the metrics of one greedy rollout and `k` sampled ones per prompt; `count` is a span's (`support.meter`).

    `eval/accuracy` is the greedy one with Wilson's interval; pass@1 is the mean over sampled rollouts and pass@k the
    unbiased estimate (Chen et al. 2021, arXiv 2107.03374), both with an interval over prompts.
    """
    certain = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    greedy = requests_for(prompts, 1, certain, seed, "eval-greedy", held_out=True)
    sampled = requests_for(prompts, k, sampling, seed, "eval", held_out=True)
    rollouts, place = list[Rollout](), {prompt.id: number for number, prompt in enumerate(prompts)}
    requests = sorted((*greedy, *sampled), key=lambda request: place[request.prompt.id])  # so a prompt is held once
    spent = Spent()
    for rollout in play(engine, task, [*map(unstarted, requests)], spent=spent):
        rollouts.append(rollout)
        count(len(rollouts), len(requests))
    greedy_groups = _scored(task, prompts, [r for r in rollouts if r.request.sampling.temperature == 0.0])
    metrics = _accuracy("eval/accuracy", greedy_groups) | {"eval/problems": float(len(greedy_groups))}
    metrics["eval/length_mean"] = float(np.mean([len(group.rollouts[0]) for group in greedy_groups]))
    examples = _examples(task, greedy_groups, "greedy")
    groups = _scored(task, prompts, [r for r in rollouts if r.request.sampling.temperature != 0.0])
    examples += _examples(task, groups, "sampled")
    return EvalResult(metrics | _sampled_metrics(groups, k), tuple(examples), together(spent.costs))


def evaluate_with(
    runtime: Runtime, run: RunSettings | EvalRunSettings, count: ReportProgress = uncounted
) -> EvalResult:
    """Evaluate by the settings of a run: `eval.problems` (-1: the whole split), sampled at `eval.temperature`."""
    prompts, at = _prompts_of(runtime.task, run.eval), run.sampling.at(run.eval.temperature)
    return evaluate(runtime.engine, runtime.task, prompts, at, run.eval.k, run.seed, count)


def search_with(
    runtime: Runtime, search: Search, settings: SplitExamSettings, sampling: SampleSettings, seed: int
) -> EvalResult:
    """Return the accuracy of what `search` answers to the same problems; nothing if it does not search."""
    prompts = _prompts_of(runtime.task, settings)
    with own_code_unless_ours(f"search {name_of(search)}", getattr(search, "func", search)):
        found = search(runtime, prompts, sampling.at(settings.temperature), seed)
        if found is None:
            return EvalResult({}, ())
        rollouts, costs = found
        if [one.request.prompt for one in rollouts] != prompts or any(one.is_partial for one in rollouts):
            raise UserError("search: return one whole rollout for each prompt, in their order")
    groups = _scored(runtime.task, prompts, rollouts)
    examples = tuple(_examples(runtime.task, groups, "searched"))
    return EvalResult({**_accuracy("search/accuracy", groups), **costs}, examples)


def no_search(runtime: Runtime, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> None:
    """Search nothing: the plain answers are all that is evaluated."""


def _prompts_of(task: Task, settings: ExamSettings) -> list[Prompt]:
    """Return the problems of an evaluation."""
    split = settings.split if isinstance(settings, SplitExamSettings) else "eval"
    prompts = task.prompts(split)
    if len(prompts) == 0:
        raise UserError(f"the task has no {split} prompts to evaluate on: let it give some, or train with eval.every=0")
    count = len(prompts) if settings.problems == -1 else min(settings.problems, len(prompts))
    return [prompts[i] for i in range(count)]


def _scored(task: Task, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[ScoredGroup]:
    """Judge the rollouts. UserError if the judge fails on more than `MOST_UNJUDGED` of them, which count as wrong."""
    groups = score_all(task, group_rollouts(prompts, rollouts))
    failed = sum(not reward.judged for group in groups for reward in group.rewards)
    if failed > MOST_UNJUDGED * len(rollouts):
        raise UserError(f"the judge failed on {failed} of {len(rollouts)} answers of the evaluation: fix it and repeat")
    return groups


def _accuracy(name: str, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Compute the accuracy of groups of one rollout each, with its interval."""
    right = sum(group.solved for group in groups)
    low, high = wilson_interval(right, len(groups))
    return {name: right / len(groups), f"{name}_low": low, f"{name}_high": high}


def _sampled_metrics(groups: Sequence[ScoredGroup], k: int) -> dict[str, float]:
    right = [group.solved for group in groups]
    metrics: dict[str, float] = {}
    for j in sorted({1, k}):
        values = [pass_at_k(count, k, j) for count in right]
        low, high = mean_interval(values, trials=k)  # which pass@k, each 0 or 1, does not depend on
        name = f"eval/pass@{j}"
        metrics |= {name: float(np.mean(values)), f"{name}_low": low, f"{name}_high": high}
    return metrics


def _examples(task: Task, groups: Sequence[ScoredGroup], reason: str) -> list[Example]:
    return [
        example(task, group, index, kept=False, reason=reason, advantage=None)
        for group in groups
        for index in range(len(group.rollouts))
    ]
