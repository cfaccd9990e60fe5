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
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Forked:
    """`grpo <words>`, with the methods of `subprocess.Popen` that tests use. Its output goes to files: a process that
    nobody reads from does not wait."""

    def __init__(self, *words: str, cwd: Path, env: Mapping[str, str] = {}, joined: bool = True) -> None:
        """`env` is added to this process's environment; `joined`: standard error goes where standard output does."""
        self._files = [tempfile.TemporaryFile("w+b") for _ in range(1 if joined else 2)]
        self._server, self.returncode = _connected(), None
        request = {"words": words, "cwd": str(cwd), "env": {**os.environ, "OMP_NUM_THREADS": "1", **env}}
        descriptors = [self._files[0].fileno(), self._files[-1].fileno()]
        socket.send_fds(self._server, [json.dumps(request).encode() + b"\n"], descriptors)
        self._answers = self._server.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            return self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._server.close()
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """What it has printed on standard output and error, once it has ended."""
        self.wait()
        printed = []
        for file in self._files:
            file.seek(0)
            printed.append(file.read().decode())
            file.close()
        return printed[0], "".join(printed[1:])

    def send_signal(self, number: int) -> None:
        """Like `Popen.send_signal`, nothing if the command has ended; between its end and the server's answer, too."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _connected() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_server())
    return connection


@functools.cache
def _server() -> str:
    """Where the server of this process listens. It ends with this process, whose end of a pipe it watches."""
    folder = tempfile.TemporaryDirectory(prefix="grpo_tests_")
    path = f"{folder.name}/server"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == b"ready\n", "the server of forked processes has not started"
    process.stdout.close()
    atexit.register(folder.cleanup)
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return path


def serve(path: str) -> None:
    from grpo_cli.support.processor import set_variables

    set_variables()
    import transformers.models.llama.modeling_llama  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import grpo_cli.cli.main
    import grpo_cli.experiment  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what has answered is nobody's to wait for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in (found := select.select([listener, sys.stdin], [], [])[0]):
            assert found
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    """Fork the command, tell its number at once and its exit code once it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 2)
    while not message.endswith(b"\n"):
        message += connection.recv(1 << 20)
    pid = os.fork()
    if not pid:
        connection.close()
        _become(json.loads(message), descriptors)
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.sendall(f"{code}\n".encode())
    finally:
        os._exit(0)


def _become(request: Mapping[str, Any], descriptors: list[int]) -> None:
    """What ends the command ends this process as it would a fresh one: handlers at exit, exit code and traceback."""
    from grpo_cli.cli.main import main

    os.setsid()
    os.chdir(request["cwd"])
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ |= request["env"]
    sys.argv = ["grpo", *request["words"]]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", closefd=False), open(2, "w", closefd=False)
    main()
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1])
