"""Word problems that a small pretrained model gets wrong more often than right: sums and differences told as stories.

"Mia has 12 shells. She finds 7 more. How many shells does Mia have now?" A level is a number of things that happen, and
how large numbers are; with `groups` a story begins with a product. The completion is free text, and its final number is
compared exactly (`answers.py`); nothing of it is ever evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from grpo_cli.support.errors import UserError, refuse
from grpo_cli.tasks.answers import equal, extract_answer
from grpo_cli.tasks.generated import GeneratedPrompts, count_problems, is_held_out
from grpo_cli.tasks.prompting import Prompting, Tokenizer
from grpo_cli.types import Prompt, Reward, Rollout

MOST_STEPS = 8


@dataclass(frozen=True)
class Scene:
    """A story without its numbers: how it begins (with one number, or with groups of some), what may happen, and what
    is asked. `{who}` is a name, `{n}` a number, `{of}` how many are in each group."""

    begins: str
    begins_in_groups: str
    more: tuple[str, ...]
    fewer: tuple[str, ...]
    asks: str


SCENES = tuple(
    scene
    for things in ("apples", "marbles", "stamps", "books", "shells", "coins")
    for scene in (
        Scene(
            f"{{who}} has {{n}} {things}.",
            f"{{who}} has {{n}} bags with {{of}} {things} each.",
            (f"Then {{who}} gets {{n}} more {things}.", f"A friend gives {{who}} {{n}} {things}."),
            (f"Then {{who}} gives away {{n}} {things}.", f"{{who}} loses {{n}} {things}."),
            f"How many {things} does {{who}} have now?",
        ),
        Scene(
            f"There are {{n}} {things} in a box.",
            f"A box holds {{n}} rows of {{of}} {things}.",
            (f"{{who}} puts {{n}} more {things} into it.", f"{{who}} adds {{n}} {things}."),
            (f"{{who}} takes {{n}} {things} out of it.", f"{{who}} takes away {{n}} {things}."),
            f"How many {things} are in the box now?",
        ),
    )
) + (
    Scene(
        "A bus leaves with {n} passengers.",
        "A bus leaves with {n} groups of {of} passengers.",
        ("At a stop {n} more passengers get on.",),
        ("At a stop {n} passengers get off.",),
        "How many passengers are on the bus now?",
    ),
    Scene(
        "There are {n} birds in a tree.",
        "In each of {n} trees there are {of} birds.",
        ("Then {n} more birds arrive.",),
        ("Then {n} birds fly away.",),
        "How many birds are in the trees now?",
    ),
)
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ines", "Jonas", "Lena", "Mia")


@dataclass(frozen=True)
class Story:
    """What happens: a beginning, `groups` of `start` each (1: `start` things), then changes, none of them 0."""

    groups: int
    start: int
    changes: tuple[int, ...]

    @property
    def answer(self) -> int:
        return self.groups * self.start + sum(self.changes)

    def __str__(self) -> str:
        """Its sum, without words: what decides the split.

        >>> str(Story(3, 4, (5, -2)))
        '3*4+5-2'
        """
        return f"{self.groups}*" * (self.groups > 1) + str(self.start) + "".join(f"{c:+d}" for c in self.changes)

    def told(self, rng: Random) -> str:
        """In the words of a random scene."""
        scene, who = rng.choice(SCENES), rng.choice(NAMES)
        begins = scene.begins_in_groups if self.groups > 1 else scene.begins
        sentences = [begins.format(who=who, n=self.groups if self.groups > 1 else self.start, of=self.start)]
        for change in self.changes:
            sentences.append(rng.choice(scene.more if change > 0 else scene.fewer).format(who=who, n=abs(change)))
        return " ".join([*sentences, scene.asks.format(who=who)])


def draw_story(rng: Random, steps: int, max_start: int, max_change: int, groups: bool) -> Story:
    """Numbers from 2 on, so that every noun is a plural; something is left after every change, and the answer is none
    of the numbers told.

    >>> draw_story(Random(0), 2, 12, 9, groups=False)
    Story(groups=1, start=8, changes=(8, -6))
    """
    while True:
        story = Story(rng.randint(2, 5) if groups else 1, rng.randint(2, max_start), ())
        for _ in range(steps):
            change = rng.randint(2, max_change)
            signs = (1, -1) if story.answer - change > 0 else (1,)
            story = Story(story.groups, story.start, (*story.changes, rng.choice(signs) * change))
        if story.answer not in (story.groups, story.start, *map(abs, story.changes)):
            return story


class WordProblems:
    """The task. How many things happen is uniform in `train`; `eval` is the same for every seed and goes through the
    numbers of them in turn. No sum of one split is in the other, whatever the words; no two texts of `eval` are alike.

    The reward is 1 where the completion's final number is the answer, else 0; with `must_end` only where the completion
    has ended by itself.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        min_steps: int,
        max_steps: int,
        max_start: int,
        max_change: int,
        groups: bool,
        must_end: bool,
        instruction: str | None,
        system_prompt: str | None,
        use_chat_template: bool,
        template: str,
        train_problems: int,
        eval_problems: int,
    ) -> None:
        _check_sizes(min_steps, max_steps, max_start, max_change, train_problems, eval_problems)
        self._prompting = Prompting(tokenizer, template, system_prompt, use_chat_template)
        self._seed, self._must_end, self._instruction = seed, must_end, instruction
        self._steps = range(min_steps, max_steps + 1)
        self._level = (max_start, max_change, groups)
        self._train = GeneratedPrompts(self._train_prompt, train_problems)
        self._eval = tuple(self._eval_prompts(eval_problems))

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split == "train":
            return self._train
        if split == "eval":
            return self._eval
        raise UserError(f"task=word_problems was asked for the split {split!r}; it has train and eval")

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        ended = rollout.finish.complete
        found = extract_answer(self.text(rollout.token_ids))
        right = equal(found.value, Fraction(prompt.answer))
        correct = float(right and (ended or not self._must_end))
        return Reward(correct, {"correct": correct, "ended": float(ended)}, weights={"correct": 1.0})

    def text(self, token_ids: Sequence[int]) -> str:
        return self._prompting.decode(token_ids)

    def _train_prompt(self, index: int) -> Prompt:
        """Problem `index` of the train split: a function of the seed and the index alone."""
        rng = Random(f"word_problems/train/{self._seed}/{index}")
        steps = rng.choice(self._steps)
        while is_held_out(str(story := draw_story(rng, steps, *self._level))):
            pass
        return self._prompt(f"train-{index}", story, story.told(rng))

    def _eval_prompts(self, count: int) -> list[Prompt]:
        rng = Random("word_problems/eval")
        seen: dict[str, Story] = {}
        for i in range(count):
            steps = self._steps[i % len(self._steps)]
            for _ in range(10_000):
                story = draw_story(rng, steps, *self._level)
                if is_held_out(str(story)) and (told := story.told(rng)) not in seen:
                    seen[told] = story
                    break
            else:
                raise UserError(
                    f"task.eval_problems={count}: only {i} distinct held-out problems were found, there are no more of "
                    f"{steps} steps with numbers up to {self._level[0]} and {self._level[1]}; ask for fewer, or raise "
                    "task.max_start"
                )
        return [self._prompt(f"eval-{i}", story, told) for i, (told, story) in enumerate(seen.items())]

    def _prompt(self, prompt_id: str, story: Story, told: str) -> Prompt:
        question = f"{told} {self._instruction}" if self._instruction else told
        return Prompt(prompt_id, self._prompting.encode(question), answer=str(story.answer))


def _check_sizes(
    min_steps: int, max_steps: int, max_start: int, max_change: int, train_problems: int, eval_problems: int
) -> None:
    problems = []
    if not 1 <= min_steps <= max_steps <= MOST_STEPS:
        problems.append(
            f"task.min_steps={min_steps} and task.max_steps={max_steps} must satisfy 1 <= min <= max <= {MOST_STEPS}"
        )
    for key, value in (("max_start", max_start), ("max_change", max_change)):
        if not 2 <= value <= 9999:
            problems.append(f"task.{key}={value} must be between 2 and 9999")
    refuse([*problems, *count_problems(train_problems, eval_problems)])
