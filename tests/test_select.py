"""Rejection, down-sampling and advantages in their order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from small import scored as group
from test_train import CountTask

from grpo_cli.methods import dr_grpo, pods
from grpo_cli.select import NOT_CHOSEN, Selection, batch_advantages, batch_rows, row_weights, select
from grpo_cli.tracking.examples import examples

GRPO = partial(dr_grpo.dr_grpo, stats_over="kept")


def chosen(rewards: tuple[float, ...], rejected: tuple[int, ...], keep: int | None, count_rejected=True) -> Selection:
    why = ["veto" if i in rejected else "" for i in range(len(rewards))]
    rng = np.random.default_rng(0)
    return select(group(*rewards), why, keep, pods.maxvar, GRPO, rng, count_rejected)


def test_a_rejected_rollout_is_never_chosen() -> None:
    """Without the rejection, the best of five would be one of the two kept."""
    selection = chosen((0.0, 1.0, 2.0, 3.0, 9.0), rejected=(4,), keep=2)
    assert selection.indices == (0, 3)
    assert selection.advantages.tolist() == [-1.5, 1.5]
    assert selection.reasons == ("", NOT_CHOSEN, NOT_CHOSEN, "", "veto")
    assert chosen((0.0, 2.0, 4.0), rejected=(2,), keep=3).indices == (0, 1), "nor in a group of no more"


def test_without_down_sampling_the_rejected_count_or_not() -> None:
    counted = chosen((0.0, 2.0, 4.0), rejected=(2,), keep=None)
    assert counted.indices == (0, 1, 2) and counted.advantages.tolist() == [-2.0, 0.0, 2.0]
    assert counted.reasons == ("", "", "veto")
    left_out = chosen((0.0, 2.0, 4.0), rejected=(2,), keep=None, count_rejected=False)
    assert left_out.indices == (0, 1) and left_out.advantages.tolist() == [-1.0, 1.0]
    # With down-sampling too, the mean is of the group that counts.
    whole = partial(dr_grpo.dr_grpo, stats_over="group")
    for count, expected in ((True, [-3.0, -1.0]), (False, [-1.0, 1.0])):
        why, rng = ["veto", "", "", ""], np.random.default_rng(0)
        found = select(group(9.0, 0.0, 1.0, 2.0), why, 2, pods.maxvar, whole, rng, count)
        assert found.indices == (1, 3) and found.advantages.tolist() == expected


def test_rows_of_a_batch_are_counted_through_all_groups_and_a_prompt_without_any_is_in_no_mean() -> None:
    """Of three prompts with 0, 2 and 1 rows two count, with 1.5 rows in the mean."""
    some = [chosen((0.0,) * 4, tuple({*range(4)} - {*kept}), None, False) for kept in ((), (0, 3), (2,))]
    assert batch_rows(some).tolist() == [4, 7, 10]
    assert row_weights(some).tolist() == pytest.approx([1.5 / 2, 1.5 / 2, 1.5])


def test_recorded_rollouts_are_whole_groups_as_far_as_they_go_and_have_their_own_advantage() -> None:
    """The best and the worst of each group of four are trained on."""
    first, second = chosen((0.0, 1.0, 5.0, 9.0), (), 2), chosen((8.0, 4.0, 0.0, 6.0), (), 2)
    other = replace(second.group, prompt=replace(second.group.prompt, id="q"))
    selections, task = [first, replace(second, group=other)], CountTask()
    found = {n: examples(task, [one.group for one in selections], selections, n) for n in (-1, 0, 4, 6, 9)}
    rows = [(row.sample, row.reward, row.kept, row.advantage) for row in found[-1]]
    assert rows[:4] == [(0, 0.0, True, -4.5), (1, 1.0, False, None), (2, 5.0, False, None), (3, 9.0, True, 4.5)]
    assert {n: len(of) for n, of in found.items()} == {-1: 8, 0: 0, 4: 4, 6: 6, 9: 8}
    assert found[4] == found[-1][:4] and found[6] == found[-1][:6] and found[9] == found[-1]


def test_advantages_of_tokens_stand_at_their_tokens_beside_those_of_whole_rollouts() -> None:
    """The first group's completions have 2 tokens and 1, the second's 3 and 1."""
    first = group(1.0, 0.0, prompt=(7, 7), replies=[(1, 1), (1,)])
    second = group(1.0, 0.0, name="q", prompt=(7,), replies=[(1, 1, 1), (1,)])
    each = Selection(first, (0, 1), torch.tensor([[0.5, 1.0], [2.0, 99.0]]), ("", ""))
    whole = Selection(second, (0,), torch.tensor([3.0]), ("", NOT_CHOSEN))
    assert batch_advantages([each, whole]).tolist() == [0.5, 1, 2, 3, 3, 3]
    assert batch_advantages([whole, whole]).tolist() == [3] * 6
