"""Jobs that another program's launcher brings somewhere leave the same files, and go on by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_sweep import HELD
from typer.testing import CliRunner

from grpo_cli.cli import main as cli
from grpo_cli.runs.lock import try_lock
from grpo_cli.sweep import launcher, pool
from grpo_cli.sweep.launcher import run_alone
from grpo_cli.sweep.resume import Sweep
from grpo_cli.sweep.status import Job, Status, is_running, read_status, write_status

COMPLETED = """echo '{"status": "completed"}' > summary.json"""
WAIT = "n=0; while [ $((n+=1)) -lt 2400 ]; do sleep 0.05; done"  # for two minutes at most, and a trap can interrupt it


def grpo(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), prog_name="grpo")


def lines(monkeypatch: pytest.MonkeyPatch, of: Callable[[Job], str]) -> None:
    """Let each job be a shell line in its folder."""
    monkeypatch.setattr(Sweep, "command_of", lambda self, job: ["sh", "-c", f"cd {job.folder}; {of(job)}"])


def states(sweep: Path) -> list[tuple[str, str | None]]:
    kept = [read_status(folder) for folder in sorted(sweep.glob("[0-9]"))]
    return [(status.state, status.reason) for status in kept if status is not None]


def test_a_job_of_another_launcher_writes_its_status_and_log_and_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[int | None, bool]] = []

    def look() -> None:
        folder = tmp_path / "s" / "0"
        while (status := read_status(folder)) is None or status.state != "running":
            time.sleep(0.01)
        seen.append((status.pid, is_running(folder)))
        (folder / "go").touch()

    waits = f"echo $$; until [ -e go ]; do sleep 0.01; done; {COMPLETED}"
    lines(monkeypatch, lambda job: waits if job.number == 0 else "echo 'error: odd'; exit 2")
    thread = threading.Thread(target=look)
    thread.start()
    result = grpo("train", "-m", "hydra/launcher=basic", "seed=1,2", "n=4,2", "m=4", "hydra.sweep.dir=s")
    thread.join()
    assert result.exit_code == 1, result.output
    assert "4 jobs: 1 done, 1 failed, 2 skipped\ngo on with: grpo train -m resume=sweep" in result.stdout
    assert [state for state, _ in states(tmp_path / "s")] == ["done", "skipped", "failed", "skipped"]
    assert states(tmp_path / "s")[2][1] == "odd"
    assert seen == [(int((tmp_path / "s" / "0" / "log.txt").read_text()), True)]
    listed = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [job["number"] for job in listed["jobs"]] == [0, 1, 2, 3]
    assert grpo("ls", "s").stdout.count("skipped") == 2

    lines(monkeypatch, lambda job: COMPLETED)
    again = grpo("train", "-m", "resume=sweep", "hydra.sweep.dir=s", "hydra/launcher=processes")
    assert again.exit_code == 0 and again.stdout.count("running") == 1, again.output
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["hydra"] == ["hydra/launcher=processes"]


def test_what_another_launcher_fails_with_is_why_its_jobs_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    monkeypatch.chdir(tmp_path)

    def launch(self: Any, jobs: Any, first: int) -> Any:
        raise ValueError("no such partition")

    monkeypatch.setattr(BasicLauncher, "launch", launch)
    result = grpo("train", "-m", "hydra/launcher=basic", "seed=1,2", "hydra.sweep.dir=s")
    assert (result.exit_code, "Traceback" in result.output) == (2, False), result.output
    assert states(tmp_path / "s") == [("failed", "ValueError: no such partition")] * 2


def listed(tmp_path: Path) -> Job:
    job = Job(0, tmp_path / "0", ("n=1",), "n=1")
    write_status(job.folder, Status("waiting", None, job.overrides))
    return job


def here(job: Job, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(monkeypatch, lambda job: line)
    run_alone(Sweep("train", lambda cfg: None, jobs={0: job}), job.folder)


def test_a_job_that_a_killed_worker_left_behind_is_waited_for_and_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray worker that is killed leaves the job's process running, and its task is tried again."""
    job = listed(tmp_path)
    with open(job.folder / "log.txt", "wb") as log:
        assert try_lock(log)
        left = subprocess.Popen(["sh", "-c", f"read go; cd {job.folder}; {COMPLETED}"], stdin=-1, stdout=log)
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: left.communicate(b"\n") and None)
    here(job, "echo again; exit 1", monkeypatch)
    assert (job.folder / "log.txt").read_bytes() == b""
    assert json.loads((job.folder / "summary.json").read_text()) == {"status": "completed"}


class Requeued(BaseException):
    """What submitit's handler ends its process with is SystemExit; any will do."""


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGUSR2, Requeued), (signal.SIGUSR1, Requeued), (signal.SIGTERM, SystemExit)]
)
def test_a_job_that_is_requeued_saves_first_and_waits_for_its_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, raised: type[BaseException], starting: bool
) -> None:
    """Also where the signal comes before the launcher knows of the process that it has begun."""

    def requeue(number: int, frame: Any) -> None:
        raise Requeued

    def press() -> None:
        while not (job.folder / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    def started(*words: Any) -> Any:
        process = start(*words)
        if starting:
            press()
        else:
            threading.Thread(target=press).start()
        return process

    job, start = listed(tmp_path), pool._started
    before = signal.signal(number, requeue) if raised is Requeued else signal.getsignal(number)
    try:
        with monkeypatch.context() as patched, pytest.raises(raised):
            patched.setattr(pool, "_started", started)
            here(job, f"""trap 'echo saved; echo "{{}}" > state; exit 1' TERM; touch ready; {WAIT}""", monkeypatch)
    finally:
        signal.signal(number, before)
    assert (job.folder / "log.txt").read_text() == "saved\n"
    assert states(tmp_path) == [("waiting", "the sweep was stopped while it ran")]
    here(job, COMPLETED, monkeypatch)
    assert states(tmp_path) == [("done", None)]


def test_a_cluster_s_own_signal_to_every_process_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = listed(tmp_path)
    here(job, f"kill -USR2 $$; {COMPLETED}", monkeypatch)
    assert states(tmp_path) == [("done", None)]


@pytest.mark.parametrize(("signalled", "ends", "queued"), [(True, 0, "requeue 7\n"), (False, 3, "")])
def test_slurm_s_script_passes_its_warning_on_and_queues_the_job_again(
    tmp_path: Path, signalled: bool, ends: int, queued: str
) -> None:
    waits = f"trap 'exit {ends}' TERM; touch ready; {WAIT if signalled else f'exit {ends}'}"
    for name, body in (("grpo", f'printf "%s\n" "$@" > asked; {waits}'), ("scontrol", 'echo "$@" >> queued')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "queued").touch()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    script = Path(__file__).parents[1] / "scripts" / "slurm.sh"
    process = subprocess.Popen([script, "a run", "n=4", "task.path='x y'"], cwd=tmp_path, env=environment)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    if signalled:
        process.send_signal(signal.SIGUSR1)
    assert process.wait() == ends
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["train", "n=4", "task.path='x y'", "hydra.run.dir='a run'", "resume=here"]
    assert (tmp_path / "queued").read_text() == queued


SMALL = ["train.prompts=1", "n=2,4", "sampling.max_new_tokens=4", "eval.every=0", "train.steps=6", "logger=jsonl"]
SMALL += ["train.checkpoint_every=1", "advantage._target_=held.advantage", "device=cpu", "hydra.sweep.dir=sweep"]


def killed(process: psutil.Process) -> None:
    process.kill()


def killed_with_its_worker(process: psutil.Process) -> None:
    process.parent().kill()
    process.kill()


def preempted(process: psutil.Process) -> None:
    """As submitit's own signal tells its worker, which has the run stop after its step."""
    process.parent().send_signal(signal.SIGUSR2)
    log = Path(next(file.path for file in process.open_files() if file.path.endswith("log.txt")))
    while "stopping after this step" not in log.read_text():
        time.sleep(0.02)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "plugin", "taken_away", "by_itself"),
    [
        ("joblib", "hydra_plugins.hydra_joblib_launcher", killed, False),
        ("submitit_local", "hydra_plugins.hydra_submitit_launcher", killed, False),
        ("submitit_local", "hydra_plugins.hydra_submitit_launcher", preempted, True),
        ("ray", "hydra_plugins.hydra_ray_launcher", killed_with_its_worker, True),
    ],
)
def test_a_job_whose_machine_is_taken_away_goes_on_from_its_checkpoint(
    tmp_path: Path, name: str, plugin: str, taken_away: Callable[[psutil.Process], None], by_itself: bool
) -> None:
    pytest.importorskip(plugin)
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    paths = [str(Path(cli.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def sweep(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "grpo_cli", "train", "-m", f"hydra/launcher={name}", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)

    process, metrics = sweep(*SMALL), tmp_path / "sweep" / "0" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    status = read_status(tmp_path / "sweep" / "0")
    assert status is not None and status.pid is not None
    taken_away(psutil.Process(status.pid))
    (tmp_path / "hold").unlink()
    output, _ = process.communicate()
    assert process.returncode == (0 if by_itself else 1), output
    if not by_itself:
        process = sweep("resume=sweep", "hydra.sweep.dir=sweep")
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert "2 jobs: 2 done" in output
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(7))
    assert "resumed at step" in (tmp_path / "sweep" / "0" / "log.txt").read_text()
