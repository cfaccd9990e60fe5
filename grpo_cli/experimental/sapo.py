"""SAPO: groups that other runs have recorded, trained on here (`collector=folder`; arXiv 2509.08721).

    own prompts = max(ceil((1 - foreign) * prompts), prompts - recorded groups);  the others are recorded groups,
    sampled uniformly without replacement

A record is JSON, of which every line is checked before any of it is used. Its tokens count as sampled by the weights at
the start (version 0), with the log-probabilities that are recorded.

Not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_cli.interfaces import Runtime, StepRollouts
from grpo_cli.runs.layout import ROLLOUTS
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.prompting import MadePrompts
from grpo_cli.tracking.examples import raw_text
from grpo_cli.types import ENVIRONMENT, GIVEN, Finish, Prompt, Request, Reward, Rollout, ScoredGroup, Span

WRITE_IT = "record.rollouts=-1 record.tokens=true"


@dataclass
class RunFolder:
    """Whole groups of another run take the place of `foreign` of a step's prompts; with fewer groups than that, more
    prompts are new. Used are the groups whose rewards differ, of prompts that this task has with the same id and
    prompt. The record is read once, when the run starts."""

    path: str | None
    foreign: Annotated[float, Field(ge=0, lt=1)]

    def setup(self, runtime: Runtime) -> None:
        """Raise UserError for a file that is no record, or holds nothing to train on."""
        if self.path is None:
            raise UserError(f"collector.path has no value: give the folder of a run with {WRITE_IT}")
        file = Path(self.path).expanduser() / ROLLOUTS
        prompts = runtime.task.prompts("train")
        named = prompts.by_id if isinstance(prompts, MadePrompts) else {prompt.id: prompt for prompt in prompts}.get
        self._rows = list[tuple[Prompt, list[dict[str, Any]]]]()
        try:
            with file.open(encoding="utf-8") as lines:
                rows = [*map(json.loads, lines)]
            for (_, name), some in groupby(rows, lambda row: (row["step"], row["prompt_id"])):
                group = [_checked(row, runtime.task.text, runtime.ends) for row in some]
                prompt = named(str(name))
                if prompt is not None and len({row["reward"] for row in group}) > 1:
                    self._rows += [(prompt, group)] * (group[0]["prompt"] == raw_text(runtime.task, prompt.token_ids))
        except (OSError, ValueError, ArithmeticError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"collector.path={self.path}: {file} is no record with tokens ({error}); write it with {WRITE_IT}"
            ) from error
        if not self._rows:
            raise UserError(
                f"collector.path={self.path} holds no group of this task to train on; record with {WRITE_IT}"
            )

    def __call__(self, step: StepRollouts) -> list[ScoredGroup]:
        count, found = int(Fraction(str(self.foreign)) * step.prompts), dict[str, ScoredGroup]()
        for place in step.rng.permutation(len(self._rows)).tolist():
            prompt, rows = self._rows[place]
            if len(found) < count and prompt.id not in found:
                found[prompt.id] = _group(prompt, rows, step)
        own = step.pick(step.prompts - len(found), found.keys())
        return [*step.score(step.generate((prompt, step.n) for prompt in own)), *found.values()]


def _checked(row: Any, text: Any, ends: Sequence[int]) -> dict[str, Any]:
    """Return the row. ValueError unless its tokens read as its completion, each with a log-probability or None."""
    ids, logprobs = row["token_ids"], row["logprobs"]
    if not ids or not all(type(one) is int and one >= 0 for one in ids) or len(logprobs) != len(ids):
        raise ValueError("token ids and log-probabilities are not whole numbers and as many numbers")
    if not all(one is None or (type(one) in (int, float) and -math.inf < one <= 1e-3) for one in logprobs):
        raise ValueError("a log-probability is above 0")
    if text(ids) != row["reply"] or (row["finish"] == Finish.EOS and ids[-1] not in ends):
        raise ValueError("its tokens are another tokenizer's")
    if not math.isfinite(float(row["reward"])):
        raise ValueError("a reward is not finite")
    theirs = [(int(start), int(end)) for start, end in row.get("environment") or ()]
    if not all(0 <= start < end <= len(ids) for start, end in theirs):
        raise ValueError("its environment's places are not among its tokens")
    row["parts"], row["environment"] = {name: float(part) for name, part in dict(row["parts"]).items()}, theirs
    return {**row, "finish": Finish(row["finish"]), "reward": float(row["reward"]), "sample": int(row["sample"])}


def _group(prompt: Prompt, rows: Sequence[dict[str, Any]], step: StepRollouts) -> ScoredGroup:
    rollouts, rewards = [], []
    for row in rows:
        versions = [GIVEN if one is None else 0 for one in row["logprobs"]]
        for start, end in row["environment"]:
            versions[start:end] = [ENVIRONMENT] * (end - start)
        spans = tuple(Span(version, len([*some])) for version, some in groupby(versions))
        logprobs = tuple(math.nan if one is None else float(one) for one in row["logprobs"])
        request = Request(prompt, row["sample"], 0, step.sampling)
        rollouts.append(Rollout(request, tuple(row["token_ids"]), logprobs, row["finish"], spans))
        rewards.append(Reward(row["reward"], row["parts"]))
    return ScoredGroup(prompt, tuple(rollouts), tuple(rewards))
