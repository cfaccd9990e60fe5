"""Spans add up, nest and survive exceptions; memory is the process's own. Clocks are made up: nothing is timed."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from grpo_cli.support.memory import free_bytes, give_back_freed, peak_bytes, resident_bytes
from grpo_cli.support.meter import WallMeter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_spans_of_one_name_add_up_and_take_starts_over(clock: Clock) -> None:
    meter = WallMeter(clock=clock)
    for seconds in (1.0, 2.5):
        with meter.span("rollout"):
            clock.now += seconds
        clock.now += 100.0  # between spans
    assert meter.take() == {"time/rollout": 3.5}
    assert meter.take() == {}


def test_a_span_contains_those_of_other_names_inside_it_and_one_of_its_own_name_is_not_counted_twice(
    clock: Clock,
) -> None:
    meter = WallMeter(clock=clock)
    with meter.span("step"):
        clock.now += 1.0
        with meter.span("reward"):
            clock.now += 2.0
        with meter.span("step"):
            clock.now += 4.0
    assert meter.take() == {"time/step": 7.0, "time/reward": 2.0}


def test_an_open_span_is_shared_between_the_takes_around_it(clock: Clock) -> None:
    meter = WallMeter(clock=clock)
    with meter.span("step"):
        clock.now += 1.0
        with meter.span("eval"):
            clock.now += 2.0
            assert meter.take() == {"time/step": 3.0, "time/eval": 2.0}
            clock.now += 4.0
        clock.now += 8.0
    assert meter.take() == {"time/step": 12.0, "time/eval": 4.0}


def test_the_open_spans_are_told_to_whoever_shows_them(clock: Clock) -> None:
    told: list[tuple[str, ...]] = []
    meter = WallMeter(on_phase=told.append, clock=clock)
    with meter.span("step"), meter.span("rollout"):
        pass
    assert told == [("step",), ("step", "rollout"), ("step",), ()]


class Queue:
    """A GPU's: it comes to marks when it has done what was queued before them."""

    def __init__(self) -> None:
        self.queued, self.waits = 0.0, 0

    def event(self, enable_timing: bool) -> Mark:
        return Mark(self)

    def synchronize(self, device: torch.device) -> None:
        assert device == torch.device("cuda:0")
        self.waits += 1


class Mark:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.after, self.waits = queue, -1.0, -1

    def record(self) -> None:
        self.after, self.waits = self.queue.queued, self.queue.waits

    def elapsed_time(self, end: Mark) -> float:
        assert self.queue.waits > end.waits, "asked before the device has come to it"
        return 1e3 * (end.after - self.after)


def test_work_of_a_gpu_is_charged_to_the_span_that_queued_it_and_nobody_waits_but_take(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    monkeypatch.setattr(torch.cuda, "synchronize", queue.synchronize)
    meter = WallMeter("cuda:0", clock=clock)
    with meter.span("step"):
        for _ in range(3):
            with meter.span("decode"):
                queue.queued += 2.0
        with meter.span("reward"):
            pass
        queue.queued += 0.5
    clock.now += 100.0  # of the host, which does not count
    assert queue.waits == 0
    assert meter.take() == {"time/decode": 6.0, "time/reward": 0.0, "time/step": 6.5}
    assert (meter.take(), queue.waits) == ({}, 1)


def test_peak_memory_grows_with_what_is_resident_and_stays() -> None:
    before = peak_bytes()
    block = torch.ones(before // 8 + 2**24, dtype=torch.float64)  # more than all that ever was resident
    after = peak_bytes()
    assert after >= block.numel() * 8
    del block
    assert peak_bytes() >= 0.99 * after  # the kernel counts per thread, and adds up now and then


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed, and has a call for it")
def test_what_is_free_of_a_gpu_is_its_share_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def fraction(device: Any = None) -> float:
        assert device is None or torch.device(device).index is not None, "PyTorch takes no other"
        return 0.5

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    for free, expected in ((80, 40), (30, 30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 100))
        assert free_bytes(torch.device("cuda")) == expected


def test_memory_that_was_freed_between_what_is_held_goes_back() -> None:
    blocks: list[torch.Tensor | None] = [torch.ones(100 << 10, dtype=torch.uint8) for _ in range(2000)]
    blocks[::2] = [None] * 1000
    before = resident_bytes()
    give_back_freed()
    assert before - resident_bytes() > 80 * 2**20
    del blocks


def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    # `ru_maxrss` of a child starts at its parent's peak; the past bug of whoever measures a sweep from its launcher.
    block = torch.ones(2**29, dtype=torch.uint8)
    program = "import grpo_cli.support.memory as m; print(m.peak_bytes())"
    peak = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
    assert 2**24 < peak < peak_bytes() - len(block) // 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_on_a_gpu_is_the_allocators() -> None:
    block = torch.empty(2**22, device="cuda")
    assert peak_bytes("cuda") == torch.cuda.max_memory_allocated() >= block.numel() * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_queued_gpu_work_is_charged_to_the_span_that_queued_it() -> None:
    meter = WallMeter("cuda")
    matrix = torch.ones(4096, 4096, device="cuda")
    with meter.span("work"):
        for _ in range(50):
            matrix @ matrix
    with meter.span("idle"):
        pass
    times = meter.take()
    assert times["time/work"] > times["time/idle"]
