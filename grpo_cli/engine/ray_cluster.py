"""This process's connection to Ray: to a Ray of its own on this machine, or to a running cluster."""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import secrets
import signal
import socket
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Ray runs the code that it is sent, so one that is started here uses the loopback interface and requires a token.
_OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
# One attempt (41 s) to reach an address that is not Ray's, in place of twenty.
_JOINED = {"RAY_gcs_server_port_wait_time_s": "1"}


class Cluster:
    """A connection, which replaces an earlier one of this process. `address` None: Ray is started here, with room for
    `workers` that need `each` of its resources."""

    def __init__(self, address: str | None, workers: int, each: Mapping[str, int | float]) -> None:
        require("ray", "engine=ray")
        os.environ |= _QUIET | (_JOINED if address else _OWN)
        _check_answers(address)
        # Paths of sockets are limited to about a hundred characters.
        root = "/tmp" if os.name == "posix" else None
        self._folder = tempfile.TemporaryDirectory("", f"grpo_ray_{os.getpid()}_", root, ignore_cleanup_errors=True)
        how: dict[str, Any] = {"address": address}
        if address is None:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once per process
            how = {"address": "local", "num_cpus": workers * int(each["CPU"]), "include_dashboard": False}
            how["_temp_dir"] = self._folder.name
        import ray

        ray.shutdown()
        before, handler = set(psutil.Process().children()), signal.getsignal(signal.SIGTERM)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about Ray's own code
                ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
            nodes, free = [node for node in ray.nodes() if node["Alive"]], ray.available_resources()
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            place = "on this machine" if address is None else f"at engine.address={address}"
            raise UserError(f"Ray {place}: {reason_of(error)}; for a cluster, try ray status there") from error
        finally:
            atexit.register(self.close)
            signal.signal(signal.SIGTERM, handler)  # a run stops by its own
        self._own = set(psutil.Process().children()) - before if address is None else set()
        fitting = room_for(each, free, [node["Resources"] for node in nodes])
        try:
            for node in nodes:
                check_public(node["NodeManagerAddress"])
            if fitting < workers:  # Ray would let them wait forever
                needs = ", ".join(f"{number:g} {name}" for name, number in each.items())
                raise UserError(
                    f"Ray has room for {fitting} of engine.workers={workers} with {needs} each: lower engine.workers, "
                    "engine.threads or engine.gpus"
                )
        except UserError:
            self.close()
            raise

    def check(self) -> None:
        """UserError if Ray itself does not run here anymore."""
        import ray

        # Ray notices the end of its processes seconds later, and ends a process that uses a dead store.
        ended = any(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in self._own)
        here = "" if ended else ray.get_runtime_context().get_node_id()
        if ended or here not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            raise UserError("Ray itself has ended, and with it all workers: continue with grpo train resume=auto")

    def close(self) -> None:
        """Disconnect; a Ray that was started here ends."""
        import ray

        atexit.unregister(self.close)
        ray.shutdown()
        self._folder.cleanup()


def room_for(
    each: Mapping[str, int | float], free: Mapping[str, int | float], nodes: Sequence[Mapping[str, int | float]]
) -> int:
    """Return how many workers that need `each` fit into what is `free` in all, each on one node."""
    rooms = [min(have.get(name, 0.0) // number for name, number in each.items() if number) for have in (free, *nodes)]
    return int(min(rooms[0], sum(rooms[1:])))


def check_public(host: str) -> None:
    """UserError for a public address without authentication."""
    if ipaddress.ip_address(host).is_global and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise UserError(
            f"engine.address: {host} is public, and Ray runs anybody's code: set RAY_AUTH_MODE=token on every node"
        )


def _check_answers(address: str | None) -> None:
    """UserError for an address that is none, or at which nothing answers."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UserError(f"engine.address={address}: use auto, or host:port of a cluster's head, as 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"engine.address={address} does not answer ({error}): run ray start --head there") from error


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error: Ray's have paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[0].partition('. ')[0].rstrip('.')}"
