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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import psutil
import torch
from pydantic import Field
from torch import nn

from grpo_cli.engine.common import EngineParts, SequenceEngine, together
from grpo_cli.engine.ray_worker import Delivery, RolloutWorker, hollow, numbers, place
from grpo_cli.engine.sequence import Sequence
from grpo_cli.interfaces import Engine, facts
from grpo_cli.support.errors import UserError
from grpo_cli.support.extras import require
from grpo_cli.support.ranges import Count
from grpo_cli.types import EngineStats, Request, Rollout

TRIES = 3  # calls in a row during which a worker dies
START = 300.0  # the most seconds until the first worker runs
FIRST = 0.9  # the part of its share that each worker gets first; the rest balances the load
# These affect bits when a process starts (`processor.set_variables`); workers must have the same.
_HANDED_ON = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_WAIT_POLICY")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# One attempt (41 s) to reach an address that is not Ray's, in place of twenty.
_JOINED = {"RAY_gcs_server_port_wait_time_s": "1"}
_ON = "continue with grpo train resume=auto"


@dataclass
class _Worker:
    """`pending` is the reference to its place or answer, None if it is idle. `portion` is what the answer is of; empty
    if it is no longer needed. `place` is empty until it runs."""

    number: int
    actor: Any
    pending: Any = None
    portion: Seq[Sequence] = ()
    place: Mapping[str, Any] = field(default_factory=dict)
    deaths: int = 0  # since its last answer

    def __str__(self) -> str:
        return f"worker {self.number} on {self.place.get('host', 'a new node')}"

    def start(self) -> None:
        """Request its place, which comes once Ray has found room on a node and started it."""
        self.pending, self.portion, self.place = self.actor.place.options(max_task_retries=-1).remote(), (), {}


@facts(stops_early=False)
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
        self._timeout, self._device = timeout, next(model.parameters()).device
        self._place = place()
        # The trainer is idle while workers run; if all are on this machine, they share its threads.
        cpus = threads or max(1, torch.get_num_threads() // (workers if address is None else 1))
        self._processes = connect(address, workers, {"CPU": cpus, "GPU": gpus})
        import ray

        environment = {name: os.environ[name] for name in (*_HANDED_ON, "PYTHONPATH") if name in os.environ}
        actor: Any = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=-1,
            runtime_env={"env_vars": environment | {"OMP_NUM_THREADS": str(cpus)}},
        )(RolloutWorker)
        self._workers = [_Worker(number, actor.remote("cuda" if gpus else "cpu")) for number in range(workers)]
        for worker in self._workers:
            worker.start()
        # Without a prefix to read, lengths are predicted here and sent to the workers.
        self._predicts = parts.predictor.prefix_tokens == 0
        build = partial(build, lengths_are_given=self._predicts)
        self._frozen = ray.put((hollow(model), numbers(model, trained=False), build))
        self._weights: Any = None  # a reference too
        self._facts: Mapping[str, Any] = {}

    def generate(self, requests: Seq[Request], enough: Callable[[Rollout], bool] | None = None) -> Iterator[Rollout]:
        """Yield one rollout per request, in order of arrival. UserError with `enough`. Closing the iterator early
        leaves the workers to finish their calls, whose answers are dropped."""
        if enough is not None:
            raise UserError(
                "engine=ray cannot stop rollouts before their end: use engine=torch or engine=vllm, or collector=equal"
            )
        import ray

        self._stats = EngineStats()
        if not requests:
            return
        start, deliveries = time.perf_counter(), list[Delivery]()
        self._last_answer = time.monotonic()
        with self._parts.span("weights"):
            self._check_ray()
            if self._weights is None:  # once per version; workers keep the previous one while they use it
                self._weights = ray.put(numbers(self._parts.model, trained=True))
        details = {"engine/weight_update_seconds": time.perf_counter() - start, "engine/requests_again": 0.0}
        sequences = [Sequence(index, request) for index, request in enumerate(requests)]
        if self._predicts:
            self._predict(sequences)
        finished = list[tuple[Sequence, Rollout]]()
        queue = deque(portions(sequences, len(self._workers), self._parts.sampler.all_at_once))
        try:
            while len(finished) < len(requests):
                for worker in self._workers:
                    if queue and worker.pending is None:
                        self._send(worker, queue.popleft())
                with self._parts.span("decode"):  # waiting for the workers
                    ready, _ = ray.wait([worker.pending for worker in self._workers if worker.pending], timeout=1.0)
                self._check_ray()
                for worker in [worker for worker in self._workers if worker.pending in ready]:
                    portion, delivery = worker.portion, self._receive(worker)
                    if delivery is None:
                        details["engine/requests_again"] += len(portion)
                        queue.extendleft([portion] if portion else [])
                    elif portion:
                        deliveries.append(delivery)
                        for sequence, rollout in zip(portion, delivery.rollouts, strict=True):
                            finished.append((sequence, replace(rollout, request=sequence.request)))
                            yield finished[-1][1]
            if self._predicts:
                details |= self._learn(finished)
        finally:
            for worker in self._workers:
                worker.portion = ()
            self._account(deliveries, sum(len(rollout) for _, rollout in finished), details)

    def _send(self, worker: _Worker, portion: Seq[Sequence]) -> None:
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        requests, lengths = [one.request for one in portion], [one.predicted for one in portion]
        worker.pending = worker.actor.generate.remote((self._frozen, self._weights), requests, lengths, autocast)
        worker.portion = portion

    def _check_ray(self) -> None:
        """UserError if Ray itself has ended, or if no worker answers."""
        import ray

        # Ray notices the end of its processes seconds later, and ends a process that uses a dead store.
        ended = any(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in self._processes)
        here = "" if ended else ray.get_runtime_context().get_node_id()
        if here not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            raise UserError(f"Ray itself has ended, and with it all workers: {_ON}")
        patience = self._timeout if any(worker.place for worker in self._workers) else START
        if time.monotonic() - self._last_answer > patience:
            raise UserError(
                f"engine=ray: no worker has answered for {patience:g} s (engine.timeout): see ray status; {_ON}"
            )

    def _receive(self, worker: _Worker) -> Delivery | None:
        """Return the answer that has come, and set the worker idle. None if that was its place, or if it has died."""
        import ray

        try:
            answer = ray.get(worker.pending)
        except ray.exceptions.RayTaskError as error:
            refused = isinstance(error.cause, UserError)
            raise UserError(str(error.cause) if refused else f"{worker}: {reason_of(error.cause)}; {_ON}") from error
        except ray.exceptions.RayError as error:
            worker.deaths += 1
            if worker.deaths == TRIES:
                raise UserError(f"{worker} died in {TRIES} calls in a row: see Ray's log; {_ON}") from error
            self._parts.warn(f"{worker} died: Ray restarts it, and any worker repeats its call")
            worker.start()
            return None
        self._last_answer, worker.pending, worker.portion = time.monotonic(), None, ()
        if isinstance(answer, Delivery):
            worker.deaths = 0
            return answer
        self._check_place(worker, answer)
        return None

    def _check_place(self, worker: _Worker, there: Mapping[str, Any]) -> None:
        """Record the place of a worker. UserError if another software runs there."""
        worker.place, here = there, self._place
        if there["software"] != here["software"]:
            raise UserError(f"{worker} has {there['software']}, not {here['software']}: install the same everywhere")
        if self._device.type == "cpu" and there["threads"] != here["threads"]:
            self._warn_once(
                f"rollouts equal engine=torch's up to rounding: workers have {there['threads']} threads "
                f"(engine.threads), the trainer {here['threads']} (OMP_NUM_THREADS)"
            )

    def _account(self, deliveries: Seq[Delivery], tokens: int, details: dict[str, float]) -> None:
        for text in (text for one in deliveries for text in one.warnings):
            self._warn_once(text)
        known = together([one.stats for one in deliveries]) if deliveries else EngineStats()
        self._facts = deliveries[-1].facts if deliveries else self._facts
        details["engine/workers"] = float(sum(bool(worker.place) for worker in self._workers))
        details["engine/weight_update_seconds"] += known.details.get("engine/weight_update_seconds", 0.0)
        self._stats = replace(known, generated_tokens=tokens, details={**known.details, **details})

    def facts(self) -> Mapping[str, Any]:
        """Return, for `summary.json`, the facts of a worker's engine, and where workers run."""
        return {**self._facts, "workers": {str(one.number): dict(one.place) for one in self._workers if one.place}}

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
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    os.environ |= _QUIET | (_JOINED if address else own)
    how: dict[str, Any] = {"address": address}
    if address is None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once per process
        how = {"address": "local", "num_cpus": workers * int(each["CPU"]), "include_dashboard": False}
        # Paths of sockets are limited to about a hundred characters.
        folder = tempfile.TemporaryDirectory("", f"grpo_ray_{os.getpid()}_", "/tmp", ignore_cleanup_errors=True)
        how["_temp_dir"] = folder.name
        atexit.register(folder.cleanup)
    elif "://" in address:
        raise UserError(f"engine.address={address}: use auto, or host:port of a cluster's head, as 10.0.0.1:6379")
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


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error: Ray's have paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    return f"{type(error).__name__}: {lines[0].partition('. ')[0].rstrip('.')}"
