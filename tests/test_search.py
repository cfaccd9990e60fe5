"""Search at evaluation: which of several replies is the answer, what they cost, and what cannot be searched."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from made import composed
from small import VOCABULARY, FakeEngine, make_engine, small_model
from tiny_hf import make_tokenizer
from words import rollout_of, task_of

from grpo_cli.collect.episodes import play
from grpo_cli.collect.label import winner
from grpo_cli.collect.requests import requests_for
from grpo_cli.collect.resuming import begun
from grpo_cli.collect.search import Replies, Searching
from grpo_cli.config.check import check_eval
from grpo_cli.config.instantiate import rule_of
from grpo_cli.engine.step.sample import uniforms
from grpo_cli.evaluate import evaluate, search_with
from grpo_cli.interfaces import Bench
from grpo_cli.methods.particle import resampled
from grpo_cli.methods.sample_and_rank import mean_logprob
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Request, Rollout

TOKENIZER = load_tokenizer(made.model())
ARITHMETIC = made.task("arithmetic", TOKENIZER)
A, B, C, D = range(2, 6)  # tokens


def search(choice: str, **changed: Any) -> Any:
    return rule_of("search", made.part("search", choice, **changed))


def problems(count: int) -> list[Prompt]:
    return [ARITHMETIC.prompts("eval")[place] for place in range(count)]


def searching(engine: Any, prompts: Sequence[Prompt], tokens: int = 12, seed: int = 0) -> Searching:
    return Searching(engine, ARITHMETIC, prompts, Sampling.plain(tokens), seed)


class Says(FakeEngine):
    """Each sample of a problem has a reply and a log-probability of each of its tokens."""

    def __init__(self, replies: Sequence[tuple[str, float]], tokenizer: Any = TOKENIZER) -> None:
        self._replies, self._tokenizer = replies, tokenizer

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for request in reversed(requests):
            text, logprob = self._replies[request.sample]
            made = rollout_of(request.prompt, text, self._tokenizer, request.sample)
            yield replace(made, request=request, sampler_logprobs=(logprob,) * len(made))


class Table(FakeEngine):
    """Two tokens: a (0.4) and then surely c, or b (0.6) and then c or d (0.5 each)."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for request in requests:
            said = list(request.prompt.token_ids[len(request.prompt.token_ids) - request.resumed :])
            drawn: list[int] = []
            logprobs: list[float] = []
            for u in uniforms([request.seed], request.sampling.max_new_tokens)[0][: 2 - len(said)]:
                chances = {A: 0.4, B: 0.6} if not said else {C: 1.0} if said == [A] else {C: 0.5, D: 0.5}
                first, *others = chances
                token = first if u < chances[first] else others[0]
                said.append(token)
                drawn.append(token)
                logprobs.append(math.log(chances[token]))
            finish = Finish.EOS if len(said) == 2 else Finish.LENGTH
            yield Rollout(request, tuple(drawn), tuple(logprobs), finish, 0)


# What each chooses


@pytest.mark.parametrize(
    ("answers", "place"),
    [
        (["5", "7", "7"], 1),
        (["5", "7", "7", "5"], 0),  # a tie: the first given
        (["7", "5", "5", "7", "5"], 1),
        ([None, None, None, "5"], 3),  # what cannot be read has no vote
        ([None, None], 0),
        (["5"], 0),
    ],
)
def test_the_majority_is_the_answer_given_most_often(answers: list[str | None], place: int) -> None:
    assert winner(answers) == place


def test_answers_are_compared_as_the_judge_reads_them(tmp_path: Path) -> None:
    """Three texts are one number, and two equal texts are another."""
    tokenizer, file = make_tokenizer(), tmp_path / "p.jsonl"
    file.write_text(json.dumps({"question": "q", "answer": "0.5"}))
    replies = [("It is 3.", -1.0), ("It is 3.", -1.0), ("It is 1/2.", -1.0), ("#### 0.50", -1.0), ("A: .5", -1.0)]
    for grading, place in (("lenient", 2), ("strict", 3)):
        task = task_of("jsonl", tokenizer, path=str(file), eval_fraction=1.0, grading=grading)
        desk = Searching(Says(replies, tokenizer), task, [*task.prompts("eval")], Sampling.plain(64), 0)
        (found,) = search("majority", k=5)(desk)
        assert found.request.sample == place, grading


def test_a_reply_that_did_not_end_has_no_answer_where_the_judge_says_so() -> None:
    cut = replace(rollout_of(problems(1)[0], "12", TOKENIZER), finish=Finish.LENGTH)
    assert (ARITHMETIC.reads(cut), ARITHMETIC.reads(rollout_of(problems(1)[0], "9+3=12", TOKENIZER))) == (None, "12")
    tokenizer, words = make_tokenizer(), []
    for must_end in (False, True):
        task = made.task("word_problems", tokenizer, must_end=must_end)
        reply = rollout_of(task.prompts("eval")[0], "That makes 12.0", tokenizer)
        words += [task.reads(reply), task.reads(replace(reply, finish=Finish.LENGTH))]
    assert words == ["12", "12", "12", None]


def test_best_is_the_likeliest_per_token_and_not_the_shortest_or_right_one() -> None:
    """Sums are -0.9 * 2, -0.5 * 6 and -0.6 * 2: the second has the best mean, and the third the best sum."""
    replies = [("7", -0.9), ("3+4=8", -0.5), ("7", -0.6)]
    (found,) = search("best", k=3)(searching(Says(replies), problems(1)))
    assert (found.request.sample, mean_logprob(found)) == (1, pytest.approx(-0.5))
    environment = replace(found, sampler_logprobs=(-0.2, math.nan, -0.4, math.nan, math.nan, math.nan))
    assert mean_logprob(environment) == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("weights", "u", "places"),
    [
        # shares 2/3, 1/6, 1/6 end at .667, .833 and 1; looked at are (0 + u)/3, (1 + u)/3, (2 + u)/3
        ((4, 1, 1), 0.3, [0, 0, 1]),  # .1, .433, .767
        ((4, 1, 1), 0.6, [0, 0, 2]),  # .2, .533, .867
        ((4, 1, 1), 0.01, [0, 0, 1]),  # .003, .337, .670
        ((1, 1, 1, 1), 0.5, [0, 1, 2, 3]),
        ((1, 0, 0, 3), 0.5, [0, 3, 3, 3]),
        ((5,), 0.9, [0]),
        ((0, 1), 0.0, [1, 1]),  # what has no weight is never chosen
    ],
)
def test_particles_are_chosen_by_their_shares(weights: Sequence[float], u: float, places: list[int]) -> None:
    with np.errstate(divide="ignore"):
        logs = np.log(np.array(weights, dtype=float))
    assert resampled(logs, u) == places
    assert resampled(logs - 5000, u) == places  # only differences of logs count, however small their powers


def frequency_of_ac(choice: Any, count: int = 200) -> float:
    prompts = [Prompt(f"p{place}", (9,), "") for place in range(count)]
    found = choice(searching(Table(), prompts, tokens=2))
    return sum(one.token_ids == (A, C) for one in found) / count


@pytest.mark.parametrize("every", [1, 2])
def test_many_particles_draw_from_the_power_of_the_distribution_of_whole_replies(every: int) -> None:
    """ac has 0.4, bc and bd 0.3 each. To the power of 4: .0256, .0081, .0081, so that ac has .6124 of the sum. Token
    by token it would have .4^4 / (.4^4 + .6^4) = .165."""
    assert frequency_of_ac(search("particle", particles=32, alpha=4.0, every=every)) == pytest.approx(0.6124, abs=0.07)


def test_with_a_power_of_one_particles_draw_from_the_distribution_itself() -> None:
    assert frequency_of_ac(search("particle", particles=8, alpha=1.0, every=1), 400) == pytest.approx(0.4, abs=0.07)


# What is drawn, and what it costs


def test_one_particle_is_plain_sampling_to_the_bit() -> None:
    engine, prompts = make_engine(small_model()), problems(3)
    asked = requests_for(prompts, 1, Sampling.plain(12), 0, "eval", held_out=True)  # as pass@k asks
    plain = {one.request.prompt.id: one for one in play(engine, ARITHMETIC, [begun(request) for request in asked])}
    found = search("particle", particles=1, every=3)(searching(engine, prompts))
    assert found == [plain[prompt.id] for prompt in prompts]


def test_replies_in_parts_have_the_tokens_of_whole_ones_and_cost_as_many() -> None:
    engine, prompts = make_engine(small_model()), problems(3)
    whole, parts = searching(engine, prompts), searching(engine, prompts)
    expected, replies, rounds = whole.go_on(whole.begin(4)), parts.begin(4), 0
    while any(one.finish is Finish.PARTIAL for row in replies for one in row):
        replies, rounds = parts.go_on(replies, 5), rounds + 1
    tokens_of = [[(one.token_ids, one.finish, one.request) for one in row] for row in replies]
    assert tokens_of == [[(one.token_ids, one.finish, one.request) for one in row] for row in expected]
    assert rounds == 3 and {len(one) for row in replies for one in row} > {12}, "some end early, some in the last round"
    assert parts.tokens == whole.tokens == sum(len(one) for row in expected for one in row)
    longest = {prompt.id: max(map(len, row)) for prompt, row in zip(prompts, expected, strict=True)}
    assert parts.sequential == whole.sequential == longest


def test_a_copy_goes_on_with_other_tokens_than_what_it_is_a_copy_of() -> None:
    desk = searching(make_engine(small_model(), eos_token_ids=(VOCABULARY,)), problems(1))  # which is never drawn
    (row,) = desk.go_on(desk.begin(4), 4)
    copies: Replies = [[replace(row[0], request=one.request) for one in row]]
    (longer,) = desk.go_on(copies)
    assert {one.token_ids[:4] for one in longer} == {row[0].token_ids} and len({one.token_ids for one in longer}) == 4


def exam(**changed: Any) -> Any:
    return replace(composed(command="eval").eval, **{"problems": 2, "temperature": 1.0, **changed})


def measured(choice: Any, replies: Sequence[tuple[str, float]]) -> Any:
    bench = Bench(torch.device("cpu"), None, TOKENIZER, 0, ARITHMETIC, Says(replies))
    return search_with(bench, choice, exam(), Sampling.plain(64), 0)


def test_accuracy_is_of_the_searched_answer_and_tokens_are_those_of_all_replies() -> None:
    right = [prompt.answer for prompt in problems(2)]
    assert right[0] != right[1]
    replies = [("x", -1.0), (right[0], -1.0), ("1" + right[0], -1.0), (right[0], -1.0)]
    found = measured(search("majority", k=4), replies)
    lengths = [len(TOKENIZER(text)["input_ids"]) + 1 for text, _ in replies]
    assert found.metrics == {
        "search/accuracy": 0.5,
        # Wilson's interval of 1 in 2: 0.5 -+ 1.96 sqrt(0.25/2 + 1.96^2/16) / (1 + 1.96^2/2)
        "search/accuracy_low": pytest.approx(0.0945, abs=1e-4),
        "search/accuracy_high": pytest.approx(0.9055, abs=1e-4),
        "search/tokens": sum(lengths),
        "search/sequential": max(lengths),
    }
    assert [(one.sample, one.reason, one.reply) for one in found.examples] == [(1, "searched", right[0])] * 2


def test_without_a_search_there_is_none_and_plain_answers_are_as_they_are_with_one() -> None:
    assert measured(search("none"), []).metrics == {} and measured(search("none"), []).examples == ()
    engine, prompts = make_engine(small_model()), problems(2)
    before = evaluate(engine, ARITHMETIC, prompts, Sampling.plain(12), 2, 0)
    search("particle", particles=4, every=3)(searching(engine, prompts))
    assert evaluate(engine, ARITHMETIC, prompts, Sampling.plain(12), 2, 0) == before


# What is refused


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        check_eval(composed(*overrides, command="eval"))
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["search=majority", "search.k=0"], "search.k=0 must be from 1 to 65536: it is how many replies vote"),
        (["search=best", "search.k=0"], "search.k=0 must be from 1 to 65536"),
        (["search=particle", "search.particles=0"], "search.particles=0 must be from 1 to 65536"),
        (["search=particle", "search.alpha=0.5"], "search.alpha=0.5 must be from 1 to 100"),
        (["search=particle", "search.every=0"], "search.every=0 must be at least 1"),
        (["search=majority", "eval.problems=0"], "eval.problems=0 must be at least 1"),
        (["search=particle", "sparsity=snapkv"], "use sparsity=dense, or search=best"),
        (["search=particle", "task=guess"], "search=particle copies replies of one turn, and task=guess has several"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_searched_is_refused_before_a_model_is_loaded(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_a_majority_is_refused_where_the_task_does_not_say_what_it_reads() -> None:
    task = made.task("guess", make_tokenizer())
    desk = Searching(FakeEngine(), task, [task.prompts("eval")[0]], Sampling.plain(8), 0)  # which would not draw
    with pytest.raises(UserError, match="does not say which answer it read in a reply: use search=best"):
        search("majority")(desk)


def test_an_own_search_gives_one_whole_rollout_for_each_problem() -> None:
    for own in (lambda desk: [], lambda desk: [row[0] for row in desk.begin(1)]):
        with pytest.raises(UserError, match="one whole rollout for each of searching.prompts"):
            measured(own, [])
