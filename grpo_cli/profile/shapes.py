"""The memory of each phase of a step, from shapes: the run's own code on fake tensors, which have no memory.

Nothing is computed and no weight is read, so this works for a model of any size. A phase is run only at its fullest
moments, such as the decode step with the most rows and those with the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from grpo_cli.engine.batching import Capped, Sampler
from grpo_cli.engine.kv.eviction import Budget, Dense
from grpo_cli.engine.step.decoder import Decoder
from grpo_cli.engine.torch.generation import Generation
from grpo_cli.engine.torch.peak import fullest_moments, parked_bytes
from grpo_cli.engine.torch.sizes import Sizes as EngineSizes
from grpo_cli.learner.forward import Forward, RowShape
from grpo_cli.learner.logprobs import _AT_ONCE as AT_ONCE
from grpo_cli.learner.logprobs import PLAIN, ByRow
from grpo_cli.model.anatomy import backbone
from grpo_cli.model.checkpointing import always_sparing, recompute_layers
from grpo_cli.model.packed import allow_packing
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, Allocations
from grpo_cli.settings import Sampling
from grpo_cli.support.memory import storage_bytes
from grpo_cli.support.meter import NullMeter
from grpo_cli.types import Prompt, Request

Sizes = Mapping[str, int]  # bytes by kind
KV = "kv"


@dataclass(frozen=True)
class EngineShape:
    """What decides how much a rollout engine allocates. `prefix` is how many tokens every rollout makes before the rest
    is ordered by predicted length; 0: none. `packed` matters on a CPU only. `rollouts` is the number of a step's, which
    also caps those that an evaluation runs at once. With `graphs`, each slot is one page from the start."""

    sampler: Sampler
    sparsity: Dense | Budget
    prefix: int
    packed: bool = False
    rollouts: int | None = None
    graphs: bool = False
    sampling: Sampling | None = None  # None: plain


@dataclass(frozen=True)
class Workload:
    """What an engine is asked for: the lengths of each prompt's rollouts. Groups may differ in size."""

    prompts: tuple[Prompt, ...]
    groups: tuple[tuple[int, ...], ...]
    max_new_tokens: int

    @classmethod
    def equal(cls, prompts: Sequence[Prompt], n: int, max_new_tokens: int, lengths: Sequence[int] = ()) -> Workload:
        """`n` rollouts of each prompt; lengths prompt by prompt, by default all `max_new_tokens`."""
        found = tuple(lengths or (max_new_tokens,) * (n * len(prompts)))
        return cls(tuple(prompts), tuple(found[i * n : (i + 1) * n] for i in range(len(prompts))), max_new_tokens)

    @property
    def n(self) -> int:
        """Rollouts of the largest group."""
        return max(map(len, self.groups))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of all rollouts, prompt by prompt."""
        return tuple(length for group in self.groups for length in group)

    @property
    def requests(self) -> list[Request]:
        sampling = Sampling.plain(self.max_new_tokens)
        pairs = zip(self.prompts, self.groups, strict=True)
        return [Request(prompt, i, 0, sampling) for prompt, group in pairs for i in range(len(group))]

    def at_full_length(self) -> Workload:
        """The same with every rollout at full length."""
        return replace(self, groups=tuple((self.max_new_tokens,) * len(group) for group in self.groups))

    @property
    def tokens(self) -> int:
        """Of all rollouts, each with its prompt."""
        pairs = zip(self.prompts, self.groups, strict=True)
        return sum(self.lengths) + sum(len(group) * len(prompt.token_ids) for prompt, group in pairs)


# Bits of a weight in NF4: 4, plus an 8-bit scale per 64 weights and a 32-bit one per 256 scales (arXiv 2305.14314, 3).
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)


class _Quantised(nn.Linear):
    """Stands for a linear layer of bitsandbytes; not a plain one, whose weight rollouts would copy."""

    def forward(self, x: Tensor) -> Tensor:
        return _Dequantised.apply(x, self.weight, self.bias).clone()  # as PEFT does before it adds an adapter's output


class _Dequantised(torch.autograd.Function):
    """A product with a weight that is dequantised only while it is used, forward and backward; its input is not kept,
    as the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ torch.empty_like(weight), None, None


def _make(layer: nn.Module) -> Hashable:
    """What layers have in common that take the same memory."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())


def _scratch(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Of a function of logits and what belongs to them, a few rows at a time: one that only allocates what it holds at
    its fullest. That is found once, since each of hundreds of chunks would take dozens of operations."""
    found: dict[Any, int] = {}

    def allocate(logits: Tensor, *others: Any) -> None:
        vocabulary = logits.shape[1]
        rows = min(len(logits), 2 * max(1, AT_ONCE["cpu"] // vocabulary))
        key = vocabulary, logits.dtype, rows, *(other for other in others if not isinstance(other, Tensor))
        if key not in found:
            nothing = SimpleNamespace(config=SimpleNamespace(vocab_size=vocabulary), parameters=list, buffers=list)
            with Allocations(nothing) as seen:
                seen.leave_out([logits, *(other for other in others if isinstance(other, Tensor))])
                compute(*(x[:rows] if isinstance(x, Tensor) else x for x in (logits, *others)))
                found[key] = sum(seen.take_peak().values())
        logits.new_empty(found[key] // 4 // vocabulary, vocabulary, dtype=torch.float32)

    return allocate


def _chosen(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    chosen = logits.new_empty(ids.shape, dtype=torch.float32)
    _CHOSEN(logits, ids, temperature)
    return chosen


_CHOSEN = _scratch(PLAIN.chosen)
_FEW_ROWS = ByRow(_chosen, _scratch(PLAIN.slope))


class ShapeModel:
    """A model without weights, and the memory that a pass of it would take. `autocast` is `none` or `bfloat16`; `bits`
    are those of a quantised weight, and affect only the size of the weights (None: not quantised)."""

    def __init__(
        self, load: Any, autocast: str, bits: float | None = None, offload: bool = False, on_cpu: bool = True
    ) -> None:
        """`load` makes the model; it is called where every new tensor is a fake one. `offload`: the inputs that
        recomputed layers keep are on another device. `on_cpu`: small passes store what they like."""
        self._on_cpu = on_cpu
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake, _unmoved():
            self.model = load()
        # Fake tensors have no values, so transformers could not see that nothing is packed, and would make masks of
        # rows x width x width that a run does not have. With this attention it makes none.
        allow_packing(self.model)
        if offload:
            recompute_layers(
                self.model, "full", lambda: saved_tensors_hooks(lambda x: (x.shape, x.dtype), _brought_back)
            )
        self._autocast = autocast
        self.bits = bits
        if bits is not None:
            for module in self._quantised():
                module.__class__ = _Quantised
            for module in self.model.modules():  # PEFT's adapters of quantised layers take their input as it is
                if hasattr(module, "cast_input_dtype_enabled"):
                    module.cast_input_dtype_enabled = False
        layers = list(backbone(self.model).layers)
        self.depth, self.alike = len(layers), len(set(map(_make, layers))) == 1
        self._decoders: dict[bool, Decoder] = {}
        self._trained: dict[int, list[Tensor]] = {}  # by the number of layers: to look for them takes milliseconds
        self.train_pass = lru_cache(maxsize=None)(self._train_pass)  # the same shapes come again and again
        self.quiet_pass = lru_cache(maxsize=None)(self._quiet_pass)
        self.rollouts = lru_cache(maxsize=None)(self._rollouts)
        self.fixed_slots = lru_cache(maxsize=None)(self._fixed_slots)

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights and buffers, shared ones counted once."""
        whole = storage_bytes([*self.model.parameters(), *self.model.buffers()])
        if self.bits is None:
            return whole
        quantised = [module.weight for module in self._quantised()]
        return whole - storage_bytes(quantised) + sum(int(weight.numel() * self.bits / 8) for weight in quantised)

    def _quantised(self) -> list[nn.Linear]:
        """What bitsandbytes quantises: linear layers, but for the head and the adapters."""
        named = [(name, module) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        return [module for name, module in named if "lora_" not in name and not name.endswith("lm_head")]

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that are trained."""
        layers = len(backbone(self.model).layers)
        if layers not in self._trained:
            self._trained[layers] = [p for p in self.model.parameters() if p.requires_grad]
        return self._trained[layers]

    @contextmanager
    def layers(self, count: int) -> Iterator[None]:
        """Within it the model has only so many of its layers."""
        body = backbone(self.model)
        every, body.layers = body.layers, body.layers[:count]
        try:
            yield
        finally:
            body.layers = every

    @contextmanager
    def watched(self, *, training: bool, few: bool = False) -> Iterator[Allocations]:
        """Within it every new tensor is fake and counted. Gradients are dropped at the end. With `few` a model of more
        than five layers has only five, the middle one of which stands for all others."""
        mode, layers = self.model.training, backbone(self.model).layers
        few = few and self.alike and self.depth > 5
        with ExitStack() as stack:
            if not self._on_cpu:
                stack.enter_context(always_sparing())
            if few:
                stack.enter_context(self.layers(5))
            stack.enter_context(self._fake)
            inner = (list(layers[1:4]), self.depth - 4) if few else ()
            allocations = stack.enter_context(Allocations(self.model, *inner))
            stack.enter_context(torch.set_grad_enabled(training))
            self.model.train(training)
            try:
                yield allocations
            finally:
                self.model.train(mode)
                for parameter in self.trained:
                    parameter.grad = None

    def precision(self) -> AbstractContextManager[Any]:
        """The precision of the learner's forward pass and of rollouts; casts of weights are cached until it ends."""
        return nullcontext() if self._autocast == "none" else torch.autocast("cpu", getattr(torch, self._autocast))

    def _train_pass(self, forward: Forward, rows: tuple[RowShape, ...], later: bool) -> tuple[Sizes, Sizes]:
        """Forward and backward of a micro-batch. `later`: gradients of an earlier one are already allocated."""
        forward.prepare(self.model)
        forward = replace(forward, by_row=_FEW_ROWS)
        with self.watched(training=True, few=True) as allocations:
            if later:
                for parameter in self.trained:
                    parameter.grad = torch.zeros_like(parameter)
                    allocations.mark(parameter.grad, GRADIENTS)
            allocations.take_peak()
            with self.precision():
                values = forward.blank(self.model, rows)
            without_backward = allocations.take_peak()
            values.sum().backward()
            return without_backward, allocations.take_peak()

    def _quiet_pass(self, forward: Forward, rows: tuple[RowShape, ...]) -> Sizes:
        """The same forward pass without gradients."""
        forward.prepare(self.model)
        forward = replace(forward, by_row=_FEW_ROWS)
        with self.watched(training=False, few=True) as allocations, self.precision():
            forward.blank(self.model, rows)
            return allocations.take_peak()

    def _decoder(self, packed: bool, allocations: Allocations) -> Decoder:
        """Its copies of weights are made once."""
        decoder = self._decoders.get(packed)
        if decoder is None:
            decoder = self._decoders[packed] = Decoder(self.model, packed=packed).in_its_precision()
        for tensor in decoder.copies:
            allocations.mark(tensor, ACTIVATIONS)
        return decoder

    def _rollouts(self, work: Workload, engine: EngineShape) -> tuple[Sizes, Sizes]:
        """Prefill and decode of one `generate`."""
        requests = work.requests
        if engine.sampling is not None:
            drawn = replace(engine.sampling, max_new_tokens=work.max_new_tokens)
            requests = [replace(request, sampling=drawn) for request in requests]
        with self.watched(training=False) as allocations, self.precision():
            decoder, sampler = self._decoder(engine.packed, allocations), Capped(engine.sampler, engine.rollouts)
            parts = (decoder, sampler, engine.sparsity, requests, (0,), NullMeter())
            generation = Generation(*parts, prefix=engine.prefix)
            for block in generation.cache.memory:
                allocations.mark(block, KV)
            found: dict[str, list[Sizes]] = {"prefill": [], "decode": []}
            allocations.take_peak()
            for moment, kv in fullest_moments(generation, work.lengths, self._on_cpu):
                found[moment].append({**allocations.take_peak(), KV: kv})
        parked = parked_bytes(generation, work.lengths)
        prefill, decode = (max(sizes, key=lambda one: sum(one.values())) for sizes in found.values())
        return _with(prefill, parked), _with(decode, parked)

    def _fixed_slots(self, work: Workload, engine: EngineShape) -> Sizes:
        """Return the keys and values that graphs need at fixed addresses, from the start of a generation to its end."""
        if not engine.graphs:
            return {}
        with self.watched(training=False), self.precision():
            decoder = Decoder(self.model).for_steps(engine.sparsity)
            sampler, others = Capped(engine.sampler, engine.rollouts), (engine.sparsity, work.requests, engine.prefix)
            return {KV: EngineSizes.of(decoder, sampler, *others, fills=True).fixed_bytes}


@contextmanager
def _unmoved() -> Iterator[None]:
    """Makes `Module.to` do nothing: PEFT moves new adapters to the device that they are on already, and PyTorch moves a
    fake parameter by swapping it, which is not allowed for one that the mode tracks."""
    move = nn.Module.to
    setattr(nn.Module, "to", lambda module, *_, **__: module)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "to", move)  # noqa: B010


def _brought_back(kept: tuple[torch.Size, torch.dtype]) -> Tensor:
    return torch.empty(kept[0], dtype=kept[1])


def _with(sizes: Sizes, parked: int) -> Sizes:
    return {**sizes, KV: sizes.get(KV, 0) + parked, ACTIVATIONS: sizes.get(ACTIVATIONS, 0)}
