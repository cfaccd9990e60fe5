"""What a run would take in each phase, part by part, and the largest group, slots and micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_cli.engine.sampler import DEFAULT_SLOTS, Infinite
from grpo_cli.learner.forward import Pass, Row
from grpo_cli.profile.allocations import ACTIVATIONS, GRADIENTS, LOGITS
from grpo_cli.profile.shapes import KV, EngineShape, ShapeModel, Sizes, Work

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
    """What a step and an evaluation are made of, as far as memory is concerned. `exam` is None without evaluations,
    `engine` where rollouts are not made by ours: then only what is around them is predicted."""

    rollouts: Work
    m: int
    engine: EngineShape | None
    exam: Work | None
    way: Pass
    temperature: float
    minibatches: int
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
    """Plans to predictions, for one model. `optimizer` is what the optimizer holds, `other` what the process holds
    beside the model's tensors.

    `freed_stays`: memory is what is resident, as on a CPU. There C's allocator keeps what activations are freed (all
    but single blocks of 32 MiB and more, with glibc), so that every phase but the first has those of the fullest.
    """

    def __init__(self, model: ShapeModel, optimizer: int, other: int, freed_stays: bool = False) -> None:
        self._model = model
        self._optimizer = optimizer
        self._other = other
        self._freed_stays = freed_stays

    def predict(self, plan: Plan) -> Prediction:
        """Each phase at its fullest, with all that lies there meanwhile."""
        model, steady = self._model, self._steady(plan)
        phases: dict[str, Sizes] = {}
        if plan.engine is not None:
            prefill, decode = model.rollouts(plan.rollouts, plan.engine)
            phases = {"prefill": {**steady, **prefill}, "decode": {**steady, **decode}}
        every = _rows(plan.rollouts, plan.rollouts.n)
        kept = _rows(plan.rollouts, plan.m)
        if plan.passes.policy_over_all or plan.passes.policy_over_kept:
            rows = every if plan.passes.policy_over_all else kept
            phases["policy_logprobs"] = {**steady, **self._quiet(plan, rows)}
        if plan.passes.reference:
            phases["ref_logprobs"] = {**steady, **self._quiet(plan, kept)}
        phases |= {phase: {**steady, **sizes} for phase, sizes in self._update(plan, kept).items()}
        if plan.exam is not None and plan.engine is not None:
            beginning, going_on = model.rollouts(plan.exam, plan.engine)
            phases["eval"] = {**steady, **(beginning if total(beginning) > total(going_on) else going_on)}
        if self._freed_stays:
            most = max(sizes.get(ACTIVATIONS, 0) for sizes in phases.values())
            phases = {phase: {**sizes, ACTIVATIONS: most} for phase, sizes in phases.items()}
        return Prediction(phases)

    def _steady(self, plan: Plan) -> dict[str, int]:
        return {
            WEIGHTS: self._model.weights,
            REFERENCE: self._model.weights if plan.passes.reference and plan.passes.second_model else 0,
            OPTIMIZER: self._optimizer,
            OTHER: self._other,
        }

    def _quiet(self, plan: Plan, rows: Sequence[Row]) -> Sizes:
        return self._model.quiet_pass(plan.way, max(_parts(plan.way, rows), key=plan.way.size), plan.temperature)

    def _update(self, plan: Plan, kept: Sequence[Row]) -> dict[str, Sizes]:
        """The first micro-batch has no gradients beside it while it goes forward, all others have."""
        first, *others = _parts(plan.way, kept[: -(-len(kept) // plan.minibatches)])
        passes = [self._model.train_pass(plan.way, first, plan.temperature, False)]
        if others:
            passes.append(self._model.train_pass(plan.way, max(others, key=plan.way.size), plan.temperature, True))
        forward, backward = (max(sizes, key=total) for sizes in zip(*passes, strict=True))
        gradients = sum(p.untyped_storage().nbytes() for p in self._model.trained)
        return {"forward": forward, "backward": backward, "optimizer": {GRADIENTS: gradients}}

    def largest(self, plan: Plan, room: int) -> dict[str, int | None]:
        """By key, the largest value that fits `room` bytes when all else stays and every rollout has full length.

        None where not even the least fits; 0 where there is no limit.
        """
        plan = plan.at_full_length()
        requests = len(plan.rollouts.lengths)
        tokens = sum(row.prompt + row.reply for row in _rows(plan.rollouts, plan.m))

        def with_n(n: int) -> Plan:
            m = n if plan.m == plan.rollouts.n else min(plan.m, n)
            return replace(plan, rollouts=_full(replace(plan.rollouts, n=n)), m=m)

        def with_slots(slots: int) -> Plan:
            assert plan.engine is not None, "asked only where the engine is ours"
            sampler = plan.engine.sampler
            infinite = Infinite(slots=slots, kv_budget=None, on_oom=sampler.on_oom)
            some = infinite if sampler.all_at_once else replace(sampler, slots=slots)  # type: ignore[type-var]
            return replace(plan, engine=replace(plan.engine, sampler=some))

        def with_tokens(count: int) -> Plan:
            return replace(plan, way=replace(plan.way, tokens=count))  # type: ignore[type-var]

        found = {"n": self._most(with_n, plan.rollouts.n, 2, MOST, room)}
        if plan.engine is not None:
            slots = min(requests, getattr(plan.engine.sampler, "slots", None) or DEFAULT_SLOTS)
            found["sampler.slots"] = self._most(with_slots, slots, 1, requests, room)
        return found | {
            "train.micro_batch_tokens": self._most(with_tokens, min(tokens, plan.way.tokens), 1, tokens, room),
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


def _rows(work: Work, take: int) -> list[Row]:
    """The first `take` rollouts of each prompt as rows of a batch."""
    return [
        Row(len(prompt.token_ids), work.lengths[place * work.n + sample], place)
        for place, prompt in enumerate(work.prompts)
        for sample in range(take)
    ]


def _parts(way: Pass, rows: Sequence[Row]) -> list[tuple[Row, ...]]:
    return [tuple(rows[i] for i in part) for part in way.cut(rows)]
