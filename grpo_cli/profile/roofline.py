"""A lower bound of each phase's time: the bytes it must move and the operations it must do, over the device's rates.

Operations are PyTorch's own count of the run's code (`operations.py`): matrix products only, a multiplication and an
addition being two. Padding, casts and gaps between kernels do not count. Weights that fit a processor's caches are read
faster than memory is copied, so the embedded model may be below its floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_cli.engine.batching import DEFAULT_SLOTS, LEAST_AT_ONCE, Sampler
from grpo_cli.learner.forward import Forward, RowShape
from grpo_cli.model.anatomy import unwrapped
from grpo_cli.profile.estimate import StepShape, parts_of, rows_of
from grpo_cli.profile.operations import Operations, operations_of
from grpo_cli.profile.shapes import ShapeModel, Workload
from grpo_cli.support.memory import storage_bytes
from grpo_cli.support.meter import WallMeter

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Rates:
    """A device's peak bandwidth (reads plus writes) and operations per second, and the source of both."""

    bytes_per_second: float
    operations_per_second: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """As published: bytes of memory, bytes per second, and dense operations per second in bfloat16 with float32
    accumulation (None: unsupported) and in float32 without tensor cores."""

    memory: float
    bandwidth: float
    bfloat16: float | None
    float32: float
    source: str


# By the words of `profile.for_gpu`. Where a datasheet gives tensor rates "with sparsity", half of them.
KNOWN: Mapping[str, Gpu] = {
    "h200": Gpu(141e9, 4.8e12, 989e12, 67e12, "NVIDIA H200 datasheet, SXM"),
    "h100": Gpu(80e9, 3.35e12, 989e12, 67e12, "NVIDIA H100 datasheet, SXM"),
    "a100_80gb": Gpu(80e9, 2.039e12, 312e12, 19.5e12, "NVIDIA A100 datasheet, SXM"),
    "a100_40gb": Gpu(40e9, 1.555e12, 312e12, 19.5e12, "NVIDIA A100 datasheet, 40 GB"),
    "l40s": Gpu(48e9, 0.864e12, 362e12, 91.6e12, "NVIDIA L40S datasheet"),
    "l4": Gpu(24e9, 0.3e12, 121e12, 30.3e12, "NVIDIA L4 datasheet"),
    "a10": Gpu(24e9, 0.6e12, 125e12, 31.2e12, "NVIDIA A10 datasheet"),
    "t4": Gpu(16e9, 0.32e12, None, 8.1e12, "NVIDIA T4 datasheet"),
    "rtx4090": Gpu(24e9, 1.008e12, 165.2e12, 82.6e12, "NVIDIA Ada GPU architecture whitepaper"),
    "rtx3090": Gpu(24e9, 0.936e12, 71e12, 35.6e12, "NVIDIA Ampere GA102 GPU architecture whitepaper"),
}


def fast_when_planned(word: bool | str) -> bool | None:
    """Whether the GPU of `profile.for_gpu` computes bfloat16 faster than float32; None without one."""
    return KNOWN[word].bfloat16 is not None if isinstance(word, str) else word or None


def published(word: str, dtype: str) -> Rates:
    gpu = KNOWN[word]
    products = gpu.float32 if dtype == "float32" or gpu.bfloat16 is None else gpu.bfloat16
    return Rates(gpu.bandwidth, products, gpu.source)


def measured(device: torch.device, dtype: str) -> Rates:
    """Measured by large copies and matrix products, each the best of five. Takes a second on a CPU."""
    big, wide = (2**30, 8192) if device.type == "cuda" else (2**27, 1024)
    source, target = (torch.zeros(big, dtype=torch.uint8, device=device) for _ in range(2))
    # Random: a GPU multiplies equal numbers up to a seventh faster, as it takes less power.
    left, right = (torch.randn(wide, wide, device=device).to(getattr(torch, dtype)) for _ in range(2))
    copied = 2 * big / _best(device, lambda: target.copy_(source))
    return Rates(copied, 2 * wide**3 / _best(device, lambda: left @ right), "measured here")


def _best(device: torch.device, run: Callable[[], Any]) -> float:
    meter = WallMeter(device)
    run()
    seconds = []
    for _ in range(5):
        with meter.span("decode"):
            run()
        seconds.append(meter.take()["time/decode"])
    return min(seconds)


@dataclass(frozen=True)
class Floor:
    """The minimum of bytes moved and operations done."""

    nbytes: int
    operations: int

    def seconds(self, rates: Rates) -> float:
        return max(self.nbytes / rates.bytes_per_second, self.operations / rates.operations_per_second)

    def bound(self, rates: Rates) -> str:
        moving = self.nbytes / rates.bytes_per_second > self.operations / rates.operations_per_second
        return "memory" if moving else "products"

    def __add__(self, other: Floor) -> Floor:
        return Floor(self.nbytes + other.nbytes, self.operations + other.operations)

    def __mul__(self, times: int) -> Floor:
        return Floor(times * self.nbytes, times * self.operations)


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of a model that decide how much is moved and multiplied."""

    rollout: Operations  # with adapters merged, if there are any
    forward: Operations
    backward: Operations
    token_bytes: int  # keys and values of one token
    read_bytes: int  # of weights, by a training or scoring pass
    rollout_bytes: int  # of weights, by a decode step
    trained_bytes: int
    optimizer_bytes: int

    @classmethod
    def of(cls, shapes: ShapeModel, dtype: str, optimizer: int) -> ModelSizes:
        """Of a model whose rollouts multiply in `dtype` and whose optimizer holds `optimizer` bytes."""
        config, number = unwrapped(shapes.model).config, _BYTES[dtype]
        rollout, forward, backward = operations_of(shapes)
        quantised = number if shapes.bits is None else shapes.bits / 8
        dim = unwrapped(shapes.model).model.layers[0].self_attn.head_dim
        return cls(
            rollout,
            forward,
            backward,
            2 * config.num_hidden_layers * config.num_key_value_heads * dim * number,
            shapes.weights,
            int(rollout.token / 2 * quantised) + rollout.logits // 2 * number,  # two operations a weight
            storage_bytes(shapes.trained),
            optimizer,
        )


def _pairs(tokens: int) -> int:
    """Pairs of a token and one that it attends to, in a row of so many."""
    return tokens * (tokens + 1) // 2


def floors(step: StepShape, numbers: ModelSizes, epochs: int) -> dict[str, Floor]:
    """By phase, under the names of a prediction; only phases that shapes decide, so not the reward."""
    kept = rows_of(step.rollouts, step.m)
    found: dict[str, Floor] = {}
    if step.engine is not None:
        asked = len(step.rollouts.lengths)
        found["prefill"] = _prefill(step.rollouts, numbers)
        found["decode"] = _decode(step.rollouts, _slots(step.engine.sampler, asked, asked), numbers)
    if step.passes.policy_over_all or step.passes.policy_over_kept:
        rows = rows_of(step.rollouts, step.rollouts.n) if step.passes.policy_over_all else kept
        found["policy_logprobs"] = _Pass.over(rows, step.forward, 1).moving(numbers.read_bytes, numbers.forward)
    if step.passes.reference:
        found["ref_logprobs"] = _Pass.over(kept, step.forward, 1).moving(numbers.read_bytes, numbers.forward)
    update = _Pass.over(kept, step.forward, step.minibatches)
    found["forward"] = update.moving(numbers.read_bytes, numbers.forward) * epochs
    found["backward"] = update.moving(numbers.read_bytes + numbers.trained_bytes, numbers.backward) * epochs
    # Weights and state are read and written, gradients read.
    moved = 3 * numbers.trained_bytes + 2 * numbers.optimizer_bytes
    found["optimizer"] = Floor(moved, 0) * (epochs * step.minibatches)
    if step.evaluation is not None and step.engine is not None:
        slots = _slots(step.engine.sampler, len(step.evaluation.lengths), len(step.rollouts.lengths))
        found["eval"] = _prefill(step.evaluation, numbers) + _decode(step.evaluation, slots, numbers)
    return found


def _slots(sampler: Sampler, asked: int, of_a_step: int) -> int:
    """Rows that may run at a time; all if only `kv_budget` bounds them."""
    if sampler.all_at_once:
        return min(asked, max(of_a_step, LEAST_AT_ONCE))
    return min(asked, sampler.slots or (asked if sampler.kv_budget is not None else DEFAULT_SLOTS))


def _prefill(work: Workload, numbers: ModelSizes) -> Floor:
    lengths = [len(prompt.token_ids) for prompt in work.prompts]
    moved = numbers.rollout_bytes + sum(lengths) * numbers.token_bytes
    return Floor(moved, numbers.rollout.of(sum(lengths), len(lengths), sum(map(_pairs, lengths))))


def _decode(work: Workload, slots: int, numbers: ModelSizes) -> Floor:
    """All tokens but each rollout's first. A step reads the weights once, and each prompt once for all its rollouts;
    the number of steps is what the longest rollout or the number of slots requires."""
    groups = [[length - 1 for length in group] for group in work.groups]
    prompts, made = [len(prompt.token_ids) for prompt in work.prompts], [count for group in groups for count in group]
    steps = max(max(made), -(-sum(made) // slots))
    replies = sum(map(_pairs, made))  # own keys that each token attends to, summed
    shared = sum(size * max(group) for size, group in zip(prompts, groups, strict=True))
    looked_at = replies + sum(size * sum(group) for size, group in zip(prompts, groups, strict=True))
    moved = steps * numbers.rollout_bytes + (replies + shared + sum(made)) * numbers.token_bytes
    return Floor(moved, numbers.rollout.of(sum(made), sum(made), looked_at))


@dataclass(frozen=True)
class _Pass:
    """A pass over rows: its micro-batches, each of which reads the weights; its tokens, those whose logits are
    computed, and the pairs of tokens of which one attends to the other."""

    parts: int
    tokens: int
    asked: int
    pairs: int

    @classmethod
    def over(cls, rows: Sequence[RowShape], way: Forward, minibatches: int) -> _Pass:
        size = -(-len(rows) // minibatches)
        parts = [part for start in range(0, len(rows), size) for part in parts_of(way, rows[start : start + size])]
        tokens = [min(way.size(part), sum(row.prompt + row.completion for row in part)) for part in parts]
        pairs = sum(_pairs(row.prompt + row.completion) for row in rows)
        for part, through in zip(parts, tokens, strict=True):
            if through < sum(
                row.prompt + row.completion for row in part
            ):  # prompts are computed once for all their rows
                again = Counter((row.group, row.prompt) for row in part)
                pairs -= sum((count - 1) * _pairs(prompt) for (_, prompt), count in again.items())
        return cls(len(parts), sum(tokens), sum(row.completion for row in rows), pairs)

    def moving(self, nbytes: int, operations: Operations) -> Floor:
        """The floor if each micro-batch moves `nbytes`."""
        return Floor(self.parts * nbytes, operations.of(self.tokens, self.asked, self.pairs))
