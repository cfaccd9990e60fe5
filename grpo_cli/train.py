"""The loop: prompts -> requests -> rollouts -> groups -> scored -> kept -> advantages -> batch -> update -> record."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_cli.batch import collate, corrected, minibatches
from grpo_cli.checkpoint import MARKER, load_state, rng_state, save_checkpoint, set_rng_state, write_summary
from grpo_cli.downsample import choose
from grpo_cli.errors import UserError
from grpo_cli.evaluate import evaluate, example
from grpo_cli.health import HealthCheck
from grpo_cli.interfaces import AdvantageFn, Correction, DownsampleRule, Engine, LossFn, Meter, Task, Tracker
from grpo_cli.learner import Learner, Update
from grpo_cli.meter import peak_bytes
from grpo_cli.metrics import kept_metrics, rollout_metrics
from grpo_cli.rollout import group_rollouts, requests_for, score, seed_of
from grpo_cli.settings import RunSettings
from grpo_cli.types import Batch, EngineStats, Example, Prompt, Record, ScoredGroup


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
class Kept:
    """A scored group and what was made of it: the indices that are trained on, and their advantages."""

    group: ScoredGroup
    indices: tuple[int, ...]
    advantages: Tensor

    @property
    def taken(self) -> ScoredGroup:
        return self.group.take(self.indices)


@dataclass
class Progress:
    """What a run has done so far: the part of a checkpoint that is neither weights nor optimizer."""

    step: int = 0
    updates: int = 0
    train_seconds: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    generated_rollouts: int = 0
    trained_rollouts: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    best_accuracy: float = -1.0
    final_accuracy: float = -1.0


class Trainer:
    """Runs a training from its first (or resumed) step to its last, and leaves its records behind however it ends."""

    def __init__(self, settings: RunSettings, parts: Parts, run_dir: Path, checkpoint: Path | None = None) -> None:
        self._settings = settings
        self._parts = parts
        self._run_dir = run_dir
        self._learner = Learner(parts.model, parts.loss, settings.model, settings.train, settings.optim)
        self._progress = Progress()
        self._health = HealthCheck()
        self._stop_asked = False
        self._settled_updates = 0  # the learner's count when the last finished step ended
        self._train_prompts = parts.task.prompts("train")
        if len(self._train_prompts) < settings.train.prompts:
            raise UserError(
                f"train.prompts={settings.train.prompts} different prompts a step were asked for, but the task has "
                f"{len(self._train_prompts)}: lower train.prompts"
            )
        self._epoch: tuple[int, np.ndarray] | None = None
        if checkpoint is not None:
            self._restore(checkpoint)

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or until a signal asks to stop; returns what `summary.json` says."""
        status, fault = "failed", None
        try:
            with self._signals():
                self._loop()
            status = "interrupted" if self._stop_asked else "completed"
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            self._save_what_is_done()
            raise
        finally:
            summary = self._summary(status, fault)
            write_summary(self._run_dir, summary)
            for tracker in self._parts.trackers:
                tracker.close(summary)
        return summary

    def _loop(self) -> None:
        settings, progress = self._settings, self._progress
        if progress.step == 0:
            evaluated = self._evaluate()
            self._save()
            self._log(Record(0, evaluated))
        while progress.step < settings.train.steps and not self._stop_asked:
            record = self._step(progress.step)
            progress.step += 1
            self._settled_updates = self._learner.updates
            last = progress.step == settings.train.steps or self._stop_asked
            if settings.eval.every and (last or progress.step % settings.eval.every == 0):
                record = replace(record, metrics={**record.metrics, **self._evaluate()})
            if last or progress.step % settings.train.checkpoint_every == 0:
                self._save()
            self._log(replace(record, step=progress.step))
        if not self._saved():  # the signal came after the last look at it
            self._save()

    def _step(self, step: int) -> Record:
        """One round of rollouts and the updates made from it."""
        start = time.perf_counter()
        span = self._parts.meter.span
        with span("step"):
            prompts = self._prompts(step)
            with span("rollout"):
                groups, stats = self._rollouts(prompts, step)
            rollout_seconds = time.perf_counter() - start
            with span("reward"):
                scored = [score(self._parts.task, group) for group in groups]
            kept = [self._keep(group, step) for group in scored]
            batch = collate([k.taken for k in kept], [k.advantages for k in kept], self._parts.pad_token_id)
            with span("logprobs"):
                batch, mismatch = self._logprobs(batch)
            with span("update"):
                updates = self._update(batch, step)
            if mismatch is None:
                mismatch = self._parts.correction(batch.sampler_logprobs, updates[0].logprobs, batch.response_mask)[2]
        self._progress.train_seconds += time.perf_counter() - start
        metrics = self._metrics(scored, kept, batch, stats, updates) | dict(mismatch)
        metrics["speed/tokens_per_second"] = stats.generated_tokens / rollout_seconds
        return Record(step, metrics, self._examples(kept))

    def _rollouts(self, prompts: Sequence[Prompt], step: int) -> tuple[list[Any], EngineStats]:
        requests = requests_for(prompts, self._settings.n, self._settings.sampling, self._settings.seed, step)
        with self._learner.autocast():
            rollouts = list(self._parts.engine.generate(requests))
        return group_rollouts(prompts, rollouts), self._parts.engine.stats()

    def _keep(self, group: ScoredGroup, step: int) -> Kept:
        """The rollouts of a group that are trained on, and their advantages."""
        rng = np.random.default_rng(seed_of(self._settings.seed, step, group.prompt.id, "downsample"))
        indices = choose(self._parts.downsample, group, self._settings.m, rng)
        totals = torch.tensor(group.totals, dtype=torch.float32)
        return Kept(group, tuple(indices), self._parts.advantage(totals[list(indices)], totals))

    def _logprobs(self, batch: Batch) -> tuple[Batch, Mapping[str, float] | None]:
        """The old policy's and the reference's log-probabilities, where the loss or the correction needs them.

        With one update per round the learner's own forward pass gives the old policy's, so that measuring the mismatch
        (None here) can wait for it.
        """
        parts, settings = self._parts, self._settings
        if parts.reference is not None:
            reference = self._learner.logprobs(parts.reference, batch, settings.sampling.temperature)
            batch = replace(batch, ref_logprobs=reference)
        if not parts.correction.needs_policy_logprobs and settings.train.epochs * settings.train.minibatches == 1:
            return batch, None
        policy = self._learner.logprobs(parts.model, batch, settings.sampling.temperature)
        weights, mask, metrics = parts.correction(batch.sampler_logprobs, policy, batch.response_mask)
        return corrected(replace(batch, policy_logprobs=policy), weights, mask), metrics

    def _update(self, batch: Batch, step: int) -> list[Update]:
        """Every epoch's minibatches in turn; a faulty one changes nothing, is dumped, and counts."""
        settings, progress = self._settings, self._progress
        updates = []
        for epoch in range(settings.train.epochs):
            rng = np.random.default_rng(seed_of(settings.seed, step, epoch, "minibatches"))
            for part in minibatches(batch, settings.train.minibatches, rng):
                update = self._learner.update(
                    part, settings.sampling.temperature, settings.sampling.max_new_tokens, step
                )
                updates.append(update)
                if update.fault is None:
                    progress.updates += 1
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
        self._parts.engine.update_weights()
        return updates

    def _dump(self, batch: Batch, step: int) -> Path:
        folder = self._run_dir / "bad_batches"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step + 1:06d}_{self._progress.skipped_steps}.pt"
        torch.save({name: value for name, value in vars(batch).items() if value is not None}, path)
        return path

    def _prompts(self, step: int) -> list[Prompt]:
        """The prompts of a step: a new order every epoch, a function of (seed, epoch).

        An epoch is a whole number of steps, so that no prompt comes twice in one; what is left over in one epoch's
        order comes in another's.
        """
        count = self._settings.train.prompts
        steps_per_epoch = len(self._train_prompts) // count
        epoch, place = divmod(step, steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            rng = np.random.default_rng(seed_of(self._settings.seed, "epoch", epoch))
            self._epoch = (epoch, rng.permutation(len(self._train_prompts)))
        return [self._train_prompts[int(i)] for i in self._epoch[1][place * count : (place + 1) * count]]

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
        self._progress.final_accuracy = accuracy
        self._progress.best_accuracy = max(self._progress.best_accuracy, accuracy)
        return dict(result.metrics)

    def _metrics(
        self,
        scored: Sequence[ScoredGroup],
        kept: Sequence[Kept],
        batch: Batch,
        stats: EngineStats,
        updates: Sequence[Update],
    ) -> dict[str, float]:
        progress = self._progress
        progress.generated_tokens += stats.generated_tokens
        progress.trained_tokens += int(batch.loss_mask.sum())
        progress.generated_rollouts += sum(len(group.rollouts) for group in scored)
        progress.trained_rollouts += len(batch)
        good = [update.metrics for update in updates if update.fault is None]
        losses = {name: float(np.mean([metrics[name] for metrics in good])) for name in (good[0] if good else ())}
        metrics = {
            **rollout_metrics(scored),
            **kept_metrics([k.taken for k in kept]),
            **losses,
            **stats.details,
            "optim/skipped_steps": progress.skipped_steps,
            "tokens/generated": progress.generated_tokens,
            "tokens/trained": progress.trained_tokens,
            "rollouts/generated": progress.generated_rollouts,
            "rollouts/trained": progress.trained_rollouts,
            "engine/decode_steps": stats.decode_steps,
            "engine/slots": stats.slots,
            "engine/slot_utilisation": stats.slot_utilisation,
            "engine/kv_peak_bytes": stats.kv_peak_bytes,
            "engine/prefill_tokens": stats.prefill_tokens,
            "clock/train_seconds": progress.train_seconds,
            "memory/peak_bytes": peak_bytes(next(self._parts.model.parameters()).device),
        }
        return {name: float(value) for name, value in metrics.items()}

    def _examples(self, kept: Sequence[Kept]) -> tuple[Example, ...]:
        """Rows for `rollouts.jsonl`: all, or so many spread evenly over the step's rollouts."""
        places = [(k, index) for k in kept for index in range(len(k.group.rollouts))]
        wanted = self._settings.record.rollouts
        if 0 <= wanted < len(places):
            places = [places[i * len(places) // wanted] for i in range(wanted)]
        rows = []
        for k, index in places:
            advantage = float(k.advantages[k.indices.index(index)]) if index in k.indices else None
            chosen = advantage is not None
            reason = "kept" if chosen else "not chosen by the down-sample rule"
            rows.append(example(self._parts.task, k.group, index, kept=chosen, reason=reason, advantage=advantage))
        return tuple(rows)

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
            "engine": dict(getattr(self._parts.engine, "state", dict)()),
            "rng": rng_state(),
        }
        with self._parts.meter.span("checkpoint"):
            save_checkpoint(
                self._run_dir / "checkpoints",
                self._progress.step,
                self._parts.save_model,
                state,
                self._settings.train.keep_checkpoints,
            )

    def _saved(self) -> bool:
        return (self._run_dir / "checkpoints" / f"step_{self._progress.step:06d}" / MARKER).exists()

    def _save_what_is_done(self) -> None:
        """After a failure: the last finished step, unless it is saved already or its weights are half-way to another."""
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
        done = self._progress.step * self._settings.train.prompts
        self._parts.say(f"resumed at step {self._progress.step}, next prompt {done + 1} (from {checkpoint})")
        if self._progress.step >= self._settings.train.steps:
            raise UserError(
                f"this run has done its {self._progress.step} steps already "
                f"(train.steps={self._settings.train.steps}): raise train.steps to go on"
            )

    def _summary(self, status: str, fault: str | None) -> dict[str, Any]:
        progress = vars(self._progress)
        device = next(self._parts.model.parameters()).device
        return {"status": status, "error": fault, **progress, "peak_memory_bytes": peak_bytes(device)}

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
