"""The pool runs jobs as processes and leaves the truth about each on the disk. The jobs here are shell lines."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import made
import psutil
import pytest

from grpo_cli.sweep.pool import Pool
from grpo_cli.sweep.resume import Sweep
from grpo_cli.sweep.status import Job, JobState, read_status, status_line

WAIT = "n=0; while [ $((n+=1)) -lt 2400 ]; do sleep 0.05; done"  # for two minutes at most, and a trap can interrupt it
COMPLETED = """echo '{"status": "completed"}' > summary.json"""


def listed(sweep: Path, *lines: str) -> list[Job]:
    """Jobs whose one override is the shell line that they run, all of them waiting."""
    return [Job(i, sweep / str(i), (line,), f"job{i}") for i, line in enumerate(lines)]


def run(
    jobs: list[Job], say: Callable[[str], None] = lambda line: None, places: Sequence[dict[str, str]] = ({},)
) -> Pool:
    def command(job: Job) -> list[str]:
        return ["sh", "-c", f"cd {job.folder}; {job.overrides[0]}"]

    pool = Pool(places, command, say)
    pool.run({job: JobState("waiting", None, job.overrides) for job in jobs})
    return pool


def status(job: Job) -> JobState:
    kept = read_status(job.folder)
    assert kept is not None
    return kept


def test_a_job_that_fails_stops_no_other_and_says_why(tmp_path: Path) -> None:
    jobs = listed(
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
    run(jobs)
    ends = [(s.state, s.exit_code, s.reason and s.reason.partition(" (")[0]) for s in map(status, jobs)]
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
    assert (jobs[0].folder / "log.txt").read_text() == "error: in another life\nerror: n=1 is\ntoo few\n"


@pytest.mark.parametrize("places", [1, 3])
def test_as_many_jobs_run_at_a_time_as_there_are_places(tmp_path: Path, places: int) -> None:
    lines, jobs = list[str](), listed(tmp_path, *["sleep 0.2; echo $PLACE $PYTHONUNBUFFERED"] * 4)
    run(jobs, lines.append, [{"PLACE": str(i)} for i in range(places)])
    running, most = 0, 0
    for line in lines:
        running += 1 if line.endswith("running") else -1
        most = max(most, running)
    assert (running, most) == (0, places)
    said = {(job.folder / "log.txt").read_text() for job in jobs}
    assert said <= {f"{i} 1\n" for i in range(places)} and len(said) >= min(2, places)


def eventually(holds: Callable[[], bool]) -> None:
    """Killed processes end when they get to it. The limit is a guard against hanging, not part of what is tested."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE  # it was not waited for
    except psutil.NoSuchProcess:
        return True


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
    saves = f"trap 'echo saved; exit 0' TERM; touch ready; {WAIT}"
    jobs = listed(tmp_path, f"""echo '{{"status": "interrupted"}}' > summary.json; {saves}""", COMPLETED)
    lines, before = list[str](), signal.getsignal(number)
    thread = press(number, (jobs[0].folder / "ready").exists)
    assert run(jobs, lines.append).stopped
    thread.join()
    assert (jobs[0].folder / "log.txt").read_text() == "saved\n"
    assert [status(job).state for job in jobs] == ["waiting", "waiting"]
    assert status(jobs[0]).reason == "the sweep was stopped while it ran"
    assert signal.getsignal(number) is before
    assert sorted(line.split()[0] for line in lines) == [f"{number.name}:", "job", "job"]


def test_asked_twice_it_kills_them_with_all_that_they_started(tmp_path: Path) -> None:
    asked = f"trap 'touch asked' TERM; sleep 600 & echo $! > child; touch ready; {WAIT}"
    (job,) = listed(tmp_path, asked)
    thread = press(signal.SIGINT, (job.folder / "ready").exists, (job.folder / "asked").exists)
    run([job])
    thread.join()
    assert (status(job).state, status(job).exit_code) == ("waiting", -9)
    child = int((job.folder / "child").read_text())
    eventually(lambda: ended(child))


def test_an_error_of_ours_leaves_no_process_behind_and_lets_it_save(tmp_path: Path) -> None:
    def fail(line: str) -> None:
        if line.endswith("running"):
            eventually((job.folder / "ready").exists)
            raise RuntimeError("a bug in the view")

    (job,) = listed(tmp_path, f"trap 'echo saved; exit 1' TERM; touch ready; {WAIT}")
    with pytest.raises(RuntimeError):
        run([job], fail)
    assert status(job).state == "waiting"
    assert (job.folder / "log.txt").read_text() == "saved\n"


@pytest.mark.parametrize(
    ("command", "begun", "last"),
    [("train", False, "hydra.run.dir='{}'"), ("train", True, "resume='{}'"), ("eval", True, "hydra.run.dir='{}'")],
)
def test_a_training_that_was_begun_goes_on_and_any_other_job_begins(
    tmp_path: Path, command: str, begun: bool, last: str
) -> None:
    if begun:
        made.record(tmp_path, {}, ["seed=1"], command=command)
    words = Sweep(command, lambda cfg: None).command_of(Job(0, tmp_path, ("seed=1",), ""))
    assert words[-1] == last.format(tmp_path)
    assert "seed=1" in words


def test_a_line_tells_how_far_a_job_came_and_why_it_ended(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "failed", "step": 2, "final_accuracy": 0.25}')
    job = Job(1, tmp_path, ("n=1",), "n=1")
    failed = JobState("failed", "no [memory]\nat all", job.overrides, seconds=61.0)
    assert status_line(job, failed) == "job 1  n=1: failed  step 2  accuracy 0.250  1m01s  no [memory] at all"
    assert status_line(job, JobState("skipped", "m > n", job.overrides)) == "job 1  n=1: skipped  m > n"


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
