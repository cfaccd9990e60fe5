"""Conflicts between parts, or of parts with `n` or `m`.

What a part requires of others it declares itself (`goes_with`, `undone_by`: see `facts.facts`); here are conflicts
that follow from the facts of two parts. Names of choices appear only in messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_cli.collect.collection import MOST_ROLLOUTS
from grpo_cli.config.choices import choice_of
from grpo_cli.config.instantiate import INNER, fact_of, says
from grpo_cli.interfaces import Rules
from grpo_cli.settings import EvalRunSettings, RunSettings
from grpo_cli.support.errors import own_code_unless_ours


@dataclass(frozen=True)
class Chosen:
    """As `facts.Others`."""

    parts: Mapping[str, Mapping[str, Any]]
    n: int
    m: int
    prompts: int

    def says(self, group: str, fact: str) -> Any:
        return says(self.parts, group, fact)

    def named(self, group: str) -> str:
        return f"{group}={choice_of(group, self.parts[group])}"

    def setting(self, group: str, key: str) -> Any:
        return self.parts[group].get(key)

    def of_each(self, hook: str) -> Iterator[str]:
        """The problems that all parts report through a hook."""
        for group, part in self.parts.items():
            if callable(ask := fact_of(group, part, hook)):
                with own_code_unless_ours(f"{group}._target_={part['_target_']}: {hook}", ask):
                    found = [*ask(part, self)]
                yield from found


def chosen(settings: RunSettings) -> Chosen:
    return Chosen(settings.parts, settings.n, settings.m, settings.train.prompts)


def eval_problems(settings: EvalRunSettings) -> Iterator[str]:
    """What cannot work in an evaluation, whose k samples of a problem are the only group that there is."""
    k = settings.eval.k
    yield from Chosen(settings.parts, k, k, settings.eval.problems).of_each("goes_with")


def problems(settings: RunSettings) -> Iterator[str]:
    """What cannot work."""
    others, least = chosen(settings), settings.n * settings.train.prompts
    yield from others.of_each("goes_with")
    yield from _drawn_problems(others)
    yield from _partial_problems(others)
    if least > MOST_ROLLOUTS:
        yield (
            f"n={settings.n} of train.prompts={settings.train.prompts} problems are {least} rollouts a step, and "
            f"{MOST_ROLLOUTS} are the most: lower n or train.prompts"
        )


def undone(settings: RunSettings, rules: Rules) -> Iterator[str]:
    """Settings made ineffective by others. Refused, but a resumed run continues with a warning."""
    others = chosen(settings)
    if rules.correction.prox == "drawn" and rules.correction.needs_policy_logprobs:
        yield (
            f"{others.named('correction')} goes by how far the old policy is from the sampler, which "
            "correction.prox=drawn takes for the old policy: every ratio is 1, and nothing is corrected; use "
            "correction.prox=now, or correction=none correction.prox=drawn"
        )
    yield from others.of_each("undone_by")


def remarks(settings: RunSettings, rules: Rules) -> Iterator[str]:
    """What works, but may not be what was meant."""
    if settings.resume is not None:
        yield from undone(settings, rules)
    n, m, others = settings.n, settings.m, chosen(settings)
    if others.says("collector", "unequal") and m < n and not others.says("downsample", "keeps_fewer"):
        yield (
            f"{others.named('collector')} makes more rollouts of some problems than of others, and of each "
            f"at most m={m} are trained on, so that the problems count alike again and the rest is only there for "
            f"downsample to choose from; train on all that it makes (m={n}, which n is), or use collector=equal"
        )


def _drawn_problems(others: Chosen) -> Iterator[str]:
    """If the sampler is not the old policy, its log-probabilities cannot stand in for the policy's."""
    if others.setting("correction", "prox") != "drawn":
        return
    inner = others.setting("engine", INNER)
    engine = others.named("engine") if inner is None else f"engine.{INNER}={inner}"
    other = [engine] * (others.says("engine", "is_policy") is False)
    hidden = others.says("sparsity", "evicts")
    other += [others.named("sparsity")] * bool(hidden)
    for setting in other:
        yield (
            f"correction.prox=drawn takes the sampler for the old policy, which {setting} is not; use "
            "correction.prox=now"
        )


def _partial_problems(others: Chosen) -> Iterator[str]:
    """Conflicts of a collector that leaves rollouts partial, or goes on with tokens that are there."""
    collector, resumed = others.named("collector"), others.says("collector", "resumes")
    if resumed and others.says("sparsity", "evicts"):
        yield (
            f"{collector} goes on with partial rollouts, whose tokens {others.named('sparsity')} would count as "
            "prompt; use sparsity=dense, or collector=equal"
        )
    if others.says("collector", "stops") and others.says("engine", "stops_early") is False:
        yield (
            f"{collector} stops rollouts before their end, which {others.named('engine')} cannot, as its workers "
            "report a rollout when it has ended; use engine=torch or engine=vllm, or collector=equal"
        )
    if resumed and others.setting("correction", "prox") == "drawn" and not others.says("collector", "stops"):
        yield f"correction.prox=drawn takes {collector}'s given tokens for drawn ones; use correction.prox=now"
    if resumed and others.says("predictor", "of_whole_rollouts"):
        yield (
            f"{others.named('predictor')} knows how long whole rollouts were, and {collector} makes them in parts; use "
            "predictor=mean"
        )
