"""What a run would take in each phase, part by part, and the largest group, slots and micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_cli.engine.sampler import DEFAULT_SLOTS, Full, Infinite
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, LOGITS
from grpo_cli.profile.shapes import KV, EngineShape, ShapeModel, Sizes, Work, parts_of

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
class Plan:
    """What a step and an evaluation are made of, as far as memory is concerned. `exam` is None without evaluations."""

    rollouts: Work
    m: int
    engine: EngineShape
    exam: Work | None
    micro_batch_tokens: int
    minibatches: int
    chunk: int
    passes: Passes

    def at_full_length(self) -> Plan:
        """The same where every rollout is as long as may be."""
        return replace(self, rollouts=_full(self.rollouts), exam=_full(self.exam) if self.exam else None)


def total(sizes: Sizes) -> int:
    return sum(sizes.values())


def _full(work: Work) -> Work:
    return replace(work, lengths=(work.max_new_tokens,) * (len(work.prompts) * work.n))


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


class Predictor:
    """Plans to predictions, for one model. `other` is what the process holds beside the model's tensors."""

    def __init__(self, model: ShapeModel, other: int) -> None:
        self._model = model
        self._other = other

    def predict(self, plan: Plan) -> Prediction:
        """Each phase at its fullest, with all that lies there meanwhile."""
        model, steady = self._model, self._steady(plan)
        prefill, decode = model.rollouts(plan.rollouts, plan.engine)
        phases: dict[str, Sizes] = {"prefill": {**steady, **prefill}, "decode": {**steady, **decode}}
        every = _lengths(plan.rollouts, plan.rollouts.n)
        kept = _lengths(plan.rollouts, plan.m)
        if plan.passes.policy_over_all or plan.passes.policy_over_kept:
            lengths = every if plan.passes.policy_over_all else kept
            phases["policy_logprobs"] = {**steady, **self._quiet(plan, lengths)}
        if plan.passes.reference:
            phases["ref_logprobs"] = {**steady, **self._quiet(plan, kept)}
        phases |= {phase: {**steady, **sizes} for phase, sizes in self._update(plan, kept).items()}
        if plan.exam is not None:
            beginning, going_on = model.rollouts(plan.exam, plan.engine)
            phases["eval"] = {**steady, **(beginning if total(beginning) > total(going_on) else going_on)}
        return Prediction(phases)

    def _steady(self, plan: Plan) -> dict[str, int]:
        trained = self._model.trained
        return {
            WEIGHTS: self._model.weights,
            REFERENCE: self._model.weights if plan.passes.reference and plan.passes.second_model else 0,
            # AdamW: two averages of each weight in its own precision, and a float32 count of its steps.
            OPTIMIZER: sum(2 * p.untyped_storage().nbytes() + 4 for p in trained),
            OTHER: self._other,
        }

    def _quiet(self, plan: Plan, lengths: Sequence[tuple[int, int]]) -> Sizes:
        part = max(parts_of(lengths, plan.micro_batch_tokens), key=lambda part: part.size)
        return self._model.quiet_pass(part.rows, part.width, part.answered, plan.chunk)

    def _update(self, plan: Plan, kept: Sequence[tuple[int, int]]) -> dict[str, Sizes]:
        """The first micro-batch has no gradients beside it while it goes forward, all others have."""
        first, *others = parts_of(kept[: -(-len(kept) // plan.minibatches)], plan.micro_batch_tokens)
        passes = [self._model.train_pass(first.rows, first.width, first.answered, plan.chunk, False)]
        if others:
            part = max(others, key=lambda part: part.size)
            passes.append(self._model.train_pass(part.rows, part.width, part.answered, plan.chunk, True))
        forward, backward = (max(sizes, key=total) for sizes in zip(*passes, strict=True))
        gradients = sum(p.untyped_storage().nbytes() for p in self._model.trained)
        return {"forward": forward, "backward": backward, "optimizer": {GRADIENTS: gradients}}

    def largest(self, plan: Plan, room: int) -> dict[str, int | None]:
        """By key, the largest value that fits `room` bytes when all else stays and every rollout has full length.

        None where not even the least fits; 0 where there is no limit.
        """
        plan = plan.at_full_length()
        sampler = plan.engine.sampler
        requests = len(plan.rollouts.lengths)
        tokens = sum(sum(length) for length in _lengths(plan.rollouts, plan.m))

        def with_n(n: int) -> Plan:
            m = n if plan.m == plan.rollouts.n else min(plan.m, n)
            return replace(plan, rollouts=_full(replace(plan.rollouts, n=n)), m=m)

        def with_slots(slots: int) -> Plan:
            some = Infinite(slots=slots) if isinstance(sampler, Full) else replace(sampler, slots=slots)  # type: ignore
            return replace(plan, engine=replace(plan.engine, sampler=some))

        def with_tokens(count: int) -> Plan:
            return replace(plan, micro_batch_tokens=count)

        slots = min(requests, getattr(sampler, "slots", None) or DEFAULT_SLOTS)
        return {
            "n": self._most(with_n, plan.rollouts.n, 2, MOST, room),
            "sampler.slots": self._most(with_slots, slots, 1, requests, room),
            "train.micro_batch_tokens": self._most(with_tokens, min(tokens, plan.micro_batch_tokens), 1, tokens, room),
        }

    def _most(self, plan_with: Callable[[int], Plan], start: int, least: int, enough: int, room: int) -> int | None:
        """The largest value, to a part in eight or to 95 % of the room; beyond `enough` nothing changes any more.

        Bytes grow nearly in proportion, so where the room ends is guessed on the line between what fits and what not.
        """
        peaks: dict[int, int] = {}
        value = start
        for _ in range(9):
            peaks[value] = self.predict(plan_with(value)).peak
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
            elif peaks[good] > 0.95 * room or bad - good <= max(1, good // 8):
                break
            else:
                share, margin = (room - peaks[good]) / (peaks[bad] - peaks[good]), (bad - good) // 8
                value = min(bad - max(1, margin), good + max(1, margin, int(0.97 * share * (bad - good))))
        return good


def _lengths(work: Work, take: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of the first `take` rollouts of each prompt."""
    return [
        (len(prompt.token_ids), work.lengths[place * work.n + sample])
        for place, prompt in enumerate(work.prompts)
        for sample in range(take)
    ]
