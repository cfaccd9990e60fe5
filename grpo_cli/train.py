"""The loop: steps and evaluations, their records, checkpoints, signals, and what remains when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.collect import rule_state
from grpo_cli.evaluate import evaluate_with
from grpo_cli.interfaces import HasMetrics, Parts, Stateful
from grpo_cli.learner.schedule import rate_jump, schedule_of
from grpo_cli.runs import layout
from grpo_cli.runs.background import Saver
from grpo_cli.runs.checkpoint import (
    clear_leftovers,
    damaged,
    load_state,
    remove_from,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from grpo_cli.runs.files import write_object
from grpo_cli.runs.record import code_version
from grpo_cli.runs.stop import Stop, Stopped
from grpo_cli.settings import RunSettings
from grpo_cli.step import Step
from grpo_cli.support.errors import UserError
from grpo_cli.support.isolation import ends_children
from grpo_cli.support.memory import peak_bytes
from grpo_cli.tracking.health import HealthCheck
from grpo_cli.tracking.progress import Progress
from grpo_cli.types import Record


class Trainer:
    """A training run from its first (or resumed) step to its last, whose records are written however it ends."""

    def __init__(self, settings: RunSettings, parts: Parts, checkpoint: Path | None = None) -> None:
        self._settings = settings
        self._parts = parts
        self._run_dir = Path(settings.run_dir)
        self._step = Step(settings, parts)
        self._learner = self._step.learner
        self._progress = Progress()
        self._task_digest = rule_state.digest_of(parts.runtime.task)
        self._saver = Saver(settings.train.checkpoint == "lazy", parts.meter.span)
        self._learner.before_change, self._learner.before_parking = self._before_change, self._saver.wait_until_copied
        self._health = HealthCheck()
        self._files = [tracker for tracker in parts.trackers if isinstance(tracker, Stateful)]
        self._stop = Stop(parts.say)
        self._resumed = checkpoint is not None
        self._owed: dict[str, float] | None = None  # metrics of a step whose evaluation a signal left out
        if checkpoint is not None:
            self._restore(checkpoint)

    def fit(self, stop: Stop | None = None) -> dict[str, Any]:
        """Train to the last step, or until a signal stops the run; return the content of `summary.json`.

        `stop` comes from a caller that already handles signals; otherwise they are handled while this runs.
        """
        status, fault = "failed", None
        self._stop = self._stop if stop is None else stop
        # A run that is killed from here on must not keep the summary of an earlier one.
        (self._run_dir / layout.SUMMARY).unlink(missing_ok=True)
        with self._stop if stop is None else nullcontext():
            clear_leftovers(self._run_dir)
            try:
                with ends_children():  # a child forked by an evaluation must not write the summary
                    self._loop()
                status = "completed" if self._is_done() and self._owed is None else "interrupted"
            except KeyboardInterrupt:
                status = "interrupted"
                raise
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"
                raise
            finally:
                self._stop.may_leave = False
                try:
                    self._saver.join()  # or its folder would be a leftover
                except Exception as error:  # beside the one that ended the run
                    self._parts.warn(f"the last checkpoint is not saved: {error}")
                clear_leftovers(self._run_dir)
                summary = self._summary(status, fault)
                try:
                    write_object(self._run_dir / layout.SUMMARY, summary)
                except UserError as error:
                    if fault is None:
                        raise
                    self._parts.warn(str(error))  # the first error is the one to raise
                finally:  # even if the disk is full
                    for tracker in self._parts.trackers:
                        tracker.close(summary)
        return summary

    def _loop(self) -> None:
        settings, progress = self._settings, self._progress
        if not self._resumed:
            if self._stop.stopped_by:
                return self._parts.say("stopped before the first step: there is nothing to save")
            self._log(Record(0, self._evaluate()))
        elif self._owed is not None:
            self._log(self._evaluated(Record(progress.step, self._owed)), own_checkpoint=False)
        state = self._state()
        if not self._resumed:
            self._save(state)
        while not self._is_done() and not self._stop.stopped_by:
            record = None
            # A step that has changed no weights is left at a signal: a resumed run makes it again.
            with ends_children(), suppress(Stopped):  # nor may a child forked by a step save it
                self._stop.may_leave = True
                try:
                    record = self._step.run(progress.step, progress)
                except Exception:
                    unchanged, self._stop.may_leave = self._stop.may_leave, False
                    if unchanged:
                        self._save_last(state)
                    raise
                self._stop.may_leave = False
            if record is None:
                break
            progress.step = record.step
            progress.updates = self._learner.updates
            last = self._is_done()
            state = self._state()
            if is_due := settings.eval.every and (last or progress.step % settings.eval.every == 0):
                try:
                    record = self._evaluated(record)
                except Exception:  # a resumed run makes the evaluation
                    self._stop.may_leave = False
                    self._save({**state, "owed": self._log(record)})
                    self._saver.join()
                    raise
            # The record before the checkpoint: resuming deletes later rows, and could not write one that is missing.
            sent = self._log(record)
            if self._owed is not None:  # an evaluation that is left may have changed what an engine has learnt
                self._owed, state = sent, {**state, "owed": sent}
            elif is_due:
                state = self._state()
            if last or self._stop.stopped_by or progress.step % settings.train.checkpoint_every == 0:
                self._save(state)
        self._save_last(state)  # the signal came after the last check, or in a step

    def _save_last(self, state: Mapping[str, Any]) -> None:
        """Save the last finished step, unless it is saved."""
        self._saver.join()
        newest = self._run_dir / layout.CHECKPOINTS / layout.step_folder(self._progress.step)
        if not (newest / layout.COMPLETE).exists():
            self._save(state)
            self._saver.join()

    def _is_done(self) -> bool:
        train, progress = self._settings.train, self._progress
        spent = ((progress.generated_tokens, train.max_generated), (progress.train_seconds, train.max_seconds))
        return progress.step >= train.steps or any(most is not None and used >= most for used, most in spent)

    def _evaluated(self, record: Record) -> Record:
        """Return the record with an evaluation; as it is, with the evaluation owed, if a signal came."""
        self._owed = dict(record.metrics)
        with suppress(Stopped):
            if not self._stop.stopped_by:
                self._stop.may_leave = True
                record = replace(record, metrics={**record.metrics, **self._evaluate()})
                self._stop.may_leave, self._owed = False, None
        return record

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of an evaluation; its time counts in `time/eval`, not in the training clock."""
        settings, parts = self._settings, self._parts
        if not settings.eval.every:
            return {}
        self._learner.park()
        with parts.meter.span("eval") as count, self._learner.autocast():
            result = evaluate_with(parts.runtime, settings, count)
        if isinstance(parts.runtime.task, HasMetrics):
            parts.runtime.task.take_metrics()  # a step has those of its own rollouts
        self._saver.join()  # raises the error of the save before
        accuracy = result.metrics["eval/accuracy"]
        if self._progress.first_accuracy is None:
            self._progress.first_accuracy = accuracy
        self._progress.final_accuracy, self._progress.final_accuracy_step = accuracy, self._progress.step
        return dict(result.metrics)

    def _log(self, record: Record, own_checkpoint: bool = True) -> dict[str, float]:
        """Pass a step's record to all trackers, with the time that it took, and return its metrics. It replaces what an
        earlier attempt left of this step (but for its checkpoint, if the run resumed from it), and of later ones."""
        # checkpoints before the records that they refer to
        remove_from(self._run_dir / layout.CHECKPOINTS, record.step if own_checkpoint else record.step + 1)
        record = replace(record, metrics={**record.metrics, **self._parts.meter.take()})
        for tracker in self._parts.trackers:
            tracker.log(record)
        for warning in self._health.check(record.metrics):
            self._parts.warn(warning)
        return {name: float(value) for name, value in record.metrics.items()}  # plain, as a checkpoint wants

    def _before_change(self) -> None:
        self._stop.may_leave = False
        self._saver.wait_until_copied()

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint of the last finished step has besides weights, optimizer state and record files."""
        return {
            "progress": dict(vars(self._progress)),
            "engine": dict(self._parts.runtime.engine.state_dict()),
            "rng": rng_state(),
            "rules": rule_state.state_of(self._parts, self._task_digest),
            "schedule": schedule_of(self._settings.optim, self._settings.train),
        }

    def _save(self, state: Mapping[str, Any]) -> None:
        """Save the last finished step; with train.checkpoint=lazy, write copies in the background."""
        parts, step, keep = self._parts, self._progress.step, self._settings.train.keep_checkpoints
        root = self._run_dir / layout.CHECKPOINTS
        with parts.meter.span("checkpoint"):
            unchanging = {**state, "records": [dict(files.state_dict()) for files in self._files]}
            overwritten: dict[str, Any] = {"optimizer": self._learner.state_dict()}  # in place, by the next update
            if (old_policy := self._step.old_policy.state_dict()) is not None:
                overwritten["old_policy"] = old_policy

            def write(copied: Mapping[str, Any]) -> None:
                save_model = partial(parts.save_model, state_dict=copied["weights"])
                save_checkpoint(root, step, save_model, {**unchanging, **copied["state"]}, keep)

            model = parts.runtime.model
            frozen = (weight for weight in model.parameters() if not weight.requires_grad)
            weights = model.state_dict() if self._saver.lazy else None
            self._saver.save({"state": overwritten, "weights": weights}, write, frozen)

    def _restore(self, checkpoint: Path) -> None:
        """Restore everything but the weights, which are loaded with the model."""
        state = load_state(checkpoint)
        with damaged(checkpoint):
            self._progress = Progress(**state["progress"])
            if self._progress.step != layout.step_of(checkpoint.name):
                raise ValueError(f"it is of step {self._progress.step}")
            engine, rules, records, rng, schedule = (
                state[n] for n in ("engine", "rules", "records", "rng", "schedule")
            )
            self._learner.load_state_dict(state["optimizer"])
        self._owed = state.get("owed")
        self._learner.updates = self._progress.updates
        self._parts.runtime.engine.load_state_dict(engine)
        rule_state.restore(self._parts, rules, self._task_digest)
        self._step.old_policy.load_state_dict(state.get("old_policy"))
        set_rng_state(rng)
        for place, files in enumerate(self._files):  # of a logger that the run had not: None
            files.load_state_dict(records[place] if place < len(records) else None)
        optim, train = self._settings.optim, self._settings.train
        step, warmup = self._progress.step, self._parts.warmup
        has_own_rate = warmup is not None and warmup.rate is not None and step < warmup.steps
        if step < train.steps and not has_own_rate and (jump := rate_jump(schedule, optim, train, step)):
            self._parts.warn(jump)
        self._parts.say(f"resumed at step {self._progress.step} (from {checkpoint})")

    def _summary(self, status: str, fault: str | None) -> dict[str, Any]:
        runtime = self._parts.runtime
        return {
            "status": status,
            "error": fault,
            "stopped_by": None if status == "completed" else self._stop.stopped_by,
            **vars(self._progress),
            "peak_memory_bytes": peak_bytes(runtime.device),
            "engine": runtime.engine.facts(),
            "update_threads": self._learner.threads,
            "update_native": self._learner.native,
            "code": code_version(),
        }
