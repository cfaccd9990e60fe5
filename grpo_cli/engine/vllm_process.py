"""vLLM inside this process: the environment it is imported with, and the process-wide state that is restored after its
start."""

from __future__ import annotations

import os
import random
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Set before vLLM is imported, unless the user has.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it shares the learner's threads
}


@contextmanager
def guest() -> Iterator[None]:
    """Wrap vLLM's import and start: set its environment, and restore the process-wide state that it changes: random
    states, threads and `set_num_threads`."""
    os.environ |= _ENVIRONMENT | os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # weights are passed as tensors
    states = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # dropout of adapters draws there
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from its imports
            yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            set_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])


# Options with which the sampler, or its log-probabilities, would not be the policy's distribution.
BIASING = (
    "logprobs_mode logits_processors generation_config override_generation_config kv_cache_dtype quantization "
    "speculative_config watermark_config hf_overrides"
).split()


def head_sizes(device: torch.device) -> list[int] | None:
    """Return the head sizes of vLLM's kernels for this device; None on a GPU, where it has kernels of several kinds."""
    if device.type == "cuda":
        return None
    with guest():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return list(CPUAttentionBackend.get_supported_head_sizes())


_holder = weakref.WeakSet[Any]()


def only(engine: Any) -> None:
    """Close the engine that uses vLLM now, if any: vLLM's state is per process."""
    while _holder:
        _holder.pop().close()
    _holder.add(engine)
