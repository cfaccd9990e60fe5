"""A host that looks at what a step has drawn only when the next one has been launched, as on a GPU: same rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from made import full, infinite, micro, prefix_head
from small import contents, make_engine, small_model, some_requests

from grpo_cli.engine.order.schedule import Lpt
from grpo_cli.engine.torch.generation import BEHIND
from grpo_cli.methods.rkv import Rkv
from grpo_cli.types import EngineStats

RKV: dict[str, Any] = dict(budget=10, buffer=4, window=3, sinks=1, kernel=3, importance=0.3, threshold=0.5)


def letters(token_ids: Sequence[int]) -> str:
    return "".join("_.abcdefghijklmnopqrstuvw"[token] for token in token_ids)


def generate(monkeypatch: pytest.MonkeyPatch, behind: int, requests: Any, parts: Any) -> tuple[Any, EngineStats]:
    monkeypatch.setitem(BEHIND, "cpu", behind)
    engine = make_engine(small_model(), decode=letters, **parts())
    return contents(engine.generate(requests)), engine.stats()


@pytest.mark.bits
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (lambda: dict(sampler=full()), {}),
        (lambda: dict(sampler=micro(slots=5)), {}),
        (lambda: dict(sampler=infinite(slots=5)), {}),
        (lambda: dict(sampler=infinite(slots=5)), {"stop": ("ab", "f")}),
        (lambda: dict(sampler=infinite(slots=5)), {"tokens": 1}),
        (lambda: dict(sampler=infinite(slots=4, kv_budget=40_000)), {}),
        (lambda: dict(sampler=infinite(slots=5), sparsity=Rkv(**RKV, protect_prompt=True, per_head=True)), {}),
        (lambda: dict(sampler=infinite(slots=5), sparsity=Rkv(**RKV, protect_prompt=False, per_head=True)), {}),
        (lambda: dict(sampler=infinite(slots=5), scheduler=Lpt(), predictor=prefix_head(prefix_tokens=8)), {}),
    ],
)
def test_a_host_that_is_a_step_behind_gives_the_same_rollouts(
    parts: Any, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = some_requests(prompts=5, n=4, **{"tokens": 40} | words)
    (now, at_once), (then, later) = (generate(monkeypatch, behind, requests, parts) for behind in (0, 1))
    assert now == then and later.generated_tokens == at_once.generated_tokens
    # Rows compute in vain until it is known that they have ended, and nothing of it counts.
    busy = [s.decode_steps * s.details.get("engine/rows_mean", 0.0) for s in (at_once, later)]
    assert busy[0] == pytest.approx(busy[1])
