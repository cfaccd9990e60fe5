"""What a run would take in each phase, part by part, and the largest group, slots and micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_cli.engine.batching import DEFAULT_SLOTS
from grpo_cli.learner.forward import Forward, RowShape
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, LOGITS
from grpo_cli.profile.shapes import KV, EngineShape, ShapeModel, Sizes, Workload
from grpo_cli.support.memory import storage_bytes

WEIGHTS, REFERENCE, OPTIMIZER, OTHER = "weights", "reference", "optimizer", "other"
# What memory is held by, in the order in which it is shown.
KINDS = (WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS, KV, LOGITS, ACTIVATIONS, OTHER)
EXACT = (WEIGHTS, REFERENCE, OPTIMIZER, GRADIENTS, KV)
MOST = 1024  # rollouts per prompt: where the search for the largest group that fits gives up


@dataclass(frozen=True)
class Passes:
    """Which passes without gradient a step makes: the policy's over all rollouts or those that are kept, and the
    reference's, which may be the model itself without its adapters."""

    policy_over_all: bool
    policy_over_kept: bool
    reference: bool
    second_model: bool = True  # where there is a reference


@dataclass(frozen=True)
class StepShape:
    """What a step and an evaluation are made of, as far as memory is concerned. `evaluation` is None where there is
    none, `engine` where rollouts are not made by ours: then only what is around them is predicted."""

    rollouts: Workload
    m: int
    engine: EngineShape | None
    evaluation: Workload | None
    forward: Forward
    minibatches: int
    passes: Passes

    def at_full_length(self) -> StepShape:
        """The same where every rollout is as long as may be."""
        evaluation = None if self.evaluation is None else self.evaluation.at_full_length()
        return replace(self, rollouts=self.rollouts.at_full_length(), evaluation=evaluation)


def most_tokens(step: StepShape) -> int:
    """Tokens that a step trains on: no pass can take more."""
    return sum(row.prompt + row.completion for row in rows_of(step.rollouts, step.m))


def with_tokens(step: StepShape, count: int) -> StepShape:
    """The same with so many tokens in one forward and backward pass, or one row."""
    return replace(step, forward=replace(step.forward, tokens=count))


def total(sizes: Sizes) -> int:
    return sum(sizes.values())


def _both(sizes: Sizes, others: Sizes) -> Sizes:
    return {kind: sizes.get(kind, 0) + others.get(kind, 0) for kind in {**sizes, **others}}


@dataclass(frozen=True)
class Prediction:
    """Bytes by phase and kind."""

    phases: Mapping[str, Sizes]

    @property
    def fullest(self) -> str:
        """The phase with most."""
        return max(self.phases, key=lambda phase: total(self.phases[phase]))

    @property
    def peak(self) -> int:
        return total(self.phases[self.fullest])

    @property
    def exact(self) -> Sizes:
        """What shapes alone decide, each at its own most."""
        return {kind: max(sizes.get(kind, 0) for sizes in self.phases.values()) for kind in EXACT}


class Estimator:
    """What steps take, for one model. `optimizer` is what the optimizer holds, `other` what the process holds
    beside the model's tensors. `on_cpu`: packed weights are for a CPU alone."""

    def __init__(self, model: ShapeModel, optimizer: int, other: int, on_cpu: bool = False) -> None:
        self._model = model
        self._optimizer = optimizer
        self._other = other
        self._on_cpu = on_cpu

    def predict(self, step: StepShape, say: Callable[[str], None] = lambda line: None) -> Prediction:
        """Each phase at its fullest, with all that lies there meanwhile. `say` hears what is looked at, as it takes
        minutes for a large model."""
        model, steady = self._model, self._steady(step)
        phases: dict[str, Sizes] = {}
        stays: Sizes = {}
        if step.engine is not None:
            say("rollouts")
            count = len(step.rollouts.lengths)
            engine = replace(step.engine, packed=step.engine.packed and self._on_cpu, rollouts=count)
            prefill, decode = model.rollouts(step.rollouts, engine)
            stays = model.stays(step.rollouts, engine)
            slots = {KV: stays[KV]} if stays else {}
            phases = {"prefill": {**steady, **prefill, **slots}, "decode": {**steady, **decode, **slots}}
        say("updates")
        every = rows_of(step.rollouts, step.rollouts.n)
        kept = rows_of(step.rollouts, step.m)
        if step.passes.policy_over_all or step.passes.policy_over_kept:
            rows = every if step.passes.policy_over_all else kept
            phases["policy_logprobs"] = {**steady, **self._quiet(step, rows)}
        if step.passes.reference:
            phases["ref_logprobs"] = {**steady, **self._quiet(step, kept)}
        phases |= {phase: {**steady, **sizes} for phase, sizes in self._update(step, kept).items()}
        for phase in phases.keys() - {"prefill", "decode"}:
            phases[phase] = _both(phases[phase], stays)
        if step.evaluation is not None and step.engine is not None:
            say("an evaluation")
            beginning, going_on = model.rollouts(step.evaluation, engine)
            phases["eval"] = {**steady, **(beginning if total(beginning) > total(going_on) else going_on)}
        return Prediction(phases)

    def _steady(self, step: StepShape) -> dict[str, int]:
        return {
            WEIGHTS: self._model.weights,
            REFERENCE: self._model.weights if step.passes.reference and step.passes.second_model else 0,
            OPTIMIZER: self._optimizer,
            OTHER: self._other,
        }

    def _quiet(self, step: StepShape, rows: Sequence[RowShape]) -> Sizes:
        return self._model.quiet_pass(step.forward, max(parts_of(step.forward, rows), key=step.forward.size))

    def _update(self, step: StepShape, kept: Sequence[RowShape]) -> dict[str, Sizes]:
        """The first micro-batch has no gradients beside it while it goes forward, all others have."""
        first, *others = parts_of(step.forward, kept[: -(-len(kept) // step.minibatches)])
        passes = [self._model.train_pass(step.forward, first, False)]
        if others:
            passes.append(self._model.train_pass(step.forward, max(others, key=step.forward.size), True))
        forwards, backwards = zip(*passes, strict=True)
        gradients = storage_bytes(self._model.trained)
        fullest = {"forward": max(forwards, key=total), "backward": max(backwards, key=total)}
        return {**fullest, "optimizer": {GRADIENTS: gradients}}

    def largest(
        self, step: StepShape, room: int, say: Callable[[str], None] = lambda line: None
    ) -> dict[str, int | None]:
        """By key, the largest value that fits `room` bytes when all else stays and every rollout has full length.

        None where not even the least fits; 0 where there is no limit. `say` hears of each key.
        """
        step = step.at_full_length()
        requests = len(step.rollouts.lengths)

        def with_n(n: int) -> StepShape:
            m = n if step.m == step.rollouts.n else min(step.m, n)
            work = Workload.equal(step.rollouts.prompts, n, step.rollouts.max_new_tokens)
            return replace(step, rollouts=work, m=m)

        def with_slots(slots: int) -> StepShape:
            assert step.engine is not None, "asked only where the engine is ours"
            return replace(step, engine=replace(step.engine, sampler=step.engine.sampler.with_slots(slots)))

        say("the largest n that fits")
        found = {"n": self._most(with_n, step.rollouts.n, 2, MOST, room)}
        if step.engine is not None:
            slots = min(requests, step.engine.sampler.slots or DEFAULT_SLOTS)
            say("the largest sampler.slots that fits")
            found["sampler.slots"] = self._most(with_slots, slots, 1, requests, room)
        say("the largest train.micro_batch_tokens that fits")
        return found | {"train.micro_batch_tokens": self.micro_batch(step, room)}

    def micro_batch(self, step: StepShape, room: int) -> int | None:
        """The most tokens in one pass that fit `room` bytes; None and 0 as `largest`."""
        tokens = most_tokens(step)
        start = min(tokens, step.forward.tokens)
        return self._most(lambda count: with_tokens(step, count), start, 1, tokens, room)

    def _most(self, step: Callable[[int], StepShape], start: int, least: int, enough: int, room: int) -> int | None:
        """The largest value, to a part in eight or to 95 % of the room above the least that was tried; beyond `enough`
        nothing changes any more.

        Bytes grow nearly in proportion, so where the room ends is guessed on the line between what fits and what not.
        """
        peaks: dict[int, int] = {}
        value = start
        for _ in range(9):
            peaks[value] = self.predict(step(value)).peak
            good = max((v for v, peak in peaks.items() if peak <= room), default=None)
            bad = min((v for v, peak in peaks.items() if peak > room), default=None)
            if good is None:
                if bad == least:
                    return None
                value = least
            elif bad is None:
                if good == enough:
                    return 0
                value = min(enough, 4 * good)
            elif room - peaks[good] < 0.05 * (room - min(peaks.values())) or bad - good <= max(1, good // 8):
                break
            else:
                share, margin = (room - peaks[good]) / (peaks[bad] - peaks[good]), (bad - good) // 8
                value = min(bad - max(1, margin), good + max(1, margin, int(0.97 * share * (bad - good))))
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
