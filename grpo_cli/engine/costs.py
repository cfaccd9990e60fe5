"""The combined cost of several engine calls: successive rounds, or portions of one request list at many workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_cli.types import EngineStats

# Details that are summed (seconds too) and maximized; all others are averaged over decode steps.
_SUMMED = {"engine/evictions", "engine/restarts", "engine/restarted_tokens", "engine/requests_again"}
_LARGEST = {"engine/kv_held_bytes", "engine/eviction_note_bytes"}


def together(parts: Sequence[EngineStats]) -> EngineStats:
    """The total of `parts`, of which there is at least one."""
    if len(parts) == 1:
        return parts[0]
    capacity = [part.decode_steps * part.slots for part in parts]
    busy = sum(part.slot_utilisation * steps for part, steps in zip(parts, capacity, strict=True))
    names = dict.fromkeys(name for part in parts for name in part.details)
    return EngineStats(
        decode_steps=sum(part.decode_steps for part in parts),
        generated_tokens=sum(part.generated_tokens for part in parts),
        prefill_tokens=sum(part.prefill_tokens for part in parts),
        slots=max(part.slots for part in parts),
        slot_utilisation=busy / sum(capacity) if sum(capacity) else 1.0,
        kv_peak_bytes=max(part.kv_peak_bytes for part in parts),
        details={name: _detail(name, [part for part in parts if name in part.details]) for name in names},
    )


def _detail(name: str, parts: Iterable[EngineStats]) -> float:
    seen = [(part.details[name], max(1, part.decode_steps)) for part in parts]
    if name in _SUMMED or name.endswith("_seconds"):
        return sum(value for value, _ in seen)
    if name in _LARGEST:
        return max(value for value, _ in seen)
    return sum(value * steps for value, steps in seen) / sum(steps for _, steps in seen)
