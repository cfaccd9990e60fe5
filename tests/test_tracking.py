"""Records arrive whole in the JSONL files and in W&B, whatever happens; secrets do not."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest
from test_resume import trained
from typed import done

from grpo_cli.interfaces import Tracker
from grpo_cli.support.errors import UserError
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.tracking.redact import HIDDEN, arguments_without_secrets, without_secrets
from grpo_cli.types import Example, Record


def example(reply: str = "2", advantage: float | None = 0.5) -> Example:
    return Example("p1", 0, "1+1=", reply, "2", 1.0, True, {"correct": 1.0}, 1, "eos", True, "kept", advantage)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_bytes().split(b"\n")[:-1]]


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read(path)]


def test_a_record_is_in_the_files_as_soon_as_it_is_logged(tmp_path):
    tracker: Tracker = JsonlTracker(tmp_path)
    reply = 'a\nb\r\u2028"\\ é 漢 \ud800 \x00'  # any text stays on one line
    numbers = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1, "e": -0.0, "f": 1e300}
    tracker.log(Record(1, numbers, (example(), example(reply, advantage=None))))
    (row,) = read(tmp_path / "metrics.jsonl")  # not closed: a killed process would have left this
    assert {name: repr(float(row[name])) for name in numbers} == {name: repr(one) for name, one in numbers.items()}
    assert (row["a"], list(row)) == ("NaN", ["step", *numbers])
    first, second = read(tmp_path / "rollouts.jsonl")
    assert first == {"step": 1, **example().row()} and "漢" in (tmp_path / "rollouts.jsonl").read_text()
    assert (second["advantage"], second["reply"]) == (None, reply)
    with pytest.raises(UserError, match="already holds the records of a run.*resume="):
        JsonlTracker(tmp_path)


def logged(run: Path, saved: int = 3, last: int = 5) -> tuple[JsonlTracker, dict[str, Any]]:
    """A run that logged steps 0 to `last`, and what its checkpoint of step `saved` kept."""
    tracker, state = JsonlTracker(run), dict[str, Any]()
    for step in range(last + 1):
        tracker.log(Record(step, {"x": step / 8}, (example(f"reply {step}"),) * 2))
        state = state if step > saved else tracker.state_dict()
    return tracker, state


def test_a_resumed_run_cuts_off_what_was_logged_after_its_checkpoint(tmp_path):
    _, state = logged(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    again = JsonlTracker(tmp_path, resumed=True)
    again.load_state_dict(state)
    assert again.state_dict() == state and b"lo" in (tmp_path / "metrics.jsonl").read_bytes(), "nothing is lost yet"
    again.log(Record(4, {"x": 0.5}, (example("reply 4"),) * 2))
    assert again.state_dict() == logged(tmp_path / "alone", saved=4, last=4)[1]
    assert steps(tmp_path / "rollouts.jsonl") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    again.load_state_dict({})  # begun anew
    again.log(Record(0, {}))
    assert (steps(tmp_path / "metrics.jsonl"), steps(tmp_path / "rollouts.jsonl")) == ([0], [])


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
@pytest.mark.parametrize("lost", [slice(2, 3), slice(2, -1)])
def test_records_that_differ_from_those_written_are_refused_and_kept_only_if_asked(tmp_path, name, lost):
    """Whole lines, of no more bytes than the checkpoint knows."""
    _, state = logged(tmp_path)
    path = tmp_path / name
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[lost]
    path.write_bytes(before := b"".join(lines)[:-9])  # the last one is cut short
    with pytest.raises(UserError, match=f"{name} .*accept_damage=true"):
        JsonlTracker(tmp_path, resumed=True).load_state_dict(state)
    assert path.read_bytes() == before
    warnings: list[str] = []
    again = JsonlTracker(tmp_path, True, accept_damage=True, warn=warnings.append)
    again.load_state_dict(state)
    again.log(Record(4, {}))
    kept = path.read_bytes().removesuffix(b'{"step": 4}\n')
    assert len(warnings) == 1 and before.startswith(kept) and kept.endswith(b"\n") and len(kept) <= state[name][0]


def test_secrets_are_hidden_by_name_by_value_and_by_looks(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "correct horse")
    named = {"api_key": "k", "token": "t", "HF-TOKEN": "x", "hf_token": "t", "password": ["a"]}
    texts = ["my correct horse!", "https://user:pw@host/data"]
    texts += [f"with {start}{'a1B2_' * 4}" for start in ("hf_", "sk-", "ghp_", "wandb_v1_")]
    plain = {"path": "org/risk-assessment-instruct-7b", "y": "my_hf_checkpoints_of_last_week"}
    plain |= {"project": "p", "micro_batch_tokens": 4096, "max_token": 5, "tokenizer": "qwen", "key": None, "x": "hf_"}
    found = without_secrets({"logger": [named], "texts": texts, **plain})
    hidden = dict.fromkeys(named, HIDDEN) | {"password": [HIDDEN]}
    assert found == {"logger": [hidden], "texts": [HIDDEN] * len(texts), **plain}
    words = ["grpo", "n=4", "++task.api_key=k", "task.url=http://u:pw@h", "a correct horse", "x=1=2"]
    cleaned = ["grpo", "n=4", f"++task.api_key={HIDDEN}", f"task.url={HIDDEN}", HIDDEN, "x=1=2"]
    assert arguments_without_secrets(words) == cleaned


# W&B, TensorBoard and Trackio


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], list[Any]]]:
    """What W&B's runs are given to log and their summaries, each with its run. There is no key, no home and no network:
    its server is a closed port of this machine."""
    import wandb

    logged, ended, log, finish = list[Any](), list[Any](), wandb.Run.log, wandb.Run.finish
    monkeypatch.setattr(wandb.Run, "log", lambda run, row: (logged.append((run, row)), log(run, row)))
    end = lambda run, **words: (ended.append((run, dict(run.summary))), finish(run, **words))  # noqa: E731
    monkeypatch.setattr(wandb.Run, "finish", end)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    yield logged, ended
    wandb.teardown()


def test_a_whole_run_is_complete_in_w_and_b(tmp_path, lonely):
    """What the files in the run's folder say is sent, and the run can be found by what it is."""
    sweep, words = tmp_path / "my sweep", ["train.steps=2", "train.prompts=1", "n=2", "sampling.max_new_tokens=4"]
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}")
    run = sweep / "7"
    words += ["eval.problems=2", "eval.k=1", "logger.tags=[mine]", "logger.table_every=1", f"hydra.run.dir='{run}'"]
    done("train", *words)
    logged, ((theirs, found),) = lonely
    rows, sent = read(run / "metrics.jsonl"), [row for _, row in logged]
    for row, of_row in zip(rows, sent, strict=True):
        assert {name: float(of_row[name]) for name in row} == {name: float(value) for name, value in row.items()}
    assert sum(len(row["rollouts"].data) for row in sent if "rollouts" in row) == len(read(run / "rollouts.jsonl"))
    summary = json.loads((run / "summary.json").read_text())
    nested = {name: summary.pop(name) for name in ("code", "engine")}
    assert {name: value for name, value in summary.items() if value is not None}.items() <= found.items()
    assert {name: json.loads(found[name]) for name in nested} == nested
    assert (theirs.group, theirs.job_type, theirs.tags) == ("my sweep", "train", ("mine",))
    config = theirs.config
    assert (config["n"], config["choices"]["sampler"], config["optim"]["lr"]) == (2, "full", 5e-4)


def test_a_resumed_run_is_the_same_w_and_b_run_and_may_go_back(tmp_path, lonely, monkeypatch):
    """The agent of a W&B sweep names it; the first life logged steps 1 to 3, but its checkpoint was of step 1."""
    import wandb

    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    logged, ended = lonely
    for first in (1, 2):
        offered = {"run_dir": tmp_path, "config": {}, "say": lambda text: None}
        tracker = made.ready("logger", "wandb", offered, mode="offline")
        for step in range(first, 4):
            tracker.log(Record(step, {"life": float(first)}))
        tracker.close({})
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    assert {run.id for run, _ in logged} == {(tmp_path / "wandb_id.txt").read_text().split()[0]} == {"theirs"}
    assert len({id(run) for run, _ in logged}) == 2
    assert [row["step"] for _, row in logged] == [1, 2, 3, 2, 3]
    wandb.teardown()  # which keeps the agent's variable
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    copy.mkdir()
    shutil.copy(tmp_path / "wandb_id.txt", copy)
    for folder in (copy, moved):
        if folder is moved:
            copy.rename(moved)
        offered = {"run_dir": folder, "config": {}, "say": lambda text: None}
        made.ready("logger", "wandb", offered, mode="offline").close({})
    names = [run.id for run, _ in ended]
    assert len(set(names)) == 2 and names[2] == names[3] == (moved / "wandb_id.txt").read_text().split()[0]


@pytest.mark.filterwarnings("ignore::Warning")  # of the library, at its import
def test_tensorboard_has_what_the_files_have_also_after_a_kill_and_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MY_TOKEN", tmp_path.name)  # which is part of the setting run_dir
    words = ("eval.every=2", "eval.problems=4", "logger=tensorboard")
    trained(tmp_path, *words, "train.steps=3", "train.checkpoint_every=2")
    # As a kill after the checkpoint of step 2 leaves it: step 3 is made again.
    (tmp_path / "checkpoints" / "step_000003" / "COMPLETE").unlink()
    (tmp_path / "summary.json").unlink()
    trained(tmp_path, *words, f"resume={tmp_path}", "train.steps=4")
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    rows = read(tmp_path / "metrics.jsonl")
    assert sorted(found) == [row.pop("step") for row in rows], "no step is there twice"
    for row, step in zip(rows, sorted(found), strict=True):  # to the rounding of an event file
        assert found[step] == {name: pytest.approx(float(value), rel=1e-6, nan_ok=True) for name, value in row.items()}
    texts = b"".join(file.read_bytes() for file in (tmp_path / "events").iterdir())
    assert tmp_path.name.encode() not in texts and HIDDEN.encode() in texts


def test_trackio_gets_the_metrics_by_step_no_secret_and_a_failure_is_an_error_at_the_start_only(tmp_path, monkeypatch):
    calls, printed = list[Any](), list[str]()

    def begin(**about: Any) -> Any:
        calls.append(about)
        if len(calls) == 1:
            raise ConnectionError("cannot begin")
        return SimpleNamespace(log=log)

    def log(values: dict[str, Any], step: int) -> None:
        calls.append((step, values))
        if step == 2:
            raise OSError("no\nroom")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(__spec__=1, init=begin))
    say = {"say": printed.append, "warn": printed.append}
    offered = {"run_dir": tmp_path / "one", "config": {"n": 4, "api_key": "s3cr3t"}, **say}
    with pytest.raises(UserError, match="trackio did not start .cannot begin"):
        made.ready("logger", "trackio", offered)
    tracker = made.ready("logger", "trackio", offered)
    for step in (1, 2, 3):
        tracker.log(Record(step, {"reward/mean": step / 4}))
    tracker.close({})
    _, about, *rest = calls
    assert (about["project"], about["name"], about["resume"]) == ("grpo-cli", "one", "allow")
    assert (about["config"]["n"], about["config"]["api_key"]) == (4, HIDDEN)
    assert rest == [(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5})]
    assert "trackio show --project grpo-cli" in printed[0] and "(no)" in printed[1] and len(printed) == 2
