"""The groups that a run is composed of, and what `conf/` says of them. Asks for neither Hydra nor torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ENGINE_PARTS = ("engine", "sampler", "scheduler", "predictor", "sparsity")
EVAL_PARTS = ("task", *ENGINE_PARTS, "logger")
TRAIN_PARTS = (*EVAL_PARTS, "correction", "downsample", "advantage", "loss")


def config_dir() -> Path:
    """`conf/`: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"neither {package / 'conf'} nor {package.parent / 'conf'} holds train.yaml")


def choices(group: str) -> list[str]:
    """The choices that `conf/` offers for a group. A file whose name begins with _ is what choices have in common."""
    return sorted(file.stem for file in (config_dir() / group).glob("[!_]*.yaml"))


def shipped(group: str, choice: str) -> dict[str, Any]:
    """What `conf/` says of a choice, that of the files that it builds on included."""
    said = _read(config_dir() / group / f"{choice}.yaml")
    bases = [base for base in said.pop("defaults", ()) if isinstance(base, str) and base != "_self_"]
    return {key: value for base in bases for key, value in shipped(group, base).items()} | said


def choice_of(group: str, part: Mapping[str, Any]) -> str:
    """What a person would choose to get this part; for one of their own its target."""
    target = part["_target_"]
    return next((choice for choice in choices(group) if shipped(group, choice).get("_target_") == target), target)


def groups_of(command: str) -> list[str]:
    """The groups that a command's configuration chooses from."""
    return list(_groups(_read(config_dir() / f"{command}.yaml")))


def _groups(config: Mapping[str, Any]) -> Iterator[str]:
    for entry in config["defaults"]:
        if isinstance(entry, dict):
            yield from (group for group in entry if not group.startswith("override "))
        elif entry != "_self_":
            yield from _groups(_read(config_dir() / f"{entry}.yaml"))


def _read(file: Path) -> dict[str, Any]:
    import yaml  # slower to import than all the rest of a shell's completion

    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
