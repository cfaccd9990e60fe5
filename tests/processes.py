"""`grpo` in processes of its own, forked from one that has loaded the libraries: a start costs 0.1 s of processor time,
not the 5 s that PyTorch and transformers take to load.

A forked command has its own session, folder, environment and signals, as a fresh one has. What libraries read from the
environment while they are loaded (numbers of threads, instruction sets) is the server's: a test that varies those, or
that is about the start itself, starts a fresh process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from grpo_cli.support.processor import set_variables

ROOT = Path(__file__).parents[1]
LOADED = ("grpo_cli.experiment", "grpo_cli.cli.main")
LOADED += ("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([*LOADED])


@functools.cache
def start_server() -> None:
    """Begin to load the libraries, with one thread and the variables that a command sets first."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = "1"
    set_variables()
    forkserver.ensure_running()
    os.environ.clear()
    os.environ |= before


class Forked:
    """`grpo <words>`, with the methods of `subprocess.Popen` that tests use. Its output goes to files: a process that
    nobody reads from does not wait."""

    def __init__(self, *words: str, cwd: Path, env: Mapping[str, str] = {}, joined: bool = True) -> None:
        """`env` is added to this process's environment; `joined`: standard error goes where standard output does."""
        self._files = [tempfile.NamedTemporaryFile("w+b") for _ in range(1 if joined else 2)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        given = (words, str(cwd), environment, [self._files[0].name, self._files[-1].name])
        start_server()
        self._process = SERVER.Process(target=_become, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int | None:
        self._process.join()
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Return what it has printed on standard output and error, once it has ended."""
        self.wait()
        printed = []
        for file in self._files:
            printed.append(file.read().decode())
            file.close()
        return printed[0], "".join(printed[1:])

    def send_signal(self, number: int) -> None:
        """Like `Popen.send_signal`, nothing if the command has ended; between its end and the server's answer, too."""
        if self.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(words: Sequence[str], cwd: str, environment: Mapping[str, str], files: Sequence[str]) -> None:
    """End as a fresh process would: with its handlers at exit, exit code and traceback."""
    from grpo_cli.cli.main import main

    os.setsid()
    os.chdir(cwd)
    for target, name in enumerate((os.devnull, *files)):
        os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), target)
    os.environ.clear()
    os.environ |= environment
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    sys.argv = ["grpo", *words]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", closefd=False), open(2, "w", closefd=False)
    try:
        main()
    finally:
        atexit._run_exitfuncs()
