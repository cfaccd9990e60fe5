"""The loop: prompts -> requests -> rollouts -> groups -> scored -> kept -> advantages -> batch -> update -> record."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_cli.errors import UserError
from grpo_cli.evaluate import evaluate
from grpo_cli.examples import examples
from grpo_cli.interfaces import AdvantageFn, Correction, DownsampleRule, Engine, LossFn, Meter, Task, Tracker
from grpo_cli.learner.batch import collate, corrected, minibatches
from grpo_cli.learner.learner import Learner, Update, rate_jump, schedule_of
from grpo_cli.memory import peak_bytes
from grpo_cli.progress import Progress, Trained, step_metrics
from grpo_cli.rollout import PromptOrder, group_rollouts, requests_for, score_all, seed_of
from grpo_cli.runs import layout
from grpo_cli.runs.checkpoint import load_state, rng_state, save_checkpoint, set_rng_state
from grpo_cli.runs.provenance import code_version
from grpo_cli.runs.summary import is_completed, write_summary
from grpo_cli.select import Selection, batch_rows, select
from grpo_cli.settings import RunSettings
from grpo_cli.tracking.health import HealthCheck
from grpo_cli.types import Batch, EngineStats, Prompt, Record, ScoredGroup


@dataclass(frozen=True)
class Parts:
    """Everything a run is put together from. `reference` is None when the loss has no KL term."""

    model: Any
    reference: Any | None
    save_model: Callable[[Path], None]
    task: Task
    engine: Engine
    pad_token_id: int
    downsample: DownsampleRule
    advantage: AdvantageFn
    correction: Correction
    loss: LossFn
    trackers: tuple[Tracker, ...]
    meter: Meter
    say: Callable[[str], None]
    warn: Callable[[str], None]


@dataclass(frozen=True)
class Judged:
    """What the correction says of all rollouts of a step; the rest is None if it never rejects."""

    rejections: Sequence[Sequence[str]]
    policy_logprobs: Tensor | None
    metrics: Mapping[str, float] | None


class Trainer:
    """Runs a training from its first (or resumed) step to its last, and leaves its records behind however it ends."""

    def __init__(self, settings: RunSettings, parts: Parts, run_dir: Path, checkpoint: Path | None = None) -> None:
        self._settings = settings
        self._parts = parts
        self._run_dir = run_dir
        self._learner = Learner(parts.model, parts.loss, settings.model, settings.train, settings.optim, parts.meter)
        self._progress = Progress()
        self._health = HealthCheck()
        self._stop_asked = False
        self._settled_updates = 0  # the learner's count when the last finished step ended
        self._prompts = PromptOrder(parts.task.prompts("train"), settings.train.prompts, settings.seed)
        if checkpoint is not None:
            self._restore(checkpoint)

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or until a signal asks to stop; returns what `summary.json` says."""
        status, fault = "failed", None
        (self._run_dir / layout.SUMMARY).unlink(missing_ok=True)  # of the run that is resumed: a kill leaves none
        try:
            with self._signals():
                self._loop()
            status = "completed" if self._progress.step >= self._settings.train.steps else "interrupted"
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            self._save_what_is_done()
            raise
        finally:
            summary = self._summary(status, fault)
            try:
                write_summary(self._run_dir, summary)
            finally:  # a full disk is no reason to leave a tracker open
                for tracker in self._parts.trackers:
                    tracker.close(summary)
        return summary

    def rehearse(self, steps: int, evaluate: bool) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Steps, and an evaluation, with nothing saved or logged: `step` or `eval` and its metrics."""
        for step in range(steps):
            yield "step", self._step(step).metrics
        if evaluate:
            yield "eval", self._evaluate()

    def _loop(self) -> None:
        settings, progress = self._settings, self._progress
        if progress.step == 0:
            self._log(Record(0, self._evaluate()))
            self._save()
        while progress.step < settings.train.steps and not self._stop_asked:
            record = self._step(progress.step)
            progress.step += 1
            self._settled_updates = self._learner.updates
            last = progress.step == settings.train.steps or self._stop_asked
            if settings.eval.every and (last or progress.step % settings.eval.every == 0):
                record = replace(record, metrics={**record.metrics, **self._evaluate()})
            # First the record: a resumed run cuts off those of steps that it makes again, and cannot make up any.
            self._log(replace(record, step=progress.step))
            if last or progress.step % settings.train.checkpoint_every == 0:
                self._save()
        if not self._saved():  # the signal came after the last look at it
            self._save()

    def _step(self, step: int) -> Record:
        """One round of rollouts and the updates made from it."""
        start = time.perf_counter()
        span = self._parts.meter.span
        with span("step"):
            prompts = self._prompts.of_step(step)
            with span("rollout"):
                groups, stats = self._rollouts(prompts, step)
            rollout_seconds = time.perf_counter() - start
            with span("reward"):
                scored = score_all(self._parts.task, groups)
            with span("logprobs"):
                judged = self._judged(scored)
            selected = [self._select(group, why, step) for group, why in zip(scored, judged.rejections, strict=True)]
            trained = self._train_on(selected, judged, step)
        self._progress.train_seconds += time.perf_counter() - start
        metrics = step_metrics(self._progress, scored, selected, stats, trained)
        metrics["memory/peak_bytes"] = float(self._peak_bytes())
        metrics["speed/tokens_per_second"] = stats.generated_tokens / rollout_seconds
        return Record(step, metrics, examples(self._parts.task, selected, self._settings.record.rollouts))

    def _rollouts(self, prompts: Sequence[Prompt], step: int) -> tuple[list[Any], EngineStats]:
        requests = requests_for(prompts, self._settings.n, self._settings.sampling, self._settings.seed, step)
        with self._learner.autocast():
            rollouts = list(self._parts.engine.generate(requests))
        return group_rollouts(prompts, rollouts), self._parts.engine.stats()

    def _judged(self, scored: Sequence[ScoredGroup]) -> Judged:
        """What the correction says of every rollout, before any is chosen; nothing if it never rejects."""
        parts, correction = self._parts, self._parts.correction
        if not correction.rejects:
            return Judged([[""] * len(group.rollouts) for group in scored], None, None)
        batch = collate(scored, [torch.zeros(len(group.rollouts)) for group in scored], parts.pad_token_id)
        policy = self._logprobs_under(parts.model, "policy_logprobs", batch)
        _, _, metrics = correction(batch.sampler_logprobs, policy, batch.response_mask)
        reasons = iter(correction.reasons(batch.sampler_logprobs, policy, batch.response_mask))
        return Judged([[next(reasons) for _ in group.rollouts] for group in scored], policy, metrics)

    def _select(self, group: ScoredGroup, rejections: Sequence[str], step: int) -> Selection:
        parts, settings = self._parts, self._settings
        rng = np.random.default_rng(seed_of(settings.seed, step, group.prompt.id, "downsample"))
        counted = parts.correction.count_rejected
        return select(group, rejections, settings.m, parts.downsample, parts.advantage, rng, counted)

    def _train_on(self, selected: Sequence[Selection], judged: Judged, step: int) -> Trained:
        """The batch of what was selected, the log-probabilities that it lacks, and the updates made from it."""
        span, parts = self._parts.meter.span, self._parts
        if not any(selection.indices for selection in selected):
            self._warn_of_rejection(step)
            self._progress.empty_steps += 1
            return Trained((), 0, 0, judged.metrics or {})
        batch = collate([s.kept for s in selected], [s.advantages for s in selected], parts.pad_token_id)
        with span("logprobs"):
            batch, corrections = self._logprobs(batch, selected, judged)
        rollouts, tokens = len(batch), int(batch.loss_mask.sum())
        if not batch.weights.any():
            self._warn_of_rejection(step)
            rollouts, tokens = 0, 0
        with span("update"):
            updates = self._update(batch, step)
        if not any(update.moved or update.fault for update in updates):
            self._progress.empty_steps += 1
        mismatch = judged.metrics or corrections or {}
        if corrections is None and updates:  # the learner's own pass was of the policy before it moved
            mismatch = parts.correction(batch.sampler_logprobs, updates[0].logprobs, batch.response_mask)[2]
        return Trained(updates, rollouts, tokens, mismatch)

    def _warn_of_rejection(self, step: int) -> None:
        self._parts.warn(
            f"step {step + 1}: every rollout was rejected by the correction, so that none of them teaches; look at "
            "mismatch/log_ratio_q001, then raise sparsity.budget, lower correction.veto, or widen "
            "correction.is_threshold_low and correction.is_threshold or correction.mask_low and correction.mask_high"
        )

    def _logprobs(
        self, batch: Batch, selected: Sequence[Selection], judged: Judged
    ) -> tuple[Batch, Mapping[str, float] | None]:
        """The old policy's and the reference's log-probabilities, where the loss or the correction needs them.

        With one update per round, and without dropout, the learner's own forward pass gives the old policy's, so that
        measuring the mismatch (None here) can wait for it.
        """
        parts, settings = self._parts, self._settings
        if parts.reference is not None:
            reference = self._logprobs_under(parts.reference, "ref_logprobs", batch)
            batch = replace(batch, ref_logprobs=reference)
        if judged.policy_logprobs is not None:
            policy = judged.policy_logprobs[batch_rows(selected), : batch.input_ids.shape[1]]
        elif (
            parts.correction.needs_policy_logprobs
            or settings.train.epochs * settings.train.minibatches > 1
            or self._learner.drops
        ):
            policy = self._logprobs_under(parts.model, "policy_logprobs", batch)
        else:
            return batch, None
        weights, mask, metrics = parts.correction(batch.sampler_logprobs, policy, batch.response_mask)
        return corrected(replace(batch, policy_logprobs=policy), weights, mask), metrics

    def _logprobs_under(self, model: Any, span: str, batch: Batch) -> Tensor:
        with self._parts.meter.span(span):
            return self._learner.logprobs(model, batch, self._settings.sampling.temperature)

    def _update(self, batch: Batch, step: int) -> tuple[Update, ...]:
        """Every epoch's minibatches in turn. A faulty one changes nothing, is dumped, and counts; one without gradient
        changes nothing. One without a token left to train on, and so without divisors, is passed over."""
        settings, progress = self._settings, self._progress
        updates: list[Update] = []
        begun = self._learner.updates
        for epoch in range(settings.train.epochs):
            rng = np.random.default_rng(seed_of(settings.seed, step, epoch, "minibatches"))
            for part in minibatches(batch, settings.train.minibatches, rng):
                if not part.loss_mask.any():
                    continue
                if self._learner.updates == begun:
                    # It has not moved, and is the old policy itself: what another pass says of that differs by rounding
                    # and dropout, which the loss would take for a policy that has moved, and clip.
                    part = replace(part, policy_logprobs=None)
                update = self._learner.update(
                    part, settings.sampling.temperature, settings.sampling.max_new_tokens, step
                )
                updates.append(update)
                if update.fault is None:
                    progress.updates += update.moved
                    progress.bad_in_a_row = 0
                    continue
                progress.skipped_steps += 1
                progress.bad_in_a_row += 1
                where = self._dump(part, step)
                self._parts.warn(f"step {step + 1}: {update.fault}; the update was skipped and its batch is in {where}")
                if progress.bad_in_a_row >= settings.train.max_bad_steps:
                    raise UserError(
                        f"{progress.bad_in_a_row} updates in a row had a loss or gradient that is not finite "
                        f"(train.max_bad_steps={settings.train.max_bad_steps}); the last batches are below "
                        f"{where.parent}. Lower optim.lr or optim.max_grad_norm, or use model.dtype=float32"
                    )
        if self._learner.updates > begun:
            self._parts.engine.update_weights()
        return tuple(updates)

    def _dump(self, batch: Batch, step: int) -> Path:
        folder = self._run_dir / layout.BAD_BATCHES
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{layout.step_folder(step + 1)}_{self._progress.skipped_steps}.pt"
        torch.save({name: value for name, value in vars(batch).items() if value is not None}, path)
        return path

    def _evaluate(self) -> dict[str, float]:
        """Metrics of an evaluation; its time is in `time/eval` and not in the training clock."""
        settings, parts = self._settings, self._parts
        if not settings.eval.every:
            return {}
        with parts.meter.span("eval"), self._learner.autocast():
            prompts = parts.task.prompts("eval")
            prompts = [prompts[i] for i in range(min(settings.eval.problems, len(prompts)))]
            sampling = replace(settings.sampling, temperature=settings.eval.temperature)
            result = evaluate(parts.engine, parts.task, prompts, sampling, settings.eval.k, settings.seed)
        accuracy = result.metrics["eval/accuracy"]
        best = self._progress.best_accuracy
        self._progress.final_accuracy = accuracy
        self._progress.best_accuracy = accuracy if best is None else max(best, accuracy)
        return dict(result.metrics)

    def _log(self, record: Record) -> None:
        times = self._parts.meter.take()
        record = replace(record, metrics={**record.metrics, **times})
        for tracker in self._parts.trackers:
            tracker.log(record)
        for warning in self._health.check(record.metrics):
            self._parts.warn(warning)

    def _save(self) -> None:
        state = {
            "progress": dict(vars(self._progress)),
            "optimizer": self._learner.state(),
            "schedule": schedule_of(self._settings.optim, self._settings.train),
            "engine": dict(getattr(self._parts.engine, "state", dict)()),
            "rng": rng_state(),
        }
        with self._parts.meter.span("checkpoint"):
            save_checkpoint(
                self._run_dir / layout.CHECKPOINTS,
                self._progress.step,
                self._parts.save_model,
                state,
                self._settings.train.keep_checkpoints,
            )

    def _saved(self) -> bool:
        saved = self._run_dir / layout.CHECKPOINTS / layout.step_folder(self._progress.step)
        return (saved / layout.COMPLETE).exists()

    def _save_what_is_done(self) -> None:
        """After a failure: the last finished step, unless it is saved or the weights are half-way to the next."""
        if self._learner.updates == self._settled_updates and not self._saved():
            try:
                self._save()
            except UserError as error:
                self._parts.warn(f"after the failure, no checkpoint could be saved: {error}")

    def _restore(self, checkpoint: Path) -> None:
        """Everything but the weights, which are loaded with the model."""
        state = load_state(checkpoint)
        self._progress = Progress(**state["progress"])
        self._learner.load_state(state["optimizer"])
        if hasattr(self._parts.engine, "load_state"):
            self._parts.engine.load_state(state["engine"])
        set_rng_state(state["rng"])
        self._say_if_the_rate_jumps(state)
        done = self._progress.step * self._settings.train.prompts
        self._parts.say(f"resumed at step {self._progress.step}, next prompt {done + 1} (from {checkpoint})")
        if self._progress.step >= self._settings.train.steps and is_completed(self._run_dir):
            raise UserError(
                f"this run has done its {self._progress.step} steps already "
                f"(train.steps={self._settings.train.steps}): raise train.steps to go on"
            )

    def _say_if_the_rate_jumps(self, state: Mapping[str, Any]) -> None:
        settings = self._settings
        if "schedule" in state and self._progress.step < settings.train.steps:
            jump = rate_jump(state["schedule"], settings.optim, settings.train, self._progress.step)
            if jump:
                self._parts.warn(jump)

    def _summary(self, status: str, fault: str | None) -> dict[str, Any]:
        measured = {**vars(self._progress), "peak_memory_bytes": self._peak_bytes()}
        engine: Mapping[str, Any] = getattr(self._parts.engine, "facts", dict)()
        return {"status": status, "error": fault, **measured, "engine": engine, "code": asdict(code_version())}

    def _peak_bytes(self) -> int:
        return peak_bytes(next(self._parts.model.parameters()).device)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT: finish the step, save, end well. A second SIGINT interrupts at once."""

        def ask(number: int, frame: Any) -> None:
            if self._stop_asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._stop_asked = True
            self._parts.say("stopping after this step; press ctrl-C again to stop at once")

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
