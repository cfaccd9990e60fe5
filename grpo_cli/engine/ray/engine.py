"""`engine=ray`: rollouts by worker processes, here or on other machines, with the same protocol as the other engines.

Each worker has a copy of the model and an engine of its own; this one distributes requests. A rollout is a function of
the weights and its request, so it is the same on any worker, however often it is restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import torch

from grpo_cli.engine.batching import Sampler
from grpo_cli.engine.costs import together
from grpo_cli.engine.interfaces import Predictor, Scheduler
from grpo_cli.engine.ray.pool import WorkerPool, portions
from grpo_cli.engine.ray.session import environment_of, require_ray, session
from grpo_cli.engine.ray.weights import hollow, numbers
from grpo_cli.engine.ray.worker import Blueprint, Done, Order, Place, place
from grpo_cli.interfaces import Engine, Meter, facts
from grpo_cli.support.errors import UserError, refuse
from grpo_cli.support.meter import NullMeter
from grpo_cli.support.ranges import Count, OneOf, Range
from grpo_cli.types import EngineStats, Request, Rollout


@facts(stops_early=False)
class RayEngine:
    """Rollouts by `workers` actors of Ray."""

    reads_stop_strings = True

    def __init__(
        self,
        model: Any,
        sampler: Sampler,
        scheduler: Scheduler,
        predictor: Predictor,
        build: Callable[..., Engine],
        meter: Meter | None = None,
        warn: Callable[[str], None] = print,
        *,
        inner: str,
        options: Mapping[str, Any] | None,
        workers: Count,
        address: str | None,
        threads: Count | None,
        gpus: Annotated[float, Range(0)],
        timeout: Annotated[float, Range(0, above=True)],
        kv_budget_of: Annotated[str, OneOf(("worker", "run"))] | None,
    ) -> None:
        refuse([*self.refuses(sampler, workers, gpus, kv_budget_of)])
        require_ray()
        self._model, self._sampler, self._predictor, self._warn = model, sampler, predictor, warn
        self._meter = meter or NullMeter()
        self._workers, self._timeout = workers, timeout
        # The trainer is idle while workers run; if all are on this machine, they share its threads.
        self._cpus = threads or max(1, torch.get_num_threads() // (workers if address is None else 1))
        self._gpus = gpus
        self._place = place("trainer", next(model.parameters()).device)
        # Without a prefix to read, lengths are predicted here and sent to the workers.
        self._tells_lengths = predictor.prefix_tokens == 0
        self._build = partial(
            build, kv_share=workers if kv_budget_of == "run" else 1, tells_lengths=self._tells_lengths
        )
        session.open(address, workers, self._cpus, gpus)
        self._weights: Any = None  # a reference into Ray's store
        self._version = 0
        self._pool: WorkerPool | None = None
        self._facts: Mapping[str, Any] = {}
        self._stats = EngineStats()
        self._said_bits = False

    @staticmethod
    def refuses(sampler: Sampler, workers: int, gpus: float, kv_budget_of: str | None) -> Iterator[str]:
        """What can be told without a model."""
        if gpus > 1 and gpus != int(gpus):
            yield f"engine.gpus={gpus:g} of a worker must be 0, a part of one, or a whole number"
        if sampler.kv_budget is not None and kv_budget_of is None:
            yield (
                f"sampler.kv_budget={sampler.kv_budget} does not say whether each of engine.workers={workers} workers "
                "has that much, or all of them together: engine.kv_budget_of=worker or engine.kv_budget_of=run"
            )

    def generate(
        self, requests: Sequence[Request], enough: Callable[[Rollout], bool] | None = None
    ) -> Iterator[Rollout]:
        """One rollout per request, in order of arrival. UserError with `enough`. Closing the iterator early ends the
        workers; the next call starts new ones."""
        if enough is not None:
            raise UserError(
                "engine=ray cannot stop rollouts before their end, as its workers report a rollout only once it has "
                "ended: use engine=torch or engine=vllm, or collector=equal"
            )
        self._stats = EngineStats()
        if not requests:
            return
        import ray

        start = time.perf_counter()
        with self._meter.span("weights"), session.answering():
            if self._weights is None:  # workers keep the previous ones while they use them
                self._version, self._weights = self._version + 1, ray.put(numbers(self._model, trained=True))
            pool = self._pool = self._pool or self._new_pool()
        put_seconds = time.perf_counter() - start
        lengths = self._predictor.predict(requests, None) if self._tells_lengths else None
        kind = next(self._model.parameters()).device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

        def order_of(portion: Sequence[int]) -> Order:
            told = tuple(lengths[index] for index in portion) if lengths else None
            return Order(
                self._version, self._weights, tuple((index, requests[index]) for index in portion), told, autocast
            )

        finished: list[Rollout] = []
        details: dict[str, float] = {}
        dealt = portions(requests, lengths, self._workers, self._sampler.all_at_once)
        try:
            for index, made in pool.serve(dealt, order_of):
                finished.append(replace(made, request=requests[index]))
                yield finished[-1]
            if self._tells_lengths:
                details |= self._predictor.learn([r for r in finished if r.request.teaches_length], None)
        finally:
            self._facts = pool.ends[-1][1].facts if pool.ends else self._facts
            self._stats = _account(pool, sum(map(len, finished)), put_seconds, details)
            if len(finished) < len(requests):
                self.close()

    def _new_pool(self) -> WorkerPool:
        import ray

        fixed, device = ray.put(numbers(self._model, trained=False)), "cuda" if self._gpus else "cpu"
        blueprint = Blueprint(hollow(self._model), fixed, self._build, device, self._cpus, self._timeout)
        options: dict[str, Any] = {"num_cpus": self._cpus, "num_gpus": self._gpus}
        options["runtime_env"] = {"env_vars": environment_of(self._cpus)}
        return WorkerPool(self._workers, options, blueprint, self._warn, self._check_place, self._meter)

    def _check_place(self, there: Place) -> None:
        """UserError for a worker with different software; one warning if only its rounding may differ."""
        mine = self._place
        for name, own, its in (
            ("Python", mine.python, there.python),
            ("torch", mine.torch, there.torch),
            ("grpo-cli", f"{mine.grpo_cli} ({mine.build})", f"{there.grpo_cli} ({there.build})"),
        ):
            if own != its:
                raise UserError(
                    f"the worker on {there.host} has {name} {its}, and the trainer has {own}: install the same on "
                    "every node, so that all make the same rollouts"
                )
        own, its = (f"{p.processor} with {p.threads} threads" for p in (mine, there))
        if there.device == "cpu" and own != its and not self._said_bits:
            self._said_bits = True
            self._warn(
                "rollouts are those of engine=torch to rounding only: the trainer computes by "
                f"{own}, {there.host} by {its} (for the same bits: processors of one kind, and either "
                f"OMP_NUM_THREADS={there.threads} or engine.threads={mine.threads})"
            )

    def stats(self) -> EngineStats:
        """The cost of the last `generate` over all workers: decode steps are summed, slots and bytes are the largest of
        one worker."""
        return self._stats

    def facts(self) -> Mapping[str, Any]:
        """For `summary.json`: the facts of a worker's engine, and where workers run."""
        places = self._pool.places if self._pool else {}
        return {**self._facts, "workers": {str(number): asdict(there) for number, there in places.items()}}

    def update_weights(self) -> None:
        """The next `generate` sends the new weights."""
        self._weights = None

    def state_dict(self) -> Mapping[str, Any]:
        """The trainer's predictor; what a worker's own predictor has learned is lost with it."""
        return {"predictor": self._predictor.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._predictor.load_state(state["predictor"])

    def close(self) -> None:
        """End the workers. Ray, if it was started here, ends with the process."""
        if self._pool:
            self._pool.close()
        self._pool = None


def _account(pool: WorkerPool, tokens: int, put_seconds: float, details: Mapping[str, float]) -> EngineStats:
    """`tokens` are counted here: a lost worker has delivered rollouts, but no account of them."""
    ends: dict[int, list[Done]] = {}
    for number, end in pool.ends:
        ends.setdefault(number, []).append(end)
    rates = [sum(e.stats.generated_tokens for e in own) / sum(e.seconds for e in own) for own in ends.values()]
    weights_seconds = [sum(end.weights_seconds for end in own) for own in ends.values()]
    own = {
        "engine/workers": float(len(pool.places)),
        "engine/worker_tokens_per_second_least": min(rates, default=0.0),
        "engine/worker_tokens_per_second_most": max(rates, default=0.0),
        "engine/weight_update_seconds": put_seconds + max(weights_seconds, default=0.0),
        "engine/requests_again": float(pool.again),
    }
    known = together([end.stats for _, end in pool.ends]) if ends else EngineStats()
    return replace(known, generated_tokens=tokens, details={**known.details, **own, **details})
