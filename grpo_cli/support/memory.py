"""The peak of memory, of a process or of each span, and whether it was memory that failed."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of what lies under tensors, that of several of them once, by what tells it from others."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storages(tensors).values())


class PhasePeaks:
    """Most memory at any time in each phase. `phase` is called with the open spans (`WallMeter(on_phase=...)`).

    What is read at an edge belongs to the phases that were open before it. A phase that closes and opens again goes on
    being the same one, so that the decode steps of a rollout cost one reading together.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        """`read` gives the peak since it was last called, in bytes."""
        self._read = read
        self._names: tuple[str, ...] = ()
        self._peaks: dict[str, int] = {}

    def phase(self, names: tuple[str, ...]) -> None:
        if names and names in (self._names, self._names[:-1]):
            return  # the innermost phase has closed, or has opened again
        self._settle()
        self._names = names

    def take(self) -> Mapping[str, int]:
        """Bytes by name of phase since the last `take`."""
        self._settle()
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _settle(self) -> None:
        peak = self._read()
        for name in self._names:
            self._peaks[name] = max(self._peaks.get(name, 0), peak)


class ResidentPeak:
    """Peak resident memory of this process and its children since the last `read`.

    A thread looks every `interval` seconds. Where the kernel's own high-water mark of this process has risen it
    counts, so that the highest peak of all is never missed. Pages that processes share count in each of them.
    """

    def __init__(self, interval: float = 0.05) -> None:
        self._interval = interval
        self._process = psutil.Process()
        self._children: Sequence[psutil.Process] = ()
        self._next_look = 0.0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._peak = 0
        self._mark = peak_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ResidentPeak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def read(self) -> int:
        self._sample()
        mark = peak_bytes()
        with self._lock:
            peak, self._peak = self._peak, 0
        if mark > self._mark:
            self._mark = mark
            peak = max(peak, mark + self._of_children())
        return peak

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            if time.monotonic() > self._next_look:  # listing them takes a hundred times as long as the rest
                self._children = self._process.children(recursive=True)
                self._next_look = time.monotonic() + 5.0
            self._sample()

    def _sample(self) -> None:
        resident = self._process.memory_info().rss + self._of_children()
        with self._lock:
            self._peak = max(self._peak, resident)

    def _of_children(self) -> int:
        total = 0
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                total += child.memory_info().rss
        return total


class AllocatedPeak:
    """Peak of what the CUDA allocator has handed out since the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> AllocatedPeak:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


def give_back_freed() -> None:
    """Give the operating system back what was freed. Python and PyTorch free into glibc's heap, which keeps blocks of
    less than 32 MiB, so that a process stays as large as it ever was; other C libraries have no such call."""
    if _TRIM is not None:
        _TRIM(0)


def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


_TRIM = _trim()


def free_bytes(device: torch.device) -> int:
    """What this process may still take: of a GPU its share, otherwise of the machine and of its control groups."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free, share - torch.cuda.memory_reserved(device))
    of_groups = _free_of_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min([int(psutil.virtual_memory().available), *of_groups])


# Of a control group: its limit, what it uses, and the cached files in that, by the names of versions 1 and 2.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_V2 = "memory.max", "memory.current", "inactive_file"


def _free_of_groups(own: Path, root: Path) -> Iterator[int]:
    """What the control groups that the process is in have left, each with those around it. In a container the paths
    may not be there, and the root be its group."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, used, cached = _V1 if controllers else _V2
        top = root / "memory" if controllers else root
        inner = top / path.lstrip("/")
        for group in (inner, *inner.parents):
            if group.is_relative_to(top) and (group / limit).exists() and (group / limit).read_text().strip() != "max":
                files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield int((group / limit).read_text()) - int((group / used).read_text()) + int(files.get(cached, 0))


def resident_bytes() -> int:
    """What is resident of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device | str = "cpu") -> int:
    """Peak memory so far: what the allocator handed out on a GPU, what was resident of this process otherwise."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss` where this is available: a process inherits its parent's there, so that a small run started by
        # a large program would report the large one's peak.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def reserved_bytes(device: torch.device) -> dict[str, int]:
    """Of a GPU, the most that the allocator had of it so far, by the metric's name; of a CPU nothing."""
    return {"memory/reserved_peak_bytes": torch.cuda.max_memory_reserved(device)} if device.type == "cuda" else {}


# CUDA's own of each process, outside of what PyTorch allocates and counts: its context, kernels, what libraries keep.
# An allowance, 0.3 to 0.6 GB by card and driver; there is no asking how much it is without NVIDIA's management library.
CONTEXT = 512 * 2**20


# In the environment of a sweep's job: its part of a GPU that several share.
SHARE = "GRPO_GPU_SHARE"


def held_by_others(device: torch.device) -> tuple[int, int, int]:
    """Bytes of a GPU that other processes hold, what is free, and what there is in all."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device) - CONTEXT), free, total


def part_of_gpu(share: float, total: int) -> float:
    """The part of a GPU's memory that PyTorch may allocate in one of 1 / `share` processes on it."""
    return share if share == 1 else max(0.0, share - CONTEXT / total)


def expand_segments(environment: Mapping[str, str] = os.environ) -> None:
    """Have the CUDA allocator grow its segments in place from now on, unless a person has said how it is to be: where
    blocks grow, as the cache's do, what they leave behind could serve nothing larger (PyTorch, "CUDA semantics")."""
    if not asked_of_allocator(environment):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def asked_of_allocator(environment: Mapping[str, str], sign: str = "") -> str:
    """What a person has asked of PyTorch's allocator, with the variable, if `sign` is part of it."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if (value := environment.get(name, "")) and sign in value:
            return f"{name}={value}"
    return ""


def give_back_cached(device: torch.device) -> None:
    """Give a GPU back what PyTorch's allocator keeps for itself of what was freed; others could not have it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, on the host in PyTorch, or in Python. Asks no library to be loaded.

    While a CUDA graph is recorded, PyTorch tells of what failed by an error of its own, when the recording ends.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False
    if "during capture" in str(error) and error.__context__ is not None:
        return is_out_of_memory(error.__context__)
    return any(sign in str(error) for sign in _OUT_OF_MEMORY)


# The allocator's text; the driver's and the runtime's, of graphs and of what libraries keep; those of cuBLAS, cuDNN and
# cuSOLVER; the allocator's of the host.
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in dataclasses and tuples; of modules none."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_of(part)]
    return tensors_of([getattr(value, field.name) for field in fields(value)]) if is_dataclass(value) else []
