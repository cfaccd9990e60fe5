"""The Ray cluster of a run: started here for the lifetime of the process, or joined.

One that is started here listens on this machine only and requires a token made for this process: Ray runs whatever code
it is sent.
"""

from __future__ import annotations

import atexit
import ipaddress
import logging
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require

ANSWERS_IN = 5.0  # seconds for an address to answer

# Switches off Ray's usage statistics and hints.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
# Makes Ray use the loopback interface only.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# These affect bits when a process starts (`processor.settle`); workers must have the same.
_HANDED_ON = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_WAIT_POLICY")


def require_ray() -> None:
    require("ray", "engine=ray")


def check_address(address: str, environment: Mapping[str, str] = os.environ) -> None:
    """UserError for an address that does not answer, or that is open to the public. Called before anything is sent."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UserError(
            f"engine.address={address} must be auto, on a node of a running cluster, or host:port of its head, for "
            "example 10.0.0.1:6379"
        )
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWERS_IN) as connection:
            check_public(connection.getpeername()[0], environment)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"nobody answers at engine.address={address} ({error}): start a head there with ray start --head "
            f"--port={port}, or leave engine.address out, and Ray is started on this machine"
        ) from error


def check_public(host: str, environment: Mapping[str, str] = os.environ) -> None:
    """UserError for a public address without authentication: anyone could run code there."""
    if ipaddress.ip_address(host).is_global and environment.get("RAY_AUTH_MODE", "").lower() != "token":
        raise UserError(
            f"the cluster's address {host} is public, and Ray runs the code that anybody sends it: reach it by a "
            "private network or a tunnel, or have it ask for a token (RAY_AUTH_MODE=token on every node and here)"
        )


def check_room(
    workers: int, cpus: int, gpus: float, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]
) -> None:
    """UserError unless there is room for all workers, each on one node: Ray would let them wait forever."""

    def room(resources: Mapping[str, float]) -> int:
        by_gpus = resources.get("GPU", 0) // gpus if gpus else math.inf
        return int(min(resources.get("CPU", 0) // cpus, by_gpus))

    alive = [node["Resources"] for node in nodes if node["Alive"]]
    fitting = min(sum(map(room, alive)), room(free))
    if fitting < workers:
        raise UserError(
            f"engine.workers={workers} of {cpus} CPUs (engine.threads) and {gpus:g} GPUs (engine.gpus) "
            f"each do not fit: {len(alive)} nodes, with {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs "
            f"free, have room for {fitting}; lower them, or join a larger cluster (engine.address)"
        )


class Session:
    """This process's only connection to Ray, which it may have started."""

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] | None = None
        self._own: list[psutil.Process] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, address: str | None, workers: int, cpus: int, gpus: float) -> None:
        """Connect, for `workers` with `cpus` and `gpus` each. `address` None: Ray is started here."""
        asked = (address, workers, cpus, gpus)
        if self._asked == asked:
            return
        self.close()
        os.environ |= {name: os.environ.get(name, value) for name, value in _QUIET.items()}
        how = {"address": address} if address else self._of_its_own(workers * cpus)
        if address is not None:
            check_address(address)
        before = {process.pid for process in psutil.Process().children()}
        with _starting(address):
            import ray

            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
        self._asked = asked
        atexit.register(self.close)
        nodes = ray.nodes()
        if address is None:
            self._own = [child for child in psutil.Process().children() if child.pid not in before]
            self._check_alone(nodes[0]["NodeManagerAddress"])
        for node in nodes:
            check_public(node["NodeManagerAddress"])
        check_room(workers, cpus, gpus, nodes, ray.available_resources())

    def _of_its_own(self, cpus: int) -> dict[str, Any]:
        """Arguments to start Ray here: on the loopback interface, with a token, its files in a temporary folder,
        whose name is short since paths of sockets are limited to about a hundred characters."""
        os.environ |= _LOOPBACK | {"RAY_AUTH_MODE": "token"}
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once per process
        root = "/tmp" if os.name == "posix" else None
        self._folder = tempfile.TemporaryDirectory("", f"grpo_ray_{os.getpid()}_", root, ignore_cleanup_errors=True)
        return {"address": "local", "num_cpus": cpus, "include_dashboard": False, "_temp_dir": self._folder.name}

    def _check_alone(self, host: str) -> None:
        """Ray reads the setting that keeps it on the loopback interface at import, which may have been earlier."""
        if not ipaddress.ip_address(host).is_loopback:
            self.close()
            raise UserError(
                f"Ray was imported before engine=ray was made, and listens on {host} instead of this machine only: "
                f"set {' '.join(f'{name}={value}' for name, value in _LOOPBACK.items())} in the environment"
            )

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Wraps calls into Ray: UserError if Ray itself is gone. Its processes are checked first: Ray silently ends
        a process that accesses a dead store."""
        import ray

        ended = [p.pid for p in self._own if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE]
        try:
            if ended:
                raise ConnectionError(f"its process {ended[0]} has ended")
            yield
        except (ray.exceptions.RaySystemError, ConnectionError) as error:
            raise UserError(
                f"Ray itself is gone ({reason_of(error)}), and all workers with it; the last checkpoint is kept: "
                "once Ray can run, continue from it with grpo train resume=auto"
            ) from error

    def close(self) -> None:
        if self._asked is None:
            return
        import ray

        atexit.unregister(self.close)
        ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()
        self._asked, self._own, self._folder = None, [], None


session = Session()


@contextmanager
def _starting(address: str | None) -> Iterator[None]:
    """Wraps Ray's start, whose errors have many types. Restores the handler of SIGTERM, with which a run saves a
    checkpoint; Ray installs its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Ray's own code
            yield
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        what = "Ray cannot be started here" if address is None else f"engine.address={address} cannot be joined"
        raise UserError(f"{what}: {reason_of(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def environment_of(threads: int) -> dict[str, str]:
    """A worker's environment: the trainer's settings that affect bits, and module paths outside the installation."""
    prefixes = tuple(os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix))
    paths = [os.path.abspath(path) for path in sys.path if not os.path.realpath(path).startswith(prefixes)]
    handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads), **handed_on}


def reason_of(error: BaseException) -> str:
    """The error on one line: Ray describes a dead actor in paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
