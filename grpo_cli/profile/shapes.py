"""What each phase of a step takes, from shapes: the run's own code on fake tensors, which have shapes and no memory.

Nothing is computed and no weight is read, so a model of any size can be asked about. A phase is run at its fullest
moments only, such as the decode step with most rows and those with the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_cli.engine.attention import Rows
from grpo_cli.engine.decoder import Decoder
from grpo_cli.engine.generation import PREFILL_TOKENS, Generation
from grpo_cli.engine.padding import TILE, round_up
from grpo_cli.engine.sampler import Sampler
from grpo_cli.engine.sparsity import Budget, Dense
from grpo_cli.engine.stop import NeverStop
from grpo_cli.learner.forward import Pass, Row
from grpo_cli.meter import NullMeter
from grpo_cli.model.packed import allow_packing
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, Allocations
from grpo_cli.settings import Sampling
from grpo_cli.types import Prompt, Request

Sizes = Mapping[str, int]  # bytes by kind
KV = "kv"


@dataclass(frozen=True)
class EngineShape:
    """What decides how much a rollout engine allocates. `prefix` is how many tokens everyone makes before the rest is
    ordered by predicted length; 0: nobody asks for that."""

    sampler: Sampler
    sparsity: Dense | Budget
    prefix: int


@dataclass(frozen=True)
class Work:
    """What one `generate` is asked for: `n` rollouts of each prompt, and how long they will be, prompt by prompt."""

    prompts: tuple[Prompt, ...]
    n: int
    max_new_tokens: int
    lengths: tuple[int, ...]


class ShapeModel:
    """A model without weights, and what a pass of it would take. `autocast` is `none` or `bfloat16`; `bits` are those
    of its quantised weights, which concerns their own size only (None: not quantised)."""

    def __init__(self, load: Any, autocast: str, bits: int | None = None) -> None:
        """`load` makes the model; it is called where every new tensor is a fake one."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake, _unmoved():
            self.model = load()
        # Fake tensors have no values, so transformers could not see that nothing is packed, and would make masks and
        # biases of rows x width x width that a run does not have. With this attention it makes none.
        allow_packing(self.model)
        self._autocast = autocast
        self._bits = bits
        self.train_pass = lru_cache(maxsize=None)(self._train_pass)  # the same shapes come again and again
        self.quiet_pass = lru_cache(maxsize=None)(self._quiet_pass)
        self.rollouts = lru_cache(maxsize=None)(self._rollouts)

    @property
    def weights(self) -> int:
        """Bytes of all weights and buffers, shared ones once."""
        held = [*self.model.parameters(), *self.model.buffers()]
        whole = sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}.values())
        if self._bits is None:
            return whole
        return whole - sum(w.untyped_storage().nbytes() - w.numel() * self._bits // 8 for w in self._quantised())

    def _quantised(self) -> list[Tensor]:
        """What bitsandbytes quantises: linear layers, but for the head and the adapters."""
        named = [(name, module) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        return [module.weight for name, module in named if "lora_" not in name and not name.endswith("lm_head")]

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @contextmanager
    def _watched(self, *, training: bool) -> Iterator[Allocations]:
        precision: AbstractContextManager[Any] = nullcontext()
        if self._autocast != "none":
            precision = torch.autocast("cpu", getattr(torch, self._autocast))
        mode = self.model.training
        with ExitStack() as stack:
            stack.enter_context(self._fake)
            allocations = stack.enter_context(Allocations(self.model))
            stack.enter_context(precision)
            stack.enter_context(torch.set_grad_enabled(training))
            self.model.train(training)
            try:
                yield allocations
            finally:
                self.model.train(mode)
                for parameter in self.model.parameters():
                    parameter.grad = None

    def _train_pass(self, way: Pass, rows: tuple[Row, ...], temperature: float, later: bool) -> tuple[Sizes, Sizes]:
        """Forward and backward of a micro-batch. `later`: gradients of an earlier one are there."""
        way.prepare(self.model)
        with self._watched(training=True) as allocations:
            if later:
                for parameter in self.trained:
                    parameter.grad = torch.zeros_like(parameter)
                    allocations.mark(parameter.grad, GRADIENTS)
            allocations.take_peak()
            values = way.blank(self.model, rows, temperature)
            forward = allocations.take_peak()
            values.sum().backward()
            return forward, allocations.take_peak()

    def _quiet_pass(self, way: Pass, rows: tuple[Row, ...], temperature: float) -> Sizes:
        """The same pass forward without gradients."""
        way.prepare(self.model)
        with self._watched(training=False) as allocations:
            way.blank(self.model, rows, temperature)
            return allocations.take_peak()

    def _rollouts(self, work: Work, engine: EngineShape) -> tuple[Sizes, Sizes]:
        """Prefill and decode of one `generate`."""
        sampling = Sampling.plain(work.max_new_tokens)
        requests = [Request(prompt, i, 0, sampling) for prompt in work.prompts for i in range(work.n)]
        with self._watched(training=False) as allocations:
            decoder = Decoder(self.model)
            generation = Generation(
                decoder, (0,), engine.sampler, engine.sparsity, requests, None, NeverStop(), NullMeter(), engine.prefix
            )
            parked = self._parked(generation, work, engine.prefix)
            for store in (generation.slots.kv, generation.prompts.store):
                allocations.mark(store.keys, KV)
                allocations.mark(store.values, KV)
            prefill = self._prefill(generation, decoder, requests, allocations)
            decode = [
                self._decode(generation, decoder, rows, width, allocations)
                for rows, width in fullest(work.lengths, generation.slots.count, generation.slots.kv.capacity)
            ]
        most = max(decode, key=lambda sizes: sum(sizes.values()))
        return _with(prefill, parked), _with(most, parked)

    def _parked(self, generation: Generation, work: Work, prefix: int) -> int:
        """Keys of those that wait after their prefix: all that go on after the token that its last key comes with."""
        if not generation.room.probes:
            return 0
        return sum(length > prefix + 1 for length in work.lengths) * generation.shape.parked_bytes

    def _prefill(
        self, generation: Generation, decoder: Decoder, requests: Sequence[Request], allocations: Allocations
    ) -> Sizes:
        """The largest batch of prompts that run together, and the first token of all that then begin."""
        prompts = {r.prompt.id: len(r.prompt.token_ids) for r in requests[: generation.slots.count]}
        widths: dict[int, int] = {}
        for length in prompts.values():
            width = round_up(length, TILE)
            widths[width] = min(widths.get(width, 0) + 1, max(1, PREFILL_TOKENS // width))
        width = max(widths, key=lambda width: width * widths[width])
        count = min(widths[width], generation.prompts.entries)
        allocations.take_peak()
        done = decoder.prefill([[0] * width] * count, False)
        entries = [generation.prompts.claim() for _ in range(count)]
        generation.prompts.put(entries, done.keys, done.values, done.logits, [width] * count)
        del done
        some = torch.zeros(generation.slots.count, dtype=torch.long)
        generation.slots.record(some, generation.prompts.logits[some], torch.zeros(1, dtype=torch.long))
        return allocations.take_peak()

    def _decode(
        self, generation: Generation, decoder: Decoder, rows: int, width: int, allocations: Allocations
    ) -> Sizes:
        """One step of so many rows that look at `width` keys of their own."""
        entries = min(generation.prompts.entries, rows)
        columns = round_up(-(-rows // entries), decoder.padding.columns)
        whole = torch.zeros(rows, dtype=torch.long)
        step = Rows(
            tokens=whole,
            positions=whole,
            lengths=whole,
            width=width,
            prompt_lengths=None,
            blind=False,
            table=torch.zeros(entries, columns, dtype=torch.long),
            place=whole,
            in_order=entries * columns == rows,
        )
        allocations.take_peak()
        hidden = decoder.step(step, generation.slots.kv, generation.prompts, generation.slots.keeper)
        generation.slots.record(whole, decoder.logits(hidden), torch.zeros(1, dtype=torch.long))
        return allocations.take_peak()


@contextmanager
def _unmoved() -> Iterator[None]:
    """Modules stay where they are: PEFT moves new adapters to where their layer is already, and PyTorch moves a fake
    parameter by swapping it for another, which one that the mode watches does not allow."""
    move = nn.Module.to
    setattr(nn.Module, "to", lambda module, *_, **__: module)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "to", move)  # noqa: B010


def fullest(lengths: Sequence[int], slots: int, capacity: int) -> list[tuple[int, int]]:
    """Moments of a rollout that may be its fullest: rows that run, and keys of their own that the longest looks at.

    Where everybody has a slot, rows end and the rest get longer; where slots are refilled they stay as many.

    >>> fullest([10, 20, 30, 300], slots=4, capacity=304)
    [(4, 16), (3, 32), (2, 32), (1, 304)]
    """
    if slots < len(lengths):
        return [(slots, min(capacity, round_up(max(lengths), TILE)))]
    moments = {}
    for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        step = max(1, int(np.quantile(lengths, share, method="lower")) - 1) if share else 1
        running = sum(length > step for length in lengths)
        if running:
            moments[running] = min(capacity, round_up(step + 1, TILE))
    return sorted(moments.items(), reverse=True) or [(slots, min(capacity, TILE))]


def _with(sizes: Sizes, parked: int) -> Sizes:
    return {**sizes, KV: sizes.get(KV, 0) + parked, ACTIVATIONS: sizes.get(ACTIVATIONS, 0)}
