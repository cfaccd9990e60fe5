"""`engine=ray`: rollouts by actors of Ray, here or on other machines, with the same protocol as the other engines.

A rollout is a function of the weights and its request, so it is the same on any worker. Ray restarts a worker
that dies, on another node if need be, and any worker repeats its call: Ray's own retries would stay with a lost node.
"""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import secrets
import signal
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import psutil
import torch
from pydantic import Field
from torch import nn

from grpo_cli.engine.common import EngineParts, SequenceEngine, together
from grpo_cli.engine.ray_worker import Delivery, RolloutWorker, hollow, numbers, place
from grpo_cli.engine.sequence import Sequence
from grpo_cli.interfaces import Engine
from grpo_cli.support.errors import UserError, reason_of
from grpo_cli.support.extras import require
from grpo_cli.support.ranges import Count
from grpo_cli.types import EngineStats, Request, Rollout

TRIES = 3  # calls in a row during which a worker dies
START = 300.0  # the most seconds until the first worker runs
FIRST = 0.9  # the part of its share that each worker gets first; the rest balances the load
# These affect bits when a process starts (`processor.set_variables`); workers must have the same.
_HANDED_ON = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_WAIT_POLICY")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
# One attempt (41 s) to reach an address that is not Ray's, in place of twenty.
_JOINED = {"RAY_gcs_server_port_wait_time_s": "1"}
_ON = "continue with grpo train resume=auto"


class RayEngine(SequenceEngine):
    """Rollouts by `workers` actors of Ray, whose engines `build` makes."""

    reads_stop_strings = True

    def __init__(
        self,
        parts: EngineParts,
        build: Callable[..., Engine],
        *,
        inner: str,
        options: Mapping[str, Any] | None,
        workers: Count,
        address: str | None,
        threads: Count | None,
        gpus: Annotated[float, Field(ge=0)],
        timeout: Annotated[float, Field(gt=0)],
    ) -> None:
        super().__init__(parts)
        model = parts.model
        if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
            raise UserError("engine=ray cannot send quantised weights: use model.quantize=none, or engine=torch")
        if gpus > 1 and gpus % 1:
            raise UserError(f"engine.gpus={gpus:g} of a worker: use 0, a part of one, or a whole number")
        self._timeout, self._device, self._place = timeout, next(model.parameters()).device, place()
        # The trainer is idle while workers run; if all are on this machine, they share its threads.
        cpus = threads or max(1, torch.get_num_threads() // (workers if address is None else 1))
        self._processes = connect(address, workers, {"CPU": cpus, "GPU": gpus})
        import ray

        environment = {name: os.environ[name] for name in (*_HANDED_ON, "PYTHONPATH") if name in os.environ}
        environment["OMP_NUM_THREADS"] = str(cpus)
        process = {"env_vars": environment}
        actor: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, runtime_env=process)(RolloutWorker)
        self._actors = [actor.remote("cuda" if gpus else "cpu") for _ in range(workers)]
        self._places: dict[int, Mapping[str, Any]] = {}  # of the workers that run, by their numbers
        self._deaths = Counter[int]()  # of each worker since its last answer
        # Ray's references to the answers to come, each with its worker, and with what was sent; of its place, nothing.
        self._calls: dict[Any, tuple[int, Seq[Sequence]]] = {}
        for number in range(workers):
            self._start(number)
        # Without a prefix to read, lengths are learned here, of all rollouts, and the workers get what was learned.
        self._predicts = parts.predictor.prefix_tokens == 0
        self._frozen = ray.put((hollow(model), numbers(model, trained=False), build))
        self._weights: Any = None  # a reference too
        self._facts: Mapping[str, Any] = {}

    def generate(self, requests: Seq[Request], enough: Callable[[Rollout], bool] | None = None) -> Iterator[Rollout]:
        """Yield one rollout per request, in order of arrival. UserError with `enough`. Closing the iterator early
        leaves the workers to finish their calls, whose answers are dropped."""
        if enough is not None:
            raise UserError("engine=ray cannot stop rollouts early: use engine=torch or vllm, or collector=equal")
        import ray

        self._stats = EngineStats()
        if not requests:
            return
        start = self._last_answer = time.monotonic()
        with self._parts.span("weights"):
            self._check_ray()
            if self._weights is None:  # once per version; workers keep the previous one while they use it
                self._weights = ray.put(numbers(self._parts.model, trained=True))
        own = {"engine/weight_update_seconds": time.monotonic() - start, "engine/requests_again": 0.0}
        costs, accuracy = list[EngineStats](), dict[str, float]()
        sequences = [Sequence(index, request) for index, request in enumerate(requests)]
        if self._predicts:
            self._predict(sequences)
        finished = list[tuple[Sequence, Rollout]]()
        queue = deque(portions(sequences, len(self._actors), self._parts.sampler.all_at_once))
        try:
            while len(finished) < len(requests):
                for number in sorted(self._places.keys() - {number for number, _ in self._calls.values()}):
                    if queue:
                        self._send(number, queue.popleft())
                with self._parts.span("decode"):  # waiting for the workers
                    ready, _ = ray.wait([*self._calls], timeout=1.0)
                self._check_ray()
                for reference in ready:
                    number, portion = self._calls.pop(reference)
                    delivery = self._receive(number, reference)
                    if delivery is not None:
                        costs.append(delivery.stats)
                        for sequence, rollout in zip(portion, delivery.rollouts, strict=True):
                            finished.append((sequence, replace(rollout, request=sequence.request)))
                            yield finished[-1][1]
                    elif portion:
                        own["engine/requests_again"] += len(portion)
                        queue.appendleft(portion)
            if self._predicts:
                accuracy |= self._learn(finished)
        finally:
            # A worker that still computes begins the next call after this one.
            self._calls = {reference: call for reference, call in self._calls.items() if not call[1]}
            total = together([EngineStats(details=own | {"engine/workers": float(len(self._places))}), *costs])
            self._stats = replace(total, details={**total.details, **accuracy})

    def _start(self, number: int) -> None:
        """Request the place of a worker, which comes once Ray has found room on a node and started it."""
        self._places.pop(number, None)
        self._calls[self._actors[number].place.options(max_task_retries=-1).remote()] = number, ()

    def _send(self, number: int, portion: Seq[Sequence]) -> None:
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        requests, learned = [one.request for one in portion], self.state_dict() if self._predicts else None
        call = self._actors[number].generate.remote((self._frozen, self._weights), requests, learned, autocast)
        self._calls[call] = number, portion

    def _receive(self, number: int, reference: Any) -> Delivery | None:
        """Return the answer that has come. None if that was the worker's place, or if it has died."""
        import ray

        worker = f"worker {number} on {self._places.get(number, {}).get('host', 'a new node')}"
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            refused = isinstance(error.cause, UserError)
            raise UserError(str(error.cause) if refused else f"{worker}: {reason_of(error.cause)}; {_ON}") from error
        except ray.exceptions.RayError as error:
            self._deaths[number] += 1
            if self._deaths[number] == TRIES:
                raise UserError(f"{worker} died in {TRIES} calls in a row: see Ray's log; {_ON}") from error
            self._parts.warn(f"{worker} died: Ray restarts it, and any worker repeats its call")
            self._start(number)
            return None
        self._last_answer = time.monotonic()
        if isinstance(answer, Delivery):
            self._deaths[number], self._facts = 0, answer.facts
            for text in answer.warnings:
                self._warn_once(text)
            return answer
        self._check_place(answer)
        self._places[number] = answer
        return None

    def _check_place(self, there: Mapping[str, Any]) -> None:
        """UserError if a worker has another software."""
        name, here = f"a worker on {there['host']}", self._place
        if there["software"] != here["software"]:
            raise UserError(f"{name} has {there['software']}, not {here['software']}: install the same everywhere")
        if self._device.type == "cpu" and there["threads"] != here["threads"]:
            self._warn_once(
                f"rollouts equal engine=torch's up to rounding: workers have {there['threads']} threads "
                f"(engine.threads), the trainer {here['threads']} (OMP_NUM_THREADS)"
            )

    def _check_ray(self) -> None:
        """UserError if Ray itself has ended, or if no worker answers."""
        import ray

        # Ray notices the end of its processes seconds later, and ends a process that uses a dead store.
        ended = any(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in self._processes)
        here = "" if ended else ray.get_runtime_context().get_node_id()
        if here not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            raise UserError(f"Ray itself has ended, and with it all workers: {_ON}")
        patience = self._timeout if self._places else START
        if time.monotonic() - self._last_answer > patience:
            raise UserError(
                f"engine=ray: no worker has answered for {patience:g} s (engine.timeout): see ray status; {_ON}"
            )

    def facts(self) -> Mapping[str, Any]:
        """Return, for `summary.json`, the facts of a worker's engine, and where workers run."""
        return {**self._facts, "workers": {str(number): dict(one) for number, one in sorted(self._places.items())}}

    def update_weights(self) -> None:
        """Have the next `generate` send the new weights."""
        self._weights = None


def portions(sequences: Seq[Sequence], workers: int, at_once: bool) -> list[Seq[Sequence]]:
    """Return the sequences, the longest first, in the order in which idle workers get them. Neighbours stay together,
    as samples of a prompt share its keys. `at_once`: a portion is one batch, so each worker gets one."""
    lengths = [1.0 if one.predicted is None else one.predicted for one in sequences]
    order = np.argsort(-np.array(lengths), kind="stable")
    shares = np.arange(1, workers + 1) / workers
    ends = shares if at_once or workers == 1 else np.concatenate([FIRST * shares, FIRST + (1 - FIRST) * shares])
    done = np.cumsum(np.array(lengths)[order])
    cuts = np.searchsorted(done, ends[:-1] * done[-1], side="right")
    return [[sequences[index] for index in piece] for piece in np.split(order, cuts) if len(piece)]


def connect(address: str | None, workers: int, each: Mapping[str, int | float]) -> set[psutil.Process]:
    """Connect to Ray, in place of an earlier connection of this process. `address` None: start it here, for this run,
    with room for `workers` that need `each` of its resources; it listens on this machine only, and asks for a token,
    since Ray runs the code that it is sent. Returns the processes of a Ray that was started."""
    require("ray", "engine=ray")
    if address is not None and "://" in address:
        raise UserError(f"engine.address={address}: use auto, or host:port of a cluster's head, as 10.0.0.1:6379")
    os.environ |= _QUIET | (_JOINED if address else _OWN)
    how: dict[str, Any] = {"address": address}
    if address is None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once per process
        # Paths of sockets are limited to about a hundred characters.
        folder = tempfile.TemporaryDirectory("", f"grpo_ray_{os.getpid()}_", "/tmp", ignore_cleanup_errors=True)
        atexit.register(folder.cleanup)
        how = {"address": "local", "num_cpus": workers * int(each["CPU"]), "include_dashboard": False}
        how["_temp_dir"] = folder.name
    import ray

    ray.shutdown()
    before, handler = set(psutil.Process().children()), signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Ray's own code
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
        hosts, free = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]], ray.available_resources()
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        place = "on this machine" if address is None else f"at engine.address={address}"
        raise UserError(f"Ray {place}: {reason_of(error)}; for a cluster, try ray status there") from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # a run stops by its own
    refuse_public(hosts)
    for name, number in each.items():
        have = free.get(name, 0.0)
        if have < workers * number:  # Ray would let them wait forever
            raise UserError(
                f"engine.workers={workers} need {workers * number:g} {name}, and Ray has {have:g}: lower "
                "engine.workers, engine.threads or engine.gpus"
            )
    return set(psutil.Process().children()) - before if address is None else set()


def refuse_public(hosts: Iterable[str]) -> None:
    """UserError for a public host without a token: Ray runs the code that it is sent."""
    for host in hosts:
        if ipaddress.ip_address(host).is_global and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
            raise UserError(f"engine.address: {host} is public: set RAY_AUTH_MODE=token on every node")
