"""Workers as real processes of a real Ray on this machine, on a small model."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import made
import psutil
import pytest
import torch
from inner import build
from small import contents, make_engine, require_bits, small_model, some_requests

if importlib.util.find_spec("ray") is None:  # not imported: what it asks the environment it asks only then
    pytest.skip("Ray is not installed", allow_module_level=True)

from grpo_cli.config.instantiate import ready  # noqa: E402
from grpo_cli.engine.order.predict import MeanLength, NoPredictor  # noqa: E402
from grpo_cli.engine.ray import pool  # noqa: E402
from grpo_cli.engine.ray.engine import RayEngine  # noqa: E402
from grpo_cli.engine.ray.session import session  # noqa: E402
from grpo_cli.engine.ray.weights import numbers  # noqa: E402
from grpo_cli.model.adapters import with_adapters  # noqa: E402
from grpo_cli.settings import LoraSettings  # noqa: E402
from grpo_cli.support.errors import UserError  # noqa: E402

LORA = LoraSettings(2, 4.0, 0.0, ("q_proj", "down_proj"), False, False)
REQUESTS = some_requests(prompts=6, n=4)
WORKERS = 3


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    """One Ray for all of this file, as it takes seconds to start."""
    monkeypatch = pytest.MonkeyPatch()
    opened = session.open
    # As large as any test needs, so that all ask for the same.
    monkeypatch.setattr(session, "open", lambda address, workers, *of_each: opened(address, WORKERS, *of_each))
    yield
    monkeypatch.undo()
    session.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture
def ray_engine(model: Any) -> Iterator[Any]:
    made_here: list[RayEngine] = []

    def make(workers: int = 2, of: Any = None, built: dict[str, Any] | None = None, **words: Any) -> RayEngine:
        slots, built = words.pop("slots", 2), built or {}
        defaults: dict[str, Any] = dict(
            sampler=made.infinite(slots=slots),
            scheduler=ready("scheduler", built.get("scheduler", "fifo")),
            predictor=NoPredictor(),
            inner="torch",
            options=None,
            address=None,
            threads=1,
            gpus=0.0,
            timeout=60.0,
            kv_budget_of=None,
        )
        of_worker = partial(build, slots=slots, **built)
        made_here.append(RayEngine(of or model, build=of_worker, workers=workers, **(defaults | words)))
        return made_here[-1]

    yield make
    for engine in made_here:
        engine.close()


def here(model: Any) -> Any:
    return contents(make_engine(model).generate(REQUESTS))


def all_there(engine: RayEngine, model: Any) -> RayEngine:
    """The engine when all its workers are ready; until then the others do the work."""
    expected = here(model)
    for _ in range(1000):
        assert contents(engine.generate(REQUESTS)) == expected
        if len(engine.facts()["workers"]) == engine._workers:
            return engine
        time.sleep(0.2)  # those who load their libraries need the processor more
    raise AssertionError("a worker does not come up")


def killed(engine: RayEngine, *workers: int) -> None:
    for number in workers:
        os.kill(engine.facts()["workers"][str(number)]["pid"], signal.SIGKILL)


def test_rollouts_are_those_of_this_process_whoever_dies_and_whoever_stops_asking(ray_engine):
    """What stands for all of `engine=ray` where tests are to be quick."""
    model, said = small_model(), list[str]()
    require_bits(model)
    engine = all_there(ray_engine(of=model, built={"seconds": 0.01}, warn=said.append), model)
    stats, facts = engine.stats(), engine.facts()
    assert stats.generated_tokens == sum(len(tokens) for tokens, *_ in here(model).values())
    assert set(facts["workers"]) == {"0", "1"} and facts["invariant"]
    assert stats.details["engine/workers"] == 2 and stats.details["engine/requests_again"] == 0
    rates = [stats.details[f"engine/worker_tokens_per_second_{which}"] for which in ("least", "most")]
    assert 0 < rates[0] <= rates[1]

    coming = engine.generate(REQUESTS)
    rollouts = [next(coming)]
    killed(engine, 1)
    rollouts += coming
    assert contents(rollouts) == here(model)
    assert engine.stats().details["engine/requests_again"] > 0
    assert [text for text in said if "worker 1 is lost (" in text and "go to others" in text]

    stopped = engine.generate(REQUESTS)
    next(stopped)
    stopped.close()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.update_weights()
    assert contents(engine.generate(REQUESTS)) == here(model)


def of_make(make: str) -> Any:
    if make == "adapters":
        pytest.importorskip("peft")
        untied = small_model("qwen3", tie_word_embeddings=False)
        return with_adapters(untied, replace(made.model(), lora=LORA)).eval()
    # As a real one of 135 M parameters.
    return small_model("llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64)


@pytest.mark.cluster
@pytest.mark.parametrize("make", ["wide", "adapters"])
def test_weights_that_move_are_followed(ray_engine, make):
    model = of_make(make)
    require_bits(model)
    engine = ray_engine(1, of=model)
    before = contents(engine.generate(REQUESTS))
    assert before == here(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    assert contents(engine.generate(REQUESTS)) == before  # update_weights was not called yet
    engine.update_weights()
    after = contents(engine.generate(REQUESTS))
    assert after == here(model)
    assert after != before
    if make == "adapters":
        assert len(numbers(model, trained=True)) == 2 * 2 * 2  # two layers, two modules, A and B


@pytest.mark.cluster
def test_lengths_that_are_predicted_here_are_told(model, ray_engine):
    require_bits(model)
    engine = ray_engine(1, built={"scheduler": "lpt"}, predictor=MeanLength(decay=0.5, max_prompts=100))
    list(engine.generate(REQUESTS))
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert engine.stats().details["predictor/mean_absolute_error"] > 0
    assert engine.state_dict()["predictor"]["kind"] == "mean"


@pytest.mark.cluster
def test_a_predictor_that_reads_hidden_states_learns_where_they_are(model, ray_engine):
    require_bits(model)
    head = made.prefix_head({"seed": 0}, prefix_tokens=2)
    engine = ray_engine(1, predictor=head, built={"scheduler": "lpt", "prefix": True})
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert engine.stats().details["engine/probe_steps"] > 0


@pytest.mark.cluster
def test_two_of_three_workers_that_are_killed_and_one_that_dies_with_new_weights_change_nothing(
    model, ray_engine, tmp_path
):
    require_bits(model)
    said, flag = list[str](), tmp_path / "die"
    engine = ray_engine(3, built={"seconds": 0.02, "die": str(flag)}, warn=said.append)
    coming = all_there(engine, model).generate(REQUESTS)
    rollouts = [next(coming)]
    killed(engine, 1, 2)
    rollouts += coming
    assert contents(rollouts) == here(model)
    all_there(engine, model)  # they were started anew
    assert len([text for text in said if "is lost" in text]) == 2
    flag.touch()
    engine.update_weights()
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert not flag.exists() and len([text for text in said if "is lost" in text]) == 3


@pytest.mark.cluster
def test_a_worker_that_hangs_is_replaced(model, ray_engine, tmp_path):
    require_bits(model)
    said, flag = list[str](), tmp_path / "hang"
    engine = all_there(ray_engine(built={"seconds": 0.02, "hang": str(flag)}, timeout=2.0, warn=said.append), model)
    flag.touch()
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert not flag.exists() and "is lost (" in said[0]
    all_there(engine, model)


@pytest.mark.cluster
def test_an_engine_that_refuses_or_cannot_be_made_ends_with_its_reason(ray_engine, monkeypatch):
    with pytest.raises(UserError, match="^lower sampling.max_new_tokens$"):
        list(ray_engine(1, built={"fails": "refused"}).generate(REQUESTS))
    monkeypatch.setattr(pool, "TRIES", 2)
    said = list[str]()
    with pytest.raises(UserError, match=r"worker 0: RuntimeError: no kernel.* resume=auto"):
        list(ray_engine(1, built={"fails": "no kernel"}, warn=said.append).generate(REQUESTS))
    assert len([text for text in said if "is lost" in text]) == 1


@pytest.mark.cluster
def test_workers_for_which_there_is_no_room_are_not_waited_for_for_ever(model, ray_engine, monkeypatch):
    all_there(ray_engine(WORKERS), model)
    monkeypatch.setattr(pool, "START", 3.0)
    with pytest.raises(UserError, match=r"no worker .* none has started within 3 s.* resume=auto"):
        list(ray_engine(1, timeout=1.0).generate(REQUESTS))


@pytest.mark.cluster
def test_this_machine_only_is_listened_on_and_sigterm_stays_the_run_s_own(ray_engine):
    before = signal.getsignal(signal.SIGTERM)
    session.close()
    ray_engine(1)
    assert signal.getsignal(signal.SIGTERM) is before
    own = psutil.Process().children(recursive=True)
    heard = {c.laddr.ip for process in own for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert heard and {address.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
    session.close()
    assert not list(Path("/tmp").glob(f"grpo_ray_{os.getpid()}_*"))


@pytest.mark.cluster
def test_a_ray_that_would_listen_to_other_machines_is_ended(ray_engine, monkeypatch):
    from ray._private import ray_constants

    session.close()
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # as where Ray was imported before
    with pytest.raises(UserError, match="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"):
        ray_engine(1)
    assert not [child for child in psutil.Process().children() if "ray" in child.name()]
