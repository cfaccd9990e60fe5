"""Whole runs on a CPU: the truths of the loop, with a random model, a toy task and fakes at the seams."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
import torch
from made import full, infinite, micro
from small import FakeEngine, make_engine, small_model

from grpo_cli.collect.epochs import Epochs
from grpo_cli.config.instantiate import factories, rules_of
from grpo_cli.interfaces import Bench, Loss, Parts
from grpo_cli.learner.learner import learning_rate
from grpo_cli.methods import pods
from grpo_cli.rules.correction import Correct
from grpo_cli.runs.checkpoint import load_state
from grpo_cli.runs.find import find_checkpoint
from grpo_cli.runs.stop import Stop
from grpo_cli.settings import (
    EvalSettings,
    RecordSettings,
    RunSettings,
    Sampling,
)
from grpo_cli.support.errors import UserError
from grpo_cli.support.meter import NullMeter
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.train import Trainer
from grpo_cli.types import Batch, EngineStats, LossOutput, Prompt, Record, Reward, Rollout, Totals


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
    """A tracker that keeps what it is told."""

    def __init__(self, on_log: Callable[[Record], None] = lambda record: None) -> None:
        self.records: list[Record] = []
        self.summary: Mapping[str, Any] | None = None
        self._on_log = on_log

    def log(self, record: Record) -> None:
        self.records.append(record)
        self._on_log(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


def settings_for(folder: Path, **train: Any) -> RunSettings:
    numbers: dict[str, Any] = dict(
        steps=4,
        prompts=3,
        micro_batch_tokens=10_000,
        logprob_chunk=64,
        max_bad_updates=2,
        checkpoint_every=2,
        keep_checkpoints=2,
    )
    return made.settings(
        n=4,
        m=4,
        device="cpu",
        run_dir=str(folder),
        model=made.model(""),
        train=made.train(**(numbers | train)),
        sampling=Sampling.plain(8),
        optim=made.optim(lr=1e-2, warmup_steps=0),
        eval=EvalSettings(every=2, problems=3, k=2, temperature=1.0),
        record=RecordSettings(rollouts=5, tokens=False),
        parts={},
    )


GRPO = made.loss()
NO_EXAM = EvalSettings(every=0, problems=1, k=1, temperature=1.0)


def make_trainer(settings: RunSettings, *, model: Any = None, checkpoint: Path | None = None, **parts: Any) -> Trainer:
    if checkpoint is not None:
        model = type(small_model()).from_pretrained(checkpoint)
    model = model or small_model()
    engine = make_engine(model, sampler=parts.pop("sampler", full()))
    bench = Bench(torch.device("cpu"), model, None, 0, CountTask(), engine)
    if isinstance(parts.get("engine"), type):
        parts["engine"] = parts["engine"](model)
    rules = rules_of(factories(made.settings().parts | {"downsample": made.part("downsample", "all")}))
    prompts = bench.task.prompts("train")
    curriculum = Epochs(prompts, settings.train.prompts, settings.seed)
    plain = Parts(
        *(bench, curriculum, rules, None, model.save_pretrained, (Recorder(),), NullMeter()),
        *(ignored, ignored),
    )
    if "loss" in parts and not isinstance(parts["loss"], Loss):
        parts["loss"].needs_reference = False
    for name, value in parts.items():
        if hasattr(rules, name):
            plain = replace(plain, rules=replace(plain.rules, **{name: value}))
        elif hasattr(bench, name):
            plain = replace(plain, bench=replace(plain.bench, **{name: value}))
        else:
            plain = replace(plain, **{name: value})
    return Trainer(settings, plain, checkpoint)


def ignored(text: str) -> None: ...


def records_of(settings: RunSettings, **parts: Any) -> list[Record]:
    """What a run logs, from the first evaluation on."""
    recorder = Recorder()
    make_trainer(settings, trackers=(recorder,), **parts).fit()
    return recorder.records


def newest(folder: Path) -> Path:
    path = find_checkpoint(folder).path
    assert path is not None
    return path


def lasting(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without those that differ from one run of the same to the next."""
    passing = ("time/", "clock/", "speed/", "memory/")
    return {name: value for name, value in metrics.items() if not name.startswith(passing)}


def timeless(record: Record) -> Any:
    return record.step, lasting(record.metrics), record.examples


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(type(small_model()).from_pretrained(folder).state_dict())


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def final_weights(settings: RunSettings, **parts: Any) -> dict[str, torch.Tensor]:
    model = parts.setdefault("model", small_model())
    make_trainer(settings, **parts).fit()
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_the_policy_learns(tmp_path: Path) -> None:
    records = records_of(settings_for(tmp_path, steps=25))
    rewards = [record.metrics["reward/mean"] for record in records if "reward/mean" in record.metrics]
    assert len(rewards) == 25
    assert np.mean(rewards[:3]) < 0.2 and np.mean(rewards[-3:]) > 0.6


def test_a_run_is_a_function_of_its_seed(tmp_path: Path) -> None:
    first = final_weights(settings_for(tmp_path / "a"))
    torch.manual_seed(123)  # global randomness is nobody's business
    np.random.seed(5)
    assert same(first, final_weights(settings_for(tmp_path / "b")))
    assert not same(first, final_weights(replace(settings_for(tmp_path / "c"), seed=1)))


@pytest.mark.bits
@pytest.mark.parametrize("sampler", [micro(slots=3), infinite(slots=2)], ids=str)
def test_the_sampler_never_changes_what_is_learned(tmp_path: Path, sampler: Any) -> None:
    first = final_weights(settings_for(tmp_path / "a"))
    assert same(first, final_weights(settings_for(tmp_path / "b"), sampler=sampler))


@pytest.mark.parametrize("words", [{}, {"epochs": 2, "minibatches": 2}], ids=["plain", "corrected"])
def test_k_steps_resume_k_steps_equals_2k_steps_bit_for_bit(tmp_path: Path, words: dict[str, Any]) -> None:
    """With several updates and a correction as well."""
    correct = made.correction(**({"importance": "token", "is_threshold": 2.0} if words else {}))
    whole = final_weights(settings_for(tmp_path / "whole", **words), correction=correct)
    make_trainer(settings_for(tmp_path / "half", steps=2, **words), correction=correct).fit()
    said, checkpoint = list[str](), newest(tmp_path / "half")
    longer = settings_for(tmp_path / "half", **words)
    make_trainer(longer, checkpoint=checkpoint, correction=correct, say=said.append).fit()
    assert checkpoint.name == "step_000002" and said[0].startswith("resumed at step 2 ")
    assert same(whole, weights(newest(tmp_path / "half")))


@pytest.mark.parametrize("summary", ["kept", None, "{", '{"status": "failed"}'])
def test_a_run_with_its_last_checkpoint_takes_no_further_step(tmp_path: Path, summary: str | None) -> None:
    """Also where it died after that checkpoint, and left no summary or half of one."""
    settings = settings_for(tmp_path, steps=2)
    before, saved = make_trainer(settings).fit(), weights(newest(tmp_path))
    if summary is None:
        (tmp_path / "summary.json").unlink()
    elif summary != "kept":
        (tmp_path / "summary.json").write_text(summary)
    recorder = Recorder()
    after = make_trainer(settings, checkpoint=newest(tmp_path), trackers=(recorder,)).fit()
    assert (after["status"], after["step"], recorder.records) == ("completed", 2, [])
    assert after["final_accuracy"] == before["final_accuracy"] and same(saved, weights(newest(tmp_path)))


def test_a_checkpoint_follows_the_record_of_its_step(tmp_path: Path) -> None:
    """A resumed run cuts off records of later steps, but could not make up one that was never written."""
    saved: list[list[str]] = []

    def look(record: Record) -> None:
        saved.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("step_??????")))

    make_trainer(settings_for(tmp_path, steps=2), trackers=(Recorder(look),)).fit()
    assert saved == [[], ["step_000000"], ["step_000000"]]


def test_a_run_that_evaluates_nothing_claims_no_accuracy(tmp_path: Path) -> None:
    settings = replace(settings_for(tmp_path, steps=1), eval=NO_EXAM)
    summary = make_trainer(settings).fit()
    assert (summary["best_accuracy"], summary["final_accuracy"]) == (None, None)
    assert summary == json.loads((tmp_path / "summary.json").read_text())


def test_sampler_and_policy_agree_in_a_dense_run(tmp_path: Path) -> None:
    records = records_of(settings_for(tmp_path))
    assert len(records) > 1
    for record in records[1:]:
        assert record.metrics["mismatch/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert record.metrics["mismatch/ratio_min"] == pytest.approx(1.0, abs=1e-3)


def test_only_the_kept_rollouts_reach_the_update(tmp_path: Path) -> None:
    seen: list[int] = []

    def watched(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        seen.append(len(batch))
        assert totals.sequences == 6
        return GRPO(logprobs, batch, totals)

    settings = replace(
        settings_for(tmp_path, steps=1),
        m=2,
        record=RecordSettings(rollouts=-1, tokens=False),
    )
    records = records_of(settings, loss=watched, downsample=pods.maxvar)
    assert sum(seen) == 6
    record = records[1]
    assert (record.metrics["rollouts/generated"], record.metrics["rollouts/trained"]) == (12, 6)
    assert len(record.examples) == 12 and sum(e.kept for e in record.examples) == 6
    for e in record.examples:
        assert (e.advantage is not None) == e.kept
        assert e.reason == ("kept" if e.kept else "not chosen by the down-sample rule")


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


SPARSE_RL = made.correction(importance="token", is_threshold=1.5, rejection="veto", veto=1e-4)


SEQUENCE_MASK = made.correction(importance="sequence", is_mode="mask", is_threshold_low=0.5, is_threshold=5.0)


@pytest.mark.parametrize("correction", [SPARSE_RL, SEQUENCE_MASK], ids=["veto", "is"])
def test_a_step_in_which_all_are_rejected_updates_nothing_and_says_so(tmp_path: Path, correction: Correct) -> None:
    """Also where weights of 0 reject, and the tokens stay in the mask: weight decay would move the weights."""
    model, warnings, recorder = small_model(), list[str](), Recorder()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = with_sampler_off_by(model, lambda rollout: 20.0)
    settings = replace(settings_for(tmp_path, steps=2), eval=NO_EXAM)
    settings = replace(settings, optim=replace(settings.optim, weight_decay=0.1))
    parts: dict[str, Any] = dict(engine=engine, correction=correction, warn=warnings.append, trackers=(recorder,))
    summary = make_trainer(settings, model=model, **parts).fit()
    assert same(before, model.state_dict()) and summary["empty_steps"] == 2 and summary["status"] == "completed"
    assert "every rollout was rejected" in warnings[0] and "sparsity.budget" in warnings[0]
    assert recorder.records[-1].metrics["optim/empty_steps"] == 2


def test_a_minibatch_of_which_all_is_rejected_updates_nothing(tmp_path: Path) -> None:
    """Of 3 prompts' 4 rollouts each, a minibatch each, the first ones alone are trained on."""
    model = small_model()
    engine = with_sampler_off_by(model, lambda rollout: 20.0 if rollout.request.sample else 0.0)
    settings = replace(settings_for(tmp_path, steps=1, minibatches=12), eval=NO_EXAM)
    summary = make_trainer(settings, model=model, engine=engine, correction=SEQUENCE_MASK).fit()
    assert (summary["updates"], summary["skipped_updates"], summary["empty_steps"]) == (3, 0, 0)


def test_a_loss_that_is_not_finite_changes_no_weight_is_dumped_and_stops_the_run(tmp_path: Path) -> None:
    def broken(logprobs: torch.Tensor, batch: Batch, totals: Totals) -> LossOutput:
        return LossOutput(logprobs.sum() * float("nan"), {})

    model, warnings = small_model(), list[str]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UserError, match=r"2 updates in a row .*train\.max_bad_updates=2"):
        make_trainer(settings_for(tmp_path), model=model, loss=broken, warn=warnings.append).fit()
    assert same(before, model.state_dict())
    assert any("loss/total is nan" in text for text in warnings)
    assert len(list((tmp_path / "bad_batches").iterdir())) == 2
    dumped = torch.load(next((tmp_path / "bad_batches").iterdir()), weights_only=True)
    assert dumped["lengths"].shape[0] == 12
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "not finite" in summary["error"] and summary["skipped_updates"] == 2


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    trainer = make_trainer(settings_for(tmp_path, checkpoint_every=1))
    step, calls = trainer._learner._optimizer.step, list[int]()

    def diverges() -> None:
        step()
        calls.append(1)
        if len(calls) == 3:
            trainer._parts.bench.model.lm_head.weight.data[0, 0] = torch.nan

    trainer._learner._optimizer.step = diverges
    with pytest.raises(UserError, match="step 3: after the update there are weights that are not finite"):
        trainer.fit()
    assert newest(tmp_path).name == "step_000002"
    assert all(weight.isfinite().all() for weight in weights(newest(tmp_path)).values())
    assert "optim.lr=0.01" in json.loads((tmp_path / "summary.json").read_text())["error"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    recorder = Recorder(lambda record: os.kill(os.getpid(), number) if record.step == 1 else None)
    handler = signal.getsignal(number)
    summary = make_trainer(settings_for(tmp_path, steps=9), trackers=(recorder,)).fit()
    assert (summary["status"], summary["step"], summary["stopped_by"]) == ("interrupted", 1, name)
    assert newest(tmp_path).name == "step_000001" and signal.getsignal(number) is handler
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


class After(CountTask):
    """Does something before it judges the next rollout after so many."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self.left, self.action = count, action

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        if self.left == 0:
            self.action()
        self.left -= 1
        return super().reward(prompt, rollout)


def press(name: str) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signal.Signals[name])


def fail() -> None:
    raise ZeroDivisionError("in the judge")


def test_what_a_signal_cut_short_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    """Not even an evaluation is added: the next run would have it, and one left alone would not."""
    alone, cut = Recorder(), Recorder()
    whole = final_weights(settings_for(tmp_path / "alone"), trackers=(alone,))
    task = After(9 + 5, press("SIGTERM"))  # the first evaluation judges 9: it is in step 1
    assert make_trainer(settings_for(tmp_path / "cut"), task=task, trackers=(cut,)).fit()["step"] == 1
    make_trainer(settings_for(tmp_path / "cut"), checkpoint=newest(tmp_path / "cut"), trackers=(cut,)).fit()
    assert same(whole, weights(newest(tmp_path / "cut")))
    assert [timeless(record) for record in cut.records] == [timeless(record) for record in alone.records]


def test_a_signal_in_the_first_evaluation_ends_the_run_after_it(tmp_path: Path) -> None:
    recorder, said, task = Recorder(), list[str](), After(0, press("SIGUSR1"))
    summary = make_trainer(settings_for(tmp_path), task=task, trackers=(recorder,), say=said.append).fit()
    assert (summary["status"], summary["step"], summary["stopped_by"]) == ("interrupted", 0, "SIGUSR1")
    assert [record.step for record in recorder.records] == [0] and newest(tmp_path).name == "step_000000"
    assert said[0].startswith("SIGUSR1: stopping after this step")


def test_a_run_that_is_stopped_before_it_begins_leaves_nothing_but_its_summary_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with Stop(said.append) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        summary = make_trainer(settings_for(tmp_path), engine=FakeEngine(), say=said.append).fit(stop)
    assert (summary["status"], summary["step"], summary["stopped_by"]) == ("interrupted", 0, "SIGHUP")
    assert said[-1] == "stopped before the first step: there is nothing to save"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    def press(record: Record) -> None:
        if record.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # who asks twice in this way waits as well
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make_trainer(settings_for(tmp_path), trackers=(Recorder(press),)).fit()
    assert newest(tmp_path).name == "step_000000"
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_by"] == "SIGTERM"


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(pytest.fail) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_outside_the_main_thread_hears_no_signals_and_trains(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        summary = pool.submit(make_trainer(settings_for(tmp_path, steps=1)).fit).result()
    assert summary["status"] == "completed"


class Counts(FakeEngine):
    """An engine whose state is how often it was asked, evaluations included: what a length predictor may learn from."""

    def __init__(self, model: Any) -> None:
        self._engine, self.asked = make_engine(model), 0

    def generate(self, requests: Any) -> Any:
        self.asked += 1
        return self._engine.generate(requests)

    def stats(self) -> EngineStats:
        return replace(self._engine.stats(), decode_steps=self.asked)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.asked = state["asked"]


def test_a_run_resumed_from_step_0_does_not_evaluate_again(tmp_path: Path) -> None:
    """Its engine would have learnt that evaluation twice."""
    alone, cut = Recorder(), Recorder(lambda record: os.kill(os.getpid(), 15) if record.step == 0 else None)
    make_trainer(settings_for(tmp_path / "alone"), engine=Counts, trackers=(alone,)).fit()
    make_trainer(settings_for(tmp_path / "cut"), engine=Counts, trackers=(cut,)).fit()
    assert newest(tmp_path / "cut").name == "step_000000"
    again: dict[str, Any] = dict(checkpoint=newest(tmp_path / "cut"), engine=Counts, trackers=(cut,))
    make_trainer(settings_for(tmp_path / "cut"), **again).fit()
    assert [timeless(record) for record in cut.records] == [timeless(record) for record in alone.records]
    states = [load_state(newest(tmp_path / name)) for name in ("alone", "cut")]
    assert states[0]["engine"] == states[1]["engine"] == {"asked": 3 + 4}
    assert same(weights(newest(tmp_path / "alone")), weights(newest(tmp_path / "cut")))


class Dies(CountTask):
    """Judges so many rollouts, and no more."""

    def __init__(self, after: int) -> None:
        self.left = after

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("in the judge")
        return super().reward(prompt, rollout)


class SameForAll(CountTask):
    """Nothing is learnt of it, so that no weight moves."""

    def reward(self, prompt: Prompt, rollout: Rollout) -> Reward:
        return Reward(1.0)


def test_a_run_whose_first_evaluation_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    """One of step 0 would say that the evaluation is done."""
    with pytest.raises(ZeroDivisionError):
        make_trainer(settings_for(tmp_path), task=After(5, fail)).fit()
    assert not (tmp_path / "checkpoints").exists()


def test_what_kills_have_left_is_cleared_when_a_run_is_resumed_and_when_it_ends(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, steps=2)
    make_trainer(settings, trackers=(JsonlTracker(tmp_path),)).fit()
    (tmp_path / "summary.json").unlink()
    seen: list[set[str]] = []

    def leave() -> None:
        for name in (".metrics.jsonl.tmp", ".rollouts.jsonl.tmp", ".summary.json.tmp"):
            (tmp_path / name).touch()
        (tmp_path / "checkpoints" / ".step_000001.tmp").mkdir()

    def names() -> set[str]:
        return {path.name for path in tmp_path.rglob("*") if path.name.endswith(".tmp")}

    class Leaves(Recorder):
        def log(self, record: Record) -> None:
            if not seen:
                seen.append(names())
                leave()

    leave()
    longer = replace(settings, train=replace(settings.train, steps=3, checkpoint_every=9))
    make_trainer(longer, checkpoint=tmp_path / "checkpoints" / "step_000002", trackers=(Leaves(),)).fit()
    assert seen == [set()] and names() == set()


def test_records_are_on_the_disk_before_the_checkpoint_that_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real = os.fsync

    def watch(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr("grpo_cli.runs.files.os.fsync", watch)
    make_trainer(replace(settings_for(tmp_path, steps=1), eval=NO_EXAM), trackers=(JsonlTracker(tmp_path),)).fit()
    saves = [place for place, name in enumerate(events) if name == "COMPLETE"]
    assert len(saves) == 2
    for begin, end in zip([0, saves[0]], saves, strict=True):
        assert {"metrics.jsonl", "rollouts.jsonl", "trainer_state.pt"} <= {*events[begin:end]}


def test_a_step_that_dies_half_way_through_the_weights_is_not_saved(tmp_path: Path) -> None:
    """As out of memory in the optimizer, or a second ctrl-C there: some weights are moved and others not."""
    trainer = make_trainer(settings_for(tmp_path))
    optimizer = trainer._learner._optimizer
    step, calls = optimizer.step, list[int]()

    def dies() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        step()

    optimizer.step = dies
    with pytest.raises(MemoryError):
        trainer.fit()
    assert newest(tmp_path).name == "step_000000"
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 1


def test_a_resumed_run_that_is_killed_does_not_go_by_its_old_summary(tmp_path: Path) -> None:
    make_trainer(settings_for(tmp_path, steps=2)).fit()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    there: list[bool] = []
    recorder = Recorder(lambda record: there.append((tmp_path / "summary.json").exists()))
    make_trainer(settings_for(tmp_path), checkpoint=newest(tmp_path), trackers=(recorder,)).fit()
    assert there == [False, False] and json.loads((tmp_path / "summary.json").read_text())["step"] == 4


def test_trackers_are_closed_when_the_summary_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, summary: Mapping[str, Any]) -> None:
        raise UserError("summary.json cannot be written (No space left on device).")

    monkeypatch.setattr("grpo_cli.train.write_summary", full)
    recorder = Recorder()
    with pytest.raises(UserError, match="No space left"):
        make_trainer(settings_for(tmp_path, steps=1), trackers=(recorder,)).fit()
    assert recorder.summary is not None and recorder.summary["status"] == "completed"

    def breaks(record: Record) -> None:
        raise RuntimeError("the first thing that went wrong")

    with pytest.raises(RuntimeError, match="the first thing"):
        make_trainer(settings_for(tmp_path / "b", steps=1), trackers=(Recorder(breaks),)).fit()


def test_evaluation_is_kept_out_of_the_training_clock(tmp_path: Path) -> None:
    records = records_of(settings_for(tmp_path))
    clocks = [r.metrics["clock/train_seconds"] for r in records[1:]]
    assert clocks == sorted(clocks) and clocks[0] > 0
    assert "clock/train_seconds" not in records[0].metrics
    assert [r.step for r in records if "eval/accuracy" in r.metrics] == [0, 2, 4]


def test_warm_up_and_schedules() -> None:
    optim = made.optim(lr=1.0, warmup_steps=4, schedule="cosine")
    rates = [learning_rate(optim, step, 12) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5) and rates[-1] < 0.05
    assert learning_rate(replace(optim, schedule="constant"), 11, 12) == 1.0
