"""Workers as real processes of a real Ray on this machine, on a small model."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import made
import psutil
import pytest
import torch
from inner import build, dying
from small import contents, make_engine, require_bits, small_model, some_requests

if importlib.util.find_spec("ray") is None:  # not imported: what it asks the environment it asks only then
    pytest.skip("Ray is not installed", allow_module_level=True)

from grpo_cli.config.instantiate import ready  # noqa: E402
from grpo_cli.engine.order.predict import MeanLength, NoPredictor  # noqa: E402
from grpo_cli.engine.ray import crew as crews  # noqa: E402
from grpo_cli.engine.ray import engine as engines  # noqa: E402
from grpo_cli.engine.ray import ray_cluster  # noqa: E402
from grpo_cli.engine.ray.engine import RayEngine  # noqa: E402
from grpo_cli.model.adapters import with_adapters  # noqa: E402
from grpo_cli.settings import LoraSettings  # noqa: E402
from grpo_cli.support.errors import UserError  # noqa: E402

LORA = LoraSettings(2, 4.0, 0.0, ("q_proj", "down_proj"))
REQUESTS = some_requests(prompts=6, n=4)


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    """One Ray for all of this file, as it takes seconds to start."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(engines, "STORE_MARGIN", 2**27)
    session = ray_cluster._session
    opened = session.open
    # As large as any test needs, so that all ask for the same.
    monkeypatch.setattr(session, "open", lambda address, workers, needs, size: opened(address, 3, needs, 2**28))
    yield
    session.close()
    monkeypatch.undo()


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


@pytest.fixture
def made_engines() -> Iterator[list[RayEngine]]:
    made_here: list[RayEngine] = []
    yield made_here
    for engine in made_here:
        engine.close()


@pytest.fixture
def ray_engine(made_engines: list[RayEngine], model: Any) -> Any:
    def make(workers: int = 2, of: Any = None, **words: Any) -> RayEngine:
        given = {
            name: words.pop(name) for name in ("slots", "seconds", "scheduler", "fails", "prefix") if name in words
        }
        slots = given.get("slots")
        defaults: dict[str, Any] = dict(
            sampler=made.full() if slots is None else made.infinite(slots=slots),
            scheduler=ready("scheduler", given.get("scheduler", "fifo")),
            predictor=NoPredictor(),
            inner="torch",
            options=None,
            address=None,
            threads=1,
            gpus=0.0,
            timeout=60.0,
            kv_budget_of=None,
        )
        engine = RayEngine(of or model, build=partial(build, **given), workers=workers, **(defaults | words))
        made_engines.append(engine)
        return engine

    return make


def here(model: Any, requests: Any = REQUESTS) -> Any:
    return contents(make_engine(model).generate(requests))


def all_there(engine: RayEngine, model: Any) -> RayEngine:
    """The engine when all its workers are ready; until then the others do the work."""
    for _ in range(1000):
        assert contents(engine.generate(REQUESTS)) == here(model)
        if len(engine.facts()["workers"]) == engine._workers:
            return engine
    raise AssertionError("a worker does not come up")


@pytest.mark.parametrize(("workers", "slots"), [(1, None), (2, 3)])
def test_rollouts_are_those_of_the_engine_in_this_process(model, ray_engine, workers, slots):
    require_bits(model)
    engine = all_there(ray_engine(workers, slots=slots), model)
    assert contents(engine.generate(REQUESTS)) == here(model)
    stats, facts = engine.stats(), engine.facts()
    assert stats.generated_tokens == sum(len(tokens) for tokens, *_ in here(model).values())
    assert set(facts["workers"]) == {str(number) for number in range(workers)} and facts["invariant"]
    assert stats.details["engine/workers"] == workers and stats.details["engine/requests_again"] == 0
    rates = [stats.details[f"engine/worker_tokens_per_second_{which}"] for which in ("least", "most")]
    assert 0 < rates[0] <= rates[1]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_move_are_followed(made_engines, ray_engine, tied):
    model = small_model("qwen3", tie_word_embeddings=tied)
    require_bits(model)
    engine = ray_engine(1, of=model)
    before = contents(engine.generate(REQUESTS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert contents(engine.generate(REQUESTS)) == before  # nobody has said that they moved
    engine.update_weights()
    after = contents(engine.generate(REQUESTS))
    assert after == here(model) and after != before


def test_under_adapters_only_adapters_go_out_again(ray_engine):
    pytest.importorskip("peft")
    model = with_adapters(small_model(), replace(made.model(), lora=LORA)).eval()
    require_bits(model)
    engine = ray_engine(1, of=model)
    put: list[int] = []
    real = engine._cluster.put
    engine._cluster.put = lambda value: put.append(len(value) if isinstance(value, dict) else 0) or real(value)
    list(engine.generate(REQUESTS))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    engine.update_weights()
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert put[0] == put[-1] == 2 * 2 * 2  # two layers, two modules, A and B


def test_lengths_that_are_predicted_here_are_told(model, ray_engine):
    require_bits(model)
    engine = ray_engine(2, slots=2, scheduler="lpt", predictor=MeanLength(decay=0.5, max_prompts=100))
    list(engine.generate(REQUESTS))
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert engine.stats().details["predictor/mean_absolute_error"] > 0
    assert engine.state_dict()["predictor"]["kind"] == "mean"


def test_what_workers_learn_of_lengths_is_theirs_and_goes_on(model, ray_engine):
    """A predictor that reads hidden states learns where they are: in the worker that has the model."""
    require_bits(model)
    head = partial(made.prefix_head, {"seed": 0}, prefix_tokens=2)
    words: dict[str, Any] = dict(slots=2, scheduler="lpt", prefix=True)
    first = ray_engine(1, predictor=head(), **words)
    for _ in range(2):
        assert contents(first.generate(REQUESTS)) == here(model)
    learnt = first.state_dict()
    assert learnt["workers"]["0"]["predictor"]["kind"] == "prefix"
    later = ray_engine(1, predictor=head(), **words)
    later.load_state_dict(learnt)
    both = [contents(engine.generate(REQUESTS)) for engine in (first, later)]
    assert both == [here(model)] * 2
    before, *same = [state["workers"]["0"]["predictor"] for state in (learnt, first.state_dict(), later.state_dict())]
    tensors = [name for name, value in before.items() if isinstance(value, torch.Tensor)]
    assert tensors and all(torch.equal(same[0][name], same[1][name]) for name in tensors), "it went on from there"
    assert any(not torch.equal(before[name], same[0][name]) for name in tensors), "and learnt more"


def test_workers_that_compute_otherwise_are_said(model, ray_engine):
    said: list[str] = []
    threads = torch.get_num_threads() + 1
    engine = ray_engine(1, threads=threads, warn=said.append)
    for _ in range(2):
        list(engine.generate(REQUESTS))
    told = [text for text in said if "to rounding only" in text]
    assert len(told) == 1 and f"a worker computes with {threads} threads, the trainer with {threads - 1}" in told[0]
    other = replace(engine._place, processor="another")
    assert "computes by" in engine._differs(other) and engine._differs(replace(other, **ours(engine))) == ""


def ours(engine: RayEngine) -> dict[str, Any]:
    return {"processor": engine._place.processor, "threads": torch.get_num_threads()}


def test_rollouts_of_a_wider_model_are_those_of_this_process(made_engines, ray_engine):
    """Of the width of a real one of 135 M parameters."""
    model = small_model("llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    require_bits(model)
    assert contents(ray_engine(1, of=model, slots=3).generate(REQUESTS)) == here(model)


def killed(engine: RayEngine, *numbers: int) -> None:
    for number in numbers:
        os.kill(engine.facts()["workers"][str(number)]["pid"], signal.SIGKILL)


def test_two_workers_that_are_killed_in_the_middle_of_a_step_change_nothing(model, ray_engine):
    require_bits(model)
    said: list[str] = []
    engine = all_there(ray_engine(3, slots=2, seconds=0.02, warn=said.append), model)
    coming = engine.generate(REQUESTS)
    rollouts = [next(coming)]
    killed(engine, 1, 2)
    rollouts += coming
    assert contents(rollouts) == here(model)
    assert engine.stats().details["engine/requests_again"] > 0
    assert len([text for text in said if "is lost" in text]) == 2
    all_there(engine, model)  # they were started anew


def test_a_worker_that_is_killed_while_it_takes_weights_changes_nothing(model, ray_engine, tmp_path, monkeypatch):
    require_bits(model)
    flag = tmp_path / "die"
    monkeypatch.setattr(engines, "fetch", dying(flag))
    said: list[str] = []
    engine = all_there(ray_engine(2, warn=said.append), model)
    flag.touch()
    engine.update_weights()
    assert contents(engine.generate(REQUESTS)) == here(model)
    assert not flag.exists() and any("is lost" in text for text in said)


def test_a_worker_that_stands_still_is_replaced(model, ray_engine):
    require_bits(model)
    said: list[str] = []
    engine = all_there(ray_engine(2, slots=2, seconds=0.02, timeout=2.0, warn=said.append), model)
    os.kill(engine.facts()["workers"]["0"]["pid"], signal.SIGSTOP)
    for _ in range(1000):
        assert contents(engine.generate(REQUESTS)) == here(model)
        if said:
            break
    assert said and "worker 0 is lost (it gave no sign of life for 2 s (engine.timeout))" in said[0]


def test_what_an_engine_refuses_is_said_here(ray_engine):
    with pytest.raises(UserError, match="^lower sampling.max_new_tokens$"):
        list(ray_engine(1, fails="refused").generate(REQUESTS))


def test_an_engine_that_cannot_be_made_ends_with_its_reason(ray_engine, monkeypatch):
    monkeypatch.setattr(crews, "TRIES", 2)
    said: list[str] = []
    with pytest.raises(UserError, match="no worker is left .* worker 0: RuntimeError: no kernel.* resume=auto"):
        list(ray_engine(1, fails="no kernel", warn=said.append).generate(REQUESTS))
    assert len([text for text in said if "is lost" in text]) == 1


def test_this_machine_only_is_listened_on(ray_engine):
    engine = ray_engine(1)
    list(engine.generate(REQUESTS[:1]))
    own = psutil.Process().children(recursive=True)
    heard = {c.laddr.ip for process in own for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    assert heard and {address.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_a_ray_that_would_listen_to_other_machines_is_ended(ray_engine, monkeypatch):
    from ray._private import ray_constants

    ray_cluster._session.close()
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # as where Ray was imported before
    with pytest.raises(UserError, match="imported before .* set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the env"):
        ray_engine(1)
    assert not [child for child in psutil.Process().children() if "ray" in child.name()]


def test_sigterm_stays_the_runs_own(ray_engine):
    before = signal.getsignal(signal.SIGTERM)
    ray_cluster._session.close()
    ray_engine(1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_versions_must_agree(ray_engine, monkeypatch):
    engine = ray_engine(1)
    monkeypatch.setattr(engine, "_place", replace(engine._place, torch="9.9"))
    with pytest.raises(UserError, match=r"has torch .*, and the trainer has 9\.9: install the same on every node"):
        list(engine.generate(REQUESTS))


def test_folders_of_dead_processes_are_removed(tmp_path, monkeypatch):
    dead = Path("/tmp") / "grpo_ray_999999999_x"
    dead.mkdir(exist_ok=True)
    folder = Path(ray_cluster._folder())
    assert not dead.exists() and folder.name.startswith(f"grpo_ray_{os.getpid()}_")
    folder.rmdir()
