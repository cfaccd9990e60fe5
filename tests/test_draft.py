"""Speculative decoding: drafts change how many tokens a step makes, and no rollout."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import infinite
from small import contents, make_engine, require_bits, small_model, some_requests
from test_config import refusal
from test_resume import rows, trained

import grpo_cli.engine.kv.cache
import grpo_cli.engine.torch.engine
from grpo_cli.config.instantiate import ready
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.torch import slots
from grpo_cli.engine.torch.draft import LEAST, LOSS, PLAIN_STEPS, REFRESH, Pays, guess, leading, speedup
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Request


class Always(Pays):
    """Drafts whatever it costs: these numbers in turn."""

    def __init__(self, *gammas: int) -> None:
        super().__init__()
        self._gammas = itertools.cycle(gammas)

    def gamma(self, rows: int, slots: int) -> int:
        return next(self._gammas)

    def checked(self, *measured: Any) -> None:
        """Nothing depends on what it took."""


def drafting(model: Any, kind: str, *gammas: int, **parts: Any) -> Any:
    engine = make_engine(model, draft=kind, **parts)
    engine._speculation.pays = Always(*gammas)
    return engine


def assert_same(model: Any, requests: list[Request], kind: str, gammas: tuple[int, ...], **parts: Any) -> Any:
    """With these drafts rollouts are those without, to rounding; returns the engine."""
    plain = {r.request.seed: r for r in make_engine(model, **parts).generate(requests)}
    engine = drafting(model, kind, *gammas, **parts)
    found = {r.request.seed: r for r in engine.generate(requests)}
    assert found.keys() == plain.keys() == {request.seed for request in requests}
    for seed, rollout in found.items():
        assert (rollout.token_ids, rollout.finish) == (plain[seed].token_ids, plain[seed].finish)
        got, wanted = (torch.tensor(one.sampler_logprobs) for one in (rollout, plain[seed]))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    return engine


@pytest.mark.parametrize("kind", ["ngram", "self"])
@pytest.mark.parametrize("gammas", [(1,), (0, 3, 7)])
def test_rollouts_are_those_without_drafts(kind: str, gammas: tuple[int, ...]) -> None:
    model, requests = small_model(), some_requests(tokens=50)
    engine = assert_same(model, requests, kind, gammas)
    stats, without = engine.stats(), make_engine(model)
    list(without.generate(requests))
    assert stats.generated_tokens == without.stats().generated_tokens
    assert stats.details["engine/drafted_tokens"] > 0
    assert kind == "ngram" or stats.decode_steps < without.stats().decode_steps


@pytest.mark.parametrize(
    "words",
    [dict(temperature=0.0), dict(temperature=0.7), dict(top_p=0.6), dict(top_k=2)],
    ids=str,
)
def test_however_tokens_are_drawn(words: dict[str, Any]) -> None:
    engine = assert_same(small_model(), some_requests(tokens=40, **words), "ngram", (3, 5))
    # What repeats itself is guessed.
    assert words != {"temperature": 0.0} or engine.stats().details["engine/draft_kept"] > 0.3


@pytest.mark.parametrize("slots", [1, 3])
def test_with_few_slots_that_are_refilled(slots: int) -> None:
    assert_same(small_model(), some_requests(tokens=30), "ngram", (3,), sampler=infinite(slots=slots))


@pytest.mark.parametrize("kind", ["ngram", "self"])
def test_over_the_border_of_a_page(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts stay within the pages that a row has, and every kept key is read again from the right one."""
    monkeypatch.setattr(grpo_cli.engine.kv.cache, "PAGE_BYTES", 1)
    engine = assert_same(small_model(), some_requests(tokens=100, n=3), kind, (7,))
    assert engine.stats().details["engine/draft_passes"] > 0


@pytest.mark.parametrize("promised", [True, False])
def test_tokens_of_a_row_query_its_pages_together_only_where_no_bits_are_promised(
    promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU and in bfloat16. Both ways are the same to rounding, over several pages too."""
    apart, real = set[bool](), slots.ahead_pieces

    def watched(*given: Any) -> Any:
        apart.add(given[-1])
        return real(*given)

    monkeypatch.setattr(slots, "ahead_pieces", watched)
    monkeypatch.setattr(grpo_cli.engine.kv.cache, "PAGE_BYTES", 1)
    monkeypatch.setattr(Decoder, "promises_bits", property(lambda decoder: promised))
    said = list[str]()
    assert_same(small_model(), some_requests(tokens=80, n=3), "ngram", (1, 5), warn=said.append)
    assert apart == {promised}
    assert promised or any("repeated or resumed may differ" in text for text in said)


def test_stop_strings_and_limits_end_a_row_amid_its_drafts() -> None:
    model = small_model()
    longest = max(make_engine(model).generate(some_requests(tokens=40)), key=len)
    some = longest.token_ids[10]
    requests = some_requests(tokens=40, stop=(f"<{some}>",))
    said = dict(decode=lambda ids: "".join(f"<{token}>" for token in ids))
    engine = drafting(model, "self", 7, **said)
    plain = {r.request.seed: (r.token_ids, r.finish) for r in make_engine(model, **said).generate(requests)}
    found = list(engine.generate(requests))
    assert {r.request.seed: (r.token_ids, r.finish) for r in found} == plain
    assert any(r.finish is Finish.STOP for r in found) and all(len(r) <= 40 for r in found)


def test_a_drafter_that_is_the_policy_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_cli.engine.torch.engine, "DRAFTER", "none")
    engine = drafting(small_model(), "self", 5, eos_token_ids=(10**6,))
    assert all(len(rollout) == 37 for rollout in engine.generate(some_requests(tokens=37)))
    assert engine.stats().details["engine/draft_kept"] == 1.0
    assert engine.stats().decode_steps == 6  # of five drafts and a token each, after the first token of all


def test_bits_are_those_without_drafts() -> None:
    model = small_model()
    require_bits(model)
    requests = some_requests(tokens=50)
    plain = contents(make_engine(model).generate(requests))
    for gammas in ((0,), (3,), (0, 1, 7, 11)):
        assert contents(drafting(model, "ngram", *gammas).generate(requests)) == plain
    assert contents(drafting(model, "self", 2, 5).generate(requests)) == plain


def test_tokens_follow_the_policy() -> None:
    """Chi-square of pairs of tokens that one pass has checked, against the model's own probabilities."""
    model, count = small_model(), 2000
    prompt = Prompt("p", (5, 6, 7, 8, 9), "")
    sampling = replace(some_requests()[0].sampling, max_new_tokens=3, top_k=3)
    requests = [Request(prompt, sample, 1_000 + sample, sampling) for sample in range(count)]
    engine = drafting(model, "self", 2, eos_token_ids=(10**6,))
    likeliest = first(model)
    seen = Counter(made.token_ids[1:] for made in engine.generate(requests) if made.token_ids[0] == likeliest)
    total, expected = sum(seen.values()), {}
    with torch.no_grad():
        for second, p in likely(model, (*prompt.token_ids, likeliest)):
            for third, q in likely(model, (*prompt.token_ids, likeliest, second)):
                expected[second, third] = p * q * total
    assert total > 200 and seen.keys() <= expected.keys()
    # The 99.99 % quantile of chi-square with 8 degrees of freedom.
    assert sum((seen[pair] - some) ** 2 / some for pair, some in expected.items()) < 31.8


def likely(model: Any, tokens: tuple[int, ...]) -> list[tuple[int, float]]:
    """The three most probable next tokens, with their shares."""
    logits, ids = model(torch.tensor([tokens])).logits[0, -1].topk(3)
    return list(zip(ids.tolist(), logits.softmax(-1).tolist(), strict=True))


def first(model: Any) -> int:
    with torch.no_grad():
        return likely(model, (5, 6, 7, 8, 9))[0][0]


@pytest.mark.parametrize(
    ("a", "gamma", "gain"),
    [
        (0.8, 3, 1.406),
        (0.8, 5, 1.318),
        (0.8, 7, 1.189),
        (0.8, 9, 1.063),
        (0.8, 11, 0.950),
        (0.6, 3, 1.036),
        (0.6, 5, 0.851),
    ],
)
def test_what_drafts_gain(a: float, gamma: int, gain: float) -> None:
    assert speedup(a, gamma, 0.35, 1.05) == pytest.approx(gain, abs=5e-4)


def told(pays: Pays, rows: int, kept: int, drafting: float, check: float, steps: int, slots: int = 64) -> list[int]:
    """What it decides over so many steps, where a plain one takes a second, a check 1 + `check` for each row's draft,
    and of every row's drafts the first `kept` are right."""
    found = []
    for _ in range(steps):
        gamma = pays.gamma(rows, slots)
        found.append(gamma)
        if gamma:
            right = min(kept, gamma)
            pays.checked(gamma, [gamma] * rows, [right] * rows, drafting * gamma, 1 + (drafting + check) * gamma)
        else:
            pays.plain(rows, 1.0)
    return found


def test_drafts_go_on_where_they_pay() -> None:
    pays = Pays()
    found = told(pays, rows=4, kept=11, drafting=0.0, check=0.05, steps=100)
    assert found[:PLAIN_STEPS] == [0] * PLAIN_STEPS and found[PLAIN_STEPS : PLAIN_STEPS + 2] == [5, 5]
    plain = [step for step, gamma in enumerate(found) if gamma == 0 and step >= PLAIN_STEPS]
    assert plain == list(range(REFRESH, 100, REFRESH))
    assert set(found[PLAIN_STEPS + 2 :]) - {0} == {11}  # all are right: the most that fit


def test_what_trials_lose_is_bounded() -> None:
    """No draft is ever right, though it would pay if all were: a trial in sixteen steps would lose 5 % of all time."""
    steps, each = 2000, 0.9
    found = told(Pays(), rows=4, kept=0, drafting=0.0, check=each, steps=steps)
    assert 3 < sum(gamma > 0 for gamma in found)
    lost = sum(each * gamma for gamma in found)
    assert lost <= LOSS * (steps + lost) + each * max(found)


def test_what_drafts_may_lose_does_not_depend_on_what_they_saved_long_ago() -> None:
    pays = Pays()
    good = told(pays, rows=4, kept=11, drafting=0.0, check=0.01, steps=1000)
    spent = sum(1 + 0.01 * gamma for gamma in good)
    pays.lose(2.5 * LOSS * spent)  # the account was at most one such share above zero
    assert not any(told(pays, rows=4, kept=11, drafting=0.0, check=0.01, steps=10))
    assert any(told(pays, rows=4, kept=11, drafting=0.0, check=0.01, steps=int(spent)))


def test_what_can_never_pay_is_tried_twice() -> None:
    """The first trial prepares products of new sizes, and does not count."""
    found = told(Pays(), rows=4, kept=11, drafting=1.0, check=0.1, steps=2000)
    assert sum(gamma > 0 for gamma in found) == 2


def test_one_row_that_nothing_was_guessed_right_for_does_not_end_trials() -> None:
    pays = Pays()
    told(pays, rows=40, kept=0, drafting=0.0, check=0.0, steps=1000)  # too many rows for drafts, but seconds pass
    told(pays, rows=1, kept=0, drafting=0.0, check=0.2, steps=PLAIN_STEPS + 1)
    found = told(pays, rows=4, kept=11, drafting=0.0, check=0.05, steps=100)
    assert sum(gamma > 0 for gamma in found) > 80


def test_checks_have_no_more_rows_than_steps_have() -> None:
    cheap = dict(kept=11, drafting=0.0, check=0.0, steps=50)
    assert max(told(Pays(), rows=32, slots=64, **cheap)) == 1  # 32 rows of two tokens
    assert max(told(Pays(), rows=33, slots=64, **cheap)) == 0
    assert max(told(Pays(), rows=33, slots=140, **cheap)) == 3  # 132 rows


@given(
    st.lists(st.integers(-1, 3), min_size=2, max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=14),
    st.integers(1, 6),
)
def test_a_guess_followed_the_same_tokens(text: list[int], behind: list[int], most: int) -> None:
    text = [*text, -1]
    found = guess(np.array(text), behind, most)
    assert len(found) <= most and -1 not in found
    wanted = behind[-LEAST:]
    places = [i for i in range(len(text) - LEAST) if text[i : i + LEAST] == wanted and text[i + LEAST] >= 0]
    if len(behind) < LEAST or not places:
        assert found == []
    else:
        assert any(text[i + LEAST : i + LEAST + len(found)] == found for i in places) and found


def test_the_longest_match_decides_and_then_the_commonest_token() -> None:
    text = np.array([1, 2, 3, 9, -1, 2, 3, 4, -1, 2, 3, 4, -1, 7, 2, 3, 5, 6, -1])
    assert guess(text, [2, 3], 2) == [4]  # two of four
    assert guess(text, [7, 2, 3], 2) == [5, 6]  # one, but after three tokens
    assert guess(text, [3], 2) == []


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_drafts_are_kept_up_to_the_first_other_token_or_an_end(drafts: list[int], drawn: list[int]) -> None:
    found = leading(drafts, np.array(drawn), frozenset({2}))
    went = []
    for place, token in enumerate(drawn[: len(drafts) + 1]):  # as a row that is fed one token after the other
        went.append(token)
        if token == 2 or place == len(drafts) or token != drafts[place]:
            break
    assert drawn[: found + 1] == went


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("engine.draft=ngram", "sparsity=rkv"), "use sparsity=dense"),
        (("engine.draft=self", "engine.cuda_graph=true"), "use one of the two"),
        (("engine.draft=ngram", "task=guess"), "task.turns=4"),
        (("engine.draft=eagle",), "engine.draft=eagle must be one of none, ngram, self"),
    ],
)
def test_what_drafts_cannot_be_combined_with(words: tuple[str, ...], why: str) -> None:
    assert why in refusal(*words)


def test_an_engine_of_workers_refuses_what_it_cannot_draft_for() -> None:
    """Whose settings are checked where it is made."""
    sparsity = ready("sparsity", "rkv", budget=8, buffer=4)
    with pytest.raises(UserError, match="engine.draft=ngram needs sparsity=dense"):
        make_engine(small_model(), draft="ngram", sparsity=sparsity)
    with pytest.raises(UserError, match="several"):
        list(make_engine(small_model(), draft="ngram").generate(some_requests(), replies=Mock()))


@pytest.mark.parametrize("kind", ["ngram", "self"])
def test_a_run_learns_the_same(kind: str, tmp_path: Path) -> None:
    """Whole runs, with drafts where they pay here: every reward and count of tokens is that of a run without."""
    words = ("train.steps=3", "train.prompts=4", "sampling.max_new_tokens=40")
    trained(tmp_path / "plain", *words)
    trained(tmp_path / "drafted", *words, f"engine.draft={kind}")
    plain, drafted = (rows(tmp_path / run) for run in ("plain", "drafted"))
    for one, other in zip(plain, drafted, strict=True):
        for name in one.keys() & {"reward/mean", "tokens/generated", "response/length_mean", "engine/prefill_tokens"}:
            assert one[name] == other[name]
    assert "engine/draft_passes" in drafted[-1] and "engine/draft_passes" not in plain[-1]
