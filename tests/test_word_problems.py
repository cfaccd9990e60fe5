"""Word problems: their stories, their splits and their judge."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import made
from hypothesis import given
from hypothesis import strategies as st
from tiny_hf import make_tokenizer
from words import rollout_of

from grpo_cli.tasks.word_problems import WordProblems, draw_story
from grpo_cli.types import Finish

TOKENIZER = make_tokenizer()


def task(seed: int = 0, **changes: Any) -> WordProblems:
    return made.task("word_problems", TOKENIZER, seed, **{"use_chat_template": False} | changes)


def by_words(text: str) -> int:
    """The oracle: sentence by sentence, by what it says."""
    first, *others = re.findall(r"[^.?]*[0-9][^.?]*\.", text)
    (value,) = map(int, re.findall("[0-9]+", first))
    for sentence in others:
        (number,) = re.findall("[0-9]+", sentence)
        gains = re.search("gets|A friend gives|puts|adds|get on|arrive", sentence)
        value += int(number) if gains else -int(number)
    return value


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_a_story_says_its_sum(seed: int, steps: int) -> None:
    rng = Random(seed)
    story = draw_story(rng, steps, 12, 9)
    told = story.in_words(rng)
    assert by_words(told) == story.answer > 0 and eval(str(story)) == story.answer  # noqa: S307 (our own digits)
    assert len(story.changes) == steps and str(story.answer) not in re.findall("[0-9]+", told)


def test_the_final_number_counts() -> None:
    prompt = replace(task(eval_problems=1).prompts("eval")[0], answer="19")
    replies = {"12 and 7 are 19. The answer is 19.0": 1.0, "19 shells, not 12": 0.0, "190": 0.0}
    for reply, right in replies.items():
        rollout = rollout_of(prompt, reply, TOKENIZER)
        for ended in (1.0, 0.0):
            rollout = rollout if ended else replace(rollout, finish=Finish.LENGTH)
            assert task(eval_problems=1).reward(prompt, rollout).parts == {"correct": right, "ended": ended}


def test_a_level_is_a_number_of_things_that_happen() -> None:
    texts = [
        TOKENIZER.decode(list(p.token_ids)) for p in task(min_steps=2, max_steps=3, eval_problems=20).prompts("eval")
    ]
    assert [len(re.findall("[0-9]+", text)) for text in texts] == [3, 4] * 10
