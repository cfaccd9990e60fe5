"""The peak of memory, of a process or of each span, and whether it was memory that failed."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch


class PhasePeaks:
    """Most memory at any time in each phase. `phase` is told which spans are open (`WallMeter(on_phase=...)`).

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
        # Not `ru_maxrss` where this is to be had: a process inherits its parent's there, so that a small run started by
        # a large program would report the large one's peak.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, on the host in PyTorch, or in Python. Asks no library to be loaded."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = ("CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
