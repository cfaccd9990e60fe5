"""What settings leave to the program by the word `auto`: written down as it was decided, and kept by a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from grpo_cli.runs.record import read_record
from grpo_cli.settings import EvalRunSettings, RunSettings

AUTO = "auto"
OPEN = {
    "model": ("dtype", "autocast"),
    "train": ("micro_batch_tokens",),
    "optim": ("lr", "weight_decay", "max_grad_norm"),
    "sampling": ("max_new_tokens",),
    "eval": ("problems", "every"),
}
Settings = TypeVar("Settings", bound=RunSettings | EvalRunSettings)


def as_decided(settings: RunSettings | EvalRunSettings) -> dict[str, dict[str, Any]]:
    """The values of what may be left open, by group."""
    return {
        group: {key: getattr(found, key) for key in keys if hasattr(found, key)}
        for group, keys in OPEN.items()
        if (found := getattr(settings, group, None)) is not None
    }


def as_begun(settings: RunSettings | EvalRunSettings, group: str) -> dict[str, Any]:
    """What the run that is resumed has written down of them; nothing where it is not resumed, or knew no `auto`."""
    return begun(Path(settings.run_dir), group) if isinstance(settings, RunSettings) and settings.resume else {}


def begun(run_dir: Path, group: str) -> dict[str, Any]:
    """The same of the run in a folder; nothing where there is none."""
    record = read_record(run_dir)
    written = {} if record is None else record.config.get(group, {})
    if not isinstance(written, dict):
        return {}
    return {key: written[key] for key in OPEN[group] if written.get(key, AUTO) != AUTO}
