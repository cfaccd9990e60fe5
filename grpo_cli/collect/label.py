"""Labels in place of reference answers (`train.label=majority`): test-time reinforcement learning (arXiv 2504.16084).

The answer that most of a group's rollouts give is taken for the right one, as the task's judge reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from grpo_cli.collect.search import Reads
from grpo_cli.interfaces import Task
from grpo_cli.support.errors import UserError
from grpo_cli.types import Reward, Rollout, ScoredGroup

Reader = Callable[[Rollout], str | None]


def reader_of(task: Task) -> Reader:
    """What reads the answer of a reply. UserError if the task says none."""
    read = task.reads if isinstance(task, Reads) else None
    if read is None:
        raise UserError(
            "train.label=majority counts equal answers, and the judge of this task does not say which it read in a "
            "reply: use a task whose answers are numbers, such as task.reward=numbers, or train.label=answer"
        )
    return read


def by_majority(read: Reader, group: ScoredGroup) -> ScoredGroup:
    """The group with reward 1 for the most frequent answer (of equally frequent ones the first given) and 0 for others;
    all 0 where none can be read. The true rewards are only logged."""
    answers = [read(one) for one in group.rollouts]
    first = winner(answers) if group.rollouts else 0
    label = answers[first] if answers else None
    right = float(label is not None and group.rewards[first].solved)
    rewards = [
        Reward(said, {"label": said, "true": one.total, "majority_right": right}, "label", {"label": 1.0}, one.judged)
        for one, answer in zip(group.rewards, answers, strict=True)
        for said in [float(label is not None and answer == label)]
    ]
    return ScoredGroup(group.prompt, group.rollouts, tuple(rewards))


def winner(answers: Sequence[str | None]) -> int:
    """The place of the first of the most frequent answers.

    >>> winner([None, "7", "5", "5", None, None, "7"])
    1
    """
    votes = Counter(answer for answer in answers if answer is not None)  # in order of their first vote
    return answers.index(max(votes, key=lambda answer: votes[answer])) if votes else 0
