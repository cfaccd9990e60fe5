"""Workers as real processes of a real Ray on this machine, on a small model."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import made
import psutil
import pytest
import torch
from inner import build
from small import adapted_model, contents, engine_of, make_engine, require_bits, small_model, some_requests

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
    processes = ray_module.connect(None, WORKERS, {"CPU": 1, "GPU": 0.0})
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


def all_there(engine: RayEngine) -> RayEngine:
    """The engine once all its workers are ready; until then the others do the work."""
    for _ in range(1000):
        list(engine.generate(REQUESTS))
        if engine.stats().details["engine/workers"] == len(engine._actors):
            return engine
        time.sleep(0.2)  # those who load their libraries need the processor more
    raise AssertionError("a worker does not come up")


def pid_of(engine: RayEngine, worker: int) -> int:
    pid: int = engine.facts()["workers"][str(worker)]["pid"]
    return pid


def test_rollouts_are_those_of_this_process_whoever_dies_and_whoever_stops_asking(ray_engine):
    """What stands for all of `engine=ray` where tests are to be quick."""
    model, said = small_model(), list[str]()
    require_bits(model)
    engine = all_there(ray_engine(model=model, seconds=0.02, warn=said.append))
    assert contents(engine.generate(REQUESTS)) == here(model)
    stats, facts = engine.stats(), engine.facts()
    assert stats.generated_tokens == sum(len(tokens) for tokens, *_ in here(model).values())
    assert set(facts["workers"]) == {"0", "1"} and facts["invariant"]
    assert stats.details["engine/requests_again"] == 0 and not said

    coming = engine.generate(REQUESTS)
    rollouts = [next(coming)]  # one portion of four has come
    for number, portion in engine._calls.values():
        if portion:
            os.kill(pid_of(engine, number), signal.SIGKILL)
    rollouts += coming
    assert contents(rollouts) == here(model)
    assert engine.stats().details["engine/requests_again"] > 0
    assert [text for text in said if "died: Ray restarts it" in text]

    stopped = engine.generate(REQUESTS)
    next(stopped)
    stopped.close()  # a worker still computes with the weights that were
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights()
    assert contents(engine.generate(REQUESTS)) == here(model)


@pytest.mark.bits
@pytest.mark.cluster
def test_each_version_of_the_weights_is_sent_once_and_of_adapters_only_they(ray_engine, monkeypatch):
    import ray

    model = adapted_model()
    engine, puts, put = ray_engine(1, model), list[Any](), ray.put
    monkeypatch.setattr(ray, "put", lambda value: (puts.append(value), put(value))[1])
    before = contents(engine.generate(REQUESTS))
    assert before == here(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3) if parameter.requires_grad else None
    assert contents(engine.generate(REQUESTS)) == before and len(puts) == 1  # update_weights was not called yet
    engine.update_weights()
    assert contents(engine.generate(REQUESTS)) == here(model) != before
    assert len(puts) == 2 and len(puts[1]) == 2 * 3 * 2  # two layers, three modules, A and B


@pytest.mark.bits
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("predictor", "figure"),
    [
        (partial(MeanLength, decay=0.5), "predictor/mean_absolute_error"),
        (partial(made.prefix_head, {"seed": 0}, prefix_tokens=2), "engine/kv_held_bytes"),
    ],
)
def test_lengths_are_predicted_where_what_they_are_predicted_from_is(ray_engine, predictor, figure):
    engine = ray_engine(1, predictor=predictor)
    list(engine.generate(REQUESTS))
    assert contents(engine.generate(REQUESTS)) == here(small_model())
    assert engine.stats().details[figure] > 0


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("built", "said"),
    [
        ({"dies": __file__}, r"worker 0 on .* died in 3 calls in a row: .*grpo train resume=auto$"),
        ({"fails": "lower sampling.max_new_tokens"}, r"^lower sampling.max_new_tokens$"),
        ({"fails": "no kernel. At all"}, r"worker 0 on .*: RuntimeError: no kernel; .*resume=auto$"),
    ],
    ids=str,
)
def test_a_worker_that_dies_refuses_or_fails_at_each_call_ends_the_run(ray_engine, built, said):
    with pytest.raises(UserError, match=said):
        list(ray_engine(1, **built).generate(REQUESTS))


@pytest.mark.cluster
def test_nobody_is_waited_for_forever(ray_engine, monkeypatch):
    engine = all_there(ray_engine())
    engine._timeout = 5.0
    monkeypatch.setattr(ray_module, "START", 3.0)
    with pytest.raises(UserError, match=r"no worker has answered for 3 s"):  # the other two have the room
        list(ray_engine(1).generate(REQUESTS))
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
