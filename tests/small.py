"""Small models and requests for tests of the engine and the trainer, made in memory in milliseconds."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import made
import numpy as np
import pytest
import torch
from made import full
from tiny_hf import random_model
from transformers import PreTrainedModel

from grpo_cli.collect.requests import seed_of
from grpo_cli.collect.resuming import joined, remaining_request, unstarted
from grpo_cli.engine.common import EngineParts
from grpo_cli.engine.cuda_graph import StepOutput
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.generation import Generation
from grpo_cli.engine.length_predictor import NoPredictor
from grpo_cli.engine.scheduling import Fifo
from grpo_cli.engine.torch_engine import TorchEngine
from grpo_cli.interfaces import Downsample
from grpo_cli.native.library import NoNative, library
from grpo_cli.rules.downsample import choose
from grpo_cli.settings import Sampling
from grpo_cli.types import Batch, EngineStats, Finish, Prompt, Request, Reward, Rollout, ScoredGroup

VOCABULARY, EOS = 24, 1


def small_model(family: str = "qwen2", *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random model whose every weight counts; float32, in evaluation mode."""
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": EOS}
    return random_model(family, seed, **(ids | config)).eval()


def adapted_model() -> Any:
    """With adapters that do something, which new ones do not."""
    pytest.importorskip("peft")
    from grpo_cli.model.adapters import with_adapters

    lora = made.lora(rank=2, alpha=8.0, dropout=0.5, targets=("q_proj", "v_proj", "down_proj"))
    return moved(with_adapters(small_model(), replace(made.model(), lora=lora)).eval())


def moved(model: Any) -> Any:
    """The model with what is trained of it moved: new adapters add nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight += torch.randn(weight.shape, generator=generator) * 0.1
    return model


def some_requests(prompts: int = 3, n: int = 4, *, tokens: int = 30, seed: int = 0, **words: Any) -> list[Request]:
    """`n` requests for each of `prompts` prompts of 3 to 39 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    sampling = replace(Sampling.plain(tokens), **words)
    requests = []
    for name in range(prompts):
        length = int(torch.randint(3, 40, (), generator=generator))
        ids = tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())
        prompt = Prompt(f"p{name}", ids, "")
        requests += [Request(prompt, sample, seed_of(seed, name, sample), sampling) for sample in range(n)]
    return requests


def require_c(name: str) -> None:
    """Skip where this file of C cannot be compiled."""
    try:
        library(name)
    except NoNative as error:
        pytest.skip(str(error))


def holds_bits(model: Any) -> bool:
    """What an engine finds out about a model once, for this test and those that follow."""
    engine = make_engine(model)
    engine._prepare()
    return bool(engine.facts()["invariant"])


def require_bits(model: Any) -> None:
    """Skips a test of bits, saying so, where the engine finds that they cannot be held for this model."""
    if not holds_bits(model):
        pytest.skip(f"bits cannot be held: {torch.get_num_threads()} threads, MKL_CBWR={os.environ.get('MKL_CBWR')}")


def engine_of(choice: str, model: Any, **words: Any) -> Any:
    """An engine with the settings of conf/engine and everything off, but for what is given."""
    parts: dict[str, Any] = dict(eos_token_ids=(EOS,), scheduler=Fifo(), predictor=NoPredictor(), sparsity=Dense())
    parts |= {"sampler": full(), **words}
    names = [field.name for field in fields(EngineParts) if field.name in parts]
    own = {name: value for name, value in words.items() if name not in names}
    part, given = made.part("engine", choice, **own), EngineParts(model=model, **{name: parts[name] for name in names})
    return pkgutil.resolve_name(part.pop("_target_"))(given, **part)


def make_engine(model: Any, **words: Any) -> TorchEngine:
    engine: TorchEngine = engine_of("torch", model, **{"cuda_graph": False} | words)
    return engine


def make_generation(decoder: Decoder, requests: Sequence[Request], **parts: Any) -> Generation:
    """All at once with everything off, but for what is given."""
    own = {name: parts.pop(name) for name in ("prefix", "capture", "observations") if name in parts}
    defaults: dict[str, Any] = dict(sampler=full(), sparsity=Dense(), eos_token_ids=(EOS,))
    defaults |= dict(model=decoder.model, scheduler=Fifo(), predictor=NoPredictor())
    return Generation(decoder, EngineParts(**(defaults | parts)), requests, **own)


@torch.no_grad()
def policy_logprobs(model: Any, rollout: Rollout) -> torch.Tensor:
    """What plain `transformers` says of a rollout's tokens, without a cache, at its temperature."""
    prompt, made = list(rollout.request.prompt.token_ids), torch.tensor(rollout.token_ids)
    logits = model(torch.tensor([prompt + made.tolist()])).logits[0, len(prompt) - 1 : -1]
    return (logits / rollout.request.sampling.temperature).log_softmax(-1).gather(1, made[:, None])[:, 0]


def finished_in_rounds(engine: Any, requests: Sequence[Request]) -> list[Rollout]:
    """Rollouts to their ends, in rounds that stop once a third of what is left has ended; a round is a version."""
    done, left, rounds = list[Rollout](), [unstarted(request) for request in requests], 0
    while left:
        asked = [remaining_request(rollout) for rollout in left]
        of = {(request.prompt.id, request.sample): one for request, one in zip(asked, left, strict=True)}
        enough = iter([False] * (len(left) // 3) + [True])  # and an engine asks no more
        made = list(engine.generate(asked, lambda _, enough=enough: next(enough)))
        assert contents(made).keys() == of.keys(), "every request comes back once"
        assert sum(one.finish is not Finish.PARTIAL for one in made) > len(left) // 3, "no round stops before"
        assert engine.stats().generated_tokens == sum(map(len, made)), "each token counts where it was drawn"
        parts = [joined(of[one.request.prompt.id, one.request.sample], one, rounds) for one in made]
        done += [one for one in parts if one.finish is not Finish.PARTIAL]
        left = [one for one in parts if one.finish is Finish.PARTIAL]
        rounds += 1
    return done


def some_and_the_rest(cases: Sequence[Any], some: Sequence[Any]) -> list[Any]:
    """Parameters of which all but `some` are marked as `matrix`; a tuple is those of several names."""
    assert all(case in cases for case in some)
    marks = [() if case in some else pytest.mark.matrix for case in cases]
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*of, marks=mark) for of, mark in zip(values, marks, strict=True)]


def scored(
    *rewards: float | Reward,
    name: str = "p",
    prompt: tuple[int, ...] = (1,),
    replies: Sequence[tuple[int, ...]] = (),
    logprobs: Sequence[tuple[float, ...]] = (),
) -> ScoredGroup:
    """A group with a rollout for each reward: of one token, unless its tokens or their log-probabilities are given."""
    asked, sampling = Prompt(name, prompt, ""), Sampling.plain(128)
    replies = replies or [(1,) * len(said) for said in logprobs] or [(1,)] * len(rewards)
    logprobs = logprobs or [(-1.0,) * len(reply) for reply in replies]
    rollouts = tuple(
        Rollout(Request(asked, sample, sample, sampling), reply, said, Finish.EOS)
        for sample, (reply, said) in enumerate(zip(replies, logprobs, strict=True))
    )
    return ScoredGroup(asked, rollouts, tuple(r if isinstance(r, Reward) else Reward(float(r)) for r in rewards))


def completions(mask: Any) -> torch.Tensor:
    """Where completions are, if responses are where the mask [B, T] is: from each row's first true to its last."""
    mask = torch.as_tensor(mask).bool()
    return (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)


def plain_batch(mask: Any, input_ids: torch.Tensor | None = None, **fields: Any) -> Batch:
    """A batch with responses where the mask [B, T] is true, all of them trained on. What is not given is 0; advantages
    are 1. Fields are as the mask, or have a number for each row."""
    response, own = torch.as_tensor(mask).bool(), completions(mask)
    ids = torch.zeros(response.shape, dtype=torch.long) if input_ids is None else input_ids
    starts = torch.where(own.any(1), own.int().argmax(1), ids.shape[1])
    prompts = [tuple(row[:start].tolist()) for row, start in zip(ids, starts, strict=True)]
    known, zeros = list(dict.fromkeys(prompts)), torch.zeros(response.shape)
    given = {"response_mask": response, "loss_mask": response, "weights": response.float(), "token_ids": ids}
    given |= {"sampler_logprobs": zeros, "old_logprobs": None, "ref_logprobs": None, "advantages": zeros + 1.0}
    for name, value in fields.items():
        given[name] = value[:, None].expand(response.shape) if value is not None and value.dim() == 1 else value
    rows = {"group": torch.tensor([known.index(one) for one in prompts], dtype=torch.long), "lengths": own.sum(1)}
    return Batch(tuple(known), **rows, **{key: value if value is None else value[own] for key, value in given.items()})


def advantages_of(rule: Any, rewards: Sequence[float | Reward], kept: Sequence[int] | None = None, **words: Any) -> Any:
    """Those of a group with these rewards, as floats."""
    return rule(scored(*rewards), range(len(rewards)) if kept is None else kept, **words).tolist()


def kept_by(rule: Downsample, group: ScoredGroup, keep: int, rng: np.random.Generator) -> ScoredGroup:
    """The part of the group that is trained on, in its order."""
    return group.take(choose(rule, group, keep, rng))


class FakeEngine:
    """As much of an engine as makes no rollouts; what is faked of one is written below its name."""

    reads_stop_strings = False

    def generate(self, requests: Any) -> Any:
        raise AssertionError("a rollout was asked for")

    def stats(self) -> EngineStats:
        return EngineStats()

    def update_weights(self) -> None: ...

    def facts(self) -> Mapping[str, Any]:
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Again:
    """A stand-in for a GPU graph: a capture that repeats a function, and overwrites its results. Capturing runs it
    once."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], StepOutput]) -> tuple[StepOutput, Callable[[], StepOutput]]:
        first = run()
        results = tuple(result.clone() for result in first)
        self.captured += 1

        def replay() -> StepOutput:
            self.replayed += 1
            for mine, its in zip(results, run(), strict=True):
                mine.copy_(its)
            return results

        return first, replay


Contents = Mapping[tuple[str, int], tuple[tuple[int, ...], tuple[float, ...], str]]


def contents(rollouts: Any) -> Contents:
    """What rollouts say, whatever the order they came in: tokens, log-probabilities and why they ended."""
    made: list[Rollout] = list(rollouts)
    found = {(r.request.prompt.id, r.request.sample): (r.token_ids, r.sampler_logprobs, r.finish.value) for r in made}
    assert len(found) == len(made), "a request came back twice"
    return found
