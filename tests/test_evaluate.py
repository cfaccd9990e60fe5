"""Evaluation: right is what the task's grading calls right, and every sample is counted where it belongs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import made
import pytest
from made import infinite, mean_length
from small import FakeEngine, make_engine, small_model
from tiny_hf import make_tokenizer

from grpo_cli.collect.requests import requests_for
from grpo_cli.engine.scheduling import Lpt
from grpo_cli.evaluate import evaluate
from grpo_cli.interfaces import Task
from grpo_cli.model.load import load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.types import Finish, Prompt, Request, Reward, Rollout

TOKENIZER = make_tokenizer()


class Scripted(FakeEngine):
    """An engine whose reply is a function of the request; it keeps the requests."""

    def __init__(self, reply: Callable[[Request], str]) -> None:
        self._reply = reply
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.asked += requests
        for request in reversed(requests):
            ids = (*TOKENIZER.encode(self._reply(request), add_special_tokens=False), TOKENIZER.eos_token_id)
            yield Rollout(request, ids, (0.0,) * len(ids), Finish.EOS)


def task_for(folder: Path) -> Task:
    """Four questions, with the answers 10, 11, 12 and 13."""
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": f"{10 + i}"}) + "\n" for i in range(4)))
    return made.task("jsonl", TOKENIZER, path=str(path), eval_fraction=1.0)


def greedy(request: Request) -> bool:
    return request.sampling.temperature == 0.0


def test_a_reward_is_right_by_its_part_correct_else_by_a_total_of_one():
    parts = {"correct": 1.0, "correct_strict": 0.0, "other": 0.99}
    assert Reward(0.0, parts).solved and Reward(1.0).solved and not Reward(0.99).solved
    assert not any(Reward(5.0, parts, answer_part=part).solved for part in ("correct_strict", "other"))


def test_each_prompt_is_answered_greedily_once_and_sampled_k_times(tmp_path):
    """Every answer can be read with what it was."""
    task = task_for(tmp_path)
    prompts, engine = list(task.prompts("eval"))[:2], Scripted(lambda one: f"{one.prompt.id} {one.sample}")
    words = dict(max_new_tokens=5, stop=("x",), max_turn_tokens=None)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, **words)
    rows = evaluate(engine, task, prompts, sampling, k=2, seed=3).examples
    certain = Sampling(temperature=0.0, top_p=1.0, top_k=0, **words)
    asked = [(0, certain), (0, sampling), (1, sampling)]  # prompt by prompt, so that few are held
    assert [(r.prompt.id[-1], r.sample, r.sampling) for r in engine.asked] == [(i, *one) for i in "12" for one in asked]
    assert len({r.seed for r in engine.asked}) == 6 and all(r.held_out for r in engine.asked)
    assert [row.reason for row in rows] == ["greedy"] * 2 + ["sampled"] * 4
    assert [row.reply[-3:] for row in rows] == ["1 0", "2 0", "1 0", "1 1", "2 0", "2 1"]


def test_an_outage_of_the_judge_is_no_accuracy(tmp_path):
    task, engine = task_for(tmp_path), Scripted(lambda one: "10")
    task.rewards = lambda pairs: [Reward(0.0, judged=i > 0) for i, _ in enumerate(pairs)]
    with pytest.raises(UserError, match="the judge failed on 1 of 4 answers"):
        evaluate(engine, task, list(task.prompts("eval")), Sampling.plain(5), k=1, seed=0)


def test_metrics_are_those_of_hand_counted_answers(tmp_path):
    task = task_for(tmp_path)

    def reply(request: Request) -> str:
        """Greedily only the first is right; of four samples none, one, two and four."""
        line = int(request.prompt.id[-1])
        right = line == 1 if greedy(request) else request.sample < (0, 1, 2, 4)[line - 1]
        return request.prompt.answer if right else ("no" if greedy(request) else "not at all")

    def measured(k: int) -> dict[str, float]:
        found = evaluate(Scripted(reply), task, list(task.prompts("eval")), Sampling.plain(128), k, seed=0).metrics
        return {name.removeprefix("eval/"): value for name, value in found.items()}

    found = measured(4)
    lengths = [1 + len(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("10", "no", "no", "no")]
    assert found["length_mean"] == sum(lengths) / 4
    assert (found["accuracy"], found["pass@1"], found["pass@4"]) == (0.25, 7 / 16, 0.75)
    # Wilson's interval of 1 in 4: (0.25 + z^2/8 -+ z sqrt(0.1875/4 + z^2/64)) / (1 + z^2/4) with z = 1.96
    assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    # s^2 of 0, 1/4, 1/2 and 1 is 35/256, and p(1-p) 63/256: as certain as 4 * 63/35 = 7.2 coin flips. Pass@4 has 4.
    assert (found["pass@1_low"], found["pass@1_high"]) == pytest.approx((0.1658, 0.7527), abs=1e-4)
    assert (found["pass@4_low"], found["pass@4_high"]) == pytest.approx((1 - 0.6994, 1 - 0.0456), abs=1e-4)


def test_an_evaluation_teaches_the_length_predictor_nothing():
    """It asks about other prompts, greedily or at another temperature, and ever the same ones."""
    predictor = mean_length()
    engine = make_engine(small_model(), sampler=infinite(slots=4), scheduler=Lpt(), predictor=predictor)
    prompts = [Prompt(f"p{i}", (2 + i, 3, 4 + i), "1") for i in range(4)]
    task = made.task("arithmetic", load_tokenizer(made.model()))

    def after_evaluation() -> str:
        evaluate(engine, task, prompts, Sampling.plain(20, temperature=0.5), k=3, seed=0)
        return repr(predictor.state_dict())

    assert after_evaluation() == repr(mean_length().state_dict())
    list(engine.generate(requests_for(prompts, 4, Sampling.plain(20), seed=0, step=0)))
    learnt = repr(predictor.state_dict())
    assert after_evaluation() == learnt != repr(mean_length().state_dict())
