"""The pool runs jobs as processes and leaves the truth about each on the disk. The jobs here are shell lines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from grpo_cli.sweep.pool import Job, JobState, Pool, read_status

WAIT = "n=0; while [ $((n+=1)) -lt 2400 ]; do sleep 0.05; done"  # for two minutes at most, and a trap can interrupt it
COMPLETED = """echo '{"status": "completed"}' > summary.json"""


def run(
    sweep: Path, *lines: str, say: Callable[[str], None] = lambda line: None, places: Sequence[dict[str, str]] = ({},)
) -> tuple[Pool, list[tuple[Path, JobState]]]:
    """Run jobs, each a shell line, and return their folders and states."""
    jobs = [Job(i, sweep / str(i), (line,), f"job{i}") for i, line in enumerate(lines)]
    pool = Pool(places, lambda job: ["sh", "-c", f"cd {job.folder}; {job.overrides[0]}"], say)
    pool.run({job: JobState("waiting", None, job.overrides) for job in jobs})
    kept = [(job.folder, state) for job in jobs if (state := read_status(job.folder))]
    assert [state for _, state in kept] == list(pool.states.values())
    return pool, kept


def test_a_job_that_fails_stops_no_other_and_says_why(tmp_path: Path) -> None:
    _, jobs = run(
        tmp_path,
        "echo 'error: in another life'; echo 'error: n=1 is'; echo 'too few' >&2; exit 2",
        COMPLETED,
        "kill -9 $$",
        "exit 3",
        "echo 'Traceback'; echo; echo 'ValueError: odd'; exit 1",
        """echo '{"status": "interrupted"}' > summary.json""",
        "kill -40 $$",
        "echo '{' > summary.json",
        COMPLETED,
    )
    ends = [(s.state, s.exit_code, s.reason and s.reason.partition(" (")[0]) for _, s in jobs]
    assert ends == [
        ("failed", 2, "n=1 is too few"),
        ("done", 0, None),
        ("failed", -9, "killed by signal 9"),
        ("failed", 3, "exit code 3, and nothing in the log"),
        ("failed", 1, "ValueError: odd"),
        ("failed", 0, "it ended interrupted"),
        ("failed", -40, "killed by signal 40"),
        ("failed", 0, f"{tmp_path}/7/summary.json cannot be read"),
        ("done", 0, None),
    ]
    assert (tmp_path / "0" / "log.txt").read_text() == "error: in another life\nerror: n=1 is\ntoo few\n"


@pytest.mark.parametrize("places", [1, 3])
def test_as_many_jobs_run_at_a_time_as_there_are_places(tmp_path: Path, places: int) -> None:
    lines, here = list[str](), [{"PLACE": str(i)} for i in range(places)]
    _, jobs = run(tmp_path, *["sleep 0.2; echo $PLACE $PYTHONUNBUFFERED"] * 4, say=lines.append, places=here)
    running, most = 0, 0
    for line in lines:
        running += 1 if line.endswith("running") else -1
        most = max(most, running)
    assert (running, most) == (0, places)
    said = {(folder / "log.txt").read_text() for folder, _ in jobs}
    assert said <= {f"{i} 1\n" for i in range(places)} and len(said) >= min(2, places)


def press(number: signal.Signals, *when: Callable[[], bool]) -> threading.Thread:
    """Send this process a signal each time that the next of these holds."""

    def wait() -> None:
        for holds in when:
            while not holds():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_asked_to_stop_it_lets_jobs_save_and_starts_no_more(tmp_path: Path, number: signal.Signals) -> None:
    stops = """echo '{"status": "interrupted"}' > summary.json; """
    stops += f"trap 'echo saved; exit 0' TERM; touch ready; {WAIT}"
    lines, before = list[str](), signal.getsignal(number)
    thread = press(number, (tmp_path / "0" / "ready").exists)
    pool, ((folder, first), (_, second)) = run(tmp_path, stops, COMPLETED, say=lines.append)
    thread.join()
    assert pool.stopped and (folder / "log.txt").read_text() == "saved\n"
    assert (first.state, first.reason) == ("waiting", "the sweep was stopped while it ran")
    assert second.state == "waiting"
    assert signal.getsignal(number) is before
    assert sorted(line.split()[0] for line in lines) == [f"{number.name}:", "job", "job"]


def test_asked_twice_it_kills_them_with_all_that_they_started(tmp_path: Path) -> None:
    asked = f"trap 'touch asked' TERM; sleep 600 & echo $! > child; touch ready; {WAIT}"
    thread = press(signal.SIGINT, (tmp_path / "0" / "ready").exists, (tmp_path / "0" / "asked").exists)
    _, ((folder, state),) = run(tmp_path, asked)
    thread.join()
    assert (state.state, state.exit_code) == ("waiting", -9)
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((folder / "child").read_text()))
        # In two minutes at most; a zombie was not waited for.
        assert any(child.status() == psutil.STATUS_ZOMBIE or time.sleep(0.01) for _ in range(12_000))


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
