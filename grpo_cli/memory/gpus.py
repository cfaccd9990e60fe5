"""GPUs that can be planned for by name (`profile.for_gpu`)."""

from __future__ import annotations

from collections.abc import Mapping

# Bytes, as published.
MEMORY: Mapping[str, float] = {
    "h200": 141e9,
    "h100": 80e9,
    "a100_80gb": 80e9,
    "a100_40gb": 40e9,
    "l40s": 48e9,
    "l4": 24e9,
    "a10": 24e9,
    "t4": 16e9,
    "rtx4090": 24e9,
    "rtx3090": 24e9,
}


def fast_when_planned(word: bool | str) -> bool | None:
    """Return whether the GPU of `profile.for_gpu` computes bfloat16 faster than float32; None without one."""
    return word != "t4" if isinstance(word, str) else word or None
