"""The config groups and their choices, in `conf/` and in `experimental/conf/`. Imports neither Hydra nor torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if compiled
EXPERIMENTAL = Path(__file__).resolve().parent.parent / "experimental" / "conf"
ENGINE_PARTS = ("engine", "sampler", "scheduler", "predictor", "sparsity")


def config_dir() -> Path:
    """`conf/`: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"neither {package / 'conf'} nor {package.parent / 'conf'} holds train.yaml")


def conf_file(name: str) -> Path:
    """The file of a name such as `loss/grpo`, in whichever of the two folders has it."""
    file = config_dir() / f"{name}.yaml"
    return file if file.is_file() else EXPERIMENTAL / f"{name}.yaml"


def is_experimental(group: str, choice: str) -> bool:
    return (EXPERIMENTAL / group / f"{choice}.yaml").is_file()


def shipped(group: str, choice: str) -> dict[str, Any]:
    """Return a choice's keys and values, including those of its base files."""
    return values_of(f"{group}/{choice}")


def values_of(name: str) -> dict[str, Any]:
    """Return the keys and values of a file of `conf/`, including those of its base files."""
    merged = functools.reduce(_over, _files(conf_file(name)), dict[str, Any]())
    return {key: value for key, value in merged.items() if key != "defaults"}


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings key by key, as Hydra does."""
    both = {k: _over(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)}
    return {**below, **above, **both}


@functools.cache
def defaults_of(command: str) -> Mapping[str, str]:
    """Return a command's default choice in each group, Hydra's own groups included."""
    listed = [entry for values in _files(conf_file(command)) for entry in values.get("defaults", [])]
    groups = [entry for entry in listed if isinstance(entry, dict)]
    return {group.removeprefix("override "): choice for entry in groups for group, choice in entry.items()}


def groups_of(command: str) -> list[str]:
    """The groups that a command's configuration chooses from."""
    return [group for group in defaults_of(command) if not group.startswith("hydra/")]


def parts_of(command: str) -> tuple[str, ...]:
    """Return its groups that are built from a `_target_`: all but the model and named experiments."""
    return tuple(group for group in groups_of(command) if group not in ("model", "experiment"))


def _files(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a file of `conf/`, unresolved, preceded by its base files."""
    values = yaml.load(file.read_text(encoding="utf-8"), _LOADER) or {}
    for base in bases_of(file, values):
        yield from _files(base)
    yield values


def bases_of(file: Path, values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that a file builds on, beside it or in its group of `conf/`."""
    for entry in values.get("defaults", []):  # groups, and overrides of their choices, are mappings
        if isinstance(entry, str) and entry != "_self_":
            beside = file.with_name(f"{entry.partition('@')[0]}.yaml")
            yield beside if beside.is_file() else config_dir() / file.parent.name / beside.name


def choices(group: str) -> list[str]:
    """The choices of a group, experimental ones last. A file whose name begins with `_` is a base of several."""
    folders = (config_dir() / group, EXPERIMENTAL / group)
    return [name for folder in folders for name in sorted(file.stem for file in folder.glob("[!_]*.yaml"))]


def marked(group: str, choice: str) -> str:
    """Return a choice as it is listed, such as `x (experimental)`."""
    return f"{choice} (experimental)" if is_experimental(group, choice) else choice


def choice_of(group: str, part: Mapping[str, Any]) -> str:
    """The choice that needs the fewest other settings to give this part; for a user's own part its target."""
    target = str(part["_target_"])
    files = {choice: shipped(group, choice) for choice in choices(group)}
    same = {choice: keys for choice, keys in files.items() if keys.get("_target_") == target}
    return max(same, key=lambda choice: sum(part.get(key) == same[choice][key] for key in same[choice]), default=target)
