"""Spans add up, nest and survive exceptions; memory is the process's own. Clocks are made up: nothing is timed."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from grpo_cli.support.memory import free_bytes, give_back_freed, peak_bytes, resident_bytes, start_peak
from grpo_cli.support.meter import Meter, spans_around


def test_spans_of_one_name_add_up_contain_those_inside_and_are_closed_by_an_exception() -> None:
    """One may outlive the one around it."""
    now, told = [0.0], list[tuple[str, ...]]()
    meter = Meter(on_phase=told.append, clock=lambda: now[0])
    with meter.span("step"):
        now[0] += 1.0
        with meter.span("reward"):
            now[0] += 6.0
        with meter.span("step"):  # is not counted twice
            now[0] += 8.0
    now[0] += 100.0
    with meter.span("reward"):
        now[0] += 2.5
    assert meter.take() == {"time/step": 15.0, "time/reward": 8.5} and meter.take() == {}
    assert told == [("step",), ("step", "reward"), ("step",), ("step", "step"), ("step",), (), ("reward",), ()]
    with pytest.raises(ValueError) as raised, meter.span("step"), meter.span("rollout"):
        with meter.span("prefill"):
            pass
        with meter.span("decode"):
            now[0] += 1.0
            raise ValueError
    assert spans_around(raised.value) == ("step", "rollout", "decode")
    assert meter.take() == {"time/prefill": 0.0, "time/decode": 1.0, "time/rollout": 1.0, "time/step": 1.0}
    outer, inner = meter.span("step"), meter.span("rollout")
    outer.__enter__(), inner.__enter__()
    now[0] += 1.0
    outer.__exit__(None, None, None)
    now[0] += 4.0
    inner.__exit__(None, None, None)
    assert meter.take() == {"time/step": 1.0, "time/rollout": 5.0}


class Mark:
    """An event of a GPU whose queue holds `queued` seconds: it knows when it comes once somebody has waited for all."""

    queued, waits = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        self.after, self.known_from = -1.0, -1

    def record(self) -> None:
        self.after, self.known_from = Mark.queued, Mark.waits + 1

    def elapsed_time(self, end: Mark) -> float:
        assert Mark.waits >= end.known_from, "asked before the device has come to it"
        return 1e3 * (end.after - self.after)


def test_work_of_a_gpu_is_charged_to_the_span_that_queued_it_and_nobody_waits_but_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(Mark, "waits", Mark.waits + 1))
    meter = Meter("cuda:0")
    with meter.span("step"):
        for _ in range(3):
            with meter.span("decode"):
                Mark.queued += 2.0
        with meter.span("reward"):
            pass
        Mark.queued += 0.5
    assert Mark.waits == 0
    assert meter.take() == {"time/decode": 6.0, "time/reward": 0.0, "time/step": 6.5}
    assert (meter.take(), Mark.waits) == ({}, 1)


def test_peak_memory_rises_stays_and_is_counted_anew_in_this_process_alone() -> None:
    before = peak_bytes()
    block = torch.ones(before // 8 + 2**26, dtype=torch.float64)  # more than all that ever was resident
    high, held = peak_bytes(), block.numel() * 8
    assert high >= held
    # `ru_maxrss` of a child starts at its parent's peak.
    program = "import grpo_cli.support.memory as m; print(m.peak_bytes())"
    peak = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
    assert 2**24 < peak < high - held // 4
    del block
    assert peak_bytes() >= 0.99 * high  # the kernel counts per thread, and adds up now and then
    start_peak(torch.device("cpu"))
    assert peak_bytes() < high - held // 2


def test_what_is_free_of_a_gpu_is_its_share_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def fraction(device: Any = None) -> float:
        assert device is None or torch.device(device).index is not None, "PyTorch takes no other"
        return 0.5

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    for free, expected in ((80, 40), (30, 30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 100))
        assert free_bytes(torch.device("cuda")) == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed, and has a call for it")
def test_memory_that_was_freed_between_what_is_held_goes_back() -> None:
    blocks: list[torch.Tensor | None] = [torch.ones(100 << 10, dtype=torch.uint8) for _ in range(2000)]
    blocks[::2] = [None] * 1000
    before = resident_bytes()
    give_back_freed()
    assert before - resident_bytes() > 80 * 2**20
    del blocks
