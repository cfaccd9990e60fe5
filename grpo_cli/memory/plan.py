"""The bytes that a step is expected to hold, by phase and kind: arithmetic on the lines that `shapes.py` finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_cli.engine.eviction import Budget, Dense
from grpo_cli.engine.generation import PREFILL_TOKENS
from grpo_cli.engine.kv_cache import BLOCK, KvLayout, blocks_for, round_up
from grpo_cli.engine.samplers import KvShape, Sampler
from grpo_cli.memory.allocations import ACTIVATIONS, LOGITS
from grpo_cli.memory.shapes import ShapeModel, Sizes
from grpo_cli.model.checkpointing import stored_bytes
from grpo_cli.support.memory import is_little

WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS = "weights", "reference", "optimizer", "gradients"
KV, WORKSPACE = "kv", "workspace"
# What holds memory, in display order; `workspace` is the program, and what its allocator and libraries keep.
KINDS = (WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS, KV, LOGITS, ACTIVATIONS, WORKSPACE)
BEFORE_UPDATES = ("prefill", "decode", "policy_logprobs", "ref_logprobs", "eval")
# Of what comes and goes in a phase on a CPU, and at most: what the allocator keeps between blocks of many sizes.
_COME_AND_GO = (GRADIENTS, KV, LOGITS, ACTIVATIONS)
_BESIDE, _MOST_BESIDE = 0.8, 160 * 2**20
_DRAWN_AT_ONCE = 1 << 19  # logits in float32 from which a CPU draws together


@dataclass(frozen=True)
class Workload:
    """The work of an engine: the tokens of each prompt, and `n` rollouts of each, all of `longest` tokens."""

    prompts: tuple[int, ...]
    n: int
    longest: int

    @property
    def rollouts(self) -> int:
        return self.n * len(self.prompts)

    @property
    def longest_row(self) -> int:
        return max(self.prompts) + self.longest

    def tokens(self, take: int, share: bool) -> int:
        """Return the tokens of a pass over `take` rollouts of each prompt; with `share` a prompt counts once.

        >>> work = Workload((10, 20), 2, 6)
        >>> work.tokens(2, share=True), work.tokens(2, share=False), work.tokens(1, share=True)
        (54, 84, 42)
        """
        return sum(prompt * (1 if share else take) + take * self.longest for prompt in self.prompts)


@dataclass(frozen=True)
class EngineShape:
    """The settings that decide how much a rollout engine allocates. Every rollout makes `prefix` tokens before the rest
    is ordered by predicted length; `packed` weights matter on a CPU only."""

    sampler: Sampler
    sparsity: Dense | Budget
    prefix: int = 0
    packed: bool = False


@dataclass(frozen=True)
class StepShape:
    """The settings that decide the memory of a step. `evaluation` is None if there is none, `engine` if rollouts are
    not made by engine=torch. Passes have at most `tokens` tokens or one row, `chunk` of which reach the head
    together."""

    rollouts: Workload
    m: int
    engine: EngineShape | None
    evaluation: Workload | None
    tokens: int
    chunk: int
    share: bool
    minibatches: int = 1
    logprobs_of: int = 0  # rollouts of each prompt in the policy's pass before updates
    reference: bool = False
    second_model: bool = True  # for the reference; else it is the model without its adapters
    optimizer: int = 0  # bytes
    parks: bool = False  # the optimizer's state is elsewhere until the first update
    workspace: int = 0  # bytes of the process without the run

    def with_n(self, n: int) -> StepShape:
        m = n if self.m == self.rollouts.n else min(self.m, n)
        return replace(self, rollouts=replace(self.rollouts, n=n), m=m)

    @property
    def tokens_of_update(self) -> int:
        return -(-self.rollouts.tokens(self.m, self.share) // self.minibatches)

    def in_a_pass(self, of: int) -> int:
        """Tokens of the largest pass over `of` tokens."""
        return min(of, max(self.tokens, self.rollouts.longest_row))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by phase and kind."""

    phases: Mapping[str, Sizes]

    @property
    def fullest(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=self.bytes_of)

    def bytes_of(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        return self.bytes_of(self.fullest)


def plan(model: ShapeModel, step: StepShape) -> MemoryPlan:
    """Compute each phase at its fullest moment, with what is there all the time."""
    steady = {
        WEIGHTS: model.weights,
        REFERENCE: model.weights if step.reference and step.second_model else 0,
        OPTIMIZER: step.optimizer,
        WORKSPACE: step.workspace,
    }
    found: dict[str, Sizes] = {}
    if step.engine is not None:
        found |= _rollouts(model, step.engine, step.rollouts, step.rollouts.rollouts)
    if step.logprobs_of:
        found["policy_logprobs"] = _quiet(model, step, step.rollouts.tokens(step.logprobs_of, step.share))
    if step.reference:
        found["ref_logprobs"] = _quiet(model, step, step.rollouts.tokens(step.m, step.share))
    found |= _update(model, step)
    if step.evaluation is not None and step.engine is not None:
        phases = _rollouts(model, step.engine, step.evaluation, step.rollouts.rollouts)
        largest = max(phases.values(), key=lambda sizes: sum(sizes.values()))
        found["eval"] = {**largest, KV: phases["decode"][KV]}
    whole: dict[str, dict[str, int]] = {}
    for phase, sizes in found.items():
        whole[phase] = {**steady, **sizes}
        if phase != "optimizer":
            whole[phase][ACTIVATIONS] += model.dequantised
        if step.parks and phase in BEFORE_UPDATES:
            whole[phase][OPTIMIZER] = 0
        if model.on_cpu:
            beside = int(_BESIDE * sum(sizes.get(kind, 0) for kind in _COME_AND_GO))
            whole[phase][WORKSPACE] += min(_MOST_BESIDE, beside)
    return MemoryPlan(whole)


def _update(model: ShapeModel, step: StepShape) -> dict[str, Sizes]:
    """Predict an update: in a first pass gradients appear as it goes back, later ones find all of them."""
    every = step.tokens_of_update
    tokens = step.in_a_pass(every)
    spares = not model.on_cpu or not is_little(model.layers * stored_bytes(model.config, tokens))
    lines, some = model.train_lines(step.chunk, spares), min(step.chunk, tokens)
    moments = [{GRADIENTS: model.gradients, **line(model.layers, tokens)} for line in lines]
    for moment in moments[1:3]:  # in the head
        moment[LOGITS] = moment.get(LOGITS, 0) * some // step.chunk + model.softmax_bytes(some)
    if every <= tokens:
        early = model.gradients - model.embedding_gradient
        last = [{**lines[3](1, tokens), GRADIENTS: early}, *({**moment, GRADIENTS: early} for moment in moments[4:])]
        moments = [*({**moment, GRADIENTS: 0} for moment in moments[:4]), *last]
    forward, backward = (max(part, key=lambda one: sum(one.values())) for part in (moments[:2], moments[2:]))
    return {"forward": forward, "backward": backward, "optimizer": {GRADIENTS: model.gradients}}


def _quiet(model: ShapeModel, step: StepShape, of: int) -> Sizes:
    tokens = step.in_a_pass(of)
    some = min(step.chunk, tokens)
    return {**model.quiet_line(model.layers, tokens), LOGITS: model.logits_bytes(some) + model.softmax_bytes(some)}


def _rollouts(model: ShapeModel, engine: EngineShape, work: Workload, of_a_step: int) -> dict[str, Sizes]:
    """Prefill and decode of one `generate`."""
    layout = KvLayout(model.layers, model.kv_heads, model.head_dim, model.dtype)
    each, longest = layout.block_bytes, max(work.prompts)
    keys = engine.sparsity.capacity(work.longest, longest + work.longest)
    parked = engine.sparsity.capacity(engine.prefix + 1, longest + engine.prefix + 1) if engine.prefix else 0
    first = keys if isinstance(engine.sparsity, Budget) else 1
    shape = KvShape(
        work.rollouts, len(work.prompts), *(each * blocks_for(tokens) for tokens in (longest, first, keys, parked))
    )
    room = engine.sampler.fit(shape, of_a_step)
    rows, waits = room.slots, shape.parked_bytes * work.rollouts if room.probes else 0
    prompts = sorted((BLOCK * blocks_for(tokens) for tokens in work.prompts), reverse=True)[:rows]
    if model.on_cpu:  # where memory counts once it is written
        begun = layout.bytes_per_token * sum(prompts) + shape.page_bytes * rows
        kv = layout.bytes_per_token * (sum(prompts) + rows * round_up(min(work.longest, keys), BLOCK)) + waits
    else:
        begun = kv = min(shape.most, shape.prompts * shape.prompt_bytes + rows * shape.slot_bytes + waits)
    if room.budget is not None:
        begun, kv = min(begun, room.budget), min(kv, room.budget)
    passed = min(max(PREFILL_TOKENS, max(prompts)), sum(prompts))
    copies = model.copied(engine.packed)
    logits = model.logits_bytes(rows) + _drawing(model, rows)
    activations = [copies + model.quiet_line(model.layers, tokens)[ACTIVATIONS] for tokens in (passed, rows)]
    return {
        "prefill": {KV: begun, LOGITS: logits, ACTIVATIONS: activations[0] + layout.bytes_per_token * passed},
        "decode": {KV: kv, LOGITS: logits, ACTIVATIONS: activations[1]},
    }


def _drawing(model: ShapeModel, rows: int) -> int:
    """Bytes of probabilities and their sums, in float32; a CPU draws from few rows at a time."""
    some = min(rows, max(1, _DRAWN_AT_ONCE // model.vocabulary)) if model.on_cpu else rows
    return 3 * 4 * some * model.vocabulary
