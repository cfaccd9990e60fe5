"""ARRoL: rollouts that begin badly are given up (`collector=arrol`, arXiv 2603.24840).

    n rollouts of each prompt, up to `at` tokens; a head predicts of each that has not ended its chance p_i to be right
    s_i = keep (p_i share / p + (1 - p_i) (1 - share) / (1 - p)), at most 1;  p: the group's mean
    each continues with the chance s_i, at least 2 of a group being left, with the tokens that it would have had; the
    others reach neither the judge nor the update

So a share of about `keep` of a group continues. The better the head predicts, the closer the share of right ones among
them is to `share`. The head learns online, from rollouts that passed `at` and were judged. Ours: the formula of s_i
(too little of the paper's own could be read), the ridge in place of a logistic head, and its calibration by the share
of right ones in each tenth of its scores. Rollouts that continue are not reweighted by 1 / s_i, so the gradient favours
balanced groups; curricula see these rollouts only.

Measured: docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from pydantic import Field

from grpo_cli.experimental.reading import ProbeRows, Probing, read
from grpo_cli.interfaces import StepRollouts, facts
from grpo_cli.rules.ridge import narrowed
from grpo_cli.support.errors import UserError
from grpo_cli.support.ranges import Count, Share
from grpo_cli.types import Group, ScoredGroup

LEAST = 2  # rollouts of a prompt; one has nothing to be compared with
BINS = 10  # of scores, in each of which the share of right ones is counted
TINY = 1e-12


@facts(resumes=True, one_turn=True)
@dataclass(kw_only=True)
class Arrol(Probing):
    """Rollouts of which those that are needed least end once they have `at` tokens (ARRoL, arXiv 2603.24840)."""

    group, kind = "collector", "arrol"

    at: Count | None
    keep: Annotated[float, Field(gt=0, le=1)]
    share: Share
    warmup: Annotated[int, Field(ge=0)]

    def __post_init__(self) -> None:
        if self.keep * self.n < LEAST:
            raise UserError(f"collector.keep={self.keep} of n={self.n} leaves less than {LEAST} rollouts: raise one")
        super().__post_init__()
        self._now: dict[tuple[str, int], tuple[Float[np.ndarray, " F"], float]] = {}  # of what passed `at` in this step
        self._begun = self._dropped = self._stopped_at = 0

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        at = self._stopped_at = look_at("collector.at", self.at, step.sampling.max_new_tokens)
        groups = step.generate(((prompt, step.n) for prompt in step.pick(step.prompts)), limit=at)
        begun = [some for group in groups if (some := group.partial).rollouts]
        sizes = {group.prompt.id: len(group.rollouts) for group in groups}
        self._begun, self._dropped, self._now = sum(len(group.rollouts) for group in begun), 0, {}
        left = []
        for group, own in zip(begun, self._read(begun) if begun else (), strict=True):
            kept = np.ones(len(own), dtype=bool)
            if step.step >= self.warmup and not np.isnan(own).any():
                chances = self._chances(self._calibrated(own))
                kept = drawn(chances, step.rng.random(len(own)), LEAST - (sizes[group.prompt.id] - len(own)))
            self._dropped += int((~kept).sum())
            stay = tuple(one for one, stays in zip(group.rollouts, kept, strict=True) if stays)
            left += [Group(group.prompt, stay)] * bool(stay)
        step.generate(left)
        return [group for group in step.score(step.groups) if group.rollouts]

    def _read(self, begun: Sequence[Group]) -> list[Float[np.ndarray, " G"]]:
        """Return what the head predicts of each group's rollouts, NaN if nothing yet, and remember the features."""
        rollouts = [rollout for group in begun for rollout in group.rollouts]
        features = narrowed(read(self._runtime, rollouts, layer=self.layer, last=1).features).astype(np.float32)
        scores = self.predict(features)
        self._now = dict(zip([one.key for one in rollouts], zip(features, scores.tolist(), strict=True), strict=True))
        return np.split(scores, np.cumsum([len(group.rollouts) for group in begun])[:-1])

    def _calibrated(self, scores: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Return the share of right ones among earlier rollouts whose score was in the same tenth, one more of the
        tenth's own middle among them."""
        _, right, said = map(np.concatenate, zip(*self.steps, strict=True))
        known = ~np.isnan(said)
        count, solved = (np.bincount(_bin(said[known]), weights, BINS) for weights in (None, right[known]))
        middles = (np.arange(BINS) + 0.5) / BINS
        return ((solved + middles) / (count + 1))[_bin(scores)]

    def _chances(self, right: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
        mean = float(right.mean())
        of_right, of_wrong = self.share / max(mean, TINY), (1 - self.share) / max(1 - mean, TINY)
        return np.minimum(self.keep * (right * of_right + (1 - right) * of_wrong), 1.0)

    def observe(self, step: int, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        ended = [pair for group in groups for pair in zip(group.rollouts, group.rewards, strict=True)]
        labelled = [(*self._now[one.key], float(reward.solved)) for one, reward in ended if one.key in self._now]
        metrics = {"prune/kept": 1 - self._dropped / self._begun} if self._begun else {}
        if more := [len(one) - self._stopped_at for one, _ in ended if len(one) > self._stopped_at]:
            metrics["prune/saved_tokens"] = self._dropped * sum(more) / len(more)
        if labelled:
            features, scores, right = map(np.array, zip(*labelled, strict=True))
            self.add([ProbeRows(features, right, scores)])
        self._now, self._begun = {}, 0
        return metrics


def look_at(key: str, wanted: int | None, longest: int) -> int:
    """Return how many tokens rollouts have when a collector looks at them: `wanted`, the setting `key`; None is a
    quarter. UserError if none gets there."""
    at = max(1, longest // 4) if wanted is None else wanted
    if at >= longest:
        raise UserError(f"{key}={at} is never reached with sampling.max_new_tokens={longest}: lower it, or use null")
    return at


def _bin(scores: Float[np.ndarray, " N"]) -> Any:
    return np.clip((scores * BINS).astype(int), 0, BINS - 1)


def drawn(chances: Float[np.ndarray, " G"], u: Float[np.ndarray, " G"], least: int) -> Any:
    """Choose which are kept, each with its chance (`u` is uniform in [0, 1)); at least `least`, if there are so many:
    then of the others those with the greatest chances.

    >>> drawn(np.array([0.9, 0.2, 0.5]), np.array([0.95, 0.1, 0.7]), 2).tolist()
    [True, True, False]
    """
    kept = u < chances
    order = np.argsort(-np.where(kept, 2.0, chances), kind="stable")
    kept[order[: max(least, 0)]] = True
    return kept
