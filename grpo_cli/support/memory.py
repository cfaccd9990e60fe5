"""Memory of processes and devices: peaks, what is free, the allocator's heap, and out-of-memory errors."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, shared ones once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


# Freed memory that a process may keep, of the machine's and of what the user has given it. What was returned to the
# system is handed out again page by page, which takes up to a third of a step; what is kept serves the next phase, and
# raised peaks by 0 to 5% of a room that was nearly full.
_KEPT, _KEPT_OF_ROOM = 1 / 32, 1 / 2
_room: int | None = None  # that the user has given this process


def little_bytes() -> int:
    """Return what is little of the memory that this process may use: of the machine, its control groups, and what the
    user has given it."""
    return int(min(_KEPT * _host_bytes(), _KEPT_OF_ROOM * (_room or _host_bytes())))


@cache
def _host_bytes() -> int:
    return min([total_bytes(torch.device("cpu")), *(limit for limit, _ in _control_groups())])


def keep_freed(room: int | None) -> None:
    """Have glibc keep a little freed memory at the end of its heap, in which it allocates blocks of up to 32 MiB (the
    most that it chooses by itself): of the machine's, or of the `room` that the user gives this process."""
    global _room
    _room = room
    if (set_option := _of_glibc("mallopt")) is not None:
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        set_option(mmap_threshold, 32 << 20)
        set_option(trim_threshold, min(little_bytes(), 2**31 - 1))


def give_back_freed(all_of_it: bool = True) -> None:
    """Return freed memory to the operating system, by default also if it is little. glibc's heap keeps freed blocks of
    less than 32 MiB, so a process would stay at its largest size."""
    trim, info = _of_glibc("malloc_trim"), _of_glibc("mallinfo2")
    if info is not None and not all_of_it:
        info.restype = _MallInfo
    if trim is not None and (all_of_it or info is None or info().free > little_bytes()):
        trim(0)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; `free` are the heap's free bytes."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "a", "b", "c", "d", "e", "f", "used", "free", "top")]


@cache
def _of_glibc(name: str) -> Any:
    """Return a function of glibc; None on other systems, whose C libraries may have no such call."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def total_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still allocate: of its share of a GPU, or of the machine and its control
    groups."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = int(torch.cuda.get_per_process_memory_fraction() * total)  # of the current device: takes no other
        return min(free, share - torch.cuda.memory_reserved(device))
    return min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _control_groups())])


def _control_groups(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of the process's control groups that limit memory, and of their parents. Cached
    files, which give way, do not count. In a container the paths may not exist, the root being its group."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers:  # of version 1
            continue
        inner = root / path.lstrip("/")
        for group in (inner, *inner.parents):
            limit = group / "memory.max"
            if group.is_relative_to(root) and limit.exists() and limit.read_text().strip() != "max":
                files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                held = int((group / "memory.current").read_text()) - int(files.get("inactive_file", 0))
                yield int(limit.read_text()), held


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device | str = "cpu") -> int:
    """Return the peak bytes so far: allocated on a GPU, else resident in this process (on Linux; elsewhere those that
    are resident now)."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Preferred to `ru_maxrss`, which a process inherits from its parent: a small run started by a large program would
    # report the large one's peak.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
    return int(found[1]) * 1024 if found else resident_bytes()


def start_peak(device: torch.device) -> None:
    """Count the peak from here on. Only Linux can for a process; elsewhere the peak is that of its whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


# CUDA's own memory of each process, which PyTorch does not count: context, kernels, libraries. An allowance: it is 0.3
# to 0.6 GB by card and driver, and cannot be queried without NVIDIA's management library.
CUDA_CONTEXT_BYTES = 512 * 2**20


def held_by_others(device: torch.device) -> tuple[int, int, int]:
    """Return the bytes of a GPU held by other processes, free, and in total."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device) - CUDA_CONTEXT_BYTES), free, total


def expand_segments() -> None:
    """Make the CUDA allocator grow its segments in place, unless the user has configured it: the freed parts of growing
    blocks, such as the cache's, could not serve larger ones (PyTorch, "CUDA semantics")."""
    if not any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def give_back_cached() -> None:
    """Return the allocator's cached memory to the GPU, if there is one, for other users of it."""
    gc.collect()
    torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed: on a GPU, on the host in PyTorch, or in Python.

    During the capture of a CUDA graph, PyTorch raises another error when the capture ends, with this one as context.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return isinstance(error, MemoryError | torch.OutOfMemoryError)
    if "during capture" in str(error) and error.__context__ is not None:
        return is_out_of_memory(error.__context__)
    return re.search(_OUT_OF_MEMORY, str(error)) is not None


# In messages of the allocator, the driver and the runtime; of cuBLAS, cuDNN and cuSOLVER; of the host's allocator.
_OUT_OF_MEMORY = "out of memory|MemoryAllocation|OUT_OF_MEMORY|ALLOC_FAILED|ALLOCATION_FAILED|DefaultCPUAllocator"
