"""Whole runs on a CPU: the truths of the loop, with a random model, a toy task and fakes at the seams."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import made
import numpy as np
import pytest
import torch
from made import mean_length
from small import FakeEngine, make_engine, small_model
from typed import lasting

from grpo_cli.collect.epochs import Epochs
from grpo_cli.config.instantiate import Factories
from grpo_cli.interfaces import Loss, Parts, Runtime
from grpo_cli.learner.schedule import learning_rate
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.runs.find import find_checkpoint
from grpo_cli.runs.stop import Stop
from grpo_cli.settings import EvalSettings, RecordSettings, RunSettings, Sampling
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import Meter
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.train import Trainer
from grpo_cli.types import Batch, LossOutput, Prompt, Record, Reward, Rollout, Totals


class CountTask:
    """Earns more the more tokens are 7: a random model learns it within a few updates. A little also hangs on the first
    token, so that there is something to learn before there is a 7."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        start = 0 if split == "train" else 100
        return [Prompt(f"{split}{i}", (2 + i % 5, 3 + i % 7, 9), "7") for i in range(start, start + 12)]

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        share = sum(token == 7 for token in rollout.token_ids) / len(rollout)
        return Reward(share + rollout.token_ids[0] / 1000, {"sevens": share})

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class Recorder:
    """A tracker that keeps what it gets."""

    def __init__(self, on_log: Callable[[Record], object] = lambda record: None) -> None:
        self.records: list[Record] = []
        self.summary: Mapping[str, Any] | None = None
        self._on_log = on_log

    def log(self, record: Record) -> None:
        self.records.append(record)
        self._on_log(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


def settings_for(folder: Path, **train: Any) -> RunSettings:
    numbers: dict[str, Any] = dict(steps=4, prompts=3, micro_batch_tokens=10_000, logprob_chunk=64, max_bad_updates=2)
    return made.settings(
        n=4,
        m=4,
        device="cpu",
        run_dir=str(folder),
        model=made.model(""),
        train=made.train(**(numbers | {"checkpoint_every": 2, "keep_checkpoints": 2} | train)),
        sampling=Sampling.plain(8),
        optim=made.optim(lr=1e-2, warmup_steps=0),
        eval=EvalSettings(every=2, problems=3, k=2, temperature=1.0),
        record=RecordSettings(rollouts=5, tokens=False),
        parts={},
    )


def make_trainer(settings: RunSettings, *, model: Any = None, checkpoint: Path | None = None, **parts: Any) -> Trainer:
    if checkpoint is not None:
        model = type(small_model()).from_pretrained(checkpoint)
    model = model or small_model()
    runtime = Runtime(torch.device("cpu"), model, None, CountTask(), make_engine(model))
    if callable(parts.get("engine")):
        parts["engine"] = parts["engine"](model)
    rules = Factories.of(made.settings().parts | {"downsample": made.part("downsample", "all")}).rules()
    curriculum = Epochs(runtime.task.prompts("train"), settings.train.prompts, settings.seed)
    ignored = str  # of what is said and warned of
    plain = Parts(runtime, curriculum, rules, None, model.save_pretrained, (Recorder(),), Meter(), ignored, ignored)
    if "loss" in parts and not isinstance(parts["loss"], Loss):
        parts["loss"].needs_reference = False
    for name, value in parts.items():
        of = next((of for of in ("rules", "runtime") if hasattr(getattr(plain, of), name)), None)
        plain = replace(plain, **({name: value} if of is None else {of: replace(getattr(plain, of), **{name: value})}))
    return Trainer(settings, plain, checkpoint)


def newest(folder: Path) -> Path:
    path = find_checkpoint(folder).path
    assert path is not None
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(type(small_model()).from_pretrained(folder).state_dict())


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def final_weights(settings: RunSettings, **parts: Any) -> dict[str, torch.Tensor]:
    model = parts.setdefault("model", small_model())
    make_trainer(settings, **parts).fit()
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_run_is_a_function_of_its_seed(tmp_path):
    """Its rollouts agree with the policy, and evaluations are kept out of the training clock."""
    recorder = Recorder()
    whole = final_weights(settings_for(tmp_path / "whole"), trackers=(recorder,))
    torch.manual_seed(123)  # global randomness does not matter
    np.random.seed(5)
    assert same(whole, final_weights(settings_for(tmp_path / "again")))
    assert not same(whole, final_weights(replace(settings_for(tmp_path / "other"), seed=1)))
    first, *steps = (record.metrics for record in recorder.records)
    clocks = [step["clock/train_seconds"] for step in steps]
    assert clocks == sorted(clocks) and clocks[0] > 0 and "clock/train_seconds" not in first
    assert [record.step for record in recorder.records if "eval/accuracy" in record.metrics] == [0, 2, 4]
    assert [step["mismatch/ratio_min"] for step in steps] == pytest.approx([1.0] * 4, abs=1e-3)


def test_a_summary_has_the_first_and_the_last_accuracy_and_no_time_of_evaluations(tmp_path, monkeypatch):
    found, clock = iter((0.25, 0.5, 0.75)), [0.0]

    def evaluated(*given: Any, **words: Any) -> Any:
        clock[0] += 1000.0
        return SimpleNamespace(metrics={"eval/accuracy": next(found)})

    monkeypatch.setattr("grpo_cli.train.evaluate_with", evaluated)
    monkeypatch.setattr("grpo_cli.step.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    summary = make_trainer(settings_for(tmp_path)).fit()
    names = ("first_accuracy", "final_accuracy", "final_accuracy_step", "train_seconds")
    assert [summary[name] for name in names] == [0.25, 0.75, 4, 0.0]


def test_a_fault_of_a_part_is_no_damage_of_the_checkpoint(tmp_path):
    make_trainer(settings_for(tmp_path, steps=2)).fit()
    faulty = FakeEngine()
    faulty.load_state_dict = lambda state: {}["a fault"]
    with pytest.raises(KeyError, match="a fault"):
        make_trainer(settings_for(tmp_path), checkpoint=newest(tmp_path), engine=faulty)


def with_sampler_off_by(model: Any, shift: Callable[[Rollout], float]) -> Any:
    """An engine whose log-probabilities are wrong by `shift`, as an engine's with evicted keys are."""
    engine = make_engine(model)

    class Shifted(FakeEngine):
        stats, state_dict = engine.stats, engine.state_dict

        def generate(self, requests: Any) -> Any:
            for rollout in engine.generate(requests):
                wrong = (rollout.sampler_logprobs[0] + shift(rollout), *rollout.sampler_logprobs[1:])
                yield replace(rollout, sampler_logprobs=wrong)

    return Shifted()


def test_a_loss_that_is_not_finite_changes_no_weight_is_dumped_and_stops_the_run(tmp_path):
    def broken(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        return LossOutput(logprobs.sum() * float("nan"), {})

    model, warnings = small_model(), list[str]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UserError, match=r"2 updates in a row .*train\.max_bad_updates=2"):
        make_trainer(settings_for(tmp_path), model=model, loss=broken, warn=warnings.append).fit()
    assert same(before, model.state_dict()) and any("loss/total is nan" in text for text in warnings)
    dumps = [torch.load(path, weights_only=True) for path in (tmp_path / "bad_batches").iterdir()]
    assert [len(dump["lengths"]) for dump in dumps] == [12, 12]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["skipped_updates"]) == ("failed", 2)


@pytest.mark.parametrize(("number", "error", "step"), [(3, UserError, 2), (2, MemoryError, 1)])
def test_an_update_that_ruins_or_breaks_weights_is_never_saved(tmp_path, number, error, step):
    """Weights that are not finite after the third; and a second one that dies half-way, as out of memory does."""
    trainer = make_trainer(settings_for(tmp_path, checkpoint_every=1))
    update, calls = trainer._learner._optimizer.step, list[int]()

    def broken() -> None:
        calls.append(1)
        if len(calls) == number and error is MemoryError:
            raise MemoryError
        update()
        if len(calls) == number:
            trainer._parts.runtime.model.lm_head.weight.data[0, 0] = torch.nan

    trainer._learner._optimizer.step = broken
    with pytest.raises(error, match=None if step == 1 else "step 3: .* not finite"):
        trainer.fit()
    assert newest(tmp_path).name == f"step_00000{step}"
    assert all(weight.isfinite().all() for weight in weights(newest(tmp_path)).values())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["step"] == step and ("optim.lr=0.01" in summary["error"]) == (error is UserError)


class After(CountTask):
    """Does something before it judges the next rollout after so many."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self.left, self.action = count, action

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        if self.left == 0:
            self.action()
        self.left -= 1
        return super().reward(prompt, rollout)


def press(*names: str) -> None:
    for name in names:
        os.kill(os.getpid(), signal.Signals[name])


def pressing(step: int, *names: str) -> Recorder:
    """A tracker that sends signals when it gets the record of a step."""
    return Recorder(lambda record: press(*names) if record.step == step else None)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, name):
    handler = signal.getsignal(signal.Signals[name])
    summary = make_trainer(settings_for(tmp_path, steps=9), trackers=(pressing(1, name),)).fit()
    assert (summary["status"], summary["step"], summary["stopped_by"]) == ("interrupted", 1, name)
    assert newest(tmp_path).name == "step_000001" and signal.getsignal(signal.Signals[name]) is handler
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop(list().append) as stop:
        press("SIGHUP")
    assert (stop.stopped_by, signal.signal(signal.SIGHUP, before)) == (None, signal.SIG_IGN)


def test_what_a_signal_cut_short_continues_as_if_there_had_been_none(tmp_path):
    """No evaluation is added at its end, nor repeated when resumed from step 0; what is left is made again."""
    alone, cut = Recorder(), Recorder()
    learning = lambda model: make_engine(model, predictor=mean_length())  # noqa: E731  # of evaluations, too
    make_trainer(settings_for(tmp_path / "alone"), engine=learning, trackers=(alone,)).fit()
    settings, parts = settings_for(tmp_path / "cut"), dict[str, Any](engine=learning, trackers=(cut,))
    assert make_trainer(settings, task=After(5, lambda: press("SIGTERM")), **parts).fit()["step"] == 0  # of 9 judged
    task, checkpoint = After(12 + 2, lambda: press("SIGINT")), newest(tmp_path / "cut")
    assert make_trainer(settings, task=task, checkpoint=checkpoint, **parts).fit()["step"] == 1
    assert newest(tmp_path / "cut").name == "step_000001" and task.left == 0
    task, checkpoint = After(12 + 5, lambda: press("SIGINT")), newest(tmp_path / "cut")  # in the evaluation of step 2
    assert make_trainer(settings, task=task, checkpoint=checkpoint, **parts).fit()["step"] == 2 and task.left == 0
    make_trainer(settings, checkpoint=newest(tmp_path / "cut"), **parts).fit()
    last = ({it.step: lasting(it.metrics) for it in one.records} for one in (cut, alone))
    assert next(last) == next(last) and [it.step for it in cut.records] == [0, 1, 2, 2, 3, 4]
    states = [load_state(newest(tmp_path / name)) for name in ("alone", "cut")]
    assert states[0]["engine"] == states[1]["engine"] != {}
    assert same(weights(newest(tmp_path / "alone")), weights(newest(tmp_path / "cut")))


def test_an_error_in_a_step_loses_none_of_those_before_it(tmp_path):
    def fails(model):  # in the rollouts of step 2
        engine, generate = make_engine(model), Mock(side_effect=[None, None, torch.OutOfMemoryError])
        made, engine.generate = engine.generate, lambda *of, **words: generate() or made(*of, **words)
        return engine

    in_step, in_evaluation = ({"task": After(count, lambda: 1 / 0)} for count in (9 + 12 + 2, 9 + 12 + 12 + 5))
    for step, parts in ((1, in_step), (1, {"engine": fails}), (2, in_evaluation)):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        with pytest.raises((UserError, torch.OutOfMemoryError)):
            make_trainer(settings_for(folder), **parts).fit()
        assert newest(folder).name == f"step_00000{step}"


def test_a_run_that_went_back_and_died_before_it_saved_goes_on_from_there(tmp_path):
    settings = settings_for(tmp_path, checkpoint_every=1, keep_checkpoints=9)
    back = tmp_path / "checkpoints" / "step_000001"
    make_trainer(settings, trackers=(JsonlTracker(tmp_path),)).fit()
    killed = After(12 + 2, lambda: signal.default_int_handler(2, None))
    for task, died in ((killed, pytest.raises(KeyboardInterrupt)), (CountTask(), nullcontext())):
        rare = replace(settings, train=replace(settings.train, checkpoint_every=9))
        again = make_trainer(rare, task=task, checkpoint=newest(back), trackers=(JsonlTracker(tmp_path, True),))
        with died:
            again.fit()
        back = tmp_path
    assert newest(tmp_path).name == "step_000004"


def test_a_run_that_went_back_to_a_step_without_its_evaluation_and_died_goes_on_from_there(tmp_path):
    settings = settings_for(tmp_path, checkpoint_every=1, keep_checkpoints=9)
    cut = After(9 + 12 + 12 + 5, lambda: press("SIGTERM"))  # in the evaluation of step 2
    make_trainer(settings, task=cut, trackers=(JsonlTracker(tmp_path),)).fit()
    back, died = newest(tmp_path), After(9 + 2, lambda: 1 / 0)
    assert back.name == "step_000002"
    for checkpoint, task in ((back, CountTask()), (back, died), (None, CountTask())):
        files = JsonlTracker(tmp_path, True)
        again = make_trainer(settings, task=task, checkpoint=checkpoint or newest(tmp_path), trackers=(files,))
        with pytest.raises(UserError) if task is died else nullcontext():
            again.fit()
    assert newest(tmp_path).name == "step_000004"


def test_a_second_ctrl_c_interrupts_at_once(tmp_path):
    """Two SIGTERM are one: a scheduler sends them to a run and to its launcher."""
    with pytest.raises(KeyboardInterrupt):
        recorder = pressing(1, "SIGTERM", "SIGTERM", "SIGINT")
        make_trainer(settings_for(tmp_path), trackers=(recorder,)).fit()
    assert newest(tmp_path).name == "step_000000"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", "SIGTERM")


def test_warm_up_and_schedules():
    optim = made.optim(lr=1.0, warmup_steps=4, schedule="cosine")
    rates = [learning_rate(optim, step, 12) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5) and rates[-1] < 0.05
    assert learning_rate(replace(optim, schedule="constant"), 11, 12) == 1.0


@pytest.mark.parametrize(("schedule", "said"), [("linear", r"0\.0075, .* 0\.005 .*train\.steps=8"), ("constant", "")])
def test_a_rate_that_jumps_is_named_with_both_numbers_and_the_keys(tmp_path, schedule, said):
    """A run of 4 steps at rate 0.01, resumed after 2 with 8 steps: of 0.01 (1 - 2/8) and 0.01 (1 - 2/4)."""
    run, warnings = settings_for(tmp_path, checkpoint_every=2), list[str]()
    run = replace(run, optim=replace(run.optim, schedule=schedule))
    make_trainer(run).fit()
    run = replace(run, train=replace(run.train, steps=8))
    make_trainer(run, checkpoint=tmp_path / "checkpoints" / "step_000002", warn=warnings.append)
    assert len(warnings) == bool(said) and all(re.search(said, line) for line in warnings)
