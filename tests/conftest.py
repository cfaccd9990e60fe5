"""What all tests share: no network, and marks that ask for more than this machine may have."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (scripts/install_vllm.sh)"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
