"""The torch rollout engine. It has no weights of its own, and between two calls of `generate` keeps only what its
predictor has learned; the work is in `generation.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from grpo_cli.engine.common import EngineParts, SequenceEngine, check_context
from grpo_cli.engine.cuda_graph import CudaGraphs
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.determinism import Invariance, computes_the_same, invariance_of, rounding_warning
from grpo_cli.engine.eviction import Dense
from grpo_cli.engine.generation import Generation
from grpo_cli.engine.layers import NATIVE, Compiled
from grpo_cli.engine.scheduling import Fifo
from grpo_cli.engine.sequence import Sequence
from grpo_cli.interfaces import Replies, facts
from grpo_cli.model.anatomy import unwrapped
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
    """Rollouts by the trainer's own modules. With float32 on a CPU a rollout's bits depend only on its request, if
    `determinism.py` finds that possible, which `facts` reports.

    `decode` turns tokens into text; it is used only for requests with stop strings.
    """

    reads_stop_strings = True

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
        self._decoder = Decoder.of(model, packed_weights)
        on_gpu = self._decoder.device.type == "cuda"
        if on_gpu if compile is None else compile:
            self._decoder = replace(self._decoder, compiled=Compiled(Compiler(warn)))
        if against := _against_graphs(unwrapped(model), self._decoder.device):
            if cuda_graph:
                raise UserError(f"engine.cuda_graph=true: {against}; leave it out")
            if on_gpu and cuda_graph is None:
                warn(f"decode steps are launched kernel by kernel, and slower: {against}")
        graphs = not against if cuda_graph is None else cuda_graph
        if self._decoder.keeps_adapters_apart:
            warn(
                "adapters are not merged for rollouts, since their base is quantised (model.quantize): each of these "
                "layers takes two more small products in every step; with model.quantize=none and float32 it takes none"
            )
        self._capture = CudaGraphs if graphs else None
        self._packed_weights, self._threads = packed_weights, threads_for(threads, model, most=1)
        self._native: bool | str = native and not compile  # or why not
        # Only useful if the scheduler orders by length.
        self._prefix = parts.predictor.prefix_tokens if parts.scheduler.needs_lengths else 0
        self._warned = set[str]()
        self._invariance: Invariance | None = None

    def generate(
        self,
        requests: Seq[Request],
        enough: Callable[[Rollout], bool] | None = None,
        replies: Replies | None = None,
    ) -> Iterator[Rollout]:
        """Yield one rollout per request, in order of finishing. Once `enough` returns True for a finished one, the
        others are partial, except those that end in the same step. With `replies` a rollout is an episode: its
        environment answers each turn.
        """
        self._stats = EngineStats()
        self._check(requests)
        with computing_with(self._threads):
            self._pad()
            if requests:
                capture = self._capture and self._capture()
                settings = self._prefix, capture, replies, enough
                yield from self._serve(Generation(self._decoder, self._parts, requests, *settings))
        give_back_freed(all_of_it=False)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._parts.warn(text)

    def _pad(self) -> None:
        """Set the padding for the current model, precision and threads; warns once if bits depend on the batch."""
        if self._native is True and not self._decoder.is_native:
            self._go_native()
        found = invariance_of(replace(self._decoder, may_pack=self._packed_weights))
        self._decoder = replace(self._decoder, padding=found.padding, may_pack=found.packed)
        self._invariance = found
        if not found.holds and self._decoder.promises_bits:
            self._warn_once(rounding_warning(found, torch.get_num_threads()))
        slow = self._decoder.no_triton(self._parts.sparsity.needs_received)
        if slow and self._decoder.device.type == "cuda":
            self._warn_once(f"decode steps attend without page tables, and are slower: {slow}")

    def _go_native(self) -> None:
        if not self._decoder.can_be_native:
            self._native = "not for this device, precision or size of heads"
            return
        natively = replace(self._decoder, functions=NATIVE)
        slower = "decode steps run slower, in PyTorch's operations: {}; engine.native=false accepts that"
        self._native = tried(lambda: computes_the_same(natively), slower, self._parts.warn)
        if self._native is True:
            self._decoder = natively

    def facts(self) -> Mapping[str, Any]:
        """Return the engine's part of `summary.json`. None before the first `generate`: nothing was tested yet."""
        found = self._invariance
        return {
            "invariant": None if found is None else found.holds,
            "threads": torch.get_num_threads() if self._decoder.device.type == "cpu" else None,
            "decode_threads": self._threads,
            "padding": None if found is None else asdict(found.padding),
            "packed_weights": None if found is None else found.packed,
            "native": None if found is None else self._native,
        }

    def _serve(self, generation: Generation) -> Iterator[Rollout]:
        """Yield rollouts, with predicted lengths if the scheduler needs them. Sets `stats` however it ends."""
        prefix, shape, room = self._prefix, generation.plan.shape, generation.plan.room
        if room.probes_with:
            self._warn_once(
                f"sampler.kv_budget cannot hold the {prefix}-token prefixes of all {shape.requests} rollouts of "
                f"{shape.prompts} prompts, so lengths are not predicted: set it to {room.probes_with} bytes, or use "
                "predictor=mean"
            )
        try:
            if room.probes:
                # Every rollout makes prefix + 1 tokens (the state after `prefix` of them yields one more), then waits
                # with its keys kept. The cost, those keys and a partly idle last round, is counted.
                yield from (rollout for _, rollout in generation.serve(Fifo(), pause_at=prefix + 1))
                generation.details["engine/probe_steps"] = float(generation.stats().decode_steps)
            if not generation.halted:
                predicting = room.probes or self._predictor.prefix_tokens == 0
                if predicting:
                    self._predict(generation.waiting)
                served: list[tuple[Sequence, Rollout]] = []
                for one in generation.serve(self._scheduler):
                    served.append(one)
                    yield one[1]
                if predicting:
                    generation.details |= self._learn(served)
                generation.details |= self._scheduler.details
        finally:
            self._stats = generation.stats()
            generation.end()

    def _check(self, requests: Seq[Request]) -> None:
        prompts: dict[str, Prompt] = {}
        for request in requests:
            prompt = request.prompt
            known = prompts.setdefault(prompt.id, prompt)
            if known is not prompt and known.token_ids != prompt.token_ids:
                raise UserError(
                    f"two prompts have the id {prompt.id!r}, one of {len(known.token_ids)} tokens and one of "
                    f"{len(prompt.token_ids)} others, but a prompt is computed once and stored under its id: make the "
                    "task's ids unique"
                )
            if request.resumed and not isinstance(self._parts.sparsity, Dense):
                raise UserError(
                    f"prompt {prompt.id} ends with {request.resumed} tokens of a partial rollout, which "
                    f"sparsity={type(self._parts.sparsity).__name__.lower()} would count as prompt and never evict: "
                    "use sparsity=dense"
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
