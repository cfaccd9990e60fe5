"""Problems without a data set: the generators of the library `reasoning-gym` (arXiv 2505.24760).

The library makes and scores problems in processes of its own (`worker.py`), since it is slow to import, some of its
problems depend on PYTHONHASHSEED, and a scorer that hangs on what a model wrote must be killed. Tasks whose scorers
would execute it are refused, as are two that accept wrong answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Annotated, Any, Unpack

from pydantic import Field

from grpo_cli.support.errors import UserError, closest
from grpo_cli.support.extras import require
from grpo_cli.support.ranges import OneOf
from grpo_cli.tasks.generated import EvalProblems, TrainProblems, is_held_out
from grpo_cli.tasks.judges import GRADINGS, Weight
from grpo_cli.tasks.prompting import MadePrompts, Tokenizer, Warn
from grpo_cli.tasks.turns import DialogueTask, TurnSettings
from grpo_cli.tasks.workers import LATE, JudgeWorkers, Question, Reply, Workers
from grpo_cli.types import Prompt, Reward, Rollout

_EXECUTES = (
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion"
)
REFUSED: Mapping[str, str] = {
    **{name: "its scorer executes the model's answer as Python" for name in _EXECUTES.split()},
    "complex_arithmetic": "its scorer accepts nan as the answer to everything",
    "composite": "it is a mix of others",
    "game_of_life_halting": "its scorer reads any text but True as False",
}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_IN_VAIN = 200  # draws before another problem is taken not to exist; a quarter of the questions are held out


@dataclass(frozen=True)
class GymWeights:
    """The weight of each part of the reward."""

    correct: Weight
    score: Weight
    format: Weight


class ReasoningGym(DialogueTask):
    """The task. A prompt's id names the problem: `train-000012`.

    A problem is a function of its task, the config, its number and the seed, on which `eval` does not depend; a hash of
    its question decides the split. A reward has the parts `correct` (a score of 1), `score`, `format` (there
    is an `<answer>`), and whether scoring ran out of time (`over_limit`) or failed (`incomparable`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        name: str | None,
        config: Mapping[str, Any] | None,
        grading: Annotated[str, OneOf(tuple(GRADINGS))],
        weights: GymWeights,
        judge_seconds: Annotated[float, Field(gt=0)],
        judge_workers: JudgeWorkers,
        train_problems: TrainProblems,
        eval_problems: EvalProblems,
        max_prompt_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        warn: Warn,
        **turns: Unpack[TurnSettings],
    ) -> None:
        require("reasoning_gym", "task=reasoning_gym")
        self._workers, self._seconds = Workers("gym", judge_workers, judge_seconds), judge_seconds
        self._name, self._config = name or "", dict(config or {})
        self._check()
        self._seed, self._strict, self._weights = seed, grading == "strict", asdict(weights)
        self._most_tokens, self._has_cut = max_prompt_tokens, False
        self._set_up(tokenizer, turns, chat_template_kwargs, warn)
        self._train = MadePrompts(self._train_prompt, train_problems)
        self._eval = self._held_out(eval_problems)
        self._train_prompt(0)  # to find mistakes at once

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return self.rewards([(prompt, rollout)])[0]

    def rewards(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Reward]:
        """Judge many rollouts at once, each with its prompt; equal answers are scored once."""
        texts = [self.text(rollout.turns[-1]) for _, rollout in pairs]
        asked = [(prompt.id, self._answer(text)) for (prompt, _), text in zip(pairs, texts, strict=True)]
        different = dict.fromkeys(asked)
        replies = self._workers.ask([{**self._where(name), "reply": answer} for name, answer in different])
        found, rewards = dict(zip(different, replies, strict=True)), []
        for text, key in zip(texts, asked, strict=True):
            score = found[key].get("score", 0.0)
            score = min(max(score, 0.0), 1.0) if isfinite(score) else 0.0
            parts = {"correct": float(score == 1), "score": score, "format": float(bool(_ANSWER.search(text)))}
            total = sum(self._weights[part] * value for part, value in parts.items())
            parts["over_limit"] = float("limit" in found[key])
            parts["incomparable"] = float("incomparable" in found[key] or "died" in found[key])
            rewards.append(Reward(total, parts, weights=self._weights))
        return rewards

    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        return {"task": self._name, **self._made([prompt.id])[0]}

    def _answer(self, text: str) -> str | None:
        """Return the text between the last tags; without tags all of it, or nothing under strict grading."""
        marked = _ANSWER.findall(text)
        return marked[-1].strip() if marked else None if self._strict else text.strip()

    def _train_prompt(self, index: int) -> Prompt:
        for number in range(index, index + _IN_VAIN * len(self._train), len(self._train)):
            name = f"train-{number:06d}"
            if prompt := self._prompt(name, self._made([name])[0]):
                return prompt
        raise UserError(
            f"task=reasoning_gym found no problem of {self._name} to train on: all are held out, or have more than "
            f"{self._most_tokens} tokens; see task.config"
        )

    def _held_out(self, wanted: int) -> list[Prompt]:
        """Return the eval split: the first different prompts, until no new one has come for long."""
        found, in_vain, start = dict[tuple[int, ...], Prompt](), 0, 0
        while len(found) < wanted and in_vain < _IN_VAIN:
            names, start = [f"eval-{number:06d}" for number in range(start, start + 8)], start + 8
            for name, made in zip(names, self._made(names), strict=True):
                prompt = self._prompt(name, made)
                in_vain = 0 if prompt and prompt.token_ids not in found else in_vain + 1
                if prompt:
                    found.setdefault(prompt.token_ids, prompt)
        if not found:
            fit = "" if self._most_tokens is None else f" of at most {self._most_tokens} tokens"
            raise UserError(f"{self._name}: found no problem{fit} to evaluate on; see task.config")
        if len(found) < wanted:
            self._warn(f"task.eval_problems={wanted}, but only {len(found)} different held-out problems were found")
        return [*found.values()][:wanted]

    def _prompt(self, name: str, made: Reply) -> Prompt | None:
        """Build a prompt; None if the problem belongs to the other split or is too long."""
        question = made["question"]
        if is_held_out(question, one_in=4) != name.startswith("eval-"):
            return None
        opening = self._opening({"task": self._name, **made}, f"prompt {name}")
        token_ids = self._prompting.encode(question + opening)
        if self._most_tokens is not None and len(token_ids) > self._most_tokens:
            if not self._has_cut:
                self._warn(f"problems of {self._name} with more than {self._most_tokens} tokens are left out")
            self._has_cut = True
            return None
        return Prompt(name, token_ids, made["answer"])

    def _where(self, name: str) -> Question:
        """Return what identifies a problem, by its prompt's id, for the worker process."""
        split, _, number = name.partition("-")
        stream = f"train/{self._seed}" if split == "train" else split
        return {"task": self._name, "config": self._config, "seed": stream, "index": int(number)}

    def _made(self, names: Sequence[str]) -> list[Reply]:
        wanted = [self._where(name) for name in names]
        replies = self._workers.ask(wanted)
        for where, reply in zip(wanted, replies, strict=True):
            if "question" not in reply:
                late = f"it took more than task.judge_seconds={self._seconds:g}"
                why = late if reply == LATE else reply.get("incomparable", reply)
                place = f"problem {where['index']} of {where['task']}"
                raise UserError(f"reasoning-gym could not make {place}: {why}; see task.config")
        return replies

    def _check(self) -> None:
        """Raise UserError for a task that does not exist, is refused, or rejects its config."""
        task = self._name
        if task in REFUSED:
            raise UserError(f"task=reasoning_gym does not take task.name={task}: {REFUSED[task]}")
        (reply,) = self._workers.ask([{"check": task, "config": self._config}])
        if names := set(reply.get("names", ())) - REFUSED.keys():
            listed = ", ".join(sorted(names))
            raise UserError(f"reasoning-gym has no task.name={task}{closest(task, names)}; it has {listed}")
        if reply:
            raise UserError(f"{task} does not accept task.config: {reply.get('incomparable', reply)}")
