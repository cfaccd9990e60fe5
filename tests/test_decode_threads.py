"""How many threads decode steps get: no bit depends on it, and the fewest are chosen that are about as fast as any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from small import contents, make_engine, small_model, some_requests

from grpo_cli.engine.step import threads as module
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.step.invariance import invariance_of
from grpo_cli.support.threads import computing_with


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    with computing_with(4):
        yield


def chosen(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, float], different: tuple[int, ...] = ()) -> int:
    monkeypatch.setattr(module, "_tried", lambda block, tokens, counts: {count: seconds[count] for count in counts})
    monkeypatch.setattr(module, "same_with_threads", lambda block, count: count not in different)
    return module.threads_for(Decoder(small_model()), 8)


@pytest.mark.parametrize(
    ("seconds", "different", "expected"),
    [
        ({1: 1.0, 2: 0.9, 4: 0.85}, (), 1),  # 1 / 0.85 < 1.2
        ({1: 1.1, 2: 0.9, 4: 0.85}, (), 2),
        ({1: 3.0, 2: 2.0, 4: 1.0}, (), 4),
        ({1: 1.0, 2: 1.1, 4: 5.0}, (1,), 2),  # 1 rounds in another way
        ({1: 1.0, 2: 1.1, 4: 5.0}, (1, 2), 4),
    ],
)
def test_the_fewest_that_are_about_as_fast(
    seconds: Mapping[int, float], different: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(monkeypatch, seconds, different) == expected


def test_nothing_is_tried_where_no_bits_are_promised_or_there_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_tried", lambda *_: pytest.fail("it was tried"))
    assert module.threads_for(Decoder(small_model().to(torch.bfloat16)), 8) == 4
    with computing_with(1):
        assert module.threads_for(Decoder(small_model()), 8) == 1


def test_a_trial_measures_every_number_unless_a_block_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(small_model())
    decoder = decoder.padded(invariance_of(decoder).padding)
    with torch.inference_mode():
        assert set(module._tried(decoder.of_one_block(), torch.arange(8), [1, 2, 4])) == {1, 2, 4}
        monkeypatch.setattr(module, "_LONG", 0.0)
        assert set(module._tried(decoder.of_one_block(), torch.arange(8), [1, 2, 4])) == {4}
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 96, "head_dim": 24, "intermediate_size": 288}], ids=str)
def test_a_rollout_is_the_same_with_a_number_that_may_be_chosen(sizes: dict[str, int]) -> None:
    model, made = small_model(**sizes), {}
    for threads in (1, 2, 4, "auto"):
        engine = make_engine(model, threads=threads)
        rollouts = engine.generate(some_requests())
        first = next(rollouts)
        if threads != "auto":
            assert torch.get_num_threads() == engine.facts()["decode_threads"] == threads
        made[threads] = contents([first, *rollouts])
        assert torch.get_num_threads() == 4
    decoder = Decoder(model)
    decoder = decoder.padded(invariance_of(decoder).padding)
    with torch.inference_mode():
        same = [count for count in (1, 2) if module.same_with_threads(decoder.of_one_block().in_its_precision(), count)]
    assert all(made[count] == made[4] for count in (*same, "auto"))


def test_the_number_goes_back_if_nobody_wants_the_rest() -> None:
    given_up = make_engine(small_model(), threads=1).generate(some_requests())
    next(given_up)
    given_up.close()
    assert torch.get_num_threads() == 4
