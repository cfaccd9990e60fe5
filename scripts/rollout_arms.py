"""What `bench_rollout.py` measures: cases, the work they ask for, and one arm per way of doing it.

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
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from grpo_cli.config.compose import model_of
from grpo_cli.config.instantiate import ready
from grpo_cli.engine.engine import TorchEngine
from grpo_cli.engine.padding import round_up
from grpo_cli.engine.predict import NoPredictor
from grpo_cli.engine.sampler import Sampler
from grpo_cli.engine.schedule import Fifo
from grpo_cli.engine.sparsity import Dense
from grpo_cli.model.load import eos_token_ids, load_model, load_tokenizer
from grpo_cli.rollout import requests_for
from grpo_cli.settings import ModelSettings, Sampling
from grpo_cli.types import Prompt, Request

NEVER = -1  # a token id that no model produces
PAGE = 32  # tokens per page of the paged caches; the 256 that `transformers` takes would mostly hold padding here
WARM_UP_TOKENS = 16


def _config(kind: type[PreTrainedConfig], theta: float, **words: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": theta}
    return kind(tie_word_embeddings=True, rope_parameters=rope, eos_token_id=None, **words)


@dataclass(frozen=True)
class Shape:
    """A model to try, and what is asked of it when nothing else is said."""

    config: PreTrainedConfig | None  # None: the embedded one
    prompt_tokens: tuple[int, int]  # fewest and most, of random tokens; the embedded task has its own
    n: int
    max_new_tokens: int
    repeats: int


SHAPES = {
    "tiny": Shape(None, (0, 0), n=64, max_new_tokens=128, repeats=15),
    "50m": Shape(
        _config(
            Qwen2Config,
            1e4,
            vocab_size=32_768,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        ),
        (16, 48),
        n=32,
        max_new_tokens=128,
        repeats=1,
    ),
    "qwen3-1.7b": Shape(
        _config(
            Qwen3Config,
            1e6,
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
        ),
        (64, 192),
        n=32,
        max_new_tokens=1024,
        repeats=1,
    ),
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

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def settings(self) -> ModelSettings:
        return model_of("hf", path=self.folder, dtype=self.dtype)


@dataclass(frozen=True)
class Work:
    """The requests of a case. With lengths that are not natural each request's limit is its length."""

    requests: list[Request]
    eos: tuple[int, ...]

    @property
    def forced(self) -> bool:
        return self.eos == (NEVER,)

    @property
    def longest(self) -> int:
        """The most tokens that a request may come to, its prompt included."""
        return max(len(r.prompt.token_ids) + r.sampling.max_new_tokens for r in self.requests)

    def cut(self, tokens: int) -> list[Request]:
        """The same requests with at most so many new tokens."""
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


def forced_lengths(count: int, longest: int, cv: float, seed: int) -> list[int]:
    """`count` numbers of tokens from 1 to `longest`: the evenly spaced quantiles, in an order of the seed's, of a
    log-normal distribution with a mean of a quarter of `longest` and this coefficient of variation.

    Quantiles and not draws, since a few draws of so skewed a distribution seldom vary as much as it does.
    """
    sigma = np.sqrt(np.log1p(cv**2))
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    lengths = np.exp(np.log(longest / 4) - sigma**2 / 2 + sigma * normal)
    shuffled = np.random.default_rng(seed).permutation(np.clip(np.rint(lengths), 1, longest))
    return shuffled.astype(int).tolist()


def make_work(case: Case) -> Work:
    """The requests, by name of prompt and number of sample: the same in every process."""
    prompts, eos = _random_prompts(case) if SHAPES[case.model].config else _task_prompts(case)
    requests = requests_for(prompts, case.n, Sampling.plain(case.max_new_tokens), case.seed, 0)
    if case.lengths == "forced":
        limits = forced_lengths(len(requests), case.max_new_tokens, case.cv, case.seed)
        requests = [with_limit(request, limit) for request, limit in zip(requests, limits, strict=True)]
    return Work(requests, eos if case.lengths == "natural" else (NEVER,))


def _task_prompts(case: Case) -> tuple[list[Prompt], tuple[int, ...]]:
    tokenizer = load_tokenizer(case.settings)
    prompts = ready("task", "arithmetic", {"tokenizer": tokenizer, "seed": case.seed}).prompts("train")
    eos = eos_token_ids(load_model(case.settings, torch.device("cpu")), tokenizer)
    return [prompts[i] for i in range(case.prompts)], eos


def _random_prompts(case: Case) -> tuple[list[Prompt], tuple[int, ...]]:
    shape, rng = SHAPES[case.model], np.random.default_rng(case.seed)
    assert shape.config is not None, "the embedded model has prompts of its own"
    widths = rng.integers(*shape.prompt_tokens, case.prompts, endpoint=True)
    ids = [tuple(rng.integers(0, shape.config.vocab_size, width).tolist()) for width in widths]
    return [Prompt(f"random{i}", tokens, "") for i, tokens in enumerate(ids)], (NEVER,)


def ours(case: Case, work: Work, stack: ExitStack, sampler: Callable[[int], Sampler]) -> Run:
    """The torch engine; its cache is made anew by every run."""
    model = load_model(case.settings, torch.device(case.device))
    engine = TorchEngine(model, work.eos, sampler(case.slots), Fifo(), NoPredictor(), Dense(), cuda_graph=False)

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
        self.forwards, self._cache = self.forwards + 1, output.past_key_values

    def take(self) -> tuple[int, int]:
        """Forwards since the last `take`, and the bytes that the cache has grown to."""
        assert self._cache is not None, "a forward came first"
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)
        forwards, self.forwards, self._cache = self.forwards, 0, None
        return forwards, nbytes


def _hf_model(case: Case, work: Work) -> PreTrainedModel:
    model = load_model(case.settings, torch.device(case.device))
    if work.forced:
        model.generation_config.eos_token_id = None  # which `generate` falls back to where it is given None
    return model


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


def generate(case: Case, work: Work, stack: ExitStack, in_slots: bool) -> Run:
    """`model.generate` on everything, or on `slots` requests at a time.

    A row that has ended stays in its batch until the last one ends, so with forced lengths the longest is all that has
    to be asked for: ending each row at its own would change nothing that is computed.
    """
    model = _hf_model(case, work)
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


def continuous(case: Case, work: Work, stack: ExitStack, in_slots: bool) -> Run:
    """Continuous batching of `transformers`, with pages for all rows at full length."""
    model = _hf_model(case, work)
    rows = case.slots if in_slots else len(work.requests)
    paged = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=rows * round_up(work.longest, PAGE) // PAGE,
        max_batch_tokens=max(rows, 512),
        max_requests_per_batch=rows,
        safety_margin=0.0,
        seed=case.seed,
    )
    manager = stack.enter_context(
        model.continuous_batching_context_manager(
            generation_config=_hf_words(work, case.max_new_tokens),
            continuous_batching_config=paged,
            warmup=case.device == "cuda",
            timeout=60,
        )
    )

    def run(requests: Sequence[Request]) -> Ran:
        before = getattr(manager, "current_batch", 0)  # which its thread sets when it starts
        for request in requests:
            limit = request.sampling.max_new_tokens
            manager.add_request(list(request.prompt.token_ids), max_new_tokens=limit, eos_token_id=list(work.eos))
        lengths: list[int] = []
        while len(lengths) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("continuous batching ended") from manager.background_thread_status.fatal_error
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                lengths.append(len(result.generated_tokens))
        assert manager.batch_processor is not None, "it has just served requests"
        return Ran(lengths, manager.current_batch - before, manager.batch_processor.cache.cache_tensor.nbytes)

    return run


def vllm(case: Case, work: Work, stack: ExitStack, in_slots: bool) -> Run:
    """vLLM in this process, with blocks for all its rows at full length and the one that it keeps for itself."""
    model = load_model(case.settings, torch.device(case.device))
    sampler = ready("sampler", "infinite", slots=case.slots) if in_slots else ready("sampler", "full")
    eos = () if work.forced else work.eos
    parts = {"sampler": sampler, "scheduler": Fifo(), "predictor": NoPredictor(), "sparsity": Dense()}
    engine = ready("engine", "vllm", {"model": model, "eos_token_ids": eos, **parts}, sleep=False)
    stack.callback(engine.close)
    list(engine.generate(work.requests))  # its cache is as large as the first requests need

    def run(requests: Sequence[Request]) -> Ran:
        lengths = [len(rollout) for rollout in engine.generate(requests)]
        stats = engine.stats()
        return Ran(lengths, stats.decode_steps, stats.kv_peak_bytes)

    return run


ARMS: Mapping[str, Arm] = {
    "full": partial(ours, sampler=lambda slots: ready("sampler", "full")),
    "micro": partial(ours, sampler=lambda slots: ready("sampler", "micro", slots=slots)),
    "infinite": partial(ours, sampler=lambda slots: ready("sampler", "infinite", slots=slots)),
    "generate": partial(generate, in_slots=False),
    "generate-slots": partial(generate, in_slots=True),
    "continuous": partial(continuous, in_slots=False),
    "continuous-slots": partial(continuous, in_slots=True),
    "vllm": partial(vllm, in_slots=False),
    "vllm-slots": partial(vllm, in_slots=True),
}
