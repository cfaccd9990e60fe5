"""Stop strings: a rollout is the one without them, cut after the token that completes one; nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from made import infinite
from small import contents, make_engine, small_model, some_requests

from grpo_cli.collect.resuming import remaining_request
from grpo_cli.engine.torch_engine import TorchEngine
from grpo_cli.experimental.adhint import begun_with
from grpo_cli.types import Finish, Rollout

LETTERS = "_.abcdefghijklmnopqrstuvw"


def decode(token_ids: Sequence[int]) -> str:
    """Token 5 is `d`, token 7 `fg` (two letters), and the rest one letter each."""
    return "".join("fg" if token == 7 else LETTERS[token] for token in token_ids)


def engine(**parts: object) -> TorchEngine:
    return make_engine(small_model(), decode=decode, **parts)


def cut(rollout: Rollout, stop: tuple[str, ...]) -> tuple[int, str]:
    """By brute force: how many tokens are left, and why it ends."""
    for count in range(1, len(rollout) + 1):
        if any(string in decode(rollout.token_ids[:count]) for string in stop):
            last_is_eos = count == len(rollout) and rollout.finish is Finish.EOS
            return count, "eos" if last_is_eos else "stop"
    return len(rollout), rollout.finish.value


STOPS = [("d",), tuple("a" + letter for letter in "bcdefghij"), ("g",), ("fgf", "cc", "e"), ("longer than any text",)]


@pytest.mark.bits
def test_a_rollout_is_cut_after_the_token_that_completes_a_string():
    requests = some_requests(n=6)
    plain = list(engine().generate(requests))
    for stop in STOPS:
        stopping = [replace(request, sampling=replace(request.sampling, stop=stop)) for request in requests]
        stopped = contents(engine(sampler=infinite(slots=3)).generate(stopping))
        reasons = set()
        for rollout in plain:
            count, reason = cut(rollout, stop)
            name = (rollout.request.prompt.id, rollout.request.sample)
            assert stopped[name] == (rollout.token_ids[:count], rollout.sampler_logprobs[:count], reason)
            reasons.add(reason)
        assert ("stop" in reasons) == (stop != STOPS[-1])  # the case has cases


@pytest.mark.bits
def test_strings_in_the_tokens_that_a_rollout_begins_with_do_not_end_it():
    """`ab` and, across their end, `b` and another letter."""
    given = tuple(map(LETTERS.index, "cab"))
    begun = [remaining_request(begun_with(one, given, one.sample, "hint")) for one in some_requests(n=6)]
    plain = {one.request.seed: one for one in engine().generate(begun)}
    stop = ("ab", *("b" + letter for letter in "cdefg"))
    stopping = [replace(one, sampling=replace(one.sampling, stop=stop)) for one in begun]
    for stopped in engine().generate(stopping):
        texts = [decode((*given, *plain[stopped.request.seed].token_ids[:count])) for count in range(len(stopped) + 1)]
        new = [any(text.count(string) > (string == "ab") for string in stop) for text in texts]
        assert new == [False] * len(stopped) + [stopped.finish is Finish.STOP]
