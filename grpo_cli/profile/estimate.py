"""Predicted memory of each phase by kind, and the largest group, slots and micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_cli.engine.batching import DEFAULT_SLOTS
from grpo_cli.learner.forward import Forward, RowShape
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, LOGITS
from grpo_cli.profile.shapes import KV, EngineShape, ShapeModel, Sizes, Workload
from grpo_cli.support.memory import storage_bytes

WEIGHTS, REFERENCE, OPTIMIZER, OTHER = "weights", "reference", "optimizer", "other"
# What holds memory, in display order.
KINDS = (WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS, KV, LOGITS, ACTIVATIONS, OTHER)
EXACT = (WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS, KV)
_BEFORE_UPDATES = {"prefill", "decode", "eval", "policy_logprobs", "ref_logprobs"}
# Of what comes and goes in a phase on a CPU, and at most: what the allocator keeps between blocks of many sizes, and
# oneDNN beside its products. Runs of 0.4 M to 50 M parameters took 100 to 150 MiB more than was live at their fullest.
_COME_AND_GO = (GRADIENTS, KV, LOGITS, ACTIVATIONS)
_BESIDE, _MOST_BESIDE = 0.8, 160 * 2**20
MOST = 1024  # rollouts per prompt: the search for the largest group that fits stops here


@dataclass(frozen=True)
class Passes:
    """Which passes without gradient a step makes: the policy's, over all rollouts or only the kept ones, and the
    reference's, which may be the model itself without its adapters."""

    policy_over_all: bool
    policy_over_kept: bool
    reference: bool
    second_model: bool = True  # where there is a reference


@dataclass(frozen=True)
class StepShape:
    """What decides the memory of a step and an evaluation. `evaluation` is None if there is none, `engine` if rollouts
    are not made by engine=torch: then everything but the rollouts is predicted."""

    rollouts: Workload
    m: int
    engine: EngineShape | None
    evaluation: Workload | None
    forward: Forward
    minibatches: int
    passes: Passes

    def at_full_length(self) -> StepShape:
        """The same with every rollout at full length."""
        evaluation = None if self.evaluation is None else self.evaluation.at_full_length()
        return replace(self, rollouts=self.rollouts.at_full_length(), evaluation=evaluation)


def most_tokens(step: StepShape) -> int:
    """Tokens that a step trains on, an upper bound for any pass."""
    return sum(row.prompt + row.completion for row in rows_of(step.rollouts, step.m))


def with_tokens(step: StepShape, count: int) -> StepShape:
    """The same with at most `count` tokens (or one row) in a forward and backward pass."""
    return replace(step, forward=replace(step.forward, tokens=count))


def total(sizes: Sizes) -> int:
    return sum(sizes.values())


def _both(sizes: Sizes, others: Sizes) -> Sizes:
    return {kind: sizes.get(kind, 0) + others.get(kind, 0) for kind in {**sizes, **others}}


def _beside(sizes: Sizes) -> int:
    return min(_MOST_BESIDE, int(_BESIDE * sum(sizes.get(kind, 0) for kind in _COME_AND_GO)))


@dataclass(frozen=True)
class Prediction:
    """Bytes by phase and kind."""

    phases: Mapping[str, Sizes]

    @property
    def fullest(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: total(self.phases[phase]))

    @property
    def peak(self) -> int:
        return total(self.phases[self.fullest])

    @property
    def exact(self) -> Sizes:
        """The kinds that shapes alone decide, each at its own peak."""
        return {kind: max(sizes.get(kind, 0) for sizes in self.phases.values()) for kind in EXACT}


class Estimator:
    """Predicts the memory of steps of one model. `optimizer` is the bytes that the optimizer holds, `other` those that
    the process holds beside the model's tensors. `on_cpu`: weights can be packed, and the allocator keeps a part of
    what comes and goes. `parks`: what the optimizer holds is elsewhere until the first update of a step."""

    def __init__(
        self, model: ShapeModel, optimizer: int, other: int, on_cpu: bool = False, parks: bool = False
    ) -> None:
        self._parks = parks
        self._model = model
        self._optimizer = optimizer
        self._other = other
        self._on_cpu = on_cpu

    def predict(
        self, step: StepShape, say: Callable[[str], None] = lambda line: None, room: int | None = None
    ) -> Prediction:
        """Each phase at its peak, including what other phases keep allocated. A large model takes minutes, so `say` is
        told of the progress. Where an update alone exceeds `room`, the other phases are left out."""
        model, steady = self._model, self._steady(step)
        phases: dict[str, Sizes] = {}
        say("updates")
        every = rows_of(step.rollouts, step.rollouts.n)
        kept = rows_of(step.rollouts, step.m)
        updates = {phase: {**steady, **sizes} for phase, sizes in self._update(step, kept, room).items()}
        if room is not None and max(map(total, updates.values())) > room:
            return Prediction(updates)
        if step.engine is not None:
            say("rollouts")
            engine = self._capped(step.engine, step)
            prefill, decode = model.rollouts(step.rollouts, engine)
            slots = model.fixed_slots(step.rollouts, engine)
            phases = {"prefill": {**steady, **prefill, **slots}, "decode": {**steady, **decode, **slots}}
        if step.passes.policy_over_all or step.passes.policy_over_kept:
            rows = every if step.passes.policy_over_all else kept
            phases["policy_logprobs"] = {**steady, **self._quiet(step, rows)}
        if step.passes.reference:
            phases["ref_logprobs"] = {**steady, **self._quiet(step, kept)}
        phases |= updates
        if step.evaluation is not None and step.engine is not None:
            say("an evaluation")
            beginning, going_on = model.rollouts(step.evaluation, engine)
            largest = beginning if total(beginning) > total(going_on) else going_on
            phases["eval"] = {**steady, **largest, **model.fixed_slots(step.evaluation, engine)}
        if self._parks:
            away = {OPTIMIZER: 0}
            phases |= {phase: {**phases[phase], **away} for phase in phases.keys() & _BEFORE_UPDATES}
        if self._on_cpu:
            phases = {phase: _both(sizes, {OTHER: _beside(sizes)}) for phase, sizes in phases.items()}
        return Prediction(phases)

    def _capped(self, engine: EngineShape, step: StepShape) -> EngineShape:
        count = len(step.rollouts.lengths)
        capped = count if engine.sampler.all_at_once else None  # of no meaning where slots are given
        return replace(engine, packed=engine.packed and self._on_cpu, rollouts=capped)

    def _steady(self, step: StepShape) -> dict[str, int]:
        return {
            WEIGHTS: self._model.weights,
            REFERENCE: self._model.weights if step.passes.reference and step.passes.second_model else 0,
            OPTIMIZER: self._optimizer,
            OTHER: self._other,
        }

    def _quiet(self, step: StepShape, rows: Sequence[RowShape]) -> Sizes:
        return self._model.quiet_pass(step.forward, max(parts_of(step.forward, rows), key=step.forward.size))

    def _update(self, step: StepShape, kept: Sequence[RowShape], room: int | None) -> dict[str, Sizes]:
        """Gradients are already allocated during the forward pass of every micro-batch but the first."""
        first, *others = parts_of(step.forward, kept[: -(-len(kept) // step.minibatches)])
        size, asked = step.forward.size, [(first, False)]
        if others:
            largest = max(others, key=size)
            if size(first) <= size(largest):  # it takes less at every moment
                asked = [(largest, True)]
            elif size(first) <= 2 * size(largest):
                asked.insert(0, (largest, True))
            else:  # which is more likely to be beyond the room by itself
                asked.append((largest, True))
        passes, taken = [], total(self._steady(step))
        for rows, later in asked:
            passes.append(self._model.train_pass(step.forward, rows, later))
            if room is not None and taken + total(passes[-1][1]) > room:
                break
        forwards, backwards = zip(*passes, strict=True)
        gradients = storage_bytes(self._model.trained)
        fullest = {"forward": max(forwards, key=total), "backward": max(backwards, key=total)}
        return {**fullest, "optimizer": {GRADIENTS: gradients}}

    def largest(
        self, step: StepShape, room: int, say: Callable[[str], None] = lambda line: None
    ) -> dict[str, int | None]:
        """By key, the largest value that fits `room` bytes, with all else unchanged and every rollout at full length.

        None if not even the smallest fits; 0 if there is no limit. `say` is told of each key.
        """
        step = step.at_full_length()

        def with_n(n: int) -> StepShape:
            m = n if step.m == step.rollouts.n else min(step.m, n)
            work = Workload.equal(step.rollouts.prompts, n, step.rollouts.max_new_tokens)
            return replace(step, rollouts=work, m=m)

        say("the largest n that fits")
        updates = self.predict(replace(step, engine=None)).peak
        start = step.rollouts.n if updates <= room else step.m  # since updates depend on m alone
        found = {"n": self._most(with_n, start, 2, MOST, room)}
        if step.engine is not None:
            say("the largest sampler.slots that fits")
            found["sampler.slots"] = self.slots(step, room) if updates <= room else None
        say("the largest train.micro_batch_tokens that fits")
        return found | {"train.micro_batch_tokens": self.micro_batch(step, room)}

    def slots(self, step: StepShape, room: int) -> int | None:
        """The most slots that fit `room` bytes; None and 0 as `largest`."""
        engine, requests = step.engine, len(step.rollouts.lengths)
        assert engine is not None, "asked only where the engine is ours"

        def with_slots(slots: int) -> StepShape:
            return replace(step, engine=replace(engine, sampler=engine.sampler.with_slots(slots)))

        return self._most(with_slots, min(requests, engine.sampler.slots or DEFAULT_SLOTS), 1, requests, room)

    def micro_batch(self, step: StepShape, room: int) -> int | None:
        """The most tokens in one pass that fit `room` bytes; None and 0 as `largest`."""
        tokens = most_tokens(step)
        start = min(tokens, step.forward.tokens)
        return self._most(lambda count: with_tokens(step, count), start, 1, tokens, room, leap=4)

    def _most(
        self, step: Callable[[int], StepShape], start: int, least: int, enough: int, room: int, leap: int = MOST
    ) -> int | None:
        """The largest value that fits, to within an eighth or to 95 % of the room beside what is always there;
        beyond `enough` nothing changes any more. `leap`: so many times as much is tried after what fits.

        The bytes of each phase grow nearly linearly, so the next guess is interpolated between what fits and what does
        not; from a single value that does not, in proportion to what it takes beside what is always there. Where less
        takes as much, as a pass of so many tokens does however many there are, the next guess is in the middle.
        """
        found: dict[int, Prediction] = {}
        value, always = start, total(self._steady(step(start)))
        for _ in range(9):
            found[value] = self.predict(step(value), room=room)
            good = max((v for v, one in found.items() if one.peak <= room), default=None)
            bad = min((v for v, one in found.items() if one.peak > room), default=None)
            if good is None and bad == least:
                return None
            if bad is None:
                if good == enough:
                    return 0
                value = min(enough, leap * value)
            elif good is not None and (
                room - found[good].peak < 0.05 * (room - always) or bad - good <= max(1, good // 8)
            ):
                break
            else:  # with nothing to do, what is always there would fit
                high = {phase: total(sizes) for phase, sizes in found[bad].phases.items()}
                low = dict.fromkeys(high, always)
                if good is not None:
                    low = {phase: total(sizes) for phase, sizes in found[good].phases.items()}
                share = min((room - low[phase]) / (high[phase] - low[phase]) for phase in high if high[phase] > room)
                under, margin = good or 0, (bad - (good or 0)) // 8
                value = min(bad - max(1, margin), under + max(1, int(0.97 * share * (bad - under))))
                above = min((v for v in found if v > bad), default=None)
                flat = above is not None and found[above].peak < 1.02 * found[bad].peak
                if flat:
                    value = (under + bad) // 2
                elif good is None and len(found) > 2:
                    value = least
                value = max(least, value)
        return good


def rows_of(work: Workload, take: int) -> list[RowShape]:
    """The first `take` rollouts of each prompt, or as many as it has, as rows of a batch."""
    return [
        RowShape(len(prompt.token_ids), length, place)
        for place, (prompt, group) in enumerate(zip(work.prompts, work.groups, strict=True))
        for length in group[:take]
    ]


def parts_of(forward: Forward, rows: Sequence[RowShape]) -> list[tuple[RowShape, ...]]:
    return [tuple(rows[i] for i in part) for part in forward.cut(rows)]
