"""`engine=ray`: rollouts by actors of Ray, here or on other machines, with the same protocol as the other engines.

A rollout is a function of the weights and its request, so it is the same on any worker: Ray restarts a worker that
dies, and repeats its call.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import logging
import os
import platform
import secrets
import signal
import socket
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import psutil
import torch
from pydantic import Field
from torch import Tensor, nn

import grpo_cli
from grpo_cli.engine.common import EngineParts, Enough, SequenceEngine, together
from grpo_cli.interfaces import Engine
from grpo_cli.support.errors import UserError, explained, reason_of
from grpo_cli.support.extras import require
from grpo_cli.support.processor import flush_denormals
from grpo_cli.support.ranges import Count
from grpo_cli.types import EngineStats, Request, Rollout

TRIES = 3  # of a call whose worker dies
START = 300.0  # the most seconds until all workers run
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

    def __init__(
        self,
        parts: EngineParts,
        build: Callable[..., Engine],
        *,
        inner: Literal["torch", "vllm", "generate"],
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
        require("ray", "engine=ray")
        self._timeout, self._device = timeout, next(model.parameters()).device
        # The trainer is idle while workers run; if all are on this machine, they share its threads.
        cpus = threads or max(1, torch.get_num_threads() // (workers if address is None else 1))
        environment = {name: os.environ[name] for name in (*_HANDED_ON, "PYTHONPATH") if name in os.environ}
        process = {"env_vars": environment | {"OMP_NUM_THREADS": str(cpus)}}
        each = f"{cpus} CPUs and {gpus:g} GPUs at engine.address={address or 'null'}"
        with explained(f"engine=ray cannot start {workers} workers of {each}", "; see ray status there"):
            self._processes = connect(address, workers * cpus)
            import ray

            words: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "runtime_env": process}
            words |= {"max_restarts": -1, "max_task_retries": TRIES - 1}
            actor: Any = ray.remote(**words)(RolloutWorker)
            self._actors = [actor.remote("cuda" if gpus else "cpu") for _ in range(workers)]
            self._places = ray.get([one.place.remote() for one in self._actors], timeout=START)
        ours = place()["software"]
        for there in self._places:
            if there["software"] != ours:
                raise UserError(f"{there['host']} has {there['software']}, not {ours}: install the same everywhere")
        self._frozen = ray.put((without_weights(model), numbers(model, trained=False), build))
        self._weights: Any = None  # a reference too
        self._facts: Mapping[str, Any] = {}

    def generate(self, requests: Sequence[Request], enough: Enough | None = None) -> Iterator[Rollout]:
        """Yield one rollout per request, in order of arrival. UserError with `enough`. Closing the iterator early
        leaves the workers to finish their calls, whose answers are dropped."""
        if enough is not None:
            raise UserError("engine=ray cannot stop rollouts early: use engine=torch or vllm, or collector=equal")
        import ray

        self._stats = EngineStats()
        if not requests:
            return
        start, kind = time.monotonic(), self._device.type
        with self._parts.span("weights"):
            self._check_ray()
            if self._weights is None:  # once per version; workers keep the previous one while they use it
                self._weights = ray.put(numbers(self._parts.model, trained=True))
        costs = [EngineStats(details={"engine/weight_update_seconds": time.monotonic() - start})]
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        queue = deque(portions(len(requests), len(self._actors), self._parts.sampler.all_at_once))
        idle, calls, answered = [*self._actors], dict[Any, Any](), time.monotonic()
        try:
            while queue or calls:
                while queue and idle:  # a worker that still computes for an earlier iterator begins after that
                    given, actor = {index: requests[index] for index in queue.popleft()}, idle.pop()
                    calls[actor.generate.remote((self._frozen, self._weights), given, autocast)] = actor
                with self._parts.span("decode"):  # waiting for the workers
                    ready, _ = ray.wait([*calls], timeout=1.0)
                self._check_ray()
                if not ready and time.monotonic() - answered > self._timeout:
                    waited = f"no worker has answered for {self._timeout:g} s (engine.timeout)"
                    raise UserError(f"engine=ray: {waited}: see ray status; {_ON}")
                for reference in ready:
                    idle.append(calls.pop(reference))
                    rollouts, stats, self._facts, warned = _answer(reference)
                    costs.append(stats)
                    for text in warned:
                        self._warn_once(text)
                    for index, rollout in rollouts.items():
                        yield replace(rollout, request=requests[index])
                    answered = time.monotonic()
        finally:
            self._stats = together(costs)

    def _check_ray(self) -> None:
        """Raise UserError if Ray itself has ended: a call on a dead store ends this process silently."""
        import ray

        ended = any(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in self._processes)
        here = "" if ended else ray.get_runtime_context().get_node_id()
        if here not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            raise UserError(f"Ray itself has ended, and with it all workers: {_ON}")

    def facts(self) -> Mapping[str, Any]:
        """Return, for `summary.json`, the facts of a worker's engine, and where workers started."""
        return {**self._facts, "workers": self._places}

    def update_weights(self) -> None:
        """Have the next `generate` send the new weights."""
        self._weights = None


def _answer(reference: Any) -> Any:
    """Return what a worker has returned. UserError for what it raised, and for one that died too often."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, UserError):
            raise UserError(str(cause)) from error
        raise UserError(f"a worker of engine=ray: {reason_of(cause)}; see Ray's log; {_ON}") from error


class RolloutWorker:
    """An actor with a copy of the model and an engine of its own. Ray may restart its process and repeat a call."""

    def __init__(self, device: str) -> None:
        self._device, self._version = torch.device(device), ""
        self._engine: Engine | None = None
        self._warnings: list[str] = []

    def place(self) -> Mapping[str, Any]:
        """Return where this process runs, once it does."""
        return place()

    def generate(
        self, references: Sequence[Any], requests: Mapping[int, Request], autocast: torch.dtype | None
    ) -> tuple[Mapping[int, Rollout], EngineStats, Mapping[str, Any], Sequence[str]]:
        """Return the rollouts of numbered requests, their cost, the engine's facts and its warnings. `references` into
        Ray's store: to the model without numbers, its frozen numbers and `build`; and to the trained numbers."""
        import ray

        frozen, weights = references
        flush_denormals()
        if self._engine is None:
            self._model, untrained, build = ray.get(frozen)
            fill(self._model, untrained | ray.get(weights), self._device)
            self._engine = build(self._model, warn=self._warnings.append)
        elif self._version != weights.hex():
            fill(self._model, ray.get(weights), self._device)
            self._engine.update_weights()
        self._version = weights.hex()
        with torch.autocast(self._device.type, autocast) if autocast else nullcontext():
            made = {id(rollout.request): rollout for rollout in self._engine.generate([*requests.values()])}
        warned, self._warnings[:] = tuple(self._warnings), []
        rollouts = {index: made[id(request)] for index, request in requests.items()}
        return rollouts, self._engine.stats(), dict(self._engine.facts()), warned


def connect(address: str | None, cpus: int) -> set[psutil.Process]:
    """Connect to Ray, in place of an earlier connection of this process. `address` None: start it here, for this run,
    with `cpus` CPUs; it listens on this machine only, and requires a token, since Ray runs the code that it receives.
    Return the processes of a Ray that was started."""
    os.environ |= _QUIET | (_JOINED if address else _OWN)
    how: dict[str, Any] = {"address": address}
    if address is None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once per process
        # Paths of sockets are limited to about a hundred characters.
        folder = tempfile.TemporaryDirectory("", f"grpo_ray_{os.getpid()}_", "/tmp", ignore_cleanup_errors=True)
        atexit.register(folder.cleanup)
        how = {"address": "local", "num_cpus": cpus, "include_dashboard": False, "_temp_dir": folder.name}
    import ray

    ray.shutdown()
    before, handler = set(psutil.Process().children()), signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Ray's own code
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **how)
    finally:
        signal.signal(signal.SIGTERM, handler)  # a run stops by its own
    return set(psutil.Process().children()) - before if address is None else set()


def place() -> dict[str, Any]:
    """Return where this process runs, and its software."""
    package, source = Path(grpo_cli.__file__).parent, hashlib.sha256()
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.[ch]")]):
        source.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    ours = f"Python {platform.python_version()}, torch {torch.__version__}, grpo-cli {source.hexdigest()[:9]}"
    return {"host": socket.gethostname(), "pid": os.getpid(), "software": ours}


def portions(requests: int, workers: int, at_once: bool) -> list[list[int]]:
    """Return the numbers of the requests that idle workers get together, in this order. Neighbours stay together, as
    samples of a prompt share its keys. `at_once`: a portion is one batch, so each worker gets one."""
    first = requests if at_once or workers == 1 else round(FIRST * requests)
    pieces = [*np.array_split(np.arange(first), workers), *np.array_split(np.arange(first, requests), workers)]
    return [piece.tolist() for piece in pieces if len(piece)]


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy for generation without the numbers of parameters and buffers, which `fill` sets."""
    memo: dict[int, Any] = {}  # tensors in it are not copied, and tied ones stay tied
    for tensor in _tensors(model).values():
        one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        memo[id(tensor)] = nn.Parameter(one, requires_grad=False) if isinstance(tensor, nn.Parameter) else one
    return copy.deepcopy(model, memo).eval()


def numbers(model: nn.Module, trained: bool) -> dict[str, np.ndarray]:
    """Return the bytes of all trained tensors, or of all others. On a CPU they are the model's own memory."""
    tensors = {name: tensor.detach() for name, tensor in _tensors(model).items() if tensor.requires_grad == trained}
    return {name: tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}


def fill(model: nn.Module, given: Mapping[str, np.ndarray], device: torch.device) -> None:
    """Set weights of a model `without_weights`. On a CPU they share the memory of `given`; on a GPU addresses stay."""
    own = _tensors(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        for name, array in given.items():
            tensor = torch.from_numpy(array).view(own[name].dtype).view(own[name].shape)
            if own[name].is_cuda:
                own[name].copy_(tensor)
            else:
                own[name].data = tensor.to(device)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each once, persistent or not."""
    return dict(chain(model.named_parameters(), model.named_buffers()))
