"""One step: rounds of requests -> rollouts -> scored groups -> verdict -> selected -> batch -> updates -> what the
rules learn -> record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_cli.collect import learnt
from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.requests import seed_of
from grpo_cli.interfaces import Parts, SetUp, Warmup
from grpo_cli.learner.batch import collate, corrected, minibatches, rows_of, verdict_on, without_rows
from grpo_cli.learner.learner import Learner, Update
from grpo_cli.learner.old_policy import old_policy
from grpo_cli.metrics import of_trained, reuse_metrics
from grpo_cli.runs import layout
from grpo_cli.select import CUT_OFF, Selection, batch_rows, row_weights, select, settled
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.facts import taken
from grpo_cli.support.memory import peak_bytes, reserved_bytes
from grpo_cli.tracking.examples import examples
from grpo_cli.tracking.progress import Progress, Trained, step_metrics, warmup_metrics
from grpo_cli.types import Batch, Finish, Record, ScoredGroup, Verdict


class Step:
    """Runs the steps of training. It owns the learner; the run's counters are passed in."""

    def __init__(self, settings: RunSettings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._span = parts.meter.span
        model, train = parts.bench.model, settings.train
        correction = parts.rules.correction
        self.learner = Learner(
            model,
            parts.rules.loss,
            settings.model,
            settings.sampling,
            train,
            settings.optim,
            parts.meter,
            parts.warn,
        )
        for rule in vars(parts.rules).values():
            if isinstance(rule, SetUp):
                rule.setup(parts.bench)
        self._advantage = partial(parts.rules.advantage, **taken(parts.rules.advantage, history=parts.history))
        self.old_policy = old_policy(correction.prox, correction.prox_window, model, self.learner)
        # With one update per step, and without dropout, the learner's own forward pass gives the old policy's
        # log-probabilities, so that measuring the mismatch can wait for it.
        several = train.epochs * train.minibatches > 1
        self._old_policy_first = correction.needs_policy_logprobs or several or self.learner.drops

    def run(self, step: int, progress: Progress) -> Record:
        """Step number `step`, from 0; adds what was done to `progress`."""
        if self._parts.warmup is not None and step < self._parts.warmup.steps:
            return self._warmed_up(self._parts.warmup, step, progress)
        start = time.perf_counter()
        with self._span("step"):
            version = self.learner.updates
            self.learner.park()
            collection = self._collection(step, version, progress)
            groups = collection.run(self._parts.rules.collector, self._parts.bench.engine)
            made = collection.made
            everything, verdict = collate(groups, self._parts.bench.pad_token_id, version), None
            cut_off = self._cut_off(groups)
            if any(cut_off):
                everything = without_rows(everything, cut_off)
            if self._parts.rules.correction.rejects:  # then it must be asked before any are chosen
                with self._span("logprobs"):
                    everything, verdict = self._corrected(everything)
            selected = self._selected(groups, verdict, cut_off, step)
            trained = self._train_on(selected, everything, verdict, step, progress)
            told = learnt.observe(self._parts, step, groups, made)
        progress.train_seconds += time.perf_counter() - start
        stats = collection.stats
        metrics = step_metrics(progress, made, stats, trained) | collection.metrics() | told
        metrics["prompts/distinct"] = float(len(self._parts.history))
        metrics["memory/peak_bytes"] = float(peak_bytes(self._parts.bench.device))
        metrics |= reserved_bytes(self._parts.bench.device)
        if stats.generated_tokens:
            metrics["speed/tokens_per_second"] = stats.generated_tokens / collection.rollout_seconds
        record = self._settings.record
        rows = examples(self._parts.bench.task, made, trained.selected, record.rollouts, record.tokens)
        return Record(step, metrics, rows)

    def _warmed_up(self, warmup: Warmup, step: int, progress: Progress) -> Record:
        """A step that imitates what it is given."""
        start = time.perf_counter()
        with self._span("step"), self._span("update"):
            batch = collate(warmup.groups(step), self._parts.bench.pad_token_id, self.learner.updates)
            updates = self._update(batch, step, progress, loss=warmup.loss, rate=warmup.rate)
        progress.train_seconds += time.perf_counter() - start
        return Record(step, warmup_metrics(progress, updates, batch))

    def _collection(self, step: int, version: int, progress: Progress) -> StepCollection:
        settings, parts = self._settings, self._parts
        most = settings.train.max_generated
        return StepCollection(
            n=settings.n,
            prompts=settings.train.prompts,
            sampling=settings.sampling,
            seed=settings.seed,
            step=step,
            curriculum=parts.curriculum,
            task=parts.bench.task,
            history=parts.history,
            version=version,
            span=self._span,
            autocast=self.learner.autocast,
            tokens_left=math.inf if most is None else most - progress.generated_tokens,
            zero_truncated=settings.train.truncated == "zero",
            has_advantage=lambda group: self._has_advantage(group, step),
        )

    def _has_advantage(self, group: ScoredGroup, step: int) -> bool:
        """Whether a rollout that would be trained on has one, as far as is known before a correction is asked."""
        (selection,) = self._selected([group], None, self._cut_off([group]), step)
        rows = zip(selection.indices, selection.advantages.tolist(), strict=True)
        return any(advantage and not selection.reasons[index] for index, advantage in rows)

    def _cut_off(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Which rollouts `train.truncated` leaves out, group after group."""
        leaves_out = self._settings.train.truncated == "leave_out"
        return [leaves_out and one.finish is Finish.LENGTH for group in groups for one in group.rollouts]

    def _selected(
        self,
        scored: Sequence[ScoredGroup],
        verdict: Verdict | None,
        cut_off: Sequence[bool],
        step: int,
    ) -> list[Selection]:
        rules, settings = self._parts.rules, self._settings
        rejected = verdict.reasons if verdict else [""] * len(cut_off)
        reasons = iter([CUT_OFF if cut else why for cut, why in zip(cut_off, rejected, strict=True)])
        selected, start = [], 0
        for group in scored:
            end = start + len(group.rollouts)
            start = end
            rng = np.random.default_rng(seed_of(settings.seed, step, group.prompt.id, "downsample"))
            why, counted = [next(reasons) for _ in group.rollouts], rules.correction.count_rejected
            # m = n trains on all, also of a group that is larger than n
            keep = settings.m if settings.m < settings.n else len(group.rollouts)
            selected.append(select(group, why, keep, rules.downsample, self._advantage, rng, counted))
        return selected

    def _train_on(
        self,
        selected: Sequence[Selection],
        everything: Batch,
        verdict: Verdict | None,
        step: int,
        progress: Progress,
    ) -> Trained:
        """Build the batch of what was selected, add the log-probabilities that it lacks, and update with it.

        `verdict` is the one on all rollouts, if there is one; otherwise the correction is asked about the batch.
        """
        if not any(selection.indices for selection in selected):
            self._warn_of_rejection(step, selected)
            progress.empty_steps += 1
            return Trained((), selected, 0, verdict.metrics if verdict else {}, {})
        batch = self._batch_of(selected, everything)
        asked_before, rejections = verdict is not None, list[str]()
        with self._span("logprobs"):
            batch = self._with_reference(batch)
            if verdict is None and (self._old_policy_first or self.old_policy.apart):
                batch, verdict = self._corrected(batch)
                rejections += verdict.reasons
        selected = settled(selected, batch, rejections)
        tokens, reuse = int(batch.trained_mask.sum()), reuse_metrics(batch)
        if not tokens:
            self._warn_of_rejection(step, selected)
        with self._span("update"):
            updates = self._update(batch, step, progress)
        progress.empty_steps += not any(update.moved or update.fault for update in updates)
        if verdict is None and updates:  # the learner's own pass was made before the policy moved
            verdict = self._verdict(batch, updates[0].logprobs)
        mismatch = verdict.metrics if verdict else {}
        reuse |= self._settled(updates, mismatch)
        of_all = asked_before or len(batch) == len(everything)
        return Trained(updates, selected, tokens, mismatch if of_all else of_trained(mismatch), reuse)

    def _batch_of(self, selected: Sequence[Selection], everything: Batch) -> Batch:
        """The selected rows, with advantages and each token's weight before a correction."""
        advantages = torch.cat([selection.advantages for selection in selected])
        rows = batch_rows(selected)
        batch = replace(rows_of(everything, rows), advantages=advantages)
        if self._settings.train.count_by == "prompt":
            batch = replace(batch, weights=batch.weights * row_weights(selected)[:, None])
        return batch

    def _with_reference(self, batch: Batch) -> Batch:
        if self._parts.reference is None:
            return batch
        with self._span("ref_logprobs"):
            return replace(batch, ref_logprobs=self.learner.logprobs(self._parts.reference, batch))

    def _settled(self, updates: Sequence[Update], mismatch: Mapping[str, float]) -> Mapping[str, float]:
        """Tell the old policy how the step went, if any weights moved; a loss need not report what it clipped."""
        clipped = [update.metrics.get("loss/clip_fraction", 0.0) for update in updates if update.moved]
        if not clipped:
            return {}
        left = 1.0 - mismatch.get("mismatch/masked_tokens", 0.0)
        return self.old_policy.settle(left * (1.0 - sum(clipped) / len(clipped)))

    def _corrected(self, batch: Batch) -> tuple[Batch, Verdict]:
        """The batch with the old policy's log-probabilities and the correction applied, and its verdict."""
        with self._span("policy_logprobs"):
            policy = self.old_policy.logprobs(batch)
        verdict = self._verdict(batch, policy)
        return corrected(replace(batch, policy_logprobs=policy), verdict), verdict

    def _verdict(self, batch: Batch, policy_logprobs: Tensor) -> Verdict:
        return verdict_on(self._parts.rules.correction, batch, policy_logprobs)

    def _warn_of_rejection(self, step: int, selected: Sequence[Selection]) -> None:
        if all(why == CUT_OFF for selection in selected for why in selection.reasons):
            return self._parts.warn(
                f"step {step + 1}: every rollout was cut off, and train.truncated=leave_out trains on none of them; "
                "raise sampling.max_new_tokens, or use train.truncated=train"
            )
        self._parts.warn(
            f"step {step + 1}: every rollout was rejected by the correction, so that none of them teaches; look at "
            "mismatch/log_ratio_q001, then raise sparsity.budget, lower correction.veto, raise correction.gate, or "
            "widen correction.is_threshold_low and correction.is_threshold or correction.mask_low and "
            "correction.mask_high"
        )

    def _update(self, batch: Batch, step: int, progress: Progress, **words: Any) -> tuple[Update, ...]:
        """Every epoch's minibatches in turn. A faulty one changes nothing, is dumped, and is counted; one without
        gradient changes nothing. One without a token left to train on, and so without divisors, is skipped."""
        settings = self._settings
        updates: list[Update] = []
        begun = self.learner.updates
        for epoch in range(settings.train.epochs):
            rng = np.random.default_rng(seed_of(settings.seed, step, epoch, "minibatches"))
            for part in minibatches(batch, settings.train.minibatches, rng):
                if not part.loss_mask.any():
                    continue
                if self.learner.updates == begun and not self.old_policy.apart:
                    # It has not moved, and is the old policy itself: another pass would differ by rounding and dropout,
                    # which the loss would take for a policy that has moved, and clip.
                    part = replace(part, policy_logprobs=None)
                update = self.learner.update(part, step, **words)
                updates.append(update)
                if update.moved:
                    self.old_policy.follow()
                if update.fault is None:
                    progress.bad_in_a_row = 0
                else:
                    self._skip(part, update.fault, step, progress)
        if self.learner.updates > begun:
            self._parts.bench.engine.update_weights()
        return tuple(updates)

    def _skip(self, batch: Batch, fault: str, step: int, progress: Progress) -> None:
        """Report a faulty update; raises UserError after too many of them in a row."""
        progress.skipped_steps += 1
        progress.bad_in_a_row += 1
        where = self._dump(batch, f"{layout.step_folder(step + 1)}_{progress.skipped_steps}.pt")
        self._parts.warn(f"step {step + 1}: {fault}; the update was skipped and its batch is in {where}")
        if progress.bad_in_a_row >= self._settings.train.max_bad_steps:
            raise UserError(
                f"{progress.bad_in_a_row} updates in a row had a loss or gradient that is not finite "
                f"(train.max_bad_steps={self._settings.train.max_bad_steps}); the last batches are below "
                f"{where.parent}. Lower optim.lr or optim.max_grad_norm, or use model.dtype=float32"
            )

    def _dump(self, batch: Batch, name: str) -> Path:
        path = Path(self._settings.run_dir) / layout.BAD_BATCHES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: value for name, value in vars(batch).items() if value is not None}, path)
        return path
