"""Word problems that a small pretrained model gets wrong more often than right: sums and differences as stories.

"Mia has 12 shells. She finds 7 more. How many shells does Mia have now?" A level is a number of things that happen, and
how large numbers are. The completion is free text, and its final number is compared exactly (`answers.py`); nothing of
it is ever evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, Unpack

from pydantic import Field

from grpo_cli.tasks.answers import final_number
from grpo_cli.tasks.arithmetic import Sum
from grpo_cli.tasks.generated import EvalProblems, GeneratedTask, TrainProblems
from grpo_cli.tasks.prompting import Tokenizer, Warn
from grpo_cli.tasks.turns import DialogueTask, TurnSettings
from grpo_cli.types import Prompt, Reward, Rollout

MOST_STEPS = 8
# A story without its numbers: how it begins, what may happen, more and fewer, and the question. `{who}` is a name and
# `{n}` a number.
Scene = tuple[str, tuple[str, ...], tuple[str, ...], str]
_OF_THINGS: tuple[Scene, Scene] = (
    (
        "{who} has {n} THINGS.",
        ("Then {who} gets {n} more THINGS.", "A friend gives {who} {n} THINGS."),
        ("Then {who} gives away {n} THINGS.", "{who} loses {n} THINGS."),
        "How many THINGS does {who} have now?",
    ),
    (
        "There are {n} THINGS in a box.",
        ("{who} puts {n} more THINGS into it.", "{who} adds {n} THINGS."),
        ("{who} takes {n} THINGS out of it.", "{who} takes away {n} THINGS."),
        "How many THINGS are in the box now?",
    ),
)
_OTHERS: tuple[Scene, Scene] = (
    (
        "A bus leaves with {n} passengers.",
        ("At a stop {n} more passengers get on.",),
        ("At a stop {n} passengers get off.",),
        "How many passengers are on the bus now?",
    ),
    (
        "There are {n} birds in a tree.",
        ("Then {n} more birds arrive.",),
        ("Then {n} birds fly away.",),
        "How many birds are in the trees now?",
    ),
)
THINGS = ("apples", "marbles", "stamps", "books", "shells", "coins")
SCENES = [(scene, things) for things in THINGS for scene in _OF_THINGS] + [(scene, "") for scene in _OTHERS]
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ines", "Jonas", "Lena", "Mia")


class WordProblems(DialogueTask, GeneratedTask[Sum]):
    """The task. The reward is 1 where the completion's final number is the answer, else 0."""

    name, sizes_are = "word_problems", "steps"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        min_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)],
        max_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)],
        max_start: Annotated[int, Field(ge=2, le=9999)],
        max_change: Annotated[int, Field(ge=2, le=9999)],
        train_problems: TrainProblems,
        eval_problems: EvalProblems,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        warn: Warn,
        **turns: Unpack[TurnSettings],
    ) -> None:
        self._level = max_start, max_change
        self._set_up(tokenizer, turns, chat_template_kwargs, warn)
        self._generate(seed, min_steps, max_steps, train_problems, eval_problems)

    def draw(self, rng: Random, size: int) -> Sum:
        """Draw how many things there are at the start and then the changes, from 2 on, so that every noun is a plural;
        something is left after every change, and the answer is neither 1 nor one of the numbers in the story."""
        max_start, max_change = self._level
        while True:
            terms = [rng.randint(2, max_start)]
            for _ in range(size):
                change = rng.randint(2, max_change)
                signs = (1, -1) if sum(terms) - change > 0 else (1,)
                terms.append(rng.choice(signs) * change)
            if sum(terms) not in (1, *map(abs, terms)):
                return Sum(tuple(terms))

    def reference(self, problem: Sum) -> str:
        return str(problem.answer)

    def question(self, problem: Sum, rng: Random) -> str:
        """Return a story in the words of a random scene."""
        ((begins, more, fewer, asks), things), who = rng.choice(SCENES), rng.choice(NAMES)
        sentences = [begins, *(rng.choice(more if change > 0 else fewer) for change in problem.terms[1:]), asks]
        filled = zip(sentences, [*map(abs, problem.terms), 0], strict=True)
        return " ".join(text.format(who=who, n=n) for text, n in filled).replace("THINGS", things)

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        correct = float(final_number(self.text(rollout.turns[-1]))[0] == int(prompt.answer))
        return Reward(correct, {"correct": correct, "ended": float(rollout.finish.complete)}, weights={"correct": 1.0})

    def _prompt(self, prompt_id: str, problem: Sum, question: str) -> Prompt:
        row = {"question": question, "answer": self.reference(problem)}
        return super()._prompt(prompt_id, problem, question + self._opening(row, f"prompt {prompt_id}"))

    def row_of(self, prompt: Prompt) -> Mapping[str, Any]:
        return {"question": self._problem(prompt)[1], "answer": prompt.answer}
