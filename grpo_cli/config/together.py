"""Rules of a step that ask something of each other, of `n` or of `m`: what cannot work, and what undoes what was asked.

The parts are asked for what they need, and only named to a person.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_cli.collect.rehearsal import CollectionSize
from grpo_cli.config.choices import choice_of
from grpo_cli.config.instantiate import says
from grpo_cli.interfaces import Rules
from grpo_cli.settings import RunSettings

# Whether an advantage divides by the deviation of its group.
_DIVIDES = {"grpo": True, "novelty": True, "per_part": True, "dr_grpo": False, "rloo": False}


def problems(settings: RunSettings) -> Iterator[str]:
    """What cannot work whatever the rules do."""
    yield from _middle_problems(settings)
    yield from _dars_problems(settings)
    yield from _drawn_problems(settings)


def undone(settings: RunSettings, rules: Rules) -> Iterator[str]:
    """What was asked for and can never be, as another setting undoes it. A run that began so goes on, and is warned."""
    parts, m = settings.parts, settings.m
    if rules.correction.prox == "drawn" and rules.correction.needs_policy_logprobs:
        yield (
            f"correction={choice_of('correction', parts['correction'])} goes by how far the old policy is from the "
            "sampler, which correction.prox=drawn takes for the old policy: every ratio is 1, and nothing is "
            "corrected; use correction.prox=now, or correction=none correction.prox=drawn"
        )
    of_kept = [word for word in of_middle(parts, "advantage") if parts["advantage"].get("stats_over") == "kept"]
    if of_kept and m != settings.n and m % 2 == 0:
        yield (
            f"m={m} leaves no rollout in the middle for {of_kept[0]} advantage.stats_over=kept, which would take the "
            "mean of two; use advantage.stats_over=group, or an odd m"
        )


def unequal_problems(settings: RunSettings) -> Iterator[str]:
    """Of a collector that makes groups of other sizes than n."""
    if found := of_middle(settings.parts):
        yield (
            f"collector={choice_of('collector', settings.parts['collector'])} makes groups of any size, of which "
            f"{' and '.join(found)} would not know the one in the middle; use collector=equal"
        )


def remarks(settings: RunSettings, rules: Rules, size: CollectionSize) -> Iterator[str]:
    """What works, and may not be what was meant."""
    if settings.resume is not None:
        yield from undone(settings, rules)
    n, m = settings.n, settings.m
    if size.unequal and m < n:
        yield (
            f"collector={choice_of('collector', settings.parts['collector'])} makes more rollouts of some problems "
            f"than of others, and of each at most m={m} are trained on, so that the problems count alike again and the "
            f"rest is only there for downsample to choose from; train on all that it makes (m={n}, which n is), or use "
            "collector=equal"
        )


def of_middle(parts: Mapping[str, Any], *groups: str) -> list[str]:
    """Which rules (of these groups, or of all) look for the rollout in the middle of a group, as they are typed."""
    asked = [group for group in groups or ("advantage", "downsample") if says(group, parts[group], "needs_middle")]
    return [f"{group}={choice_of(group, parts[group])}" for group in asked]


def _middle_problems(settings: RunSettings) -> Iterator[str]:
    n, m, parts = settings.n, settings.m, settings.parts
    over_group = parts["advantage"].get("stats_over") != "kept" or m == n
    for advantage in of_middle(parts, "advantage"):
        if n % 2 == 0 and over_group:
            yield (
                f"n={n} has no middle rollout for {advantage}; take n={n + 1} (downsample=median m={n} then trains on "
                f"{n})"
            )
    for downsample in of_middle(parts, "downsample"):
        if m == n:  # if m is less, the rule itself is asked
            yield f"{downsample} leaves out one of n={n} rollouts, so m must be {n - 1}"


def _dars_problems(settings: RunSettings) -> Iterator[str]:
    """What one's own rules ask is not known."""
    names = {group: choice_of(group, settings.parts[group]) for group in ("collector", "advantage")}
    divides, divided = _DIVIDES.get(names["advantage"]), settings.parts["collector"].get("divided")
    if names["collector"] == "dars" and isinstance(divided, bool) and divides not in (None, divided):
        does, other = ("divides", "dr_grpo") if divides else ("does not divide", "grpo")
        yield (
            f"collector=dars counts for {'divided' if divided else 'undivided'} advantages, but "
            f"advantage={names['advantage']} {does} by the deviation; use advantage={other} or "
            f"collector.divided={str(divides).lower()}"
        )


def _drawn_problems(settings: RunSettings) -> Iterator[str]:
    """Where what was drawn from is not the policy as it was, its log-probabilities cannot stand for the policy's."""
    parts = settings.parts
    if parts["correction"].get("prox") != "drawn":
        return
    engine, sparsity = choice_of("engine", parts["engine"]), choice_of("sparsity", parts["sparsity"])
    other = f"engine={engine}" if engine == "vllm" else f"engine.inner={parts['engine'].get('inner')}"
    foreign = "vllm" in (engine, parts["engine"].get("inner"))
    for setting in [other] * foreign + [f"sparsity={sparsity}"] * (sparsity != "dense"):
        yield (
            f"correction.prox=drawn takes the sampler for the old policy, which {setting} is not; use "
            "correction.prox=now"
        )
