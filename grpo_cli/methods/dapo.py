"""DAPO's dynamic sampling: rounds of problems until a step has enough groups with a learning signal (arXiv 2503.14476).

    mixed: the group's answers are not all as good (penalties do not count)
    a round asks for ceil((1 + surplus) * (prompts - mixed so far)) problems

The rest of DAPO is `loss=dapo` (more room upwards, a mean over tokens) and the reward part `overlong`
(`tasks/formats.py`).

Measured: scripts/reproduce/dapo.md (no gain in accuracy seen at equal tokens; what is dropped is paid for).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import ceil
from typing import Annotated, Any

from grpo_cli.collect.stored import HoldsGroups
from grpo_cli.interfaces import Collection, Rounds
from grpo_cli.support.facts import Others, facts
from grpo_cli.support.ranges import Range
from grpo_cli.types import GroupRequest, Round, ScoredGroup


def _goes_with(own: Mapping[str, Any], others: Others) -> Iterator[str]:
    if own.get("hold") is True and own.get("surplus") == 0:
        yield (
            f"{others.named('collector')} has nothing to hold where a round asks for no more than is lacking: give "
            "collector.surplus of more than 0, or collector.hold=false"
        )


@facts(goes_with=_goes_with)
class Dynamic(HoldsGroups):
    """Rounds until `train.prompts` groups are mixed: their answers are not all as good, whatever penalties say, and a
    rollout has an advantage where those that were cut off are left out (`Collection.teaches`). The others are dropped.

    A round asks for `1 + surplus` times the problems that are lacking, n rollouts of each (ours: the release asks for
    as many in each round, three times a step's). After `most_rounds` of them, or once the run has generated
    `train.max_generated` tokens, the step trains on the mixed groups that there are; with none at all it is a plain
    step without a gradient. Mixed groups beyond `train.prompts` are dropped, too, or with `hold` (ours) go first in
    the next step, as they were drawn and judged: their tokens are as old as `off/lag_mean` says.
    """

    kind = "dynamic"

    def __init__(
        self,
        *,
        surplus: Annotated[float, Range(0, 1000, "it is how many times what is lacking is asked for besides")],
        most_rounds: Annotated[int, Range(1, 1000, "a step has to end")],
        hold: bool,
    ) -> None:
        self._share = 1 + Fraction(str(surplus))  # in floating point 1.1 * 50 is more than 55
        self._most_rounds, self._hold = most_rounds, hold

    def __call__(self, collection: Collection) -> Rounds:
        prompts, held = collection.prompts, self._held
        joining, elsewhere = held[:prompts], {group.prompt.id for group in held}
        mixed, equal = list(held), list[ScoredGroup]()
        if len(held) >= prompts:
            yield Round(held=joining)
        for number in range(self._most_rounds):
            lacking = prompts - len(mixed)
            if lacking <= 0 or (number and collection.at_limit):
                break
            picked = collection.pick(ceil(self._share * lacking), elsewhere)
            requests = tuple(GroupRequest(prompt, collection.n) for prompt in picked)
            groups = yield Round(requests, held=joining if number == 0 else ())
            new = {prompt.id for prompt in picked}
            for group in collection.score([group for group in groups if group.prompt.id in new]):
                (mixed if collection.teaches(group) else equal).append(group)
        taken, over = (mixed or equal)[:prompts], mixed[prompts:]
        self._held = tuple(over) if self._hold else ()
        dropped = [*(equal if mixed else equal[prompts:]), *([] if self._hold else over)]
        collection.note("dropped_groups", len(dropped))
        collection.note("tokens_dropped", sum(one.num_drawn for group in dropped for one in group.rollouts))
        collection.note("held_groups", len(self._held))
        return [group.prompt.id for group in taken]
