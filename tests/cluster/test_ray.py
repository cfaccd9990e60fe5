"""Workers as real processes of a real Ray on this machine, on a small model."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import made
import psutil
import pytest
import torch
from inner import build
from small import contents, engine_of, make_engine, require_bits, small_model, some_requests

if importlib.util.find_spec("ray") is None:  # not imported: what it asks the environment it asks only then
    pytest.skip("Ray is not installed", allow_module_level=True)

from grpo_cli.config.instantiate import ready  # noqa: E402
from grpo_cli.engine import ray_engine as ray_module  # noqa: E402
from grpo_cli.engine.length_predictor import MeanLength, NoPredictor  # noqa: E402
from grpo_cli.engine.ray_engine import RayEngine  # noqa: E402
from grpo_cli.support.errors import UserError  # noqa: E402

REQUESTS = some_requests(prompts=6, n=4)
WORKERS = 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all of this file, as it takes seconds to start; workers find this folder's modules."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(os.path.isdir, sys.path)))
    before = signal.getsignal(signal.SIGTERM)
    processes = ray_module.connect(None, WORKERS)
    assert signal.getsignal(signal.SIGTERM) is before
    patch.setattr(ray_module, "connect", lambda *of_an_engine: processes)
    yield
    patch.undo()
    import ray

    ray.shutdown()


@pytest.fixture
def ray_engine() -> Iterator[Any]:
    import ray

    made_here: list[RayEngine] = []

    def make(workers: int = WORKERS, model: Any = None, predictor: Any = NoPredictor, **words: Any) -> RayEngine:
        inner = {name: words.pop(name) for name in ("seconds", "fails", "dies") if name in words}
        scheduler = "fifo" if predictor is NoPredictor else "lpt"
        words |= {"build": partial(build, scheduler=scheduler, predictor=predictor, **inner), "threads": 1}
        words |= {"sampler": made.infinite(slots=2), "scheduler": ready("scheduler", scheduler), "timeout": 300.0}
        words |= {"predictor": predictor(), "workers": workers}
        engine: RayEngine = engine_of("ray", model or small_model(), **words)
        made_here.append(engine)
        return engine

    yield make
    for actor in (actor for engine in made_here for actor in engine._actors):
        ray.kill(actor)  # the next test's find room at once


def here(model: Any) -> Any:
    return contents(make_engine(model).generate(REQUESTS))


def pid_of(engine: RayEngine, worker: int) -> int:
    pid: int = engine.facts()["workers"][worker]["pid"]
    return pid


def test_rollouts_are_those_of_this_process_whoever_dies_and_whoever_stops_asking(ray_engine):
    """What stands for all of `engine=ray` where tests are to be quick."""
    model = small_model()
    require_bits(model)
    engine = ray_engine(model=model, seconds=0.02)
    assert contents(engine.generate(REQUESTS)) == here(model)
    stats, facts = engine.stats(), engine.facts()
    assert stats.generated_tokens == sum(len(tokens) for tokens, *_ in here(model).values())
    assert len(facts["workers"]) == WORKERS and facts["invariant"]

    coming = engine.generate(REQUESTS)
    rollouts = [next(coming)]  # one portion of four has come
    for number in range(WORKERS):
        os.kill(pid_of(engine, number), signal.SIGKILL)
    assert contents([*rollouts, *coming]) == here(model)

    stopped = engine.generate(REQUESTS)
    next(stopped)
    stopped.close()  # a worker still computes with the weights that were
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.add_(0.3)
    engine.update_weights()
    assert contents(engine.generate(REQUESTS)) == here(model)


@pytest.mark.bits
@pytest.mark.cluster
@pytest.mark.parametrize(
    "predictor",
    [partial(MeanLength, decay=0.5), partial(made.prefix_head, {"seed": 0}, prefix_tokens=2, min_rollouts=2)],
)
def test_lengths_are_predicted_where_what_they_are_predicted_from_is(ray_engine, predictor):
    engine = ray_engine(1, predictor=predictor)
    list(engine.generate(REQUESTS))
    assert contents(engine.generate(REQUESTS)) == here(small_model())
    assert engine.stats().details["predictor/mean_absolute_error"] > 0


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("built", "said"),
    [
        ({"dies": __file__}, r"^a worker of engine=ray: Actor\w+Error: .*; see Ray's log; .*resume=auto$"),
        ({"fails": "lower sampling.max_new_tokens"}, r"^lower sampling.max_new_tokens$"),
        ({"fails": "no kernel. At all"}, r"^a worker of engine=ray: RuntimeError: no kernel; .*resume=auto$"),
    ],
    ids=str,
)
def test_a_worker_that_dies_refuses_or_fails_at_each_call_ends_the_run(ray_engine, built, said):
    with pytest.raises(UserError, match=said):
        list(ray_engine(1, **built).generate(REQUESTS))


@pytest.mark.cluster
def test_nobody_is_waited_for_forever(ray_engine, monkeypatch):
    engine = ray_engine()
    engine._timeout = 5.0
    monkeypatch.setattr(ray_module, "START", 3.0)
    with pytest.raises(UserError, match=r"cannot start 1 workers of 1 CPUs"):  # the other two have the room
        ray_engine(1)
    for number in range(WORKERS):
        os.kill(pid_of(engine, number), signal.SIGSTOP)
    with pytest.raises(UserError, match=r"no worker has answered for 5 s .*resume=auto$"):
        list(engine.generate(REQUESTS))


@pytest.mark.cluster
def test_this_machine_only_is_listened_on_by_ray():
    own = psutil.Process().children(recursive=True)
    heard = {c.laddr.ip for process in own for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert heard and {address.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
