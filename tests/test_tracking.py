"""Records arrive whole in the JSONL files and in W&B, whatever happens; secrets do not."""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import pytest
from test_resume import trained
from typer.testing import CliRunner

from grpo_cli.cli import main as cli
from grpo_cli.interfaces import Tracker
from grpo_cli.runs.record import code_version
from grpo_cli.support.errors import UserError
from grpo_cli.tracking.jsonl import JsonlTracker
from grpo_cli.tracking.redact import HIDDEN, arguments_without_secrets, without_secrets
from grpo_cli.tracking.wandb import WandbTracker
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
    assert len(read(tmp_path / "metrics.jsonl")) == 1


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
    assert again.state_dict() == state and steps(tmp_path / "rollouts.jsonl") == [0, 0, 1, 1, 2, 2, 3, 3]
    again.log(Record(4, {"x": 0.5}, (example("reply 4"),) * 2))
    assert again.state_dict() == logged(tmp_path / "alone", saved=4, last=4)[1]
    again.load_state_dict({})  # begun anew
    assert steps(tmp_path / "metrics.jsonl") == steps(tmp_path / "rollouts.jsonl") == []


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
    JsonlTracker(tmp_path, True, accept_damage=True, warn=warnings.append).load_state_dict(state)
    kept = path.read_bytes()
    assert len(warnings) == 1 and before.startswith(kept) and kept.endswith(b"\n") and len(kept) <= state[name][0]


def test_a_full_disk_ends_a_run_with_one_error_and_costs_no_record_of_a_checkpoint(tmp_path):
    tracker, state = logged(tmp_path, last=3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, hard))
    try:
        with pytest.raises(UserError, match="metrics.jsonl cannot be written"):
            tracker.log(Record(4, {"x": 0.5}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = JsonlTracker(tmp_path, resumed=True)
    again.load_state_dict(state)
    assert steps(tmp_path / "metrics.jsonl") == [0, 1, 2, 3]


def test_secrets_are_hidden_by_name_by_value_and_by_looks(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "correct horse")
    named = {"api_key": "k", "token": "t", "HF-TOKEN": "x", "hf_token": "t", "password": ["a"]}
    texts = ["my correct horse!", "https://user:pw@host/data"]
    texts += [f"with {start}{'a1B2_' * 4}" for start in ("hf_", "sk-", "ghp_", "wandb_v1_")]
    plain = {"project": "p", "micro_batch_tokens": 4096, "max_token": 5, "tokenizer": "qwen", "key": None, "x": "hf_"}
    found = without_secrets({"logger": [named], "texts": texts, **plain})
    hidden = dict.fromkeys(named, HIDDEN) | {"password": [HIDDEN]}
    assert found == {"logger": [hidden], "texts": [HIDDEN] * len(texts), **plain}
    words = ["grpo", "n=4", "++task.api_key=k", "task.url=http://u:pw@h", "a correct horse", "x=1=2"]
    cleaned = ["grpo", "n=4", f"++task.api_key={HIDDEN}", f"task.url={HIDDEN}", HIDDEN, "x=1=2"]
    assert arguments_without_secrets(words) == cleaned


# --- W&B -----------------------------------------------------------------------------------------------------------


def offline_records(run_dir: Path) -> list[Any]:
    """The records of W&B's own log, which `wandb sync` sends: a LevelDB log of protocol buffers behind 7 bytes."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    wandb.teardown()  # as at the end of the program: the service is done writing
    records = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        data, position, whole = path.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while position < len(data):
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            whole += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # full, or the last part
                records.append(WandbRecord.FromString(whole))
                whole = b""
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.fixture
def lonely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No key, no home, no network: W&B's server is a closed port of this machine."""
    import wandb

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


def wandb_tracker(run_dir: Path, config: dict[str, Any], **words: Any) -> WandbTracker:
    say = {name: words.pop(name) for name in ("say", "warn") if name in words}
    return made.ready("logger", "wandb", {"run_dir": run_dir, "config": config, **say}, **words)


def test_a_whole_run_is_complete_in_w_and_b(tmp_path, lonely):
    """What the files in the run's folder say is in W&B's offline log, and the run can be found by what it is."""
    sweep, words = tmp_path / "my sweep", ["train.steps=2", "train.prompts=1", "n=2", "sampling.max_new_tokens=4"]
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}")
    run = sweep / "7"
    words += ["eval.problems=2", "eval.k=1", "logger.tags=[mine]", "logger.table_every=1", f"hydra.run.dir='{run}'"]
    result = CliRunner().invoke(cli.app, ["train", *words])
    assert result.exit_code == 0, result.output
    records = offline_records(run)
    logged: dict[int, dict[str, Any]] = {}
    for row in history(records):  # the last table comes in a row of its own
        logged.setdefault(row["step"], {}).update(row)
    for row in read(run / "metrics.jsonl"):
        for name, value in row.items():
            assert float(logged[row["step"]][name]) == float(value), name
    assert len(logged) == 3
    summed = {item.key: json.loads(item.value_json) for record in records for item in record.summary.update}
    summary = json.loads((run / "summary.json").read_text())
    code, engine = summary.pop("code"), summary.pop("engine")
    assert summary.items() <= summed.items() and json.loads(summed["code"]) == code == code_version()
    assert json.loads(summed["engine"]) == engine
    (started,) = {record.run.run_id: record.run for record in records if record.HasField("run")}.values()
    assert (started.run_group, started.job_type) == ("my sweep", "train")
    assert list(started.tags) == ["mine"]
    config = {item.key: json.loads(item.value_json) for record in records for item in record.run.config.update}
    assert (config["n"], config["choices"]["sampler"], config["optim"]["lr"]) == (2, "full", 5e-4)
    tables = [json.loads(path.read_text()) for path in run.rglob("*.table.json")]
    assert sum(len(table["data"]) for table in tables) == len(read(run / "rollouts.jsonl"))


def test_a_resumed_run_is_the_same_w_and_b_run_and_may_go_back(tmp_path, lonely):
    """The agent of a W&B sweep names it; the first life logged steps 1 to 3, but its checkpoint was of step 1."""
    lonely.setenv("WANDB_RUN_ID", "theirs")
    lonely.setenv("WANDB_SWEEP_ID", "sweep")
    for first in (1, 2):
        tracker = wandb_tracker(tmp_path, {}, project="p", mode="offline", say=lambda text: None)
        for step in range(first, 4):
            tracker.log(Record(step, {"life": float(first)}))
        tracker.close({})
        time.sleep(1.1)  # W&B names folders by the second
        lonely.delenv("WANDB_RUN_ID", raising=False)
    records = offline_records(tmp_path)
    ids = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    assert ids == {(tmp_path / "wandb_id.txt").read_text().strip()} == {"theirs"}
    assert [(row["step"], row["life"]) for row in history(records)] == [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]


def test_only_failures_of_w_and_b_are_forgiven(tmp_path, lonely):
    import wandb

    def broken(error: Exception) -> Any:
        def log(values: dict[str, Any]) -> None:
            raise error

        return SimpleNamespace(log=log)

    warnings: list[str] = []
    tracker = wandb_tracker(tmp_path, {}, mode="disabled", warn=warnings.append)
    tracker._run = broken(wandb.errors.CommError("server said no\nat length"))
    for step in (1, 2):
        tracker.log(Record(step, {}))
    assert len(warnings) == 1 and "server said no)" in warnings[0]
    tracker._run = broken(TypeError("a bug of ours"))
    with pytest.raises(TypeError):
        tracker.log(Record(3, {}))
    assert list(tmp_path.iterdir()) == []


# TensorBoard


# Of the library, at its import.
QUIET = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::ResourceWarning"
)


@QUIET
def test_tensorboard_has_what_the_files_have_also_after_a_kill_and_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MY_TOKEN", "k" * 12)
    words = ("eval.every=2", "eval.problems=4", "logger=tensorboard", f"task.system_prompt={'k' * 12}")
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
    assert b"kkkk" not in texts and HIDDEN.encode() in texts


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
