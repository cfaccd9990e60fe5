"""Searches of `grpo eval`: which of several replies is the answer, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import made
import numpy as np
import pytest
import torch
from made import composed
from small import FakeEngine, make_engine, small_model
from words import rollout_of

from grpo_cli.collect.episodes import play
from grpo_cli.collect.requests import requests_for
from grpo_cli.collect.resuming import unstarted
from grpo_cli.config.instantiate import make
from grpo_cli.evaluate import search_with
from grpo_cli.experimental.dora import cosines, rebase, shared_out
from grpo_cli.experimental.ets import chosen, clusters
from grpo_cli.interfaces import Runtime
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request, Rollout

TOKENIZER = load_tokenizer(made.model())
ARITHMETIC = made.task("arithmetic", TOKENIZER)


def search(choice: str, **changed: Any) -> Any:
    return make("search", made.part("search", choice, **changed))


def problems(count: int) -> list[Prompt]:
    return [ARITHMETIC.prompts("eval")[place] for place in range(count)]


def runtime(engine: Any, model: Any = None, task: Any = ARITHMETIC) -> Runtime:
    return Runtime(torch.device("cpu"), model, TOKENIZER, 0, task, engine)


def answers(choice: Any, engine: Any, prompts: Sequence[Prompt], tokens: int = 12) -> list[Rollout]:
    return list(choice(runtime(engine), prompts, Sampling.plain(tokens), 0)[0])


class Says(FakeEngine):
    """Each sample of a problem has a reply and a log-probability of each of its tokens."""

    def __init__(self, replies: Sequence[tuple[str, float]]) -> None:
        self._replies = replies
        self.read: list[tuple[int, ...]] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for request in reversed(requests):
            self.read.append(request.prompt.token_ids)
            text, logprob = self._replies[request.sample]
            made = rollout_of(request.prompt, text, TOKENIZER, request.sample)
            yield replace(made, request=request, sampler_logprobs=(logprob,) * len(made))


# ---- what each chooses


def test_best_is_the_likeliest_per_token_and_not_the_shortest_or_right_one() -> None:
    """Sums are -0.9 * 2, -0.5 * 6 and -0.6 * 2: the second has the best mean, and the third the best sum."""
    replies = [("7", -0.9), ("3+4=8", -0.5), ("7", -0.6)]
    (found,) = answers(search("best", k=3), Says(replies), problems(1))
    assert found.request.sample == 1


def test_drafts_are_read_before_the_problem_and_the_answer_is_the_problems() -> None:
    """The likelier of two drafts, its last four tokens, an empty line, the problem."""
    (prompt,), engine = problems(1), Says([("3+4=8", -0.9), ("1+7=9", -0.5), ("12", -1.0)])
    found = search("pdr", drafts=2, keep=1, rounds=1, workspace=4)(
        runtime(engine, small_model()), [prompt], Sampling.plain(12), 0
    )
    draft = (*TOKENIZER("1+7=9")["input_ids"], TOKENIZER.eos_token_id)[-4:]
    assert engine.read[2:] == [(*draft, *TOKENIZER("\n\n")["input_ids"], *prompt.token_ids)]
    assert found[0][0].request.prompt == prompt and found[0][0].request.sample == 2


def test_places_are_shared_among_likely_replies_and_directions() -> None:
    """REBASE at T = 1 of scores log 4, log 2, log 1, log 1 and 8 places: 4, 2, 1, 1. Two alike have about half each."""
    scores = [math.log(x) for x in (4, 2, 1, 1)]
    assert rebase(scores, 8, 1.0) == [4, 2, 1, 1] and rebase(scores, 3, 1.0) == [2, 1, 0, 0]
    alike = cosines(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
    # weights 1/2, 1/2, 1 of equal scores: shares .25, .25, .5 of 3 places are .75, .75 and 1.5, the largest first
    assert shared_out([0.5] * 3, alike, 3, 1.0) == [1, 0, 2]


def test_the_part_of_a_tree_that_goes_on_is_the_best_of_all_choices() -> None:
    """Against every subset of leaves: worth less nodes kept and more clusters."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        count = int(rng.integers(1, 7))
        worth, labels = rng.dirichlet(np.ones(count)).tolist(), rng.integers(0, 3, count).tolist()
        paths = [tuple(rng.integers(0, 2, 2).tolist()) for _ in range(count)]
        cost, diversity = rng.random(2) * 2
        nodes = [{("leaf", i), *(path[:end] for end in range(3))} for i, path in enumerate(paths)]
        everything, every = len(set().union(*nodes)), len(set(labels))

        def value(some: Sequence[int], worth=worth, nodes=nodes, labels=labels, c=cost, d=diversity) -> float:
            kept, found = len(set().union(*(nodes[i] for i in some))), len({labels[i] for i in some})
            return sum(worth[i] for i in some) - c * kept / everything + d * found / every  # noqa: B023

        best = max(value(some) for size in range(1, count + 1) for some in combinations(range(count), size))
        found, worth_of = chosen(worth, paths, labels, cost, diversity)
        assert worth_of == pytest.approx(best) and value(found) == pytest.approx(best)
    assert clusters(cosines(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]))) == [0, 0, 1]


# ---- what is drawn, and what it costs


def test_one_particle_is_plain_sampling_to_the_bit() -> None:
    engine, prompts = make_engine(small_model()), problems(3)
    asked = requests_for(prompts, 1, Sampling.plain(12), 0, "eval", held_out=True)  # as pass@k asks
    plain = {one.request.prompt.id: one for one in play(engine, ARITHMETIC, [unstarted(request) for request in asked])}
    found = answers(search("particle", particles=1, every=3), engine, prompts)
    assert found == [plain[prompt.id] for prompt in prompts]


def test_accuracy_is_of_the_searched_answer_and_tokens_are_those_of_all_replies() -> None:
    right = [prompt.answer for prompt in problems(2)]
    assert right[0] != right[1]
    replies = [("x", -1.0), (right[0], -1.0), ("1" + right[0], -1.0), (right[0], -1.0)]
    exam = replace(composed(command="eval").eval, problems=2, temperature=1.0)
    found = search_with(runtime(Says(replies)), search("majority", k=4), exam, Sampling.plain(64), 0)
    lengths = [len(TOKENIZER(text)["input_ids"]) + 1 for text, _ in replies]
    names = ("accuracy", "tokens", "sequential")
    assert [found.metrics[f"search/{name}"] for name in names] == [0.5, sum(lengths), max(lengths)]
    assert [(one.sample, one.reason, one.reply) for one in found.examples] == [(1, "searched", right[0])] * 2


# ---- what is refused
