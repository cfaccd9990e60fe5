"""The torch rollout engine. It has no weights of its own, and between two calls of `generate` keeps only what its
predictor has learned; the work is in `generation.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from grpo_cli.engine.common import EngineParts, Enough, SequenceEngine, check_context
from grpo_cli.engine.cuda_graph import CudaGraphs
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.determinism import batch_invariant, computes_the_same
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.generation import Generation
from grpo_cli.engine.layers import NATIVE, Compiled
from grpo_cli.engine.products import has_packed
from grpo_cli.engine.scheduling import Fifo
from grpo_cli.engine.sequence import Sequence
from grpo_cli.interfaces import EnvironmentAnswers, facts
from grpo_cli.model.checks import context_of
from grpo_cli.model.compiling import Compiler
from grpo_cli.native.library import tried
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import give_back_freed
from grpo_cli.support.ranges import Count
from grpo_cli.support.threads import computing_with, threads_for
from grpo_cli.types import EngineStats, Prompt, Request, Rollout


@facts(is_policy=True, answers_in_place=True)
class TorchEngine(SequenceEngine):
    """Rollouts by the trainer's own modules. With float32 in C a rollout's bits depend only on its request, if
    `determinism.py` finds that possible, which `facts` reports."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        cuda_graph: bool | None,
        packed_weights: bool,
        native: bool,
        compile: bool | None,
        threads: Count | Literal["auto"],
    ) -> None:
        super().__init__(parts)
        model, warn = parts.model, parts.warn
        self._decoder = Decoder.of(model)
        on_gpu = self._decoder.device.type == "cuda"
        if on_gpu if compile is None else compile:
            self._decoder = replace(self._decoder, compiled=Compiled(Compiler(warn)))
        if against := _against_graphs(self._decoder.model, self._decoder.device):
            if cuda_graph:
                raise UserError(f"engine.cuda_graph=true: {against}; leave it out")
            if on_gpu and cuda_graph is None:
                warn(f"decode steps are launched kernel by kernel, and slower: {against}")
        self._capture = None if against or cuda_graph is False else CudaGraphs
        self._packed_weights, self._threads = packed_weights, threads_for(threads, model, most=1)
        self._native: bool | str = native and not compile  # or why not
        # Only useful if the scheduler orders by length.
        self._prefix = parts.predictor.prefix_tokens if parts.scheduler.needs_lengths else 0
        self._is_invariant: bool | None = None  # until it is tested

    def generate(
        self, requests: Seq[Request], enough: Enough | None = None, answers: EnvironmentAnswers | None = None
    ) -> Iterator[Rollout]:
        """Yield one rollout per request, in order of finishing. Once `enough` returns True for a finished one, the
        others are partial, except those that end, or whose environment ends them, in the same step. With `answers` a
        rollout is an episode: its environment answers each turn.
        """
        self._stats = EngineStats()
        self._check(requests)
        with computing_with(self._threads):
            self._prepare()
            if requests:
                settings = self._prefix, self._capture and self._capture(), answers, enough
                yield from self._serve(Generation(self._decoder, self._parts, requests, *settings))
        give_back_freed(all_of_it=False)

    def _prepare(self) -> None:
        """Choose C and the padding for the model, precision and threads; warn once if bits depend on the batch."""
        if self._native is True and not self._decoder.is_native:
            slower = "decode steps run slower, in PyTorch's operations: {}; engine.native=false accepts that"
            native, self._native = replace(self._decoder, functions=NATIVE), "not for this device, precision or model"
            if self._decoder.can_be_native:
                self._native = tried(lambda: computes_the_same(native), slower, self._parts.warn)
            self._decoder = native if self._native is True else self._decoder
        decoder = replace(self._decoder, may_pack=self._packed_weights and has_packed(self._decoder.precision))
        self._decoder, self._is_invariant = batch_invariant(decoder)
        if decoder.promises_bits and not self._is_invariant:
            self._warn_once(
                f"float32 products depend on the number of rows here ({torch.get_num_threads()} threads): a rollout is "
                "the same to rounding only under another sampler, scheduler or number of slots (engine.invariant in "
                "summary.json); resuming and repeating a run are not affected"
            )

    def facts(self) -> Mapping[str, Any]:
        """Return the engine's part of `summary.json`. None before the first `generate`: nothing was tested yet."""
        known = self._is_invariant is not None
        return {
            "invariant": self._is_invariant,
            "threads": self._threads if self._decoder.device.type == "cpu" else None,
            "padding": asdict(self._decoder.padding) if known else None,
            "packed_weights": self._decoder.packs if known else None,
            "native": self._native if known else None,
        }

    def _serve(self, generation: Generation) -> Iterator[Rollout]:
        """Yield rollouts, with predicted lengths if the scheduler needs them. Sets `stats` however it ends."""
        details = dict[str, float]()
        if self._prefix and self._parts.sampler.kv_budget is not None:
            self._warn_once("predictor=prefix predicts nothing under a sampler.kv_budget: use predictor=mean")
        try:
            if generation.plan.prefix_blocks:
                # Every rollout makes prefix + 1 tokens (the state after `prefix` of them yields one more), then waits
                # with its keys kept. The cost, those keys and a partly idle last round, is counted.
                yield from (rollout for _, rollout in generation.serve(Fifo(), pause_at=self._prefix + 1))
            if not generation.stopped:
                predicting = generation.plan.prefix_blocks > 0 or self._predictor.prefix_tokens == 0
                if predicting:
                    self._predict(generation.waiting)
                served = list[tuple[Sequence, Rollout]]()
                for one in generation.serve(self._scheduler):
                    served.append(one)
                    yield one[1]
                if predicting:
                    details |= self._learn(served)
        finally:
            self._stats = generation.stats(details)

    def _check(self, requests: Seq[Request]) -> None:
        prompts: dict[str, Prompt] = {}
        for request in requests:
            prompt = request.prompt
            if prompts.setdefault(prompt.id, prompt).token_ids != prompt.token_ids:  # each is stored under its id
                raise UserError(f"two prompts have the id {prompt.id!r}: make the task's ids unique")
            if request.resumed_tokens and not isinstance(self._parts.sparsity, Dense):
                raise UserError(
                    f"prompt {prompt.id} ends with {request.resumed_tokens} tokens of a partial rollout, which "
                    "eviction would count as prompt: use sparsity=dense"
                )
        check_context(requests, context_of(self._decoder.model.config))


def _against_graphs(model: Any, device: torch.device) -> str:
    """Return why decode steps cannot be replayed as CUDA graphs; empty if they can."""
    if getattr(model, "is_loaded_in_8bit", False):
        return "model.quantize=8bit searches for outliers in every step"
    kind = getattr(model.model.rotary_emb, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"rope_type {kind} depends on the longest row in every step"
    return "" if device.type == "cuda" else f"a graph needs a GPU, and the model is on {device}"
