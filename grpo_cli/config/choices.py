"""The groups that a run is composed of, and the choices that `conf/` offers for each."""

from __future__ import annotations

from pathlib import Path

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
    """The choices that `conf/` offers for a group. A file whose name begins with `_` is what several are based on."""
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml") if not file.stem.startswith("_"))
