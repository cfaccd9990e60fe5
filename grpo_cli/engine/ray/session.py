"""The Ray that a run works with: started here for as long as the process lives, or joined.

A Ray that is started here listens on this machine only and asks whoever calls for a token that it was given for this
process: Ray runs whatever code it is sent.
"""

from __future__ import annotations

import atexit
import importlib.util
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
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from grpo_cli.support.errors import UserError

# From the release that the tests have run on (2.60.0).
TESTED_VERSIONS = ">=2.60,<3"
ANSWERS_IN = 5.0  # seconds for an address to answer

# Of Ray's own: it sends nothing home; its libraries' hints are not a run's.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
# What Ray goes by on desktops, where nodes stay on the loopback interface.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# What decides bits is asked for when a process starts (`processor.settle`); workers are to have the same.
_HANDED_ON = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class Needs:
    """Of one worker."""

    cpus: int
    gpus: float


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            f"engine=ray needs Ray ({TESTED_VERSIONS}), which is not installed here: pip install 'grpo-cli[ray]', or "
            "pip install -e '.[ray]' in a checkout"
        )


def check_address(address: str, environment: Mapping[str, str] = os.environ) -> None:
    """Before anything is sent there. UserError for one that nobody answers, or that anybody could."""
    if address == "auto":
        return
    if "://" in address:
        raise UserError(
            f"engine.address={address}: Ray's client protocol carries no weights between nodes; give host:port of a "
            "running cluster's head, or run the command on a node of it with engine.address=auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"engine.address={address} is neither auto nor host:port, for example 10.0.0.1:6379")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWERS_IN) as connection:
            check_public(connection.getpeername()[0], environment)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"nobody answers at engine.address={address} ({error}): start a head there with ray start --head "
            f"--port={port}, or leave engine.address out, and Ray is started on this machine"
        ) from error


def check_gpus(workers: int, gpus: float, here: int) -> None:
    """Ray takes the number that it is told where it is started here, and its workers would wait for GPUs for ever."""
    if workers * gpus > here:
        raise UserError(
            f"engine.workers={workers} with engine.gpus={gpus:g} each need {workers * gpus:g} GPUs, and this machine "
            f"has {here}: lower them, or join a cluster that has as many (engine.address)"
        )


def check_public(host: str, environment: Mapping[str, str] = os.environ) -> None:
    """A cluster that everybody can reach, and that asks nobody who they are, is one that everybody can use."""
    if ipaddress.ip_address(host).is_global and environment.get("RAY_AUTH_MODE", "").lower() != "token":
        raise UserError(
            f"the cluster's address {host} is public, and Ray runs the code that anybody sends it: reach it by a "
            "private network or a tunnel, or have it ask for a token (RAY_AUTH_MODE=token on every node and here)"
        )


class Session:
    """This process's one connection to a Ray, which may have been started by it."""

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] | None = None
        self._own: list[psutil.Process] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self, address: str | None, workers: int, needs: Needs, store_bytes: int) -> None:
        """`address` None: Ray is started here, with `store_bytes` for what all processes share."""
        asked = (address, workers, needs, store_bytes)
        if self._asked == asked:
            return
        self.close()
        how: dict[str, Any] = {"address": address}
        if address is None:
            check_gpus(workers, needs.gpus, torch.cuda.device_count())
            os.environ |= _LOOPBACK | {"RAY_AUTH_MODE": "token"}
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once in a process
            # A short name, as sockets lie there, whose paths may have about a hundred characters.
            place = "/tmp" if os.name == "posix" else None
            self._folder = tempfile.TemporaryDirectory(
                "", f"grpo_ray_{os.getpid()}_", place, ignore_cleanup_errors=True
            )
            how = {"address": "local", "num_cpus": workers * needs.cpus, "num_gpus": math.ceil(workers * needs.gpus)}
            how |= {"object_store_memory": store_bytes, "include_dashboard": False, "_temp_dir": self._folder.name}
        else:
            check_address(address)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        before = {process.pid for process in psutil.Process().children()}
        with _starting(address), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Ray's own code
            import ray

            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
        self._asked = asked
        atexit.register(self.close)
        if address is None:
            self._own = [child for child in psutil.Process().children() if child.pid not in before]
            self._check_alone(ray.nodes()[0]["NodeManagerAddress"])
        else:
            for node in ray.nodes():
                check_public(node["NodeManagerAddress"])
            _check_room(workers, needs, ray.nodes(), ray.available_resources())

    def _check_alone(self, host: str) -> None:
        """Ray reads what keeps it on the loopback interface when it is imported, which may have been before."""
        if not ipaddress.ip_address(host).is_loopback:
            self.close()
            raise UserError(
                f"Ray was imported before engine=ray was made, and listens on {host} instead of this machine only: "
                f"set {' '.join(f'{name}={value}' for name, value in _LOOPBACK.items())} in the environment"
            )

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around calls into Ray: where it is itself gone, nothing that was asked of it can be had. Its processes are
        looked at before, since Ray ends a process, without a word, that reaches for a store that has gone."""
        import ray

        ended = [p.pid for p in self._own if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE]
        if ended:
            raise _gone(f"its process {ended[0]} has ended")
        try:
            yield
        except (ray.exceptions.RaySystemError, ConnectionError) as error:
            raise _gone(reason_of(error)) from error

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


def _gone(reason: str) -> UserError:
    return UserError(
        f"Ray itself is gone ({reason}), and all workers with it; the last checkpoint is kept: go on from it with "
        "grpo train resume=auto, once Ray can run"
    )


@contextmanager
def _starting(address: str | None) -> Iterator[None]:
    """Around Ray's start, whose errors are of many kinds, each with a reason of its own. Ray takes SIGTERM for its own,
    which a run answers with a checkpoint."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        what = "Ray cannot be started here" if address is None else f"engine.address={address} cannot be joined"
        raise UserError(f"{what}: {reason_of(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_room(workers: int, needs: Needs, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> None:
    """Whether so many workers find a place, each on one node."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    places = sum(_places(resources, needs) for resources in alive)
    fitting = min(places, _places(free, needs))
    if fitting >= workers:
        return

    def told(resources: Mapping[str, float]) -> str:
        return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"

    total = {name: sum((r.get(name, 0.0) for r in alive), 0.0) for name in ("CPU", "GPU")}
    of_each = f"{needs.cpus} CPUs (engine.threads) and {needs.gpus:g} GPUs (engine.gpus) each"
    would = f"engine.workers={fitting} would do" if fitting else "not even one finds a place"
    raise UserError(
        f"engine.workers={workers} of {of_each} do not fit: the cluster has {told(total)} on {len(alive)} nodes, of "
        f"which {told(free)} are free; {would}"
    )


def _places(resources: Mapping[str, float], needs: Needs) -> int:
    by_gpus = resources.get("GPU", 0) // needs.gpus if needs.gpus else math.inf
    return int(min(resources.get("CPU", 0) // needs.cpus, by_gpus))


def environment_of(threads: int) -> dict[str, str]:
    """Of a worker: the trainer's settings that decide bits, and where a person's own modules are found."""
    handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(_own_paths()), "OMP_NUM_THREADS": str(threads), **handed_on}


def _own_paths() -> Iterator[str]:
    """Where a person's own modules are found: what of Python's path is no part of its installation."""
    installed = tuple({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    for path in sys.path:
        if not os.path.realpath(path).startswith(installed):
            yield os.path.abspath(path)


_GUESSES = " Some common causes include:"  # of Ray's, which are as long as all that it knows
_PARTICULARS = ("class_name", "actor_id", "pid", "namespace", "ip:", "File")


def reason_of(error: BaseException) -> str:
    """In a line: Ray tells of a dead actor in paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(_PARTICULARS)]
    return f"{type(error).__name__}: {told[-1].partition(_GUESSES)[0] if told else 'no reason given'}"
