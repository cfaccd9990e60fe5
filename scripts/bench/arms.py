"""What `rollout.py` measures: cases, the work they ask for, and one arm per way of doing it.

An arm is a function that loads the case's model and returns another that serves requests and says what that took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from common import engine_of, settings_of
from transformers import GenerationConfig, PreTrainedConfig, Qwen2Config

from grpo_cli.collect.requests import requests_for
from grpo_cli.config.instantiate import make
from grpo_cli.config.overrides import quoted
from grpo_cli.model.load import eos_token_ids, load_model, load_tokenizer
from grpo_cli.settings import RunSettings
from grpo_cli.types import Prompt, Request

WARM_UP_TOKENS = 16
NEVER = -1  # an end-of-sequence token that no model produces


def _qwen2(vocabulary: int, *sizes: int) -> PreTrainedConfig:
    """`sizes`: hidden, intermediate, layers, heads, key-value heads, context."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    words = dict(zip((*names, "max_position_embeddings"), sizes, strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return Qwen2Config(
        vocab_size=vocabulary, tie_word_embeddings=True, eos_token_id=None, rope_parameters=rope, **words
    )


@dataclass(frozen=True)
class Shape:
    """A model to try, and what is asked of it when nothing else is said."""

    config: PreTrainedConfig | None  # None: the embedded one
    prompt_tokens: tuple[int, int]  # fewest and most, of random tokens; the embedded task has its own
    n: int
    max_new_tokens: int
    repeats: int


_50M = _qwen2(32_768, 512, 1536, 12, 8, 2, 2048)
_WIDE = _qwen2(256, 256, 256, 2, 8, 8, 1 << 16)
SHAPES = {
    "tiny": Shape(None, (0, 0), n=64, max_new_tokens=128, repeats=15),
    "50m": Shape(_50M, (16, 48), n=32, max_new_tokens=128, repeats=1),
    "wide": Shape(_WIDE, (16, 16), n=16, max_new_tokens=128, repeats=1),  # as many key-value heads as heads
}


@dataclass(frozen=True)
class Case:
    """What every arm of one comparison is given. `slots` is for the arms that do not take everything at once."""

    model: str
    folder: str  # where its weights are
    device: str
    n: int
    prompts: int
    slots: int
    max_new_tokens: int
    lengths: str  # natural | forced | full
    cv: float
    threads: int
    repeats: int
    seed: int
    words: Sequence[str] = ()  # of `grpo train`: another task, another precision

    @property
    def run(self) -> tuple[str, ...]:
        """The words of `grpo train` that say the same."""
        dtype = "bfloat16" if self.device == "cuda" else "float32"
        model = ("model=hf", f"model.path={quoted(self.folder)}", f"model.dtype={dtype}", "model.autocast=none")
        return (*model, f"seed={self.seed}", f"sampling.max_new_tokens={self.max_new_tokens}", *self.words)

    @property
    def settings(self) -> RunSettings:
        return settings_of(*self.run)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.settings.model.autocast == "bfloat16")

    def loaded(self) -> Any:
        return load_model(self.settings.model, torch.device(self.device))


@dataclass(frozen=True)
class Work:
    """The requests of a case. With lengths that are not natural each request's limit is its length."""

    requests: list[Request]
    eos: tuple[int, ...]

    @property
    def forced(self) -> bool:
        return self.eos == (NEVER,)

    def cut(self, tokens: int) -> list[Request]:
        """Return the same requests with at most `tokens` new tokens."""
        return [with_limit(r, min(r.sampling.max_new_tokens, tokens)) for r in self.requests]


@dataclass(frozen=True)
class Ran:
    """One run of an arm: tokens made per request, in no particular order, and what it took."""

    lengths: Sequence[int]
    steps: int
    kv_bytes: int


Run = Callable[[Sequence[Request]], Ran]
Arm = Callable[[Case, Work, ExitStack], Run]


def with_limit(request: Request, tokens: int) -> Request:
    return replace(request, sampling=replace(request.sampling, max_new_tokens=tokens))


def make_work(case: Case) -> Work:
    """The requests, by name of prompt and number of sample: the same in every process."""
    shape = SHAPES.get(case.model)
    prompts, eos = _random_prompts(case, shape) if shape and shape.config else _task_prompts(case)
    requests = requests_for(prompts, case.n, case.settings.sampling, case.seed, 0)
    if case.lengths == "forced":
        longest = case.max_new_tokens
        limits = lognormal(len(requests), longest, longest / 4, case.cv, case.seed)
        requests = [with_limit(request, limit) for request, limit in zip(requests, limits, strict=True)]
    return Work(requests, eos if case.lengths == "natural" else (NEVER,))


def lognormal(count: int, longest: int, mean: float, cv: float, seed: int) -> list[int]:
    """`count` lengths up to `longest`: quantiles of a log-normal distribution with this mean and coefficient of
    variation, shuffled by the seed."""
    sigma = np.sqrt(np.log1p(cv**2))
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    lengths = np.exp(np.log(mean) - sigma**2 / 2 + sigma * normal)
    shuffled = np.random.default_rng(seed).permutation(np.clip(np.rint(lengths), 1, longest))
    return shuffled.astype(int).tolist()


def _task_prompts(case: Case) -> tuple[list[Prompt], tuple[int, ...]]:
    settings = case.settings
    tokenizer = load_tokenizer(settings.model)
    offered = {"tokenizer": tokenizer, "seed": case.seed, "warn": print}
    prompts = make("task", settings.parts["task"], offered).prompts("train")
    return [prompts[i] for i in range(case.prompts)], eos_token_ids(case.loaded(), tokenizer)


def _random_prompts(case: Case, shape: Shape) -> tuple[list[Prompt], tuple[int, ...]]:
    rng = np.random.default_rng(case.seed)
    assert shape.config is not None, "the embedded model has prompts of its own"
    widths = rng.integers(*shape.prompt_tokens, case.prompts, endpoint=True)
    ids = [tuple(rng.integers(0, shape.config.vocab_size, width).tolist()) for width in widths]
    return [Prompt(f"random{i}", tokens, "") for i, tokens in enumerate(ids)], (NEVER,)


def ours(*given: Any) -> Run:
    """The engine of `grpo train <words>`, whose cache is made anew by every run."""
    *words, case, work, _ = given
    return _run_by(_engine(case, work.eos, *words))


def _engine(case: Case, eos: Sequence[int], *words: str) -> Any:
    model = case.loaded()
    if case.lengths == "full":  # a longer context than it may have learnt; nobody reads what it says
        model.config.max_position_embeddings = max(model.config.max_position_embeddings, 2 * case.max_new_tokens)
    slots = () if "sampler=full" in words else (f"sampler.slots={case.slots}",)
    return engine_of(model, eos, *slots, *words)


def _run_by(engine: Any) -> Run:
    def run(requests: Sequence[Request]) -> Ran:
        lengths = [len(rollout) for rollout in engine.generate(requests)]
        stats = engine.stats()
        return Ran(lengths, stats.decode_steps, stats.kv_peak_bytes)

    return run


class Watch:
    """A forward hook that counts, and holds the cache of the last forward so that its shapes can be read."""

    def __init__(self) -> None:
        self.forwards, self._cache = 0, None

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        name = "cache" if "cache" in output else "past_key_values"  # renamed by transformers 5.24
        self.forwards, self._cache = self.forwards + 1, output[name]

    def take(self) -> tuple[int, int]:
        """Forwards since the last `take`, and the bytes that the cache has grown to."""
        assert self._cache is not None, "a forward came first"
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)
        forwards, self.forwards, self._cache = self.forwards, 0, None
        return forwards, nbytes


def _hf_words(work: Work, max_new_tokens: int) -> GenerationConfig:
    """Sample from the model's own distribution; what ends a reply."""
    eos = None if work.forced else list(work.eos)
    return GenerationConfig(do_sample=True, top_k=0, eos_token_id=eos, pad_token_id=0, max_new_tokens=max_new_tokens)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and attention mask, a row each.

    >>> left_padded([[5, 6, 7], [8]])
    ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])
    """
    width = max(map(len, prompts))
    tokens = [[0] * (width - len(ids)) + list(ids) for ids in prompts]
    return tokens, [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]


def generate(in_slots: bool, case: Case, work: Work, stack: ExitStack) -> Run:
    """`model.generate` on everything, or on `slots` requests at a time.

    A row that has ended stays in its batch until the last one ends, so with forced lengths the longest is all that has
    to be asked for: ending each row at its own would change nothing that is computed.
    """
    model = case.loaded()
    if work.forced:
        model.generation_config.eos_token_id = None  # which `generate` falls back to where it is given None
    torch.manual_seed(case.seed)
    watch = Watch()
    stack.callback(model.register_forward_hook(watch).remove)

    def one_batch(requests: Sequence[Request]) -> Ran:
        tokens, mask = left_padded([r.prompt.token_ids for r in requests])
        limits = np.array([r.sampling.max_new_tokens for r in requests])
        out = model.generate(
            torch.tensor(tokens, device=case.device),
            attention_mask=torch.tensor(mask, device=case.device),
            generation_config=_hf_words(work, int(limits.max())),
        )
        ended = np.isin(out[:, len(mask[0]) :].cpu().numpy(), work.eos)
        lengths = np.where(ended.any(1), ended.argmax(1) + 1, limits)
        forwards, kv_bytes = watch.take()
        return Ran(lengths.tolist(), forwards - 1, kv_bytes)

    def run(requests: Sequence[Request]) -> Ran:
        rows = case.slots if in_slots else len(requests)
        batches = [one_batch(requests[start : start + rows]) for start in range(0, len(requests), rows)]
        lengths = [length for batch in batches for length in batch.lengths]
        return Ran(lengths, sum(batch.steps for batch in batches), max(batch.kv_bytes for batch in batches))

    return run


def vllm(word: str, case: Case, work: Work, stack: ExitStack) -> Run:
    """vLLM in this process, with blocks for all its rows at full length and the one that it keeps for itself."""
    engine = _engine(case, () if work.forced else work.eos, "engine=vllm", "engine.sleep=false", word)
    stack.callback(engine.close)
    run = _run_by(engine)
    run(work.requests)  # its cache is as large as the first requests need

    def without_prompts(requests: Sequence[Request]) -> Ran:
        engine._llm.reset_prefix_cache()  # as after an update: no arm knows the prompts before it begins
        return run(requests)

    return without_prompts


ARMS: Mapping[str, Arm] = {
    "full": partial(ours, "sampler=full"),
    "micro": partial(ours, "sampler=micro"),
    "infinite": partial(ours, "sampler=infinite"),
    "infinite-graph": partial(ours, "sampler=infinite", "engine.cuda_graph=true"),
    "generate": partial(generate, False),
    "generate-slots": partial(generate, True),
    "vllm": partial(vllm, "sampler=full"),
    "vllm-slots": partial(vllm, "sampler=infinite"),
}
