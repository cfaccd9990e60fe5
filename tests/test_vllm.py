"""The vLLM engine with vLLM itself, on a CPU with the embedded model: the policy's weights, its log-probabilities, the
same rollouts in distribution as the torch engine's, and how it ends when something is wrong."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from made import infinite, micro
from small import contents, engine_of, finished_in_rounds, make_engine, policy_logprobs
from transformers import PreTrainedModel
from typed import json_lines, refused

from grpo_cli.collect.episodes import play
from grpo_cli.collect.requests import requests_for
from grpo_cli.collect.resuming import unstarted
from grpo_cli.engine.vllm_engine import VllmEngine
from grpo_cli.model.load import load_model, load_tokenizer
from grpo_cli.settings import Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.arithmetic import Arithmetic
from grpo_cli.types import Request, Rollout

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TINY = made.model()
CLOSE = 1e-4


def tiny() -> PreTrainedModel:
    return load_model(TINY, torch.device("cpu"))


@pytest.fixture(scope="module")
def task() -> Arithmetic:
    return made.task("arithmetic", load_tokenizer(TINY))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[VllmEngine]:
    """One engine of 64 slots for all tests that change nothing."""
    yield engine_of("vllm", model, rollouts_per_step=64)


def requests_of(task: Arithmetic, prompts: int, n: int, **words: Any) -> list[Request]:
    sampling = replace(Sampling.plain(128), **words)
    return requests_for([task.prompts("train")[i] for i in range(prompts)], n, sampling, 0, 0)


def worst(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> float:
    """The largest difference to what `transformers` says, at the temperature that was sampled at."""
    return max(float((policy_logprobs(model, r) - torch.tensor(r.sampler_logprobs)).abs().max()) for r in rollouts)


def test_sampler_logprobs_are_those_of_the_distribution_drawn_from_and_a_seed_draws_again(
    engine: VllmEngine, model: PreTrainedModel, task: Arithmetic
):
    """Also one of 64 bits: vLLM stores seeds with a sign."""
    for temperature in (1.0, 0.7):
        requests = requests_of(task, 4, 4, temperature=temperature)
        requests[0] = replace(requests[0], seed=2**64 - 1)
        first, again = (list(engine.generate(requests)) for _ in range(2))
        assert len(first) == 16 and worst(model, first) < CLOSE
        tokens = [{name: said[0] for name, said in contents(one).items()} for one in (first, again)]
        assert tokens[0] == tokens[1] and len(set(tokens[0].values())) > 6, "samples of a prompt differ"


def test_greedy_replies_and_episodes_are_those_of_torch(engine: VllmEngine, model: PreTrainedModel, task: Arithmetic):
    """Of an episode the one draws a turn of everybody in a round, the other answers in place."""
    requests, game = requests_of(task, 16, 1, temperature=0.0), made.task("guess", load_tokenizer(TINY))
    assert contents(engine.generate(requests)) == contents(make_engine(model).generate(requests))
    turns = requests_of(game, 8, 1, temperature=0.0, max_new_tokens=64, max_turn_tokens=4)

    def played(by: Any) -> dict[str, Any]:
        return {one.request.prompt.id: (one.parts, one.finish) for one in play(by, game, [*map(unstarted, turns)])}

    found = played(engine)
    assert found == played(make_engine(model)) and any(len(parts) > 2 for parts, _ in found.values())


@pytest.mark.parametrize(("sampler", "slots"), [(micro(slots=5), 5), (infinite(slots=7), 7)], ids=str)
def test_what_is_stopped_goes_on_where_it_was_and_every_request_comes_back_once(model, task, sampler, slots):
    engine = engine_of("vllm", model, sampler=sampler, decode=lambda ids: "".join(chr(97 + one) for one in ids))
    requests = requests_of(task, 4, 6, max_new_tokens=40)
    rollouts = finished_in_rounds(engine, requests)
    assert {id(rollout.request) for rollout in rollouts} == {id(request) for request in requests}
    assert any(len(rollout) > 1 for rollout in rollouts) and worst(model, rollouts) < CLOSE
    made = contents(engine.generate(requests))
    assert set(made) == {(r.prompt.id, r.sample) for r in requests}, "nothing is left of what was stopped"
    for tokens, logprobs, finish in made.values():
        assert len(tokens) == len(logprobs) <= 40 and (tokens[-1] == 1) == (finish == "eos")
    assert engine.stats().slots == slots and 0 < engine.stats().slot_utilisation <= 1
    greedy = requests_of(task, 12, 1, temperature=0.0)
    plain = contents(make_engine(model).generate(greedy))
    assert contents(finished_in_rounds(engine, greedy)) == plain
    middle = {name: tokens[len(tokens) // 2] for name, (tokens, *_) in plain.items()}
    words = [replace(one.sampling, stop=(chr(97 + middle[one.prompt.id, 0]),)) for one in greedy]
    stopping = [replace(one, sampling=word) for one, word in zip(greedy, words, strict=True)]
    for name, (tokens, _, finish) in contents(engine.generate(stopping)).items():
        assert tokens == plain[name][0][: plain[name][0].index(middle[name]) + 1]
        assert finish == ("eos" if tokens[-1] == 1 else "stop")


def test_rollouts_that_were_stopped_and_resumed_are_those_of_the_torch_engine_in_distribution(engine, model, task):
    """Lengths and rewards of 2,048 rollouts each, over the same prompts with other seeds.

    Kolmogorov-Smirnov: for equal distributions the largest distance between two empirical ones of n each exceeds
    1.95 sqrt(2 / n) in 0.1 % of cases. Rewards are 0 or 1: the shares' difference against 3.3 standard errors.
    """
    requests = requests_of(task, 32, 64)
    torch_engine = make_engine(model)
    lengths, rewards = [], []
    for rollouts in (finished_in_rounds(engine, requests), list(torch_engine.generate(requests))):
        lengths.append(np.sort([len(rollout) for rollout in rollouts]))
        rewards.append(np.mean([task.reward(rollout.request.prompt, rollout).total for rollout in rollouts]))
    grid = np.arange(129)
    below = [np.searchsorted(some, grid, side="right") / len(some) for some in lengths]
    distance, share = np.abs(below[0] - below[1]).max(), np.mean(rewards)
    print(f"lengths: distance {distance:.4f}, means {lengths[0].mean():.2f} {lengths[1].mean():.2f}; rewards {rewards}")
    assert distance < 1.95 * (2 / 2048) ** 0.5
    assert abs(rewards[0] - rewards[1]) < 3.3 * (2 * share * (1 - share) / 2048) ** 0.5


def test_what_vllm_would_change_silently_is_refused(engine: VllmEngine, model: PreTrainedModel, task: Arithmetic):
    for words, named in (({"temperature": 0.005}, "sampling.temperature"), ({"max_new_tokens": 700}, "max_model_len")):
        with pytest.raises(UserError, match=named):
            list(engine.generate(requests_of(task, 1, 1, **words)))
    for options, named in (({"logprobs_mode": "raw_logprobs"}, "logprobs_mode would bias"), ({"seed": 3}, "TypeError")):
        with pytest.raises(UserError, match=named):
            list(engine_of("vllm", model, options=options).generate(requests_of(task, 1, 1)))


def test_a_budget_bounds_the_cache(model: PreTrainedModel, task: Arithmetic):
    engine = engine_of("vllm", model, sampler=infinite(kv_budget="2MB"))
    assert len(list(engine.generate(requests_of(task, 2, 4, max_new_tokens=16)))) == 8
    assert engine.stats().kv_peak_bytes <= 2_000_000
    core = weakref.ref(engine._llm.llm_engine.engine_core)
    engine.close()
    gc.collect()
    assert core() is None, "a closed engine lets vLLM go"


def test_the_policy_learns_and_a_failure_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After nine steps, with an evaluation after the eighth: in the tenth, vLLM fails among the rollouts."""
    updates, update, step = list[int](), VllmEngine._update, VllmEngine._step

    def counted(engine: VllmEngine) -> None:
        updates.append(1)
        update(engine)

    def failing(engine: VllmEngine, *given: Any) -> Any:
        if len(updates) == 10 and given[0].steps == 5:
            engine._llm.llm_engine.step = lambda: 1 // 0
        return step(engine, *given)

    monkeypatch.setattr(VllmEngine, "_update", counted)
    monkeypatch.setattr(VllmEngine, "_step", failing)
    words = "train engine=vllm sampler=infinite sampler.slots=64 train.steps=20 train.checkpoint_every=8 "
    words += f"eval.every=8 eval.problems=100 eval.k=1 logger=jsonl hydra.run.dir={tmp_path}"
    assert "vLLM failed after 5 steps with 64 rollouts under way: ZeroDivisionError" in refused(*words.split())
    records = json_lines(tmp_path / "metrics.jsonl")
    accuracy = {r["step"]: r["eval/accuracy"] for r in records if "eval/accuracy" in r}
    assert accuracy[0] < 0.6 and accuracy[8] > accuracy[0] + 0.15
    assert all(abs(r["mismatch/ratio_mean"] - 1) < 1e-3 for r in records if r["step"])
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "checkpoints" / "step_000008" / "model.safetensors").is_file()


@pytest.mark.gpu
def test_a_gpus_memory_is_given_back_between_rollouts(task: Arithmetic):
    model = tiny().to("cuda", torch.bfloat16)
    engine = engine_of("vllm", model, memory=0.2)
    for _ in range(2):
        rollouts = engine.generate(requests_of(task, 2, 4))
        next(rollouts)
        awake, _ = torch.cuda.mem_get_info()
        assert len(list(rollouts)) == 7 and torch.cuda.mem_get_info()[0] > awake + 2**30
        engine.update_weights()
