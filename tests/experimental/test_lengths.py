"""What goes by how long rollouts are: tail batching (arXiv 2509.21009), SortedRL (2603.23414) and the shortest of a
group (2605.30859)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import made
import numpy as np
from bank import InOrder, Scripted, collection_of
from small import scored
from test_collectors import problems
from test_partial import held_of
from test_resume import cut_off_and_resumed, rows

from grpo_cli.experimental.roll_packer import Tail
from grpo_cli.experimental.sorted_rl import Sorted
from grpo_cli.rules.downsample import choose
from grpo_cli.types import Finish, Request, Reward, Rollout


class ByLength(Scripted):
    """Each rollout has so many tokens as a table says of its problem; it is right if they are more than one."""

    def __init__(self, length: Callable[[Request], int]) -> None:
        super().__init__()
        self.length = length

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        self.rounds.append(list(requests))
        stopped_at = None
        for request in sorted(requests, key=self.length):
            length = self.length(request)
            if stopped_at is None or length == stopped_at:
                rollout = Rollout(request, (3,) * length, (-1.0,) * length, Finish.EOS)
                yield rollout
                if stopped_at is None and enough is not None and enough(rollout):
                    stopped_at = length
            else:
                yield Rollout(request, (3,) * stopped_at, (-1.0,) * stopped_at, Finish.PARTIAL)

    def reward(self, prompt: Any, rollout: Rollout) -> Reward:
        return Reward(float(len(rollout) > 1))


# Tail batching


def test_long_problems_are_set_aside_and_come_together_worked_by_hand() -> None:
    """Two problems a step and one more under way; the lengths of one rollout each. In step 0 p0 and p2 end after 4
    tokens, of which p1 has as many; so step 1 with p3, p4 and p5; then two are aside, and step 2 is theirs."""
    lengths = {"p0": 2, "p1": 9, "p2": 4, "p3": 3, "p4": 3, "p5": 8, "p6": 1, "p7": 2, "p8": 5}
    engine, rule, curriculum = ByLength(lambda r: lengths[r.prompt.id]), Tail(surplus=0.5), OnceInOrder(9)
    told = []
    for step in range(4):
        collection = collection_of(engine, curriculum, n=1, prompts=2, step=step, version=step)
        groups = collection.run(rule)
        aside = [group["prompt"][0] for group in rule.state_dict()["aside"]]
        told.append(([g.prompt.id for g in groups], aside, collection.metrics()["collect/tokens_dropped"]))
        assert collection.metrics()["collect/long_step"] == (step == 2)
    assert told == [
        (["p0", "p2"], ["p1"], 4.0),
        (["p3", "p4"], ["p1", "p5"], 3.0),
        (["p1", "p5"], [], 0.0),
        (["p6", "p7"], ["p8"], 2.0),
    ]


class OnceInOrder(InOrder):
    """No problem comes twice."""

    def __init__(self, count: int) -> None:
        super().__init__(problems(count))
        self.seen: set[str] = set()

    def pick(self, step: int, count: int, without: Any) -> Any:
        found = super().pick(step, count, self.seen | set(without))
        self.seen |= {prompt.id for prompt in found}
        return found


def test_what_a_checkpoint_holds_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = ["collector=tail", "collector.surplus=1.0", "train.prompts=3", "train.steps=5", "record.rollouts=-1"]
    words += ["optim.lr=1e-3", "sampling.max_new_tokens=40"]
    cut_off_and_resumed(tmp_path, *words, step=5)
    assert rows(tmp_path / "alone")[1]["collect/set_aside"]


# Length-sorted updates


def test_a_load_is_trained_on_from_its_shortest_to_its_longest_before_the_next_begins() -> None:
    """Three steps of two problems: p0 and p3, p4 and p1, p2 and p5. Then the next load."""
    lengths = {"p0": 1, "p1": 7, "p2": 9, "p3": 2, "p4": 5, "p5": 12} | {f"p{place}": place for place in range(6, 12)}
    engine, rule, curriculum = Continued(lengths), Sorted(loads=3), OnceInOrder(12)
    trained = []
    for step in range(4):
        groups = collection_of(engine, curriculum, n=1, prompts=2, step=step, version=step).run(rule)
        trained.append({group.prompt.id for group in groups})
    assert trained == [{"p0", "p3"}, {"p4", "p1"}, {"p2", "p5"}, {"p6", "p7"}]
    assert [len(group.rollouts[0]) for group in held_of(rule)] == [7] * 4, "as far as the longest that ended"


class Continued(ByLength):
    """Lengths are of the whole rollout, also where it goes on."""

    def __init__(self, lengths: dict[str, int]) -> None:
        super().__init__(lambda request: lengths[request.prompt.id.partition("+")[0]] - request.resumed_tokens)


# The shortest of a group


def test_the_shortest_are_kept_and_of_equally_long_ones_the_likeliest() -> None:
    replies = [(-1.0,) * 5, (-2.0,) * 3, (-0.5,) * 3, (-9.0,), (-1.0,) * 3]
    kept = choose(made.downsample("shortest"), scored(*[0.0] * 5, logprobs=replies), 3, np.random.default_rng(0))
    assert kept == [2, 3, 4]
