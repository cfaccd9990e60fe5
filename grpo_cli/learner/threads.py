"""How many threads updates are given on a CPU: all, or one, where all of them take longer.

An update of a small model consists of operations of microseconds, which more threads slow down: waking them takes
longer than they save. Whether it is so depends on the model, the batch and the machine, so it is measured, at the first
update. A gradient's last bits depend on the number of threads, and a measurement may end either way: so nothing between
one and all is tried, and one has to be clearly faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from grpo_cli.support.threads import computing_with, seconds_of

_ROUNDS = 2
_WORTH = 1.25  # times the seconds of one thread: more than that, and all of them only get in each other's way
_LONG = 0.25  # seconds of an eighth of a pass with one thread: of so much work there is a share for each


def threads_for_updates(work: Callable[[Tensor], object], rows: Tensor) -> int:
    """1 or PyTorch's number, for updates with passes of such rows; `work` takes some of them forward and backward."""
    most = torch.get_num_threads()
    if most == 1:
        return most
    row, eighth, half = (partial(work, rows[: max(1, len(rows) // share)]) for share in (len(rows), 8, 2))
    with computing_with(1):
        # A row first, which takes long enough by itself where the model is large.
        if any(min(seconds_of(part), seconds_of(part)) > _LONG for part in (row, eighth)):
            return most
    one = all_of_them = math.inf
    for _ in range(_ROUNDS):
        with computing_with(1):
            one = min(one, seconds_of(half))
        all_of_them = min(all_of_them, seconds_of(half))
    return 1 if all_of_them > _WORTH * one else most
