"""Ray as the carrier: workers are its actors, weights lie in its object stores, once per node.

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
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_cli.engine.ray.messages import Lost, News, Order
from grpo_cli.engine.ray.worker import Blueprint, RolloutWorker
from grpo_cli.support.errors import UserError

# From the release that the tests have run on (2.60.0).
TESTED_VERSIONS = ">=2.60,<3"
ANSWERS_IN = 5.0  # seconds for an address to answer
TAKE = 1.0  # seconds that a worker waits for something to tell

# Of Ray's own: it sends nothing home; its libraries' hints are not a run's.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
# What Ray goes by on desktops, where nodes stay on the loopback interface.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_FOLDER = "grpo_ray_"  # and a process's number
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


class _Session:
    """This process's one connection to a Ray, which may have been started by it."""

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] | None = None
        self._own: list[psutil.Process] = []
        self._folder: str | None = None

    def open(self, address: str | None, workers: int, needs: Needs, store_bytes: int) -> None:
        asked = (address, workers, needs, store_bytes)
        if self._asked == asked:
            return
        self.close()
        if address is None:
            os.environ |= _LOOPBACK | {"RAY_AUTH_MODE": "token"}
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once in a process
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        before = {process.pid for process in psutil.Process().children()}
        with _handlers_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Ray's own code
            import ray

            with _starting(address):
                if address is None:
                    self._folder = _folder()
                    ray.init(
                        "local",
                        num_cpus=workers * needs.cpus,
                        num_gpus=math.ceil(workers * needs.gpus),
                        object_store_memory=store_bytes,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.CRITICAL,
                        _temp_dir=self._folder,
                    )
                else:
                    ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
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

    def check(self) -> None:
        """Raises UserError if a part of the Ray that was started here has ended. Ray would end this process for it,
        sooner or later, and without a word."""
        for process in self._own:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                raise UserError(_gone(f"its process {process.pid} has ended"))

    def close(self) -> None:
        if self._asked is None:
            return
        import ray

        atexit.unregister(self.close)
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._asked, self._own, self._folder = None, [], None


_session = _Session()


def _folder() -> str:
    """For Ray's logs and sockets, so with a short name (a socket's path may have about a hundred characters). Those of
    processes that were killed before they could remove theirs are removed."""
    place = Path("/tmp") if os.name == "posix" else Path(tempfile.gettempdir())
    for old in place.glob(f"{_FOLDER}*_*"):
        pid = old.name.removeprefix(_FOLDER).partition("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}_", dir=place)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for its own, which a run answers with a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _starting(address: str | None) -> Iterator[None]:
    """Around Ray's start, whose errors are of many kinds, each with a reason of its own."""
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        what = "Ray cannot be started here" if address is None else f"engine.address={address} cannot be joined"
        raise UserError(f"{what}: {_reason(error)}") from error


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


class RayCluster:
    """Workers as actors. `address` None: Ray is started here for as long as this process lives."""

    def __init__(
        self, address: str | None, workers: int, needs: Needs, store_bytes: int, environment: Mapping[str, str]
    ) -> None:
        require_ray()
        if address is not None:
            check_address(address)
        else:
            check_gpus(workers, needs.gpus, torch.cuda.device_count())
        self._needs = needs
        handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
        self._environment = {"PYTHONPATH": os.pathsep.join(_own_paths()), **handed_on, **environment}
        _session.open(address, workers, needs, store_bytes)
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {}  # a reference to a worker's next news, and whose it is
        self._blueprint: Any = None
        self._end = weakref.finalize(self, _kill_all, self._actors)

    def put(self, value: Any) -> Any:
        """A handle of what now lies in the store; it goes when the handle is forgotten everywhere."""
        import ray

        with _answering():
            return ray.put(value)

    def build(self, blueprint: Blueprint) -> None:
        """What workers are built from that are started from now on."""
        self._blueprint = self.put(blueprint)

    def start(self, worker: int, state: Mapping[str, Any] | None) -> None:
        import ray

        with _answering():
            actor: Any = (
                ray.remote(RayWorker)
                .options(
                    num_cpus=self._needs.cpus,
                    num_gpus=self._needs.gpus,
                    max_concurrency=4,  # one that waits for news, one that brings orders, and to spare
                    max_restarts=0,
                    runtime_env={"env_vars": self._environment},
                )
                .remote(self._blueprint, state)
            )
            self._actors[worker] = actor
            self._waiting[actor.take.remote(TAKE)] = worker

    def ask(self, worker: int, order: Order) -> None:
        with _answering():
            self._actors[worker].ask.remote(order)

    def cancel(self, worker: int, portion: int) -> None:
        if worker in self._actors:  # which it is not when all were ended, and a generator is closed after that
            with _answering():
                self._actors[worker].cancel.remote(portion)

    def news(self, seconds: float) -> Sequence[tuple[int, News | Lost]]:
        import ray

        with _answering():
            ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=seconds)
            if ready:
                ready, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
            return [(self._waiting[reference], self._told(reference)) for reference in ready]

    def _told(self, reference: Any) -> News | Lost:
        import ray

        worker = self._waiting.pop(reference)
        try:
            _session.check()
            news: News = ray.get(reference)
        except ray.exceptions.RayError as error:
            return Lost(_reason(error))
        self._waiting[self._actors[worker].take.remote(TAKE)] = worker
        return news

    def stop(self, worker: int) -> None:
        actor = self._actors.pop(worker)
        self._waiting = {reference: number for reference, number in self._waiting.items() if number != worker}
        _kill(actor)

    def close(self) -> None:
        """End all workers. Ray, if it was started here, ends with this process."""
        self._end()
        self._waiting.clear()


def _own_paths() -> Iterator[str]:
    """Where a person's own modules are found: what of Python's path is no part of its installation."""
    installed = tuple({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    for path in sys.path:
        if not os.path.realpath(path).startswith(installed):
            yield os.path.abspath(path)


_GUESSES = " Some common causes include:"  # of Ray's, which are as long as all that it knows
_PARTICULARS = ("class_name", "actor_id", "pid", "namespace", "ip:", "File")


def _reason(error: BaseException) -> str:
    """In a line: Ray tells of a dead actor in paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(_PARTICULARS)]
    return f"{type(error).__name__}: {told[-1].partition(_GUESSES)[0] if told else 'no reason given'}"


class RayWorker(RolloutWorker):
    """The worker as Ray makes it: its node is known there only."""

    def __init__(self, blueprint: Blueprint, state: Mapping[str, Any] | None) -> None:
        import ray

        super().__init__(blueprint, ray.get_runtime_context().get_node_id(), state)


def fetch(handle: Any) -> Any:
    """What a worker takes out of its node's store; it is brought there first, once per node."""
    import ray

    return ray.get(handle)


def _kill(actor: Any) -> None:
    import ray

    if ray.is_initialized():
        with suppress(UserError), _answering():  # where Ray is gone, so are its actors
            ray.kill(actor)


def _kill_all(actors: dict[int, Any]) -> None:
    for actor in actors.values():
        _kill(actor)
    actors.clear()


@contextmanager
def _answering() -> Iterator[None]:
    """Around every call into Ray: where it is itself gone, nothing that was asked of it can be had. It is looked at
    before, since a process whose store has gone is ended by Ray as soon as it reaches for it."""
    import ray

    try:
        _session.check()
        yield
    except (ray.exceptions.RaySystemError, ConnectionError) as error:
        raise UserError(_gone(_reason(error))) from error


def _gone(reason: str) -> str:
    return (
        f"Ray itself is gone ({reason}), and all workers with it; the last checkpoint is kept: go on from it with "
        "grpo train resume=auto, once Ray can run"
    )
