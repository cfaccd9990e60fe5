"""The findings of a profile as one value, as `profile.json`, and as named numbers for a tracker."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_cli.profile.estimate import EXACT, KINDS, Prediction, total
from grpo_cli.profile.measure import Measured, Phase
from grpo_cli.profile.shapes import Sizes
from grpo_cli.report.profiles import SCHEMA
from grpo_cli.runs.files import json_line, write_atomically
from grpo_cli.runs.layout import PROFILE as FILE


@dataclass(frozen=True)
class Findings:
    """`measured` is None for a plan. `predicted` is for the lengths that were seen or forced, `at_most` for rollouts
    that are all of full length, both without what `not_predicted` lists; `largest` are the largest values that then
    fit `room` bytes (None: none does, 0: any does)."""

    command: tuple[str, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    threads: int
    measured: Measured | None
    predicted: Prediction
    at_most: Prediction
    room: int
    largest: Mapping[str, int | None]
    not_predicted: tuple[str, ...] = ()


def document(findings: Findings) -> dict[str, Any]:
    """The findings as plain values, in seconds and bytes; every file has every key."""
    measured = findings.measured
    return {
        "schema": SCHEMA,
        "command": list(findings.command),
        "device": findings.device,
        "threads": findings.threads,
        "versions": dict(findings.versions),
        "settings": findings.settings,
        "measured": None if measured is None else _measured(measured),
        "predicted": _predicted(findings.predicted),
        "predicted_at_most": _predicted(findings.at_most),
        "not_predicted": list(findings.not_predicted),
        "fit": {
            "room_bytes": findings.room,
            "fits": findings.at_most.peak <= findings.room,
            "largest": dict(findings.largest),
        },
    }


def _measured(measured: Measured) -> dict[str, Any]:
    return {
        "phases": {name: _phase(phase) for name, phase in measured.phases.items()},
        "engine": dict(measured.engine),
        "peak": {"phase": measured.fullest, "bytes": measured.peak_bytes, "held_by": _sizes(measured.memory)},
        "exact_bytes": dict(measured.exact),
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "seconds_median": phase.median,
        "seconds_least": min(phase.seconds),
        "seconds_most": max(phase.seconds),
        "times": len(phase.seconds),
        "tokens": phase.tokens,
        "tokens_per_second": tokens_per_second(phase),
        "peak_bytes": phase.peak_bytes,
    }


def tokens_per_second(phase: Phase) -> float | None:
    return None if phase.tokens is None or not phase.median else phase.tokens / phase.median


def _predicted(prediction: Prediction) -> dict[str, Any]:
    return {
        "phases": {
            name: {"bytes": total(sizes), "held_by": _sizes(sizes)} for name, sizes in prediction.phases.items()
        },
        "peak": {"phase": prediction.fullest, "bytes": prediction.peak},
        "exact_bytes": dict(prediction.exact),
    }


def _sizes(sizes: Sizes) -> dict[str, int]:
    return {kind: sizes.get(kind, 0) for kind in KINDS}


def metrics(findings: Findings) -> dict[str, float]:
    """Named numbers (see `metrics.py`)."""
    numbers: dict[str, float] = {"profile/predicted_peak_bytes": findings.predicted.peak}
    numbers |= {f"profile/predicted_{kind}_bytes": findings.predicted.exact[kind] for kind in EXACT}
    if findings.measured is not None:
        numbers["profile/peak_bytes"] = findings.measured.peak_bytes
        numbers |= {f"profile/{kind}_bytes": findings.measured.exact[kind] for kind in EXACT}
        for name, phase in findings.measured.phases.items():
            numbers |= {f"profile/{name}_seconds": phase.median, f"profile/{name}_peak_bytes": phase.peak_bytes}
    return {name: float(value) for name, value in numbers.items()}


def write(findings: Findings, folder: Path) -> Path:
    """Write `profile.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomically(path, (json_line(document(findings), indent=2) + "\n").encode())
    return path


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of these packages."""
    return {package: importlib.metadata.version(package) for package in packages}
