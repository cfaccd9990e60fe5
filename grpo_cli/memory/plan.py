"""The bytes that a step is expected to hold, by phase and kind: arithmetic on the lines of `shapes.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.evictor import statistics
from grpo_cli.engine.generation import PREFILL_TOKENS
from grpo_cli.engine.kv_cache import BLOCK, KvPlan, blocks_for
from grpo_cli.engine.samplers import Sampler
from grpo_cli.engine.sampling import rows_at_once
from grpo_cli.engine.sequence import bucket
from grpo_cli.memory.shapes import ACTIVATIONS, LOGITS, ShapeModel, Sizes
from grpo_cli.model.checkpointing import stored_bytes
from grpo_cli.native.ops import scratch_bytes
from grpo_cli.settings import Sampling
from grpo_cli.support.memory import little_bytes
from grpo_cli.types import Prompt, Request

WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS = "weights", "reference", "optimizer", "gradients"
KV, WORKSPACE = "kv", "workspace"
# What holds memory, in display order; `workspace` is the program, and what its allocator and libraries keep.
KINDS = (WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS, KV, LOGITS, ACTIVATIONS, WORKSPACE)
UPDATE = ("forward", "backward", "optimizer")
# A CPU's allocator keeps this part of what comes and goes in a phase, between blocks of many sizes, and not more.
_COME_AND_GO = (GRADIENTS, KV, LOGITS, ACTIVATIONS)
_KEPT, _MOST_KEPT = 0.8, 160 * 2**20
_BY_ONEDNN = 52 * 2**20  # kept of products in bfloat16 on a CPU, of which a step has each number of rows


@dataclass(frozen=True)
class Workload:
    """The work of an engine: the tokens of each prompt, and `n` rollouts of each, all of `longest` tokens."""

    prompts: tuple[int, ...]
    n: int
    longest: int

    @property
    def rollouts(self) -> int:
        return self.n * len(self.prompts)

    @cached_property
    def requests(self) -> list[Request]:
        sampling = Sampling.plain(self.longest)
        prompts = (Prompt(str(i), (0,) * tokens, "") for i, tokens in enumerate(self.prompts))
        return [Request(prompt, 0, 0, sampling) for prompt in prompts] * self.n

    def tokens(self, take: int, shares_prompts: bool) -> int:
        """Return the tokens of a pass over `take` rollouts of each prompt, which counts once if it `shares_prompts`."""
        return sum(prompt * (1 if shares_prompts else take) + take * self.longest for prompt in self.prompts)


@dataclass(frozen=True)
class StepShape:
    """The settings that decide the memory of a step. `evaluation` is None if there is none, `sampler` if rollouts are
    not made by engine=torch. Passes have at most `tokens` tokens or one row, `chunk` of which reach the head
    together."""

    rollouts: Workload
    m: int
    sampler: Sampler | None
    sparsity: Dense | Budget
    evaluation: Workload | None
    tokens: int
    chunk: int
    shares_prompts: bool
    prefix: int = 0  # tokens of every rollout before the rest is ordered by predicted length
    pauses: bool = False  # sequences wait for an environment, with blocks of their own
    packed: bool = False  # weights of the engine, which matters on a CPU only
    minibatches: int = 1
    updates: int = 1  # of a step; a parked state comes back at the end of the first
    logprobs_of: int = 0  # rollouts of each prompt in the policy's pass before updates
    reference: bool = False
    second_model: bool = True  # for the reference; else it is the model without its adapters
    optimizer: int = 0  # bytes
    average: int = 0  # of them, those of correction.prox=ewma, which are never parked
    parks: bool = False  # the optimizer's state is elsewhere until the first update
    workspace: int = 0  # bytes of the process without the run

    def with_n(self, n: int) -> StepShape:
        m = n if self.m == self.rollouts.n else min(self.m, n)
        of = self.logprobs_of and (n if self.logprobs_of == self.rollouts.n else m)  # which is 0, m or n
        return replace(self, rollouts=replace(self.rollouts, n=n), m=m, logprobs_of=of)

    @property
    def tokens_of_update(self) -> int:
        """Return the most tokens of an update: a minibatch may have the longest prompts, each in few of its rows."""
        work, rows = self.rollouts, -(-len(self.rollouts.prompts) * self.m // self.minibatches)
        prompts = sorted(work.prompts * (1 if self.shares_prompts else self.m), reverse=True)
        return sum(prompts[:rows]) + rows * work.longest

    def has_state(self, phase: str) -> bool:
        """True if the optimizer's state is on the device in a phase also where it is parked."""
        return phase == "optimizer" or (phase in UPDATE and self.updates > 1)

    def in_a_pass(self, of: int) -> int:
        """Return the tokens of the largest pass over `of` tokens."""
        return min(of, max(self.tokens, max(self.rollouts.prompts) + self.rollouts.longest))


class MemoryPlan(dict[str, Sizes]):
    """Bytes by phase and kind."""

    @property
    def fullest(self) -> str:
        """The phase with the highest peak."""
        return max(self, key=self.bytes_of)

    def bytes_of(self, phase: str) -> int:
        return sum(self[phase].values())

    @property
    def peak(self) -> int:
        return self.bytes_of(self.fullest)


def plan(model: ShapeModel, step: StepShape) -> MemoryPlan:
    """Compute each phase at its fullest moment, with what is there all the time."""
    phases = {} if step.sampler is None else _rollouts(model, step, step.sampler, step.rollouts)
    if step.logprobs_of:
        phases["old_logprobs"] = _no_gradients(model, step, step.logprobs_of)
    if step.reference:
        phases["ref_logprobs"] = _no_gradients(model, step, step.m)
    phases |= _update(model, step)
    if step.evaluation is not None and step.sampler is not None:
        parts = _rollouts(model, step, step.sampler, step.evaluation)
        phases["eval"] = {**_fullest(*parts.values()), KV: parts["decode"][KV]}
    scratch = scratch_bytes(max(step.rollouts.prompts) + step.rollouts.longest, model.layout.dim) * step.shares_prompts

    def whole(phase: str, sizes: Sizes) -> Sizes:
        kept = min(_MOST_KEPT, int(_KEPT * sum(sizes.get(kind, 0) for kind in _COME_AND_GO))) if model.on_cpu else 0
        kept += scratch * (model.on_cpu and (phase in UPDATE or "logprobs" in phase))
        always = {
            WEIGHTS: model.weights,
            REFERENCE: model.weights if step.reference and step.second_model else 0,
            OPTIMIZER: step.average if step.parks and not step.has_state(phase) else step.optimizer,
            ACTIVATIONS: model.dequantised if phase != "optimizer" else 0,
            WORKSPACE: step.workspace + kept + (_BY_ONEDNN if model.on_cpu and model.dtype == torch.bfloat16 else 0),
        }
        return {kind: sizes.get(kind, 0) + always.get(kind, 0) for kind in KINDS}

    return MemoryPlan({phase: whole(phase, sizes) for phase, sizes in phases.items()})


def _fullest(*moments: Sizes) -> Sizes:
    return max(moments, key=lambda sizes: sum(sizes.values()))


def _update(model: ShapeModel, step: StepShape) -> dict[str, Sizes]:
    """Predict an update: gradients appear in the backward of its first pass and exist in later ones."""
    tokens = step.in_a_pass(every := step.tokens_of_update)
    spares = not model.on_cpu or model.layers * stored_bytes(model.config, tokens) > little_bytes()
    lines, some = model.train_lines(step.chunk, spares), min(step.chunk, tokens)

    def moments(layers: int, gradients: int) -> list[dict[str, int]]:
        found = [{GRADIENTS: gradients, **line(layers, tokens)} for line in lines]
        for moment in found[1:3]:  # in the head
            moment[LOGITS] = moment.get(LOGITS, 0) * some // step.chunk + model.softmax_bytes(some)
        return found

    found = moments(model.layers, model.gradients)
    if every <= tokens:
        early = model.gradients - model.embedding_gradient
        found = [*moments(model.layers, 0)[:4], moments(1, early)[3], *moments(model.layers, early)[4:]]
    forward, backward = _fullest(*found[:2]), _fullest(*found[2:])
    return {"forward": forward, "backward": backward, "optimizer": {GRADIENTS: model.gradients}}


def _no_gradients(model: ShapeModel, step: StepShape, take: int) -> Sizes:
    """Predict log-probabilities of `take` rollouts of each prompt."""
    tokens = step.in_a_pass(step.rollouts.tokens(take, step.shares_prompts))
    some = min(step.chunk, tokens)
    logits = model.logits_bytes(some) + model.softmax_bytes(some)
    return {**model.line_without_gradients(model.layers, tokens), LOGITS: logits}


def _rollouts(model: ShapeModel, step: StepShape, sampler: Sampler, work: Workload) -> dict[str, Sizes]:
    """Predict prefill and decode of one `generate`; an eviction policy's statistics count as keys and values."""
    layout, policy, per_step = model.layout, step.sparsity, step.rollouts.rollouts
    cache = KvPlan.of(layout, sampler, policy, work.requests, per_step, step.prefix, step.pauses)
    token, slots = layout.bytes_per_token, cache.slots
    rows = slots if model.on_cpu else bucket(slots)  # graphs have few numbers of rows
    remembered = 0
    if isinstance(policy, Budget):  # of those that run and those that wait
        some = slots * (1 + step.pauses) + work.rollouts * bool(cache.prefix_blocks)
        made = statistics(policy, layout, some, (cache.own_blocks, cache.prompt_blocks), torch.device("meta"))
        remembered = sum(tensor.nbytes for tensor in made if tensor is not None)
    read = work.rollouts if cache.prefix_blocks else slots * (1 + step.pauses)  # requests come prompt by prompt
    prompts = sorted((BLOCK * blocks_for(tokens) for tokens in work.prompts), reverse=True)[:read]
    begun = kv = cache.blocks * layout.block_bytes
    if model.on_cpu:  # where memory counts once it is written
        own = slots * min(blocks_for(work.longest), cache.own_blocks) + cache.spare_blocks * (not step.pauses)
        begun, kv = (min(kv, token * sum(prompts) + held * layout.block_bytes) for held in (slots, own))
    passed = min(max(PREFILL_TOKENS, max(prompts)), sum(prompts))
    drawn = min(rows, rows_at_once(model.vocabulary)) if model.on_cpu else rows
    logits = model.logits_bytes(rows) + 3 * 4 * drawn * model.vocabulary  # probabilities and their sums: float32
    pool = 0 if model.on_cpu else logits  # the largest graph's, which stays while fewer rows run one step without
    layers = model.line_without_gradients
    prefill, decode = (model.copied(step.packed) + layers(model.layers, n)[ACTIVATIONS] for n in (passed, rows))
    if policy.needs_received and not model.on_cpu:  # PyTorch copies a layer's keys
        decode += 8 * rows * layout.heads * layout.dim * BLOCK * (cache.own_blocks + cache.prompt_blocks)
    return {
        "prefill": {KV: begun + remembered, LOGITS: logits + pool, ACTIVATIONS: prefill + token * passed},
        "decode": {KV: kv + remembered, LOGITS: logits + pool // 2, ACTIVATIONS: decode},
    }
