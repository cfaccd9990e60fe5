"""One step: rollouts -> scored groups -> batch -> correction -> selection -> updates -> what rules learn -> record."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_cli.collect import rule_state
from grpo_cli.collect.collection import StepCollection
from grpo_cli.collect.requests import seed_of
from grpo_cli.interfaces import Parts, SetUp, Warmup
from grpo_cli.learner.batch import collate, corrected, minibatches, rows_of, verdict_on, with_rows_untrained
from grpo_cli.learner.learner import Learner, Update
from grpo_cli.learner.old_policy import is_needed_first, old_policy
from grpo_cli.metrics import reuse_metrics
from grpo_cli.runs import layout
from grpo_cli.runs.checkpoint import write_tensors
from grpo_cli.runs.files import must_be_writable
from grpo_cli.select import CUT_OFF, Selection, batch_advantages, batch_rows, cut_off, finalised, row_weights, select
from grpo_cli.settings import RunSettings
from grpo_cli.support.errors import UserError
from grpo_cli.support.memory import peak_bytes
from grpo_cli.tracking.examples import examples
from grpo_cli.tracking.progress import Progress, TrainedStep, step_metrics, warmup_metrics
from grpo_cli.types import Batch, Record, ScoredGroup, Verdict


class Step:
    """The steps of a training run, with their learner. The run's counters are passed in."""

    def __init__(self, settings: RunSettings, parts: Parts) -> None:
        self._settings, self._parts, self._runtime, self._span = settings, parts, parts.runtime, parts.meter.span
        model, train, correction = parts.runtime.model, settings.train, parts.rules.correction
        self.learner = Learner(
            model, parts.rules.loss, settings.model, settings.sampling, train, settings.optim, parts.meter, parts.warn
        )
        self._prompt_count = len(parts.runtime.task.prompts("train"))
        for rule in vars(parts.rules).values():
            if isinstance(rule, SetUp):
                rule.setup(parts.runtime)
        self.old_policy = old_policy(correction.prox, correction.prox_window, model, self.learner)
        self._old_policy_first = is_needed_first(correction, train, self.learner.has_dropout)

    def run(self, step: int, progress: Progress) -> Record:
        """Run step `step`, from 0, and add what was done to `progress`. The record has the number of finished steps."""
        if self._parts.warmup is not None and step < self._parts.warmup.steps:
            return self._sft_step(self._parts.warmup, step, progress)
        start = time.perf_counter()
        with self._span("step"):
            self.learner.park()
            collection = self._new_collection(step, progress)
            groups = collection.run(self._parts.rules.collector)
            trained = self._learn(groups, collection.version, step, progress)
            finished = collection.finished_groups
            observed = rule_state.observe(self._parts, step, groups, finished)
        progress.train_seconds += time.perf_counter() - start
        stats, record = collection.stats, self._settings.record
        metrics = step_metrics(progress, finished, stats, trained) | collection.metrics() | observed
        metrics["prompts/distinct"] = float(len(self._runtime.history))
        metrics["memory/peak_bytes"] = float(peak_bytes(self._runtime.device))
        if stats.generated_tokens:
            metrics["speed/tokens_per_second"] = stats.generated_tokens / collection.rollout_seconds
        rows = examples(self._runtime.task, finished, trained.selected, record.rollouts, record.tokens)
        return Record(step + 1, metrics, rows)

    def _sft_step(self, warmup: Warmup, step: int, progress: Progress) -> Record:
        start = time.perf_counter()
        with self._span("step"), self._span("update"):
            self.learner.park()
            batch = collate(warmup.groups(step), self.learner.updates)
            updates = self._update(batch, step, progress, warmup)
        progress.train_seconds += time.perf_counter() - start
        return Record(step + 1, warmup_metrics(progress, updates, batch))

    def _new_collection(self, step: int, progress: Progress) -> StepCollection:
        settings, runtime, most = self._settings, self._runtime, self._settings.train.max_generated
        return StepCollection(
            n=settings.n,
            prompts=settings.train.prompts,
            sampling=settings.sampling,
            seed=settings.seed,
            step=step,
            curriculum=self._parts.curriculum,
            engine=runtime.engine,
            task=runtime.task,
            history=runtime.history,
            version=self.learner.updates,
            prompt_count=self._prompt_count,
            tokens_left=math.inf if most is None else most - progress.generated_tokens,
            truncated=settings.train.truncated,
            span=self._span,
            autocast=self.learner.autocast,
        )

    def _learn(self, groups: Sequence[ScoredGroup], version: int, step: int, progress: Progress) -> TrainedStep:
        """Correct the mismatch with the sampler, select what is trained on, and update with it.

        A correction that can reject runs on all rollouts, before any are chosen. Other corrections run on the chosen
        rows: before the updates if these need old log-probabilities, else after them, with the log-probabilities of the
        first update's forward pass.
        """
        everything, verdict = collate(groups, version), None
        reasons = cut_off(groups, self._settings.train.truncated)
        if any(reasons):
            everything = with_rows_untrained(everything, [bool(reason) for reason in reasons])
        if self._parts.rules.correction.rejects:
            with self._span("logprobs"):
                everything, verdict = self._corrected(everything)
            reasons = [cut or rejected for cut, rejected in zip(reasons, verdict.reasons, strict=True)]
        selected = self._select(groups, reasons, step)
        if not any(selection.indices for selection in selected):
            self._warn_of_rejection(step, selected)
            progress.empty_steps += 1
            return TrainedStep((), selected, 0, verdict.metrics if verdict else {})
        batch, rejections = self._batch_of(selected, everything), list[str]()
        with self._span("logprobs"):
            if (reference := self._parts.reference) is not None:
                with self._span("ref_logprobs"):
                    with_adapters = reference is not self._runtime.model
                    batch = replace(batch, ref_logprobs=self.learner.logprobs(reference, batch, with_adapters))
            if verdict is None and (self._old_policy_first or self.old_policy.differs):
                batch, verdict = self._corrected(batch)
                rejections += verdict.reasons
        selected = finalised(selected, batch, rejections)
        tokens, reuse = int(batch.trained_mask.sum()), reuse_metrics(batch)
        if not tokens:
            self._warn_of_rejection(step, selected)
        with self._span("update"):
            updates = self._update(batch, step, progress)
        progress.empty_steps += not any(update.stepped or update.fault for update in updates)
        if verdict is None and updates:  # the first update's forward pass was made before the policy changed
            verdict = verdict_on(self._parts.rules.correction, batch, updates[0].logprobs)
        mismatch = verdict.metrics if verdict else {}
        weighed = max(tokens, 1) / max(int(batch.loss_mask.sum()), 1)  # share of the tokens in the loss
        active = self._end_old_policy(updates, mismatch, weighed)
        return TrainedStep(updates, selected, tokens, {**mismatch, **reuse, **active})

    def _corrected(self, batch: Batch) -> tuple[Batch, Verdict]:
        """Return the batch with the old policy's log-probabilities and the correction applied, and its verdict."""
        with self._span("old_logprobs"):
            old_logprobs = self.old_policy.logprobs(batch)
        verdict = verdict_on(self._parts.rules.correction, batch, old_logprobs)
        return corrected(replace(batch, old_logprobs=old_logprobs), verdict), verdict

    def _select(self, groups: Sequence[ScoredGroup], reasons: Sequence[str], step: int) -> list[Selection]:
        """Choose rollouts of each group, of which `reasons` leave some out, and compute their advantages."""
        rules, settings, left, selected = self._parts.rules, self._settings, iter(reasons), list[Selection]()
        for group in groups:
            rng = np.random.default_rng(seed_of(settings.seed, step, group.prompt.id, "downsample"))
            group_reasons, count_rejected = [next(left) for _ in group.rollouts], rules.correction.count_rejected
            # m = n trains on all, also of a group that is larger than n; m < n chooses, also of a smaller one
            keep = settings.m if settings.m < settings.n else None
            selected.append(select(group, group_reasons, keep, rules.downsample, rules.advantage, rng, count_rejected))
        return selected

    def _batch_of(self, selected: Sequence[Selection], everything: Batch) -> Batch:
        """Return the selected rows, with advantages and each token's weight before a correction."""
        batch = replace(rows_of(everything, batch_rows(selected)), advantages=batch_advantages(selected))
        if self._settings.train.count_by == "prompt":
            batch = replace(batch, weights=batch.weights * batch.per_token(row_weights(selected)))
        return batch

    def _update(self, batch: Batch, step: int, progress: Progress, warmup: Warmup | None = None) -> tuple[Update, ...]:
        """Make each epoch's updates. Count a faulty update and leave the weights alone; skip a minibatch without
        trained tokens, which has no divisors."""
        settings, before, updates = self._settings, self.learner.updates, list[Update]()
        loss_and_rate = (warmup.loss, warmup.rate) if warmup else ()
        for epoch in range(settings.train.epochs):
            rng = np.random.default_rng(seed_of(settings.seed, step, epoch, "minibatches"))
            for minibatch in minibatches(batch, settings.train.minibatches, rng):
                if not minibatch.loss_mask.any():
                    continue
                if self.learner.updates == before and not self.old_policy.differs:
                    # Until the first optimizer step the learner is the old policy: another pass would differ by
                    # rounding and dropout, which the loss would take for a policy that has changed, and clip.
                    minibatch = replace(minibatch, old_logprobs=None)
                update = self.learner.update(minibatch, step, *loss_and_rate)
                updates.append(update)
                if update.stepped:
                    self.old_policy.after_update()
                if update.fault is None:
                    progress.bad_in_a_row = 0
                else:
                    self._skip(minibatch, update.fault, step, progress)
        if self.learner.updates > before:
            self._runtime.engine.update_weights()
        return tuple(updates)

    def _end_old_policy(
        self, updates: Sequence[Update], mismatch: Mapping[str, float], weighed: float
    ) -> Mapping[str, float]:
        """Pass the old policy the share of tokens that were neither masked nor clipped, if weights changed."""
        clipped = [update.metrics.get("loss/clip_fraction", 0.0) for update in updates if update.stepped]
        left = 1.0 - mismatch.get("mismatch/masked_tokens", 0.0)
        return self.old_policy.end_step(left * (1.0 - sum(clipped) / len(clipped) / weighed)) if clipped else {}

    def _skip(self, batch: Batch, fault: str, step: int, progress: Progress) -> None:
        """Report a faulty update and keep its batch; UserError after too many of them in a row."""
        progress.skipped_updates += 1
        progress.bad_in_a_row += 1
        folder = Path(self._settings.run_dir) / layout.BAD_BATCHES
        with must_be_writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{layout.step_folder(step + 1)}_{progress.skipped_updates}.pt"
        write_tensors(path, {name: value for name, value in vars(batch).items() if value is not None})
        self._parts.warn(f"step {step + 1}: {fault}; the update was skipped and its batch is in {path}")
        if progress.bad_in_a_row >= self._settings.train.max_bad_updates:
            raise UserError(
                f"{progress.bad_in_a_row} updates in a row were not finite (train.max_bad_updates="
                f"{self._settings.train.max_bad_updates}); see {folder}; lower optim.lr or optim.max_grad_norm"
            )

    def _warn_of_rejection(self, step: int, selected: Sequence[Selection]) -> None:
        if all(reason == CUT_OFF for selection in selected for reason in selection.reasons):
            why = "was cut off (train.truncated=leave_out): raise sampling.max_new_tokens or use train.truncated=train"
        else:
            why = "was rejected or cut off: see mismatch/log_ratio_q001; widen correction's bounds or sparsity.budget"
        self._parts.warn(f"step {step + 1}: nothing to train on, as every rollout {why}")
