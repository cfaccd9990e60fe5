"""Rollouts that read another context than their problem's own prompt, or begin with tokens that are given."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
import torch
from bank import Scripted, collection_of
from hypothesis import given
from hypothesis import strategies as st
from small import make_engine, small_model
from test_collectors import InOrder
from test_seams import Spy, quiet
from test_train import CountTask, Recorder, make_trainer, settings_for
from tiny_hf import make_tokenizer
from words import task_of

from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.stored import from_plain, to_plain
from grpo_cli.config.instantiate import rule_of
from grpo_cli.history import History
from grpo_cli.learner.batch import collate, corrected, plainly, totals, verdict_on
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import (
    GIVEN,
    Finish,
    Group,
    GroupRequest,
    Prompt,
    Request,
    Rollout,
    Round,
    ScoredGroup,
    Span,
)

TOKENIZER = load_tokenizer(made.model())
A, B = Prompt("a", (5, 6), "1"), Prompt("b", (7,), "2")
HINT = Prompt("a~hint", (9, 9, 5, 6), "1")
SOLUTION = tuple(range(100, 110))


class Asked(Scripted):
    """Scripted rollouts of `length` tokens with what is given them, of a task with contexts and solutions."""

    def __init__(self, solves: Callable[[Request], bool] = lambda request: False, length: int = 4) -> None:
        super().__init__(solves)
        self._length = length

    def generate(self, requests: Sequence[Request]) -> Any:
        self.rounds.append(list(requests))
        for one in requests:
            count = min(self._length, one.sampling.max_new_tokens)
            yield Rollout(one, tuple(range(50, 50 + count)), (-1.0,) * count, Finish.EOS, count)

    def in_context(self, prompt: Prompt, texts: Sequence[str]) -> Prompt:
        return Prompt(f"{prompt.id}~{'|'.join(texts)}", (*map(len, texts), *prompt.token_ids), prompt.answer)

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def solution(self, prompt: Prompt) -> Sequence[int]:
        return SOLUTION


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"p{place}", (place, 3), "") for place in range(count)]


def collect(rule: Any, desk: Any, prompts: Sequence[Prompt], n: int = 8, **more: Any) -> tuple[Any, StepCollection]:
    words: dict[str, Any] = {"sampling": Sampling.plain(20)} | more
    collection = collection_of(desk, InOrder(prompts), n=n, prompts=len(prompts), **words)
    return collection.run(rule, desk), collection


def rounds_of(*rounds: Round) -> Any:
    def rule(collection: Any) -> Any:
        collection.pick(collection.prompts)
        for one in rounds:
            _ = yield one
        return None

    return rule


def collector(choice: str, **changed: Any) -> Any:
    return rule_of("collector", made.part("collector", choice, **changed))


# ---- what is read, and what is given


def test_groups_answers_and_numbers_go_by_the_problem_whatever_a_rollout_reads():
    desk = Asked(lambda request: request.prompt.id == "a~hint")
    requests = (GroupRequest(A, 2), GroupRequest(A, 1, HINT), GroupRequest(B, 1), GroupRequest(A, 1, HINT, (8, 7)))
    (a, b), collection = collect(rounds_of(Round(requests), Round((GroupRequest(A, 1),))), desk, [A, B])
    assert [group.prompt for group in (a, b)] == [A, B]
    assert [one.request.sample for one in a.rollouts] == [0, 1, 2, 3, 4]
    assert [one.request.prompt.id for one in a.rollouts] == ["a", "a", "a~hint", "a~hint", "a"]
    assert {one.request.about for one in a.rollouts} == {A} and len({r.request.seed for r in a.rollouts}) == 5
    assert a.solved == 2 and [reward.total for reward in a.rewards] == [0.0, 0.0, 1.0, 1.0, 0.0]
    given = a.rollouts[3]
    assert given.token_ids == (8, 7, 50, 51, 52, 53) and given.spans == (Span(GIVEN, 2), Span(0, 4))
    assert [math.isnan(one) for one in given.sampler_logprobs] == [True] * 2 + [False] * 4 and given.given == 2
    asked = desk.rounds[0][-1]  # of the engine: what is given is read, and leaves 18 of 20 tokens
    assert asked.prompt.token_ids == (9, 9, 5, 6, 8, 7) and asked.sampling.max_new_tokens == 18
    assert asked.prompt.id.startswith("a~hint+") and asked.resumed == 2


def test_a_reply_that_is_given_its_own_beginning_goes_on_as_it_did():
    """Greedily, by a real engine; so what is given stands where the reply would have it."""
    prompt, engine = Prompt("a", (5, 6, 9), ""), make_engine(small_model())
    greedy = {"sampling": replace(Sampling.plain(12), temperature=0.0), "n": 1}
    task = {"task": CountTask(), "curriculum": InOrder([prompt]), "history": History(), "prompts": 1, "seed": 0}

    def made_by(*requests: GroupRequest) -> Sequence[Rollout]:
        collection = StepCollection(**task, **greedy, step=0, span=lambda name: nullcontext())
        return collection.run(rounds_of(Round(requests)), engine)[0].rollouts

    (whole,) = made_by(GroupRequest(prompt, 1))
    assert len(whole) == 12
    longer = Prompt("a~", (5,), "")
    parts = made_by(GroupRequest(prompt, 1, prefix=whole.token_ids[:5]), GroupRequest(prompt, 1, longer, (6, 9)))
    assert parts[0].token_ids == whole.token_ids
    assert parts[1].token_ids == (6, 9, *whole.token_ids[:10])
    assert parts[0].sampler_logprobs[5:] == pytest.approx(whole.sampler_logprobs[5:], abs=1e-5)


def test_a_reply_is_trained_under_what_it_read_and_a_correction_never_sees_what_was_given():
    desk = Asked()
    groups, _ = collect(rounds_of(Round((GroupRequest(A, 1, HINT, (8, 7)), GroupRequest(A, 1)))), desk, [A])
    batch = collate(groups, 0)
    assert batch.input_ids[0].tolist() == [9, 9, 5, 6, 8, 7, 50, 51, 52, 53]
    assert batch.input_ids[1].tolist() == [5, 6, 50, 51, 52, 53, 0, 0, 0, 0]
    assert batch.drawn_mask[0].tolist() == [False] * 6 + [True] * 4
    policy = batch.sampler_logprobs + 5.0  # a ratio that this correction cuts to 2
    verdict = verdict_on(made.correction(importance="token", is_threshold=2.0), batch, policy)
    assert corrected(batch, verdict).weights[0].tolist() == [0.0] * 4 + [1.0] * 2 + [2.0] * 4


def test_stored_and_partial_rollouts_keep_what_they_read():
    groups, _ = collect(rounds_of(Round((GroupRequest(A, 1, HINT, (8,)), GroupRequest(A, 1)))), Asked(), [A])
    back = from_plain(to_plain(groups[0]))
    assert [one.request for one in back.rollouts] == [one.request for one in groups[0].rollouts]
    partial = Group(A, tuple(replace(one, finish=Finish.PARTIAL) for one in groups[0].rollouts))
    back_again = from_plain(to_plain(partial))
    assert [one.request for one in back_again.rollouts] == [one.request for one in partial.rollouts]
    assert back_again.rollouts[0].spans == partial.rollouts[0].spans
    older = to_plain(groups[0].take([1]))
    del older["rollouts"][0]["context"]
    assert from_plain(older).rollouts[0].request == groups[0].rollouts[1].request


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            GroupRequest(A, 1, Prompt("a", (1,), "1")),
            "round 1 of the collector has two texts with the id 'a': give each",
        ),
        (
            GroupRequest(A, 1, Prompt("a~hint", (1,), "1")),
            "round 1 of the collector has two texts with the id 'a~hint': give each context an id of its own",
        ),
        (
            GroupRequest(A, 1, Prompt("long", (1,) * 31, "1")),
            "has a context of problem 'a' with 31 tokens, and 30 fit beside sampling.max_new_tokens=20: put less",
        ),
        (
            GroupRequest(A, 1, prefix=(1,) * 20),
            "gives 20 tokens of each reply to problem 'a', and with sampling.max_new_tokens=20 none is left to draw",
        ),
    ],
)
def test_impossible_words_are_refused_before_a_rollout_is_made(request_: GroupRequest, said: str):
    desk = Asked()
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        collect(rounds_of(Round((GroupRequest(A, 1, HINT), request_))), desk, [A], max_prompt_tokens=30)
    assert desk.rounds == []


def test_as_much_as_fits_is_taken():
    requests = (GroupRequest(A, 1, Prompt("long", (1,) * 30, "1")), GroupRequest(A, 1, prefix=(1,) * 19))
    (group,), _ = collect(rounds_of(Round(requests)), Asked(), [A], max_prompt_tokens=30)
    assert [len(one) for one in group.rollouts] == [4, 20]


# ---- a second row under the plain prompt


def arms_of(group: ScoredGroup) -> Any:
    return collate([group, *plainly([group])], 0)


def test_a_second_row_is_the_reply_under_the_plain_prompt_and_all_of_it_given():
    groups, _ = collect(rounds_of(Round((GroupRequest(A, 1), GroupRequest(A, 1, HINT, (8,))))), Asked(), [A])
    batch = arms_of(groups[0])
    assert len(batch) == 3 and batch.input_ids[2].tolist()[:7] == [5, 6, 8, 50, 51, 52, 53]
    assert batch.lags is not None and batch.lags[2].tolist() == [0, 0, *[GIVEN] * 5, 0, 0]
    assert not batch.drawn_mask[2].any() and batch.response_mask[2].tolist() == [False] * 2 + [True] * 5 + [False] * 2


def test_rows_that_are_not_counted_teach_and_are_in_no_divisor_nor_mean():
    """The gradient of a second row is -0.1 A / (its length x counted rows) for each of its tokens."""
    groups, _ = collect(rounds_of(Round((GroupRequest(A, 1), GroupRequest(A, 1, HINT)))), Asked(), [A])
    batch = arms_of(groups[0])
    counted = torch.tensor([True, True, False])
    weights = batch.weights * torch.tensor([1.0, 1.0, 0.1])[:, None]
    batch = replace(batch, counted=counted, weights=weights, advantages=torch.tensor([-1.0, 3.0, 3.0]))
    divisors = totals(batch, 20)
    assert (divisors.sequences, divisors.tokens) == (2, 8)
    logprobs = torch.full(batch.input_ids.shape, -1.0, requires_grad=True)
    out = made.loss()(logprobs, batch, divisors)
    out.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[1].tolist() == pytest.approx([0.0] * 4 + [-3 / 8] * 4)
    assert logprobs.grad[2].tolist() == pytest.approx([0, 0, *[-0.1 * 3 / 8] * 4, 0, 0])
    assert float(out.metrics["loss/policy_ratio_mean"]) == 1.0


class Hinted(CountTask):
    """Whose hints are tokens."""

    def in_context(self, prompt: Prompt, texts: Sequence[str]) -> Prompt:
        return Prompt(f"{prompt.id}~{texts}", (11, 12, *prompt.token_ids), prompt.answer)


def half_hinted(collection: Any) -> Any:
    for_each = collection.pick(collection.prompts)
    hinted = [GroupRequest(prompt, 2, collection.in_context(prompt, ["x"])) for prompt in for_each]
    yield Round(tuple(one for p, h in zip(for_each, hinted, strict=True) for one in (GroupRequest(p, 2), h)))
    return None


@pytest.mark.parametrize("correction", ["none", "mis"])
def test_plain_rows_are_in_the_update_with_their_weight_and_advantage(tmp_path: Path, correction: str):
    """12 rollouts of 3 problems, half of them hinted: 6 more rows, before and after a correction that rejects."""
    spy = Spy()
    settings = quiet(settings_for(tmp_path, steps=1, plain_weight=0.1))
    (record,) = made_records(settings, spy, correction=made.correction(correction))
    (batch,) = spy.batches
    assert batch.counted is not None and int(batch.counted.sum()) == 12 and len(batch) == 18
    responses = [tuple(ids[mask].tolist()) for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)]
    starts = [int(mask.nonzero()[0]) for mask in batch.response_mask]
    hinted = [row for row in range(18) if starts[row] == 5]
    again = [row for row in range(18) if not batch.counted[row]]
    assert len(hinted) == len(again) == 6 and {starts[row] for row in again} == {3}

    def said(rows: Sequence[int]) -> list[Any]:
        read = [tuple(batch.input_ids[row, starts[row] - 3 : starts[row]].tolist()) for row in rows]
        return sorted((*one, responses[row], float(batch.advantages[row])) for one, row in zip(read, rows, strict=True))

    assert said(hinted) == said(again)
    assert all(batch.weights[row].max() == pytest.approx(0.1) for row in again)
    trained = int(batch.loss_mask[batch.counted].sum())
    assert record.metrics["tokens/trained"] == trained


def made_records(settings: Any, spy: Spy, **rules: Any) -> list[Any]:
    recorder = Recorder()
    rules |= {"collector": half_hinted, "loss": spy, "task": Hinted()}
    make_trainer(settings, trackers=(recorder,), **rules).fit()
    return [record for record in recorder.records if "reward/mean" in record.metrics]


def test_without_a_plain_weight_there_are_no_such_rows(tmp_path: Path):
    spy = Spy()
    made_records(quiet(settings_for(tmp_path, steps=1)), spy)
    assert len(spy.batches[0]) == 12 and spy.batches[0].counted is None


# ---- worked solutions and contexts of tasks


@given(st.integers(0, 10_000), st.sampled_from([(2, 8), (9, 12)]))
def test_a_sum_s_solution_is_its_lines_without_the_answer(place: int, terms: tuple[int, int]):
    task = made.task("arithmetic", TOKENIZER, min_terms=terms[0], max_terms=terms[1])
    prompt = task.prompts("train")[place]
    text = task.text(task.solution(prompt))
    lines = task.text(prompt.token_ids).rstrip("=").count("+") + task.text(prompt.token_ids).count("-")
    assert text.count("=") == lines - 1 and (not text or text.endswith("="))
    whole = tuple(task.solution(prompt)) + task._verbatim.encode(prompt.answer) + (TOKENIZER.eos_token_id,)
    done = Rollout(Request(prompt, 0, 0, Sampling.plain(200)), whole, (0.0,) * len(whole), Finish.EOS, 0)
    assert task.reward(prompt, done).total == 1.0 and text.rpartition("=")[2] == ""


@pytest.mark.parametrize("split", ["train", "eval"])
def test_texts_stand_before_the_problem_and_its_answer_stays(split: str):
    task = made.task("arithmetic", TOKENIZER)
    prompt = task.prompts(split)[3]
    context = task.in_context(prompt, ["1+2=3", "x"])
    assert task.text(context.token_ids) == "1+2=3\n\nx\n\n" + task.text(prompt.token_ids)
    assert context.answer == prompt.answer and context.id.startswith(f"{prompt.id}~")
    other = task.in_context(prompt, ["1+2=3", "y"])
    assert other.id != context.id and task.in_context(prompt, ["1+2=3", "x"]) == context


def test_a_story_is_told_again_behind_a_text_in_the_template_and_solved_line_by_line():
    tokenizer = make_tokenizer()
    task = made.task("word_problems", tokenizer, min_steps=3, max_steps=3)
    prompt = task.prompts("eval")[0]
    asked = task.text(prompt.token_ids)
    assert asked.startswith("Question: ") and asked.endswith("\nAnswer:")
    behind = task.text(task.in_context(prompt, ["Be careful."]).token_ids)
    assert behind == asked.replace("Question: ", "Question: Be careful.\n\n")
    lines = task.text(task.solution(prompt)).strip().split("\n")
    assert len(lines) == 2 and lines[1].split("=")[0].startswith(lines[0].split("=")[1])


def rows(path: Path, *answers: Any, name: str = "answer") -> str:
    texts = [{"question": f"q{i}", "answer": "#### 1", name: answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(path)


def test_a_row_s_solution_is_its_text_but_the_last_line(tmp_path: Path):
    tokenizer = make_tokenizer()
    path = rows(tmp_path / "p.jsonl", "1+1=2\n2+2=4\n#### 4", "#### 4", "a\n#### 4")
    task = task_of("jsonl", tokenizer, path=path, eval_path=asked_elsewhere(tmp_path))
    assert [task.text(task.solution(prompt)).strip() for prompt in task._train] == ["1+1=2\n2+2=4", "", "a"]
    context = task.in_context(task._train[0], ["see"])
    assert task.text(context.token_ids) == "Question: see\n\nq0\nAnswer:"


@pytest.mark.parametrize(
    ("answers", "field", "said"),
    [
        (["#### 4", "#### 5", "7"], None, "none has a line before the one that says the answer"),
        (
            [4, 5],
            "work",
            "line 1: the field 'work' (task.solution_field) must be the text of a worked solution, but is 4",
        ),
        (
            ["x\n#### 1"],
            "missing",
            "the field 'missing' (task.solution_field) must be the text of a worked solution",
        ),
    ],
)
def test_a_solution_that_is_none_is_refused_with_its_place(
    tmp_path: Path, answers: list[Any], field: str | None, said: str
):
    path = rows(tmp_path / "p.jsonl", *answers, name=field if field == "work" else "answer")
    tokenizer = make_tokenizer()
    task = task_of("jsonl", tokenizer, path=path, eval_path=asked_elsewhere(tmp_path), solution_field=field)
    with pytest.raises(UserError) as refused:
        task.solution(task.prompts("train")[0])
    assert said in str(refused.value)


def asked_elsewhere(folder: Path) -> str:
    (folder / "e.jsonl").write_text(json.dumps({"question": "r", "answer": "#### 1"}))
    return str(folder / "e.jsonl")
