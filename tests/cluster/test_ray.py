"""Workers as real processes of a real Ray on this machine, on a small model."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
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
from grpo_cli.engine.length_predictor import MeanLength  # noqa: E402
from grpo_cli.engine.ray_engine import RayEngine  # noqa: E402
from grpo_cli.engine.ray_worker import numbers  # noqa: E402
from grpo_cli.model.adapters import with_adapters  # noqa: E402
from grpo_cli.settings import LoraSettings  # noqa: E402
from grpo_cli.support.errors import UserError  # noqa: E402

LORA = LoraSettings(2, 4.0, 0.0, ("q_proj", "down_proj"), False, False)
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


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture
def ray_engine(model: Any) -> Iterator[Any]:
    import ray

    made_here: list[RayEngine] = []

    def make(workers: int = WORKERS, of: Any = None, built: dict[str, Any] | None = None, **words: Any) -> RayEngine:
        build_one = partial(build, slots=2, **(built or {}))
        scheduler = ready("scheduler", (built or {}).get("scheduler", "fifo"))
        defaults = dict(sampler=made.infinite(slots=2), scheduler=scheduler, threads=1, timeout=300.0)
        engine = engine_of("ray", of or model, build=build_one, workers=workers, **(defaults | words))
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
    engine = all_there(ray_engine(of=model, built={"seconds": 0.02}, warn=said.append))
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


@pytest.mark.cluster
def test_each_version_of_the_weights_is_sent_once_and_of_adapters_only_they(ray_engine, monkeypatch):
    import ray

    pytest.importorskip("peft")
    untied = small_model("qwen3", tie_word_embeddings=False)
    model = with_adapters(untied, replace(made.model(), lora=LORA)).eval()
    require_bits(model)
    engine, puts, put = ray_engine(1, of=model), list[Any](), ray.put
    monkeypatch.setattr(ray, "put", lambda value: (puts.append(value), put(value))[1])
    before = contents(engine.generate(REQUESTS))
    assert before == here(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    assert contents(engine.generate(REQUESTS)) == before  # update_weights was not called yet
    assert len(puts) == 1
    engine.update_weights()
    after = contents(engine.generate(REQUESTS))
    assert after == here(model) != before
    assert len(puts) == 2
    assert len(puts[1]) == len(numbers(model, trained=True)) == 2 * 2 * 2  # two layers, two modules, A and B


@pytest.mark.cluster
def test_lengths_are_predicted_where_what_they_are_predicted_from_is(model, ray_engine):
    require_bits(model)
    engine = ray_engine(1, built={"scheduler": "lpt", "predicts": "means"}, predictor=MeanLength(decay=0.5))
    list(engine.generate(REQUESTS))
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert engine.stats().details["predictor/mean_absolute_error"] > 0
    assert engine.state_dict()["predictor"]["kind"] == "mean"
    head = made.prefix_head({"seed": 0}, prefix_tokens=2)
    engine = ray_engine(1, predictor=head, built={"scheduler": "lpt", "predicts": "prefix"})
    assert contents(engine.generate(REQUESTS)) == here(model)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("built", "said"),
    [
        ({"dies": True}, r"worker 0 on .* died in 3 calls in a row: .*grpo train resume=auto$"),
        ({"fails": "refused"}, r"^lower sampling.max_new_tokens$"),
        ({"fails": "no kernel. At all"}, r"worker 0 on .*: RuntimeError: no kernel; .*resume=auto$"),
    ],
    ids=str,
)
def test_a_worker_that_dies_refuses_or_fails_at_each_call_ends_the_run(ray_engine, tmp_path, built, said):
    flag = tmp_path / "dies"
    flag.touch()
    with pytest.raises(UserError, match=said):
        list(ray_engine(1, built=built | ({"dies": str(flag)} if "dies" in built else {})).generate(REQUESTS))


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
