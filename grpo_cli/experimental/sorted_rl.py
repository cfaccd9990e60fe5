"""SortedRL: updates from the shortest rollouts of a large batch to its longest (arXiv 2603.23414).

    load loads * prompts prompts; each step trains on those that end next, `prompts` or more; only when all of a
    load are trained on is the next one loaded

So a load is a small curriculum from short to long, and no rollout is older than its load. Read from the abstract and
secondary sources, which give neither the size of a load nor the bound of the cache: both are ours. A partial rollout
continues from its tokens here; with `collector=tail` it begins again (the paper has both).

Measured: docs/studies.md (no difference in accuracy seen, fewer decode steps; embedded model).
"""

from __future__ import annotations

import sys
from typing import Annotated

from pydantic import Field

from grpo_cli.methods.april import Partial


class Sorted(Partial):
    """A collector like `april.Partial` that begins nothing while it holds anything (SortedRL, arXiv 2603.23414).

    A load lasts `loads` steps or fewer, so that its longest rollouts may be sampled by the weights of that many.
    """

    kind = "sorted"

    def __init__(self, *, loads: Annotated[int, Field(ge=2, le=1000)]) -> None:
        super().__init__(surplus=float(loads - 1), max_lag=sys.maxsize)

    def _fresh(self, under_way: int, held: int) -> int:
        return 0 if held else under_way
