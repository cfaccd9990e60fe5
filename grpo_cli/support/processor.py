"""Settings of numerical libraries, through environment variables that they read once: call `set_variables` before torch
computes anything, at best before it is loaded. Values set by the user are kept.

MKL_CBWR   MKL's strict reproducibility: a row of a float32 product has the same bits whatever the number of rows and
           threads. Documented (oneMKL's developer reference, "Reproducibility Conditions") for Intel's processors with
           AVX2 or AVX-512; on others MKL takes these values for AUTO, which holds no such thing, so it is left alone
           there. An unknown value is taken for AUTO too, without a word. Whether bits hold is tried in any case
           (`engine/determinism.py`).
OMP_WAIT_POLICY
           Idle OpenMP threads sleep. The default spins, and where another program wants the cores a step of small
           operations takes twenty times as long (measured on 2 cores with 2 to 3 busy neighbours).
ONEDNN_PRIMITIVE_CACHE_CAPACITY, LRU_CACHE_CAPACITY
           Products in bfloat16, each of its shape, kept by oneDNN and by PyTorch. By default each keeps 1024, which
           hold 900 MB after rollouts of every number of rows from 512 to 1; a step uses a few dozen again and again.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from grpo_cli.support.errors import UserError

CPUINFO = Path("/proc/cpuinfo")


def set_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not. UserError for several processes."""
    others = environment.get("WORLD_SIZE", "1").strip()
    if others not in ("", "0", "1") and {"RANK", "LOCAL_RANK"} & environment.keys():
        raise UserError(
            f"WORLD_SIZE={others}: torchrun and accelerate start several processes, each of which would train a run of "
            "its own; start grpo by itself, with engine=ray for several GPUs"
        )
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        environment.setdefault(cache, "64")
    if (branch := strict_branch()) is not None:
        environment.setdefault("MKL_CBWR", branch)


def flush_denormals() -> None:
    """Treat denormal numbers (below 1e-38 in float32) as 0, since processors are many times slower on them: AdamW's
    averages of zero gradients become denormal within a thousand steps.

    It applies to this thread and those that it starts later: call it before PyTorch computes in parallel.
    """
    import torch  # here: help and completion do without it

    torch.set_flush_denormal(True)  # returns False on a processor that cannot, which only costs time


def fast_in_bfloat16(device: str) -> bool:
    """True if `device` (auto, cpu or cuda) multiplies faster in bfloat16 than in float32: a GPU with native
    support, an x86 processor with AMX or AVX512_BF16. Elsewhere, Arm included, it was not measured."""
    import torch  # here: help and completion do without it

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return has["architecture"] == "x86_64" and bool(has.get("amx_bf16") or has.get("avx512_bf16"))


def strict_branch() -> str | None:
    """Return the value of MKL_CBWR that is documented to fix bits on this processor, None if there is none."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # not Linux: other builds of PyTorch do not use MKL
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    extensions = set(flags[1].split()) if flags and re.search(r"^vendor_id\s*:\s*GenuineIntel$", text, re.M) else set()
    if "avx512vl" in extensions:  # of Intel's Skylake servers and later, with the others that MKL's branch needs
        return "AVX512,STRICT"
    return "AVX2,STRICT" if "avx2" in extensions else None
