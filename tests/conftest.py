"""What all tests share: no network, the same course each time, and marks that ask for more than this machine may have.

Hypothesis tries the same examples each time; `pytest --hypothesis-profile=explore` looks for new ones.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from grpo_cli.support.processor import set_variables

os.environ.setdefault("OMP_NUM_THREADS", "1")
set_variables()  # before torch is loaded
# A shell ignores ctrl-C for what it starts in the background, and nohup hang-ups; tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
SCRIPTS = Path(__file__).parents[1] / "scripts"
SMOLLM2 = Path(os.environ.get("SMOLLM2", SCRIPTS.parent / "models" / "smollm2"))
sys.path += [str(SCRIPTS), str(SCRIPTS / "bench")]
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests' servers are on this machine, their repositories in their folders, their tables without colours.
for _name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith(("GIT_", "FORCE_"))]:
    del os.environ[_name]
# Tests of W&B set their own: its service, once started, is one for the whole process, and dies with the test before.
os.environ["WANDB_MODE"] = "disabled"

_CLOCKLESS = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("repeat", _CLOCKLESS, derandomize=True)
hypothesis.settings.register_profile("explore", _CLOCKLESS, derandomize=False)
hypothesis.settings.load_profile("repeat")


@pytest.fixture(autouse=True)
def _same_type_checks_each_time() -> None:
    """beartype looks at one item of a sequence, by `random`."""
    random.seed(0)


@pytest.fixture(autouse=True)
def _denormal_numbers_in_each_test() -> Iterator[None]:
    """Hypothesis asks for them, and what makes a run has its process do without."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _own_modules_of_each_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process of a user's imports a module once; here each test has a folder of its own with files of one name."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name in [name for name, one in sys.modules.items() if str(getattr(one, "__file__", "")).startswith(base)]:
        del sys.modules[name]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the number of threads to the test's parameter."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """For input that ends in a RecursionError: Hypothesis's hook on the garbage collector fails with it, by chance."""
    gc.disable()
    yield
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr not in ("gpu", "vllm"):  # runs of other tests take the device that there is
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    interprets = "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton")
    lacks = {
        "gpu": "" if torch.cuda.is_available() else "no CUDA device, or not chosen (-m gpu)",
        "smollm2": "" if (SMOLLM2 / "model.safetensors").is_file() else f"{SMOLLM2} lacks: scripts/get_smollm2.sh",
        "triton": "" if interprets else "no Triton, or not to be interpreted (TRITON_INTERPRET=1)",
        "vllm": "" if importlib.util.find_spec("vllm") else "vLLM is not installed (scripts/install_vllm.sh)",
    }
    for item in items:
        for name in (name for name in lacks if item.get_closest_marker(name) and lacks[name]):
            item.add_marker(pytest.mark.skip(reason=lacks[name]))
        if item.get_closest_marker("gpu") or item.get_closest_marker("triton"):  # whose libraries warn
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("bits"):
        from small import require_bits, small_model

        for heads in (1, 2, 4):
            require_bits(small_model(num_key_value_heads=heads))
