"""Hints, nudges, repairs, examples, majority labels and refined drafts: worked numbers, and steps made up."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import composed
from small import FakeEngine, advantages_of, describe, plain_batch, scored
from test_contexts import SOLUTION, Asked, collect, collector, problems
from tiny_hf import make_tokenizer
from words import rollout_of

from grpo_cli.collect import learnt
from grpo_cli.collect.label import by_majority
from grpo_cli.collect.search import Searching
from grpo_cli.config.check import check, check_eval
from grpo_cli.config.compose import settings_of
from grpo_cli.config.instantiate import rule_of
from grpo_cli.experiment import build
from grpo_cli.history import History, Visit
from grpo_cli.methods.adhint import right_hints, share
from grpo_cli.methods.lightning_rl import per_part
from grpo_cli.methods.scope import beginning
from grpo_cli.methods.xrpo import Icl, bm25
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import (
    GIVEN,
    AdvantageInputs,
    Finish,
    GroupRequest,
    Prompt,
    Request,
    Rollout,
    Round,
    ScoredGroup,
    Span,
)

TOKENIZER = load_tokenizer(made.model())
ARITHMETIC = made.task("arithmetic", TOKENIZER)
COLLECTORS = ("hint", "nudge", "repair", "icl")


def group_of(rewards: Sequence[float], arms: Sequence[str | None], given: Sequence[int] = ()) -> ScoredGroup:
    """A group whose rollouts read these contexts (None: the plain prompt), some of them given tokens."""
    plain = scored(*rewards)
    asked = [
        replace(one.request, prompt=Prompt(arm, (9,), ""), problem=plain.prompt) if arm else one.request
        for one, arm in zip(plain.rollouts, arms, strict=True)
    ]
    spans = [(Span(GIVEN, 1),) if place in given else (Span(0, 1),) for place in range(len(rewards))]
    pairs = zip(plain.rollouts, asked, spans, strict=True)
    return replace(plain, rollouts=tuple(replace(one, request=request, spans=of) for one, request, of in pairs))


def advantages(choice: str, group: ScoredGroup, kept: Sequence[int] | None = None, **changed: Any) -> list[float]:
    everyone = tuple(range(len(group.rollouts)))
    places, rewards = everyone if kept is None else tuple(kept), torch.tensor(group.totals)
    rule = made.advantage(choice, **changed)
    return advantages_of(rule, rewards[list(places)], rewards, AdvantageInputs(group, places, everyone)).tolist()


# ---- hint


@pytest.mark.parametrize(("difficulty", "given"), [(0.0, 0.0), (0.25, 0.2), (0.5, 0.4), (1.0, 0.8)])
def test_a_harder_problem_is_given_more(difficulty: float, given: float):
    assert share(difficulty, 0.0, 0.8) == pytest.approx(given)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(-2, 2))
def test_the_share_is_within_its_bounds_and_rises(one: float, other: float, least: float, noise: float):
    low, high = sorted((one, other))
    assert 0 <= share(low, least * 0.5, 0.9, noise) <= share(high, least * 0.5, 0.9, noise) + 1e-12 <= 0.9 + 1e-12


def test_the_second_half_begins_with_a_share_of_the_solution_by_the_first_half_s_difficulty():
    """p0 is solved by none of its first 4, p1 by half and p2 by all: 8, 4 and no tokens of 10."""

    def solves(request: Request) -> bool:
        return request.sample < int(request.about.id[1:]) * 2

    groups, collection = collect(collector("hint", noise=0.0), Asked(solves), problems(3))
    given = [[one.given for one in group.rollouts] for group in groups]
    assert given == [[0] * 4 + [8] * 4, [0] * 4 + [4] * 4, [0] * 8]
    assert groups[0].rollouts[7].token_ids[:9] == (*SOLUTION[:8], 50)
    metrics = collection.metrics()
    assert metrics["collect/hint_share"] == pytest.approx((0.8 + 0.4 + 0.0) / 3)
    assert metrics["collect/reward_hinted"] == 0.0
    assert metrics["collect/reward_plain"] == pytest.approx((2 + 4) / 16)


def test_a_hint_may_stand_before_the_problem_and_be_for_unsolved_problems_alone():
    rule = collector("hint", noise=0.0, given="prompt", only_unsolved=True, plain=6)
    groups, _ = collect(rule, Asked(lambda request: request.about.id == "p1" and request.sample == 0), problems(2))
    ids = [[one.request.prompt.id for one in group.rollouts] for group in groups]
    words = " ".join(map(str, SOLUTION[:8]))
    assert ids == [["p0"] * 6 + [f"p0~{words}"] * 2, ["p1"] * 8]
    assert not any(one.given for group in groups for one in group.rollouts)


@pytest.mark.parametrize(
    ("rule", "words", "given", "share_given"),
    [
        # 8 of 10 tokens: all but one of the room, no room at all, a text that fits by a token and one that does not
        (("hint", {"given": "answer"}), {"sampling": Sampling.plain(6)}, 5, 0.5),
        (("hint", {"given": "answer"}), {"sampling": Sampling.plain(1)}, 0, 0.0),
        (("hint", {"given": "prompt"}), {"max_prompt_tokens": 3}, 3, 0.8),
        (("hint", {"given": "prompt"}), {"max_prompt_tokens": 2}, 0, 0.0),
        (("nudge", {"hints": ["one"], "per_problem": 1, "drop": 0.0}), {"max_prompt_tokens": 3}, 3, None),
        (("nudge", {"hints": ["one"], "per_problem": 1, "drop": 0.0}), {"max_prompt_tokens": 2}, 0, None),
    ],
)
def test_what_a_hint_has_too_much_is_left_out_and_no_run_ends(
    rule: tuple[str, Any], words: Any, given: int, share_given: float | None
):
    changed = rule[1] | ({"noise": 0.0} if rule[0] == "hint" else {})
    groups, collection = collect(collector(rule[0], **changed), Asked(length=1), problems(2), **words)
    last = [group.rollouts[-1] for group in groups]
    aids = [one.given or (not one.unaided) * len(one.request.prompt.token_ids) for one in last]
    assert aids == [given, given]
    assert share_given is None or collection.metrics()["collect/hint_share"] == pytest.approx(share_given)


@pytest.mark.parametrize("aided", ["context", "beginning"])
def test_a_run_remembers_what_was_solved_without_help(aided: str):
    """Of p one of two plain rollouts is right, and both with a hint; of q there are none but with a hint."""
    texts, given = (["h"] * 2, []) if aided == "context" else ([None] * 2, [2, 3])
    p = replace(group_of([1.0, 0.0, 1.0, 1.0], [None, None, *texts], given), prompt=Prompt("p", (1,), ""))
    q = replace(group_of([1.0, 1.0], ["h", "h"]), prompt=Prompt("q", (2,), ""))
    shown = dict[str, list[tuple[str, int, int]]]()

    class Rule:
        def __init__(self, name: str) -> None:
            self.name = name

        def observe(self, step: int, groups: Sequence[ScoredGroup]) -> dict[str, float]:
            shown[self.name] = [(one.prompt.id, one.solved, len(one.rollouts)) for one in groups]
            return {}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None: ...

    rules = SimpleNamespace(collector=Rule("collector"), credit=Rule("credit"))
    parts: Any = SimpleNamespace(history=History(), curriculum=Rule("curriculum"), replay=None, rules=rules)
    assert learnt.observe(parts, 0, [p, q], [p, q]) == {}
    assert parts.history.visits("p") == (Visit(0, 1, 2),) and not parts.history.visits("q")
    assert shown == {"curriculum": [("p", 1, 2)], "credit": [("p", 1, 2)], "collector": [("p", 3, 4), ("q", 2, 2)]}


def test_a_rollout_is_compared_with_those_of_its_own_arm():
    """Arms: plain (1, 0), given (1, 1, 0), and a hint read by one alone."""
    group = group_of([1, 0, 1, 1, 0, 1], [None] * 5 + ["h"], given=(2, 3, 4))
    expected = [0.5, -0.5, 1 / 3, 1 / 3, -2 / 3, 0.0]
    assert advantages("arms", group) == pytest.approx(expected)
    assert advantages("arms", group, kept=(4, 1)) == pytest.approx([-2 / 3, -0.5])


def test_given_tokens_count_only_where_the_rollout_is_no_worse_than_its_like():
    batch = plain_batch([[False, True, True]] * 3, advantages=torch.tensor([1.0, -1.0, 0.0]))
    assert right_hints(batch, ["p"] * 3, History()) is None
    factors = right_hints(replace(batch, lags=torch.tensor([[0, GIVEN, 0]] * 3)), ["p"] * 3, History())
    assert factors is not None and factors.tolist() == [[1, 1, 1], [1, 0, 1], [1, 1, 1]]


# ---- nudge

ARMS = ["a", "a", "a", None, "b", "b", "b", None]
REWARDS = [1, 0, 1, 1, 0, 0, 1, 0]


def test_nudge_compares_within_a_hint_and_hints_with_each_other():
    golden = [1.0244, -0.9583, 1.0244, 0.9913, -1.0244, -1.0244, 0.9583, -0.9913]
    found = advantages("nudge", group_of(REWARDS, ARMS))
    assert found == pytest.approx(golden, abs=5e-5)
    assert advantages("nudge", group_of(REWARDS, ARMS), kept=(7, 0)) == pytest.approx([found[7], found[0]])


def test_with_one_between_or_without_hints_it_is_grpo_with_the_deviation_of_all():
    rewards = np.array(REWARDS, dtype=float)
    white = ((rewards - rewards.mean()) / (rewards.std() + 1e-5)).tolist()
    assert advantages("nudge", group_of(REWARDS, ARMS), between=1.0) == pytest.approx(white)
    assert advantages("nudge", group_of(REWARDS, [None] * 8)) == pytest.approx(white)
    assert advantages("nudge", group_of([0.1] * 8, ARMS)) == [0.0] * 8


def test_hints_share_the_rollouts_and_some_are_dropped():
    hints = ["one", "two", "three"]
    rule = collector("nudge", hints=hints, per_problem=2, drop=0.0)
    groups, _ = collect(rule, Asked(), problems(4))
    for group in groups:
        counts = Counter(one.request.prompt.id for one in group.rollouts)
        assert sorted(counts.values()) == [4, 4] and all(name.partition("~")[2] in hints for name in counts)
    assert len({one.request.prompt.id.partition("~")[2] for group in groups for one in group.rollouts}) == 3
    dropped, collection = collect(collector("nudge", drop=1.0), Asked(), problems(4))
    assert not any(one.request.problem for group in dropped for one in group.rollouts)
    assert collection.metrics()["collect/hinted"] == 0.0
    half, collection = collect(collector("nudge", drop=0.5), Asked(), problems(40))
    assert 0.4 < collection.metrics()["collect/hinted"] < 0.6  # of 320 draws; 3 deviations are 0.08


def test_hints_come_from_a_file_with_one_in_each_line(tmp_path: Path):
    (tmp_path / "hints.txt").write_text("one\n\n two \none\n")
    groups, _ = collect(
        collector("nudge", hints=str(tmp_path / "hints.txt"), per_problem=2, drop=0.0), Asked(), problems(1)
    )
    assert {one.request.prompt.id for one in groups[0].rollouts} == {"p0~one", "p0~two"}


# ---- repair


@given(st.integers(0, 40), st.integers(0, 5))
def test_a_cut_is_in_the_first_half(length: int, seed: int):
    tokens = tuple(range(length))
    whole = Rollout(Request(Prompt("p", (1,), ""), 0, 0, Sampling.plain(64)), tokens, (-1.0,) * length, Finish.EOS, 0)
    cut = beginning(replace(whole, spans=(Span(0, length),) * (length > 0)), np.random.default_rng(seed))
    assert cut == tokens[: len(cut)] and len(cut) <= length // 2 and (len(cut) > 0) == (length > 1)


def test_failed_replies_to_unsolved_problems_go_on_from_a_cut_and_others_are_plain():
    desk = Asked(lambda request: request.about.id == "p1" or request.sample == 7, length=6)
    groups, collection = collect(collector("repair"), desk, problems(2))
    assert [len(group.rollouts) for group in groups] == [8, 8]
    given = [[one.given for one in group.rollouts] for group in groups]
    assert given[0][:6] == [0] * 6 and all(1 <= count <= 3 for count in given[0][6:]) and given[1] == [0] * 8
    assert groups[0].rollouts[7].token_ids[: given[0][7]] == tuple(range(50, 50 + given[0][7]))
    assert collection.metrics()["collect/repaired"] == 0.5


# ---- icl


def test_bm25_by_hand():
    """ln 1.6 for a token that 2 of 3 texts hold, ln(8/3) for one that one holds; the mean length is 3."""
    found = bm25([1, 3, 1], [[1, 2], [1, 1, 3], [4, 5, 6, 7]])
    first = math.log(1.6) * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 2 / 3))
    second = math.log(1.6) * 2 * 2.5 / (2 + 1.5) + math.log(8 / 3) * 2.5 / 2.5
    assert found == pytest.approx([first, second, 0.0]) and bm25([1], []) == []


def solved(name: str, prompt: tuple[int, ...], reply: tuple[int, ...]) -> ScoredGroup:
    return scored(0.0, 1.0, name=name, prompt=prompt, replies=[(1, 1), reply])


def test_unsolved_problems_come_behind_their_nearest_solved_ones():
    rule: Icl = collector("icl", examples=1, memory=2)
    rule.observe(0, [solved("gone", (0, 3), (4,)), solved("near", (0, 3), (5,)), solved("far", (8, 9), (6,))])
    asked = problems(2)  # (0, 3) and (1, 3)
    groups, _ = collect(rule, Asked(lambda request: request.about.id == "p1"), asked)
    assert [one.request.prompt.id for one in groups[0].rollouts] == ["p0"] * 4 + ["p0~0 3 5"] * 4
    assert [one.request.prompt.id for one in groups[1].rollouts] == ["p1"] * 8
    other: Icl = collector("icl", examples=1, memory=2)
    other.load_state_dict(rule.state_dict())
    assert other.state_dict() == rule.state_dict()
    other.forget(lambda name: name == "near")
    again, _ = collect(other, Asked(), asked[:1])
    assert again[0].rollouts[7].request.prompt.id == "p0~8 9 6"


def test_a_problem_is_no_example_of_itself_and_what_does_not_fit_is_left_out():
    rule: Icl = collector("icl", examples=2)
    rule.observe(0, [solved("p0", (0, 3), (5,)), solved("q", (0, 3), (6,)), solved("r", (1, 3), (7,))])
    both, _ = collect(rule, Asked(), problems(1))
    assert both[0].rollouts[7].request.prompt.id == "p0~0 3 6|1 3 7"
    one, _ = collect(rule, Asked(), problems(1), max_prompt_tokens=3)  # a token for each text, and two of its own
    assert one[0].rollouts[7].request.prompt.id == "p0~0 3 6"
    none, _ = collect(rule, Asked(), problems(1), max_prompt_tokens=2)
    assert none[0].rollouts[7].request.problem is None


# ---- labels


def answered(*answers: str, true: str = "7") -> ScoredGroup:
    """Replies to a sum whose answer is `true`; x is no answer."""
    prompt = Prompt("p", tuple(TOKENIZER("3+4=")["input_ids"]), true)
    rollouts = tuple(rollout_of(prompt, said, TOKENIZER, place) for place, said in enumerate(answers))
    return ScoredGroup(prompt, rollouts, tuple(ARITHMETIC.reward(prompt, one) for one in rollouts))


@pytest.mark.parametrize(
    ("answers", "rewards", "right"),
    [
        (("5", "7", "1=5"), [1, 0, 1], 0.0),
        (("7", "5", "5", "7"), [1, 0, 0, 1], 1.0),  # a tie: the first seen
        (("x", "x", "7"), [0, 0, 1], 1.0),
        (("x", "y="), [0, 0], 0.0),
    ],
)
def test_the_label_is_the_answer_given_most_often(answers: tuple[str, ...], rewards: list[float], right: float):
    group = by_majority(ARITHMETIC.reads, answered(*answers))
    assert group.totals.tolist() == rewards and [reward.solved for reward in group.rewards] == [r == 1 for r in rewards]
    assert [reward.parts["majority_right"] for reward in group.rewards] == [right] * len(answers)
    assert [reward.parts["true"] for reward in group.rewards] == [float(said == "7") for said in answers]


def test_no_rule_is_shown_what_is_true():
    """Of three wrong answers the first is the label; parts that add up to it are not taken for it."""
    group = by_majority(ARITHMETIC.reads, answered("5", "5", "7"))
    everyone = (0, 1, 2)
    rewards = torch.tensor(group.totals)
    inputs = AdvantageInputs(group, everyone, everyone)
    found = per_part(
        rewards, rewards, inputs, **{k: v for k, v in made.part("advantage", "per_part").items() if k[0] != "_"}
    )
    assert found[0] == found[1] > 0 > found[2]


def test_a_later_round_may_change_the_label_and_held_groups_keep_theirs():
    class Reading(Asked):
        def reads(self, rollout: Rollout) -> str:
            return "5" if rollout.request.sample in (0, 3, 4) else "7"

    seen = []

    def rule(collection: Any) -> Any:
        (prompt,) = collection.pick(1)
        for count in (1, 2, 2):
            groups = yield Round((GroupRequest(prompt, count),))
            seen.append(collection.score(groups)[0].totals.tolist())
        return None

    groups, collection = collect(rule, Reading(), problems(1), label="majority")
    assert seen == [[1], [0, 1, 1], [1, 0, 0, 1, 1]] and groups[0].totals.tolist() == seen[-1]
    assert collection.made[0].solved == 3


def test_a_reply_that_is_cut_off_earns_nothing_where_that_is_asked_for():
    class Cut(Asked):
        def generate(self, requests: Sequence[Request]) -> Any:
            yield from (replace(one, finish=Finish.LENGTH) for one in super().generate(requests))

        def reads(self, rollout: Rollout) -> str:
            return "7"

    groups, _ = collect(collector("equal"), Cut(), problems(1), label="majority", zero_truncated=True)
    assert groups[0].totals.tolist() == [0.0] * 8


def test_labels_are_refused_for_a_task_that_does_not_say_what_it_reads():
    desk = Asked()
    with pytest.raises(UserError, match="does not say which it read in a reply: use a task whose answers are numbers"):
        collect(collector("equal"), desk, problems(1), label="majority")
    assert desk.rounds == []


# ---- pdr


class Drafts(FakeEngine):
    """Sample i says the digit i + 1 with a log-probability of -(i + 1)."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> Any:
        for request in requests:
            self.asked.append(request)
            made_ = rollout_of(request.prompt, f"9+{request.sample + 1}", TOKENIZER, request.sample)
            yield replace(made_, request=request, sampler_logprobs=(-float(request.sample + 1),) * len(made_))


def desk_of(engine: Any, count: int = 2, **more: Any) -> Searching:
    prompts = [ARITHMETIC.prompts("eval")[place] for place in range(count)]
    return Searching(engine, ARITHMETIC, prompts, Sampling.plain(12), 0, **more)


def test_the_likeliest_drafts_are_put_before_the_problem_which_is_answered_anew():
    engine = Drafts()
    desk = desk_of(engine)
    found = rule_of("search", made.part("search", "pdr", drafts=3, keep=2, rounds=2, workspace=8))(desk)
    read = [ARITHMETIC.text(one.prompt.token_ids) for one in engine.asked]
    problem = ARITHMETIC.text(desk.prompts[0].token_ids)
    own = [text for one, text in zip(engine.asked, read, strict=True) if one.about == desk.prompts[0]]
    assert own == [problem] * 3 + [f"9+1\n\n9+2\n\n{problem}"] * 3 + [f"9+4\n\n9+5\n\n{problem}"]
    assert [one.request.about for one in found] == desk.prompts and [one.request.sample for one in found] == [6, 6]
    assert desk.tokens == 2 * 7 * 4 and sum(desk.sequential.values()) == 2 * 3 * 4
    assert all(one.held_out for one in engine.asked) and len({one.seed for one in engine.asked}) == 14


def test_of_a_draft_its_end_is_shown():
    engine = Drafts()
    rule_of("search", made.part("search", "pdr", drafts=1, keep=1, rounds=1, workspace=3))(desk_of(engine, 1))
    assert ARITHMETIC.text(engine.asked[1].prompt.token_ids).startswith("+1\n\n")  # and the token that ends it


def test_a_workspace_that_does_not_fit_is_refused():
    with pytest.raises(
        UserError, match=r"make it \d+ tokens, and 10 fit beside .*max_new_tokens=12: lower it, or search"
    ):
        rule_of("search", made.part("search", "pdr"))(desk_of(Drafts(), max_prompt_tokens=10))


# ---- what cannot be


def refusal(*overrides: str, command: str = "train") -> str:
    with pytest.raises(UserError) as refused:
        (check if command == "train" else check_eval)(composed(*overrides, command=command))
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["collector=hint", "collector.plain=16"],
            "collector.plain=16 rollouts of a problem without a hint leave none",
        ),
        (["collector=hint", "collector.given=both"], "collector.given=both must be one of answer, prompt"),
        (["collector=hint", "sparsity=snapkv"], "use sparsity=dense, or collector=equal"),
        (
            ["collector=hint", "correction.prox=drawn"],
            "tokens are trained on that it did not draw; use correction.prox=now",
        ),
        (["advantage=arms"], "advantage=arms compares rollouts with the same hint, and collector=equal gives none"),
        (["advantage=nudge"], "advantage=nudge compares rollouts with the same hint, and collector=equal gives none"),
        (["train.plain_weight=0.1"], "and collector=equal gives none; use collector=nudge, or train.plain_weight=0"),
        (["collector=hint", "train.plain_weight=0.1"], "and collector=hint gives none"),
        (["train.plain_weight=2.0"], "train.plain_weight=2.0 must be from 0 to 1"),
        (["collector=nudge", "n=6"], "collector.per_problem=4 hints do not share n=6 rollouts evenly"),
        (["collector=nudge", "collector.hints=[a,b,a]"], "collector.hints=['a', 'b', 'a'] holds 2 different hints"),
        (["collector=nudge", "collector.hints=none.txt"], "collector.hints=none.txt cannot be read: No such file"),
        (["collector=repair", "collector.retries=16"], "collector.retries=16 of n=16 rollouts leave none to repair"),
        (["collector=hint", "sampling.top_p=0.9"], "training on truncated sampling biases the importance ratio"),
        (["train.label=most"], "train.label=most must be one of answer, majority"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_go_together_is_refused_before_a_model_is_loaded(overrides: list[str], said: str):
    assert said in refusal(*overrides)


def test_an_empty_file_of_hints_is_refused(tmp_path: Path):
    (tmp_path / "hints.txt").write_text("\n  \n")
    said = refusal("collector=nudge", f"collector.hints={tmp_path / 'hints.txt'}")
    assert "hints.txt holds 0 different hints, and collector.per_problem=4: give as many, one in each line" in said


def test_a_workspace_without_a_token_for_each_draft_is_refused():
    assert "search.keep=2 drafts are more than" in refusal("search=pdr", "search.workspace=1", command="eval")


class Plain(Asked):
    """A task with nothing of the kind."""

    in_context = solution = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("hint", r"gives parts of worked solutions, and this task has none \(no solution\(prompt\)\)"),
        ("nudge", r"puts text before a problem, and this task cannot \(it has no in_context\(prompt, texts\)\)"),
    ],
)
def test_a_task_without_solutions_or_contexts_is_refused_before_a_rollout_is_made(choice: str, said: str):
    desk = Plain()
    with pytest.raises(UserError, match=said):
        collect(collector(choice), desk, problems(1))
    assert desk.rounds == []


def test_a_search_of_drafts_is_refused_for_a_task_without_contexts():
    desk = Searching(Drafts(), Plain(), [ARITHMETIC.prompts("eval")[0]], Sampling.plain(12), 0)
    with pytest.raises(UserError, match="the search puts text before a problem, and this task cannot"):
        rule_of("search", made.part("search", "pdr"))(desk)


def test_a_problem_goes_without_a_hint_that_is_longer_than_the_context():
    task = made.task("word_problems", make_tokenizer())
    rule = collector("nudge", hints=["step by step " * 40], per_problem=1, drop=0.0)
    ([group], _) = collect(rule, Task(task), [task.prompts("train")[0]], max_prompt_tokens=100)
    assert all(one.unaided for one in group.rollouts)


class Task(Asked):
    """Its contexts are a real task's."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self._task = task

    def in_context(self, prompt: Prompt, texts: Sequence[str]) -> Prompt:
        return self._task.in_context(prompt, texts)


# ---- whole runs of the embedded model


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=hint_arithmetic", "replay=fifo"],
        ["collector=hint", "collector.given=prompt", "train.plain_weight=0.1", "correction=mis", "m=2"],
        [
            "collector=nudge",
            "advantage=nudge",
            "train.plain_weight=0.1",
            "train.count_by=prompt",
            "train.minibatches=2",
        ],
        ["collector=repair", "loss=dapo", "correction=tis"],
        ["collector=icl", "train.plain_weight=0.5", "sampler=infinite", "sampler.slots=3"],
        ["train.label=majority", "collector=dars", "advantage=dr_grpo"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_whole_steps_are_trained_on_and_every_metric_has_its_sentence(tmp_path: Path, words: list[str]):
    tokens = 128 if words[0].startswith("experiment") else 40  # a hint is of up to 0.8 of 90 tokens
    short = ["n=4", "train.prompts=3", "train.steps=3", "eval.every=0", f"sampling.max_new_tokens={tokens}"]
    build(settings_of(*short, *words, f"run_dir={tmp_path}", "device=cpu", "logger=jsonl")).fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 3 and all(math.isfinite(row["loss/total"]) for row in steps)
    assert all(describe(name) for row in steps for name in row if "/" in name)
    if "train.label=majority" in words:
        assert all(0 <= row["reward/true"] <= 1 and 0 <= row["reward/majority_right"] <= 1 for row in steps)
    gives = words[0] in ("experiment=hint_arithmetic", "collector=repair")
    assert any(row.get("off/given_share", 0) > 0 for row in steps) == gives
